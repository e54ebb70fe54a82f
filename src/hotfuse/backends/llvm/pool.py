"""The threads of parallel loops: nobody ever waits for a thread that has not begun.

    hf_parallel(body, data, threads, per)      runs body(data, thread, part, parts) for all threads * per parts

Every thread has `per` parts of its own, which it takes first, so that it finds in its cache what it had there before; then it
helps others with theirs. The thread that asks takes part. When it finds nothing more to take, all parts are taken, and it
waits only for those that others are in the middle of. With fork and join (OpenMP's way) it waits for every thread to arrive,
begun or not: one other busy process on the machine then costs a whole time slice of the scheduler *per loop*.

One loop runs at a time; who finds the pool busy (another caller's thread) does all its parts alone. Threads that have nothing
to do look for work for some tens of microseconds and then sleep in the kernel. `word` counts loops: odd while one is open. A
thread that comes enters itself in `inside` before it looks at `word` again, and the asker closes `word` before it
looks at `inside`: one of the two sees the other, so memory of a loop is never touched after it was left.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from dataclasses import dataclass

from hotfuse.backends.llvm.jit import Loaded, compile_object, keep, load_object
from hotfuse.backends.llvm.target import host

MOST = 256
"""Threads that can take part, the asking one included."""
LOOKS = 3000
"""How often an idle thread looks for work before it sleeps: some tens of microseconds."""
PATIENCE = 2000
"""How often the asking thread looks whether others are done before it offers its processor to them."""
SLICE_NS = 100_000
"""The time slice that threads ask of the scheduler. A short one lets a thread that wakes up take the processor from one
that only spins, as torch's own threads do for milliseconds after an operator; kernels that know no such slices ignore it."""
_FUTEX = {"x86_64": 202, "aarch64": 98}
_ATTRIBUTES = {"x86_64": (315, 314), "aarch64": (275, 274)}
"""The system calls that read and set how a thread is scheduled."""
_PAUSE = {"x86_64": "pause", "aarch64": "yield"}
_WORD, _LOCK, _INSIDE, _ASLEEP, _JOB, _STARTED, _TAKEN = 0, 64, 128, 192, 256, 320, 384
_BYTES = _TAKEN + 64 * MOST

_TEXT = """
@pool = internal global [{bytes} x i8] zeroinitializer, align 128
declare i64 @syscall(i64, ...)
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare i32 @sched_yield()

define void @hf_parallel(ptr %body, ptr %data, i64 %wanted, i64 %per) {{
  %got = cmpxchg ptr {lock}, i32 0, i32 1 acquire monotonic
  %free = extractvalue {{ i32, i1 }} %got, 1
  br i1 %free, label %size, label %alone
alone:
  call void %body(ptr %data, i64 0, i64 0, i64 1)
  ret void
size:
  %fits = icmp slt i64 %wanted, {most}
  %threads = select i1 %fits, i64 %wanted, i64 {most}
  %others = sub i64 %threads, 1
  %started = load i64, ptr {started}
  %enough = icmp sge i64 %started, %others
  br i1 %enough, label %fill, label %grow
grow:
  call void @start(i64 %others)
  br label %fill
fill:
  store ptr %body, ptr {job}
  store ptr %data, ptr {job_data}
  store i64 %threads, ptr {job_threads}
  store i64 %per, ptr {job_per}
  br label %clear
clear:
  %t = phi i64 [0, %fill], [%t.next, %clear]
  %t.at = getelementptr [64 x i8], ptr {taken}, i64 %t
  store i64 0, ptr %t.at
  %t.next = add i64 %t, 1
  %t.more = icmp slt i64 %t.next, %threads
  br i1 %t.more, label %clear, label %open
open:
  %before = load i32, ptr {word}
  %odd = add i32 %before, 1
  store atomic i32 %odd, ptr {word} seq_cst, align 64
  %asleep = load atomic i32, ptr {asleep} seq_cst, align 64
  %some = icmp ne i32 %asleep, 0
  br i1 %some, label %wake, label %own
wake:
  %woken = call i64 (i64, ...) @syscall(i64 {futex}, ptr {word}, i32 129, i32 2147483647, ptr null, ptr null, i32 0)
  br label %own
own:
  call void @work(i64 0)
  %even = add i32 %odd, 1
  store atomic i32 %even, ptr {word} seq_cst, align 64
  br label %look
look:
  %n = phi i32 [0, %own], [%n.next, %again]
  %inside = load atomic i32, ptr {inside} seq_cst, align 64
  %done = icmp eq i32 %inside, 0
  br i1 %done, label %leave, label %wait
wait:
  %n.next = add i32 %n, 1
  %patient = icmp ult i32 %n, {patience}
  br i1 %patient, label %pause, label %offer
pause:
  call void asm sideeffect "{pause}", ""()
  br label %again
offer:
  %offered = call i32 @sched_yield()
  br label %again
again:
  br label %look
leave:
  store atomic i32 0, ptr {lock} release, align 64
  ret void
}}

define internal void @work(i64 %thread) {{
  %body = load ptr, ptr {job}
  %data = load ptr, ptr {job_data}
  %threads = load i64, ptr {job_threads}
  %per = load i64, ptr {job_per}
  %parts = mul i64 %threads, %per
  br label %whose
whose:
  %k = phi i64 [0, %0], [%k.next, %nothing]
  %sum = add i64 %thread, %k
  %over = icmp sge i64 %sum, %threads
  %less = sub i64 %sum, %threads
  %owner = select i1 %over, i64 %less, i64 %sum
  %taken = getelementptr [64 x i8], ptr {taken}, i64 %owner
  %first = mul i64 %owner, %per
  br label %take
take:
  %n = atomicrmw add ptr %taken, i64 1 seq_cst
  %some = icmp slt i64 %n, %per
  br i1 %some, label %do, label %nothing
do:
  %part = add i64 %first, %n
  call void %body(ptr %data, i64 %thread, i64 %part, i64 %parts)
  br label %take
nothing:
  %k.next = add i64 %k, 1
  %more = icmp slt i64 %k.next, %threads
  br i1 %more, label %whose, label %end
end:
  ret void
}}

define internal void @start(i64 %others) {{
  %tid = alloca i64
  br label %next
next:
  %n = load i64, ptr {started}
  %enough = icmp sge i64 %n, %others
  br i1 %enough, label %end, label %make
make:
  %id = add i64 %n, 1
  store i64 %id, ptr {started}
  %argument = inttoptr i64 %id to ptr
  %failed = call i32 @pthread_create(ptr %tid, ptr null, ptr @serve, ptr %argument)
  %fine = icmp eq i32 %failed, 0
  br i1 %fine, label %detach, label %next
detach:
  %made = load i64, ptr %tid
  %detached = call i32 @pthread_detach(i64 %made)
  br label %next
end:
  ret void
}}

define internal ptr @serve(ptr %argument) {{
  %thread = ptrtoint ptr %argument to i64
  %attributes = alloca [64 x i8], align 8
  %read = call i64 (i64, ...) @syscall(i64 {getattr}, i64 0, ptr %attributes, i64 48, i64 0)
  %known = icmp eq i64 %read, 0
  br i1 %known, label %shorten, label %fresh
shorten:
  %runtime = getelementptr i8, ptr %attributes, i64 24
  store i64 {slice}, ptr %runtime
  %set = call i64 (i64, ...) @syscall(i64 {setattr}, i64 0, ptr %attributes, i64 0)
  br label %fresh
fresh:
  %last = phi i32 [0, %0], [0, %shorten], [%last.again, %rest], [%seen, %out]
  br label %look
look:
  %n = phi i32 [0, %fresh], [%n.next, %pause]
  %seen = load atomic i32, ptr {word} acquire, align 64
  %open = trunc i32 %seen to i1
  %new = icmp ne i32 %seen, %last
  %both = and i1 %open, %new
  br i1 %both, label %enter, label %idle
idle:
  %n.next = add i32 %n, 1
  %awake = icmp ult i32 %n, {looks}
  br i1 %awake, label %pause, label %rest
pause:
  call void asm sideeffect "{pause}", ""()
  br label %look
rest:
  %last.again = phi i32 [%last, %idle]
  %a = atomicrmw add ptr {asleep}, i32 1 seq_cst
  %slept = call i64 (i64, ...) @syscall(i64 {futex}, ptr {word}, i32 128, i32 %seen, ptr null, ptr null, i32 0)
  %b = atomicrmw sub ptr {asleep}, i32 1 seq_cst
  br label %fresh
enter:
  %c = atomicrmw add ptr {inside}, i32 1 seq_cst
  %now = load atomic i32, ptr {word} seq_cst, align 64
  %same = icmp eq i32 %now, %seen
  br i1 %same, label %asked, label %out
asked:
  %threads = load i64, ptr {job_threads}
  %mine = icmp slt i64 %thread, %threads
  br i1 %mine, label %help, label %out
help:
  call void @work(i64 %thread)
  br label %out
out:
  %d = atomicrmw sub ptr {inside}, i32 1 seq_cst
  br label %fresh
}}

define void @hf_forget() {{
  store i32 0, ptr {word}
  store i32 0, ptr {lock}
  store i32 0, ptr {inside}
  store i32 0, ptr {asleep}
  store i64 0, ptr {started}
  ret void
}}
"""


def pool_text(machine: str) -> str:
    """The pool's code for a processor architecture."""

    def at(offset: int) -> str:
        return f"getelementptr (i8, ptr @pool, i64 {offset})"

    return _TEXT.format(
        bytes=_BYTES, most=MOST, looks=LOOKS, patience=PATIENCE, futex=_FUTEX[machine], pause=_PAUSE[machine],
        getattr=_ATTRIBUTES[machine][0], setattr=_ATTRIBUTES[machine][1], slice=SLICE_NS,
        word=at(_WORD), lock=at(_LOCK), inside=at(_INSIDE), asleep=at(_ASLEEP), started=at(_STARTED), taken=at(_TAKEN),
        job=at(_JOB), job_data=at(_JOB + 8), job_threads=at(_JOB + 16), job_per=at(_JOB + 24),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool of this process: it lives as long as the process does."""

    loaded: Loaded
    address: int
    """Of `hf_parallel`."""


def unavailable() -> str:
    """Why there can be no pool here; empty where there can."""
    if platform.system() != "Linux" or platform.machine() not in _FUTEX:
        return f"no way to wake threads on {platform.system()} {platform.machine()}"
    return ""


@functools.cache
def pool() -> Pool:
    """The pool, made once; threads start when a loop first wants them. A forked child starts its own."""
    names = ("hf_parallel", "hf_forget")
    loaded = load_object(compile_object(pool_text(platform.machine()), host()).code, names)
    keep(loaded)
    os.register_at_fork(after_in_child=ctypes.CFUNCTYPE(None)(loaded.address("hf_forget")))
    return Pool(loaded, loaded.address("hf_parallel"))
