"""Kernels that share work again and again: one team of threads for the whole kernel, which meets between the loops it shares.

    for step                                    every thread counts along
      what has no parallel loop in it           the first thread does it;         then all meet
      for panel parallel                        every thread takes its part;      then all meet

A fork and a join of the OpenMP runtime for every step cost a microsecond where threads are awake, and wait for a scheduler where
one of them is not. Meeting is one counter that everybody adds to and looks at: a tenth of that. A thread that has looked for long
sleeps until the last one wakes it (`gather`), so a team that shares its cores with other load goes on.

In every other round of the loop around it a thread goes through its part backwards. So it begins with the data that the caches
still hold of the round before. In one order for all rounds, data that is a little larger than a cache is always evicted just
before it is read again (a layer of 256 units, whose weights are as large as a cache: 1.03 to 1.08 times as fast backwards). Data
much larger than a cache is read in one order: little of it would be kept, and the hardware prefetches upwards (512 units: 0.96 to
0.99 backwards).

Only what lies in memory passes from one part to the next, so nothing may define or carry tiles around a parallel loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from hotfuse.backends.llvm.emission.code import Module
from hotfuse.backends.llvm.emission.state import FunctionState
from hotfuse.backends.llvm.emission.statements import Block, bounds, emit_when, launch, on_stack, part, serial, slot
from hotfuse.backends.llvm.threads import fork_join
from hotfuse.ir.dims import Dim, expr, sym
from hotfuse.lower.cpu import thread_work
from hotfuse.lower.cpu.scratch import bytes_of
from hotfuse.lower.cpu.thread_work import halfway, loop_work, trips
from hotfuse.tile.program import BufferKind, Instr, Kernel, Loop, LoopKind, Stmt, TileAccess, When, instructions

_LINE = 128
"""Bytes that the counter has for itself: two lines, as neighbours are fetched in pairs."""
KEPT_BYTES = 2 << 20
"""Most constants of a round that are worth another order: twice a usual second-level cache."""
Enter = Callable[[FunctionState, str, str], FunctionState]


def shares(stmts: Sequence[Stmt]) -> bool:
    """Whether statements have a parallel loop in them."""
    return any(
        not isinstance(s, Instr) and ((isinstance(s, Loop) and s.kind is LoopKind.PARALLEL) or shares(s.body))
        for s in stmts
    )


def is_for_team(stmts: Sequence[Stmt]) -> bool:
    """Whether a kernel's statements share work in a loop, and can be run by a team."""
    return _repeats(stmts, inside=False) and _possible(stmts)


def _repeats(stmts: Sequence[Stmt], *, inside: bool) -> bool:
    """Whether a parallel loop lies in a loop of several rounds."""
    for s in stmts:
        if isinstance(s, When) and _repeats(s.body, inside=inside):
            return True
        if isinstance(s, Loop) and (
            inside if s.kind is LoopKind.PARALLEL else _repeats(s.body, inside=inside or not _once(s))
        ):
            return True
    return False


def _once(loop: Loop) -> bool:
    """Whether a loop only names a number."""
    return trips(loop) == 1 or loop.hi == expr("+", loop.lo, loop.step)


def _possible(stmts: Sequence[Stmt]) -> bool:
    """Whether what surrounds parallel loops is counting and memory only."""
    for s in stmts:
        match s:
            case Instr():
                if s.outs:
                    return False
            case When():
                if shares(s.body) and not _possible(s.body):
                    return False
            case Loop(kind=LoopKind.PARALLEL):
                pass
            case Loop():
                if shares([s]) and (s.kind is LoopKind.UNROLL or s.carried or not _possible(s.body)):
                    return False
                if not shares([s]) and s.outs:
                    return False
    return True


# ---- how many threads ----------------------------------------------------------------------------------------------------


def _cost(stmts: Sequence[Stmt], lanes: int) -> tuple[Dim, Dim, Dim]:
    """(vector operations that threads share, meetings, most parts of one parallel loop), over what is known outside."""
    work: Dim = 0
    meetings: Dim = 0
    parts: Dim = 0
    for s in stmts:
        match s:
            case Loop(kind=LoopKind.PARALLEL):
                found, met, most = loop_work(s, lanes), 1, trips(s)
            case Loop() if shares([s]):
                found, met, most = (halfway(s, d) for d in _cost(s.body, lanes))
                found, met = expr("*", trips(s), found), expr("*", trips(s), met)
            case When() if shares(s.body):
                found, met, most = _cost(s.body, lanes)
            case _:
                continue
        work, meetings, parts = expr("+", work, found), expr("+", meetings, met), expr("max", parts, most)
    return work, meetings, parts


def threads_for(stmts: Sequence[Stmt], lanes: int, *, awake: bool = False) -> Dim:
    """How many threads a kernel deserves: each is woken once, unless it is awake, and must have enough to do between meetings."""
    work, meetings, parts = _cost(stmts, lanes)
    each = expr("//", expr("//", work, expr("max", 1, meetings)), thread_work.MEETING_WORK)
    return expr("min", parts, expr("//", work, thread_work.AWAKE_WORK if awake else thread_work.WORK_PER_THREAD), each)


# ---- code ----------------------------------------------------------------------------------------------------------------


def emit_team(s: FunctionState, stmts: Sequence[Stmt], block: Block, enter: Enter) -> None:
    """The statements as a function that every thread of a team runs; one thread alone runs the same without meetings."""
    fn, name = s.fn, f"{s.kernel.name}.team"
    name = "".join(ch if ch.isalnum() or ch in "_." else "_" for ch in name)
    common = on_stack(s)
    slots = ["%buffers", "%sizes", *(s.bases[n] for n in common)]
    counter = -(-8 * len(slots) // _LINE) * _LINE
    context = fn.alloca(f"[{counter + _LINE} x i8], align {_LINE}")
    for k, pointer in enumerate(slots):
        fn.do(f"store ptr {pointer}, ptr {slot(fn, context, 8 * k)}")
    for word in (0, 8):  # how many have come, how many sleep
        fn.do(f"store i64 0, ptr {slot(fn, context, counter + word)}")
    launch(s, name, context, *(threads_for(stmts, fn.target.lanes, awake=awake) for awake in (False, True)))
    inner = enter(s, name, "ptr %context, i64 %thread, i64 %threads")
    with inner.fn.at(inner.fn.scopes[0]):
        for k, own in enumerate(common, 2):
            inner.bases[own] = inner.fn.val(f"load ptr, ptr {slot(inner.fn, '%context', 8 * k)}")
        met = slot(inner.fn, "%context", counter)
        first = inner.fn.val("icmp eq i64 %thread, 0")
    _Team(inner, met, first, block).write(inner, stmts)
    inner.fn.leave()


class _Team:
    """The function of all threads while it is written."""

    def __init__(self, s: FunctionState, met: str, first: str, block: Block) -> None:
        self.s, self.met, self.first, self.block = s, met, first, block
        self.meeting = _meeting(s.fn.module)

    def write(self, s: FunctionState, stmts: Sequence[Stmt]) -> None:
        """Statements of which some share work: in turns what the first thread does and what all of them do."""
        for shared, several in groupby(stmts, key=lambda stmt: shares([stmt])):
            if not shared:
                self._alone(list(several))
                continue
            for stmt in several:
                if isinstance(stmt, When):
                    emit_when(s, stmt, self.write)
                elif isinstance(stmt, Loop) and stmt.kind is LoopKind.PARALLEL:
                    self._part(stmt)
                elif isinstance(stmt, Loop):
                    serial(s, stmt, *bounds(s, stmt), self.write)

    def _alone(self, stmts: Sequence[Stmt]) -> None:
        fn = self.s.fn
        mine, after = fn.labels("mine", "after")
        fn.do(f"br i1 {self.first}, label %{mine}, label %{after}")
        fn.label(mine)
        self.block(self.s, stmts)
        fn.do(f"br label %{after}")
        fn.label(after)
        self._meet()

    def _part(self, loop: Loop) -> None:
        fn = self.s.fn
        low, high = part(fn, loop, fn.i64(loop.lo), fn.i64(trips(loop)))
        serial(self.s, loop, low, high, self._to_and_fro(loop, low, high))
        self._meet()

    def _to_and_fro(self, loop: Loop, low: str, high: str) -> Block:
        """What writes the body of a part, so that its rounds count down in every other round of the loop around it."""
        fn = self.s.fn
        rounds = next((around for around in reversed(self.s.around) if not _once(around)), None)
        constants = _constants(self.s.kernel, loop.body)
        if rounds is None or not isinstance(constants, int) or constants > KEPT_BYTES:
            return self.block
        nth = expr("//", expr("+", sym(rounds.var), expr("*", rounds.lo, -1)), rounds.step)
        back = fn.truth(expr("==", expr("%", nth, 2), 1))
        ends = fn.val(f"add i64 {low}, {fn.val(f'sub i64 {high}, {loop.step}')}")

        def turned(s: FunctionState, stmts: Sequence[Stmt]) -> None:
            with fn.at(fn.scopes[-1]):
                at = fn.symbol[loop.var]
                mirrored = fn.val(f"sub i64 {ends}, {at}")
                fn.symbol[loop.var] = fn.val(f"select i1 {back}, i64 {mirrored}, i64 {at}")
            self.block(s, stmts)

        return turned

    def _meet(self) -> None:
        self.s.fn.do(f"call void @{self.meeting}(ptr {self.met}, i64 %threads)")


def _constants(kernel: Kernel, stmts: Sequence[Stmt]) -> Dim:
    """Bytes of all constants that statements read from."""
    names = {a.buffer for i in instructions(stmts) for a in i.args if isinstance(a, TileAccess)}
    return expr("+", 0, *(bytes_of(b) for b in kernel.buffers if b.name in names and b.kind is BufferKind.CONST))


def _meeting(module: Module) -> str:
    """A function in which threads wait until all of them have come: the counter passes the next multiple of their number."""
    name = "team.meeting"
    if name in module.defined:
        return name
    module.declared.setdefault(fork_join.WAIT, f"declare void @{fork_join.WAIT}(ptr, i64)")
    module.declared.setdefault(fork_join.WAKE, f"declare void @{fork_join.WAKE}(ptr)")
    text = f"""
define internal void @{name}(ptr %met, i64 %threads) #0 {{
entry:
  %many = icmp ugt i64 %threads, 1
  br i1 %many, label %come, label %done
come:
  %before = atomicrmw add ptr %met, i64 1 seq_cst
  %odd = urem i64 %before, %threads
  %even = sub i64 %before, %odd
  %all = add i64 %even, %threads
  %with.me = add i64 %before, 1
  %last = icmp eq i64 %with.me, %all
  br i1 %last, label %wake, label %wait
wake:
  call void @{fork_join.WAKE}(ptr %met)
  br label %done
wait:
  call void @{fork_join.WAIT}(ptr %met, i64 %all)
  br label %done
done:
  ret void
}}"""
    module.defined[name] = list(text.strip().splitlines())
    return name
