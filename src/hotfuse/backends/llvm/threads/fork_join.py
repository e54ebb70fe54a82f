"""How the threads of a team come together: what native code calls instead of the OpenMP runtime's own fork.

A native run keeps one team from the first kernel that wants threads to its end (decision 28):

    open      a run begins; nobody is woken yet. It may bring words in which it remembers whether a team pays (`alone`)
    fork      the first one starts the runtime's region, with all threads that calls have; the caller stays outside of it and posts
              its work, and each thread that it wants takes a part. Between forks threads stay in the region and look for the next
    close     the run has ended: threads leave the region, and torch's own kernels find them where they left them

A kernel that is called alone is a run of its own. Forks ask for more or fewer threads, the region never does: the GNU runtime ends
threads that a smaller region leaves over, and makes new ones for the next larger one, some tens of microseconds each.

The runtime's threads look at memory for some milliseconds (8 where a pause takes 27 ns) before they let their core go. That is
right while each has a core of its own. Where the system has put two of them on one core, the running one looks for the other, which
stands behind it in the queue, and the shortest kernel takes those milliseconds. So

    the first thread    notes its core, and does not go to the runtime's join before all others have begun
    every other thread  notes its core; where one of the team has it already, moves to one that nobody has
    a waiting thread    looks for about as long as being woken takes, then sleeps until it is woken

A thread moves by excluding cores from those it may run on and allowing them again at once: it stays where it is then, and is as
free as before. At most one of the process moves in `EVERY_NS`, so that teams that outnumber the cores do not chase each other.
`moved` counts. Teams between the steps of one kernel wait in the same way (`team`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from hotfuse.backends.llvm.threads import alone
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.target import host
from hotfuse.native.toolchain import helper_object

FORK, OPEN, CLOSE, WAIT, WAKE = "team_fork", "team_open", "team_close", "team_wait", "team_wake"
NAMES = (FORK, OPEN, CLOSE, WAIT, WAKE)
OPENMP = ("GOMP_parallel_start", "GOMP_parallel_end", "omp_get_thread_num", "omp_get_num_threads")
"""What there has to be of an OpenMP runtime."""
EVERY_NS = 2_000_000
SPINS = 1 << 12
"""Looks before a thread sleeps: a tenth of a millisecond, about what being woken costs. With fewer, a thread that waits for one
just waking falls asleep too, and so on in turns; and another process takes the core for a whole slice of time."""
BETWEEN_SPINS = 1 << 14
"""The same between the forks of a run: what one thread does meanwhile takes longer, and being woken would come on top of it."""
_CPUS = 1024
_POSTED, _JOB, _DONE, _BEGUN, _TAKEN = 0, 128, 256, 384, 512
"""Where in the memory of a team things are, each in lines of its own: which job is the newest; its code, its data, the threads in
the team, parts to be done in all so far, the team around this one, and what `alone` notes of the run; the counts of parts done and
of threads that have begun, each with its sleepers behind it; the set of cores that the team has."""
_CODE, _DATA, _SIZE, _PARTS, _AROUND, _STATE, _BEGAN, _MODE = (_JOB + 8 * k for k in range(8))
BYTES = _TAKEN + _CPUS // 8
_ALIGNED = 128
_OPENED, _CLOSED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p), ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ROUSE = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_ALL = (1 << 16) - 1
"""Threads that a job asks for to end the team. A job is known by a word: its number, and in the lowest bits for how many threads
it is. A thread that is not among them reads nothing else, as the next job may be written already."""
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
define void @{FORK}(ptr %body, ptr %data, i64 %cold, i64 %awake, i64 %given) {{
  call void %body(ptr %data, i64 0, i64 1)
  ret void
}}
define void @{OPEN}(ptr %team, ptr %state) {{
  ret void
}}
define void @{CLOSE}(ptr %team) {{
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


def text(triple: str, key: int) -> str:
    """The functions; a count is a word that only grows, with the number of those who sleep until it has grown behind it. `key` is
    that of the thread's own word (`pthread_key_create`) that tells of the team it is the first thread of."""
    declared, paused = _pause(triple)
    futex = _FUTEX[family(triple)]
    return f"""
{declared}
declare void @GOMP_parallel_start(ptr, ptr, i32)
declare void @GOMP_parallel_end()
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare ptr @pthread_getspecific(i32)
declare i32 @pthread_setspecific(i32, ptr)
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
declare i32 @clock_gettime(i32, ptr)
declare i64 @syscall(i64, ...)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
@moved = global i64 0
@moved.last = global i64 0
@regions = global i64 0

define void @{OPEN}(ptr %team, ptr %state) {{
  call void @llvm.memset.p0.i64(ptr align 128 %team, i8 0, i64 {BYTES}, i1 false)
  %around = call ptr @pthread_getspecific(i32 {key})
  %around.at = getelementptr i8, ptr %team, i64 {_AROUND}
  store ptr %around, ptr %around.at
  %state.at = getelementptr i8, ptr %team, i64 {_STATE}
  store ptr %state, ptr %state.at
  %set = call i32 @pthread_setspecific(i32 {key}, ptr %team)
  ret void
}}

define void @{CLOSE}(ptr %team) {{
  %around.at = getelementptr i8, ptr %team, i64 {_AROUND}
  %around = load ptr, ptr %around.at
  %set = call i32 @pthread_setspecific(i32 {key}, ptr %around)
  %size.at = getelementptr i8, ptr %team, i64 {_SIZE}
  %size = load i64, ptr %size.at
  %started = icmp ne i64 %size, 0
  br i1 %started, label %end, label %done
end:
  %others = sub i64 %size, 1
  %begun = getelementptr i8, ptr %team, i64 {_BEGUN}
  call void @{WAIT}(ptr %begun, i64 %others)
  call void @post(ptr %team, ptr null, ptr null, i64 {_ALL})
  call void @GOMP_parallel_end()
  br label %done
done:
  call void @noted(ptr %team)
  ret void
}}

; runs a body(data, thread, threads): on as many threads as are worth waking, or, where the team is awake, worth telling
define void @{FORK}(ptr %body, ptr %data, i64 %cold, i64 %awake, i64 %given) {{
entry:
  %own = alloca [{BYTES} x i8], align 128
  %team = call ptr @pthread_getspecific(i32 {key})
  %inside = icmp ne ptr %team, null
  br i1 %inside, label %member, label %single
single:
  %cold.given = call i64 @llvm.smin.i64(i64 %cold, i64 %given)
  %several = icmp sgt i64 %cold.given, 1
  br i1 %several, label %run, label %one
run:
  call void @{OPEN}(ptr %own, ptr null)
  call void @{FORK}(ptr %body, ptr %data, i64 %cold, i64 %cold, i64 %given)
  call void @{CLOSE}(ptr %own)
  ret void
member:
  %size.at = getelementptr i8, ptr %team, i64 {_SIZE}
  %size = load i64, ptr %size.at
  %started = icmp ne i64 %size, 0
  %worth = select i1 %started, i64 %awake, i64 %cold
  %asked = call i64 @llvm.smin.i64(i64 %worth, i64 %given)
  %many = icmp sgt i64 %asked, 1
  br i1 %many, label %ready, label %one
ready:
  br i1 %started, label %share, label %decide
decide:
  %mode.at = getelementptr i8, ptr %team, i64 {_MODE}
  %decided = load i64, ptr %mode.at
  %stays = icmp uge i64 %decided, {alone.COLD_ALONE}
  br i1 %stays, label %one, label %ask
ask:
  %serial = call i1 @alone(ptr %team, i64 %given)
  br i1 %serial, label %one, label %start
start:
  %cpu = call i32 @sched_getcpu()
  %shared = call i1 @take(ptr %team, i32 %cpu)
  %count = trunc i64 %given to i32
  call void @GOMP_parallel_start(ptr @serve, ptr %team, i32 %count)
  %there = call i32 @omp_get_num_threads()
  %there.l = zext i32 %there to i64
  store i64 %there.l, ptr %size.at
  %counted = atomicrmw add ptr @regions, i64 1 monotonic
  br label %share
share:
  %members = phi i64 [%size, %ready], [%there.l, %start]
  %wanted = call i64 @llvm.smin.i64(i64 %asked, i64 %members)
  %alone = icmp slt i64 %wanted, 2
  br i1 %alone, label %one, label %go
go:
  %others = sub i64 %wanted, 1
  %parts.at = getelementptr i8, ptr %team, i64 {_PARTS}
  %parts.before = load i64, ptr %parts.at
  %parts = add i64 %parts.before, %others
  store i64 %parts, ptr %parts.at
  call void @post(ptr %team, ptr %body, ptr %data, i64 %wanted)
  call void %body(ptr %data, i64 0, i64 %wanted)
  %ended = getelementptr i8, ptr %team, i64 {_DONE}
  call void @{WAIT}(ptr %ended, i64 %parts)
  ret void
one:
  call void %body(ptr %data, i64 0, i64 1)
  ret void
}}

; wakes a team that is open
define void @rouse(i64 %threads) {{
  call void @{FORK}(ptr @nothing, ptr null, i64 %threads, i64 %threads, i64 %threads)
  ret void
}}

define internal void @nothing(ptr %data, i64 %thread, i64 %threads) {{
  ret void
}}

define internal void @post(ptr %team, ptr %body, ptr %data, i64 %wanted) {{
  %body.at = getelementptr i8, ptr %team, i64 {_CODE}
  %data.at = getelementptr i8, ptr %team, i64 {_DATA}
  store ptr %body, ptr %body.at
  store ptr %data, ptr %data.at
  %before = load i64, ptr %team
  %number = lshr i64 %before, 16
  %next = add i64 %number, 1
  %high = shl i64 %next, 16
  %word = or i64 %high, %wanted
  %old = atomicrmw xchg ptr %team, i64 %word seq_cst
  call void @{WAKE}(ptr %team)
  ret void
}}

; what every thread but the first does in the region
define internal void @serve(ptr %team) {{
entry:
  %thread.i = call i32 @omp_get_thread_num()
  %thread = zext i32 %thread.i to i64
  %cpu = call i32 @sched_getcpu()
  %shared = call i1 @take(ptr %team, i32 %cpu)
  br i1 %shared, label %away, label %begin
away:
  call void @move(ptr %team)
  br label %begin
begin:
  %begun = getelementptr i8, ptr %team, i64 {_BEGUN}
  %ended = getelementptr i8, ptr %team, i64 {_DONE}
  %body.at = getelementptr i8, ptr %team, i64 {_CODE}
  %data.at = getelementptr i8, ptr %team, i64 {_DATA}
  %one.more = atomicrmw add ptr %begun, i64 1 seq_cst
  call void @{WAKE}(ptr %begun)
  br label %look
look:
  %number = phi i64 [0, %begin], [%found, %news], [%found, %work]
  %next = add i64 %number, 1
  %until = shl i64 %next, 16
  call void @between(ptr %team, i64 %until)
  br label %news
news:
  %word = load atomic i64, ptr %team acquire, align 8
  %found = lshr i64 %word, 16
  %wanted = and i64 %word, {_ALL}
  %mine = icmp ult i64 %thread, %wanted
  br i1 %mine, label %read, label %look
read:
  %body = load ptr, ptr %body.at
  %over = icmp eq ptr %body, null
  br i1 %over, label %leave, label %work
work:
  %data = load ptr, ptr %data.at
  call void %body(ptr %data, i64 %thread, i64 %wanted)
  %one.done = atomicrmw add ptr %ended, i64 1 seq_cst
  call void @{WAKE}(ptr %ended)
  br label %look
leave:
  ret void
}}

; notes a core; whether another thread of the team had it
define internal i1 @take(ptr %team, i32 %cpu) {{
  %known = icmp ult i32 %cpu, {_CPUS}
  br i1 %known, label %note, label %no
note:
  %word.i = lshr i32 %cpu, 6
  %bit.i = and i32 %cpu, 63
  %bit.l = zext i32 %bit.i to i64
  %bit = shl i64 1, %bit.l
  %taken = getelementptr i8, ptr %team, i64 {_TAKEN}
  %word = getelementptr i64, ptr %taken, i32 %word.i
  %old = atomicrmw or ptr %word, i64 %bit monotonic
  %both = and i64 %old, %bit
  %had = icmp ne i64 %both, 0
  ret i1 %had
no:
  ret i1 false
}}

define internal void @move(ptr %team) {{
  %may = alloca [{_CPUS // 64} x i64]
  %free = alloca [{_CPUS // 64} x i64]
  %now = call i64 @clock()
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
  %taken.base = getelementptr i8, ptr %team, i64 {_TAKEN}
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
  %shared = call i1 @take(ptr %team, i32 %cpu)
  %counted = atomicrmw add ptr @moved, i64 1 monotonic
  br label %done
done:
  ret void
}}

{alone.text(_STATE, _BEGAN, _MODE)}
{_waiting(f"define void @{WAIT}", SPINS, paused, futex)}
{_waiting("define internal void @between", BETWEEN_SPINS, paused, futex)}

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


def _waiting(definition: str, spins: int, paused: str, futex: int) -> str:
    """A function that looks for a while, then sleeps, until a count has grown so far."""
    return f"""
{definition}(ptr %count, i64 %until) {{
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
  %long = icmp ugt i64 %more, {spins}
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
"""


@dataclass(frozen=True, slots=True)
class ForkJoin:
    """The functions, loaded into this process."""

    code: Loaded
    symbols: dict[str, int]

    def _word(self, name: str) -> int:
        return ctypes.c_int64.from_address(self.code.address(name)).value

    @property
    def moved(self) -> int:
        """How many threads went to a core of their own."""
        return self._word("moved")

    @property
    def regions(self) -> int:
        """How often the runtime was asked for its threads."""
        return self._word("regions")

    @contextmanager
    def awake(self, threads: int) -> Generator[None]:
        """What kernels find inside a native run: an open team, all of it awake. Nothing of torch may fork meanwhile."""
        memory = ctypes.create_string_buffer(BYTES + _ALIGNED)
        at = -(-ctypes.addressof(memory) // _ALIGNED) * _ALIGNED
        _OPENED(self.symbols[OPEN])(at, None)
        try:
            _ROUSE(self.code.address("rouse"))(threads)
            yield
        finally:
            _CLOSED(self.symbols[CLOSE])(at)


def fork_join_of(openmp: Mapping[str, int], system: Mapping[str, int] | None = None) -> ForkJoin:
    """The functions over a runtime's own (`OPENMP`), by their names there; `system` replaces calls of the C library."""
    names = (*NAMES, "rouse", "moved", "regions")
    code = load_object(helper_object(text(host().triple, _key())), names, {**openmp, **(system or {})})
    return ForkJoin(code, {n: code.address(n) for n in NAMES})


@once
def _key() -> int:
    """A word of every thread's own; it lives as long as the process."""
    found = ctypes.c_uint32()
    if ctypes.CDLL(None).pthread_key_create(ctypes.byref(found), None) != 0:
        raise InternalError("the system gives no word of a thread's own", because="pthread_key_create failed")
    return found.value
