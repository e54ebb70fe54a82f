"""How the threads of a fork come together: what our kernels call instead of the OpenMP runtime's own fork.

The runtime's threads look at memory for some milliseconds (8 where a pause takes 27 ns) before they let their core go. That is
right while each has a core of its own. Where the system has put two of them on one core, whoever runs looks for the other, which
stands behind it in the queue, and the shortest kernel takes those milliseconds. So

    the first thread    notes its core, forks, does its part, and does not go to the runtime's join before all others have begun
    every other thread  notes its core; where one of the team has it already, moves to one that nobody has; then does its part
    who waits           looks for about as long as being woken takes, then sleeps until it is woken

A thread moves by excluding cores from those it may run on and allowing them again at once: it stays where it is then, and is as
free as before. At most one of the process moves in `EVERY_NS`, so that teams that outnumber the cores do not chase each other.
`moved` counts. Teams between the steps of one kernel wait in the same way (`team`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from hotfuse.backends.llvm.jit import Loaded, compile_object, load_object
from hotfuse.backends.llvm.target import host

FORK, WAIT, WAKE = "GOMP_parallel", "team_wait", "team_wake"
EVERY_NS = 2_000_000
SPINS = 1 << 12
"""Looks before a thread sleeps: a tenth of a millisecond, about what being woken costs. With fewer, whoever waits for one that is
just waking falls asleep too, and so on in turns; and whoever else wants the core takes it for a whole slice of time."""
_CPUS = 1024
_COUNT, _TAKEN = 128, 256
"""Where in the memory of a fork the count of threads that have begun is, and the set of cores that the team has."""
_BYTES = _TAKEN + _CPUS // 8
_FUTEX = {"x86": 202, "arm": 98}
"""The number of the system call that sleeps on a word, and wakes those who do."""
_PAUSES = {"x86": ("llvm.x86.sse2.pause", "", ""), "arm": ("llvm.aarch64.hint", "i32", "i32 1")}
"""Per architecture, the instruction that says "waiting": its name, what it takes, what it is given."""


def family(triple: str) -> str:
    """The kind of processor that a target's name begins with."""
    return "x86" if triple.startswith("x86") else "arm"


def _pause(triple: str) -> tuple[str, str]:
    """The declaration of the instruction that says "waiting", and its call."""
    name, takes, given = _PAUSES[family(triple)]
    return f"declare void @{name}({takes})", f"call void @{name}({given})"


SERIAL_TEXT = f"""
define void @{FORK}(ptr %body, ptr %data, i32 %threads, i32 %flags) {{
  call void %body(ptr %data)
  ret void
}}
define void @{WAIT}(ptr %count, i64 %until) {{
  ret void
}}
define void @{WAKE}(ptr %count) {{
  ret void
}}
"""
"""The same where everything runs on the calling thread."""


def text(triple: str) -> str:
    """The functions; a count is a word that only grows, with the number of those who sleep until it has grown behind it."""
    declared, paused = _pause(triple)
    futex = _FUTEX[family(triple)]
    return f"""
{declared}
declare void @openmp_fork(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
declare i32 @clock_gettime(i32, ptr)
declare i64 @syscall(i64, ...)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
@moved = global i64 0
@moved.last = global i64 0

define void @{FORK}(ptr %body, ptr %data, i32 %threads, i32 %flags) {{
  %fork = alloca [{_BYTES} x i8], align 128
  call void @llvm.memset.p0.i64(ptr align 128 %fork, i8 0, i64 {_BYTES}, i1 false)
  %data.at = getelementptr i8, ptr %fork, i64 8
  store ptr %body, ptr %fork
  store ptr %data, ptr %data.at
  %cpu = call i32 @sched_getcpu()
  %shared = call i1 @take(ptr %fork, i32 %cpu)
  call void @openmp_fork(ptr @share, ptr %fork, i32 %threads, i32 %flags)
  ret void
}}

define internal void @share(ptr %fork) {{
  %data.at = getelementptr i8, ptr %fork, i64 8
  %body = load ptr, ptr %fork
  %data = load ptr, ptr %data.at
  %count = getelementptr i8, ptr %fork, i64 {_COUNT}
  %thread = call i32 @omp_get_thread_num()
  %first = icmp eq i32 %thread, 0
  br i1 %first, label %one, label %other
one:
  call void %body(ptr %data)
  %threads = call i32 @omp_get_num_threads()
  %others = sub i32 %threads, 1
  %until = zext i32 %others to i64
  call void @{WAIT}(ptr %count, i64 %until)
  br label %done
other:
  %cpu = call i32 @sched_getcpu()
  %shared = call i1 @take(ptr %fork, i32 %cpu)
  br i1 %shared, label %away, label %begin
away:
  call void @move(ptr %fork)
  br label %begin
begin:
  %before = atomicrmw add ptr %count, i64 1 seq_cst
  call void @{WAKE}(ptr %count)
  call void %body(ptr %data)
  br label %done
done:
  ret void
}}

; notes a core; whether another thread of the team had it
define internal i1 @take(ptr %fork, i32 %cpu) {{
  %known = icmp ult i32 %cpu, {_CPUS}
  br i1 %known, label %note, label %no
note:
  %word.i = lshr i32 %cpu, 6
  %bit.i = and i32 %cpu, 63
  %bit.l = zext i32 %bit.i to i64
  %bit = shl i64 1, %bit.l
  %taken = getelementptr i8, ptr %fork, i64 {_TAKEN}
  %word = getelementptr i64, ptr %taken, i32 %word.i
  %old = atomicrmw or ptr %word, i64 %bit monotonic
  %both = and i64 %old, %bit
  %had = icmp ne i64 %both, 0
  ret i1 %had
no:
  ret i1 false
}}

define internal void @move(ptr %fork) {{
  %time = alloca [2 x i64]
  %may = alloca [{_CPUS // 64} x i64]
  %free = alloca [{_CPUS // 64} x i64]
  %failed = call i32 @clock_gettime(i32 1, ptr %time)
  %ns.at = getelementptr i64, ptr %time, i64 1
  %s = load i64, ptr %time
  %ns = load i64, ptr %ns.at
  %s.ns = mul i64 %s, 1000000000
  %now = add i64 %s.ns, %ns
  %last = load atomic i64, ptr @moved.last monotonic, align 8
  %since = sub i64 %now, %last
  %soon = icmp slt i64 %since, {EVERY_NS}
  br i1 %soon, label %done, label %mine
mine:
  %claim = cmpxchg ptr @moved.last, i64 %last, i64 %now monotonic monotonic
  %claimed = extractvalue {{ i64, i1 }} %claim, 1
  br i1 %claimed, label %ask, label %done
ask:
  %unknown = call i32 @sched_getaffinity(i32 0, i64 {_CPUS // 8}, ptr %may)
  %asked = icmp eq i32 %unknown, 0
  br i1 %asked, label %word, label %done
word:
  %i = phi i64 [0, %ask], [%i1, %word]
  %any = phi i64 [0, %ask], [%any1, %word]
  %may.at = getelementptr i64, ptr %may, i64 %i
  %free.at = getelementptr i64, ptr %free, i64 %i
  %taken.base = getelementptr i8, ptr %fork, i64 {_TAKEN}
  %taken.at = getelementptr i64, ptr %taken.base, i64 %i
  %may.w = load i64, ptr %may.at
  %taken.w = load atomic i64, ptr %taken.at monotonic, align 8
  %not.w = xor i64 %taken.w, -1
  %free.w = and i64 %may.w, %not.w
  store i64 %free.w, ptr %free.at
  %any1 = or i64 %any, %free.w
  %i1 = add i64 %i, 1
  %end = icmp eq i64 %i1, {_CPUS // 64}
  br i1 %end, label %some, label %word
some:
  %none = icmp eq i64 %any1, 0
  br i1 %none, label %done, label %go
go:
  %refused = call i32 @sched_setaffinity(i32 0, i64 {_CPUS // 8}, ptr %free)
  %gone = icmp eq i32 %refused, 0
  br i1 %gone, label %back, label %done
back:
  %again = call i32 @sched_setaffinity(i32 0, i64 {_CPUS // 8}, ptr %may)
  %cpu = call i32 @sched_getcpu()
  %shared = call i1 @take(ptr %fork, i32 %cpu)
  %counted = atomicrmw add ptr @moved, i64 1 monotonic
  br label %done
done:
  ret void
}}

; looks for a while, then sleeps, until a count has grown so far
define void @{WAIT}(ptr %count, i64 %until) {{
entry:
  br label %look
look:
  %looks = phi i64 [0, %entry], [%more, %again]
  %now = load atomic i64, ptr %count acquire, align 8
  %there = icmp uge i64 %now, %until
  br i1 %there, label %done, label %again
again:
  {paused}
  %more = add i64 %looks, 1
  %long = icmp ugt i64 %more, {SPINS}
  br i1 %long, label %wait, label %look
wait:
  %sleepers = getelementptr i64, ptr %count, i64 1
  %one.more = atomicrmw add ptr %sleepers, i64 1 seq_cst
  br label %check
check:
  %then = load atomic i64, ptr %count seq_cst, align 8
  %came = icmp uge i64 %then, %until
  br i1 %came, label %rise, label %sleep
sleep:
  %low = trunc i64 %then to i32
  %woken = call i64 (i64, ...) @syscall(i64 {futex}, ptr %count, i32 128, i32 %low, ptr null, ptr null, i32 0)
  br label %check
rise:
  %one.less = atomicrmw sub ptr %sleepers, i64 1 monotonic
  br label %done
done:
  ret void
}}

define void @{WAKE}(ptr %count) {{
  %at = getelementptr i64, ptr %count, i64 1
  %sleepers = load atomic i64, ptr %at seq_cst, align 8
  %some = icmp ne i64 %sleepers, 0
  br i1 %some, label %wake, label %done
wake:
  %woken = call i64 (i64, ...) @syscall(i64 {futex}, ptr %count, i32 129, i32 2147483647, ptr null, ptr null, i32 0)
  br label %done
done:
  ret void
}}
"""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The functions, loaded into this process."""

    code: Loaded
    symbols: dict[str, int]

    @property
    def moved(self) -> int:
        """How many threads went to a core of their own."""
        return ctypes.c_int64.from_address(self.code.address("moved")).value


def gathered(openmp: Mapping[str, int], system: Mapping[str, int] | None = None) -> Gathered:
    """The functions over a runtime's fork and its two queries, by their names there; `system` replaces calls of the C library."""
    names = (FORK, WAIT, WAKE)
    symbols = {"openmp_fork": openmp[FORK], **{n: at for n, at in openmp.items() if n != FORK}, **(system or {})}
    code = load_object(compile_object(text(host().triple), host()).code, (*names, "moved"), symbols)
    return Gathered(code, {n: code.address(n) for n in names})
