"""Finishing a planned run: what leaves it, where intermediates lie, which sizes are read off which input.

A run's results are tensors of their own, never memory of its arena. A view that is wanted outside is either the only thing
wanted of a buffer that it covers, and then the result has the view's shape; or the library makes it from the run's results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.run.lanes import ForkSpan, allocate_lanes, planned_forks, touched
from hotfuse.compile.run.run_plan import RunPlanner
from hotfuse.compile.run.run_steps import (
    PlannedBranch,
    PlannedCall,
    PlannedChoice,
    PlannedLoop,
    PlannedMark,
    PlannedMove,
    PlannedStep,
    Pointer,
    Root,
    RunState,
    bytes_of,
)
from hotfuse.ir.dims import Dim, expr, symbols
from hotfuse.ir.graph import Graph, Value, output_values
from hotfuse.ir.subgraph import extract
from hotfuse.ir.types import DType, TensorType, size_of
from hotfuse.lower.common.algebra import add, mul
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.own_sizes import anchored
from hotfuse.lower.run.arena import LINE, Live, rounded
from hotfuse.lower.run.description import (
    LOOP_VAR,
    THREADS,
    Base,
    BranchStep,
    Call,
    ChoiceStep,
    Constant,
    InputSpec,
    LoopStep,
    Mark,
    MemoryAddress,
    MoveStep,
    OutputSpec,
    Run,
    SizeSpec,
    Step,
    Word,
)
from hotfuse.lower.run.forks import Fork
from hotfuse.lower.run.inplace import may_overwrite
from hotfuse.lower.run.places import whole


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run, with what the process that serves needs besides its code."""

    run: Run
    words: tuple[Word, ...]
    exits: tuple[int, ...]
    returned: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Result:
    value: Value
    root: int
    strides: tuple[Dim, ...]


def finish(planner: RunPlanner, first: int, last: int, sizes: Mapping[str, int], threads: int = 1) -> FinishedRun:
    """The run over parts `first` up to `last`; raises CannotLower where a size cannot be told.

    With several threads, it may fork where calls are independent.
    """
    level, state = planner.level, planner.state
    nodes = range(level.parts[first][0], level.parts[last - 1][1])
    results, exits, returned = _leaving(level.graph, nodes, state)
    forks = planned_forks(planner, sizes, threads)
    placed = _Placed(state, results, sizes, forks)
    read = {v.name: i for i, v in enumerate(state.inputs)}
    grown = {name: (read[past], dim) for name, (past, dim) in state.grown.items()}
    outputs = tuple(
        OutputSpec(r.value.name, r.value.type.dtype, r.value.type.shape, r.strides, grown.get(r.value.name))
        for r in results
        if isinstance(r.value.type, TensorType)
    )
    steps = placed.steps(state.steps, first)
    symbols_of_words = tuple(state.symbols.get(i, "") for i in range(len(state.words)))
    given = list(state.inputs)
    reads = _sizes(level.graph, state, given, _used(placed, outputs) - {THREADS} - set(symbols_of_words))
    given += _fallback_inputs(planner, first, last, {v.name for v in given})
    inputs = tuple(_spec(v, read=i < len(state.inputs)) for i, v in enumerate(given))
    switch = (Word(Constant.SWITCH),) if forks else ()
    run = Run(inputs, reads, outputs, steps, (*symbols_of_words, *("" for _ in switch)), placed.arena, placed.scratch, forks)
    return FinishedRun(run, (*state.words, *switch), exits, returned)


def _fallback_inputs(planner: RunPlanner, first: int, last: int, present: set[str]) -> list[Value]:
    """What the parts read from outside when each is entered by itself, beyond what the run reads."""
    level = planner.level
    graph = level.graph
    made = {v.name for i in range(level.parts[first][0], level.parts[last - 1][1]) for v in graph.nodes[i].outs}
    found: dict[str, Value] = {}
    for begin, end, kernel in level.parts[first:last]:
        piece = extract(graph, range(begin, end), "part")
        for v in (anchored(graph, piece) if kernel >= 0 else piece).inputs:
            if v.name not in made | present:
                found[v.name] = v
    return list(found.values())


def _spec(v: Value, *, read: bool) -> InputSpec:
    t = v.type
    if not isinstance(t, TensorType):
        return InputSpec(v.name, DType.I64, -1, None)
    order = (t.layout.order or tuple(range(len(t.shape)))) if read and not t.layout.strided else None
    return InputSpec(v.name, t.dtype, len(t.shape), order)


# -- what leaves


def _leaving(graph: Graph, nodes: range, state: RunState) -> tuple[tuple[_Result, ...], tuple[int, ...], tuple[str, ...]]:
    """The run's results, the nodes behind it, and what those give."""
    maker = {v.name: i for i in nodes for v in graph.nodes[i].outs}
    wanted = {v.name: v for i in range(len(graph.nodes)) if i not in nodes for v in graph.nodes[i].ins if v.name in maker}
    wanted |= {v.name: v for v in output_values(graph) if v.name in maker}
    values = {v.name: v for i in nodes for v in graph.nodes[i].outs}
    own = {r.name: i for i, r in enumerate(state.roots) if r.kind == "made" and r.name in values}
    bases = {n for n in wanted if n in own}
    while True:
        taken = {own[n] for n in bases}
        direct = _direct([v for n, v in wanted.items() if n not in own], state, taken)
        exits, more = _behind([n for n in wanted if n not in own and n not in direct], graph, maker, own)
        if more <= bases:
            break
        bases |= more
    results = [_base(values[n], own[n], state) for n in values if n in bases]
    results += [direct[n] for n in values if n in direct]
    back = tuple(n for n in values if n in wanted and n not in bases and n not in direct)
    return tuple(results), tuple(sorted(exits)), back


def _base(v: Value, root: int, state: RunState) -> _Result:
    return _Result(v, root, state.lies[v.name].strides)


def _direct(views: Sequence[Value], state: RunState, taken: set[int]) -> dict[str, _Result]:
    """Views that become results themselves: alone in wanting a buffer, which they cover."""
    found: dict[str, _Result] = {}
    alone: dict[int, int] = {}
    for v in views:
        if v.name in state.lies:
            alone[state.lies[v.name].root] = alone.get(state.lies[v.name].root, 0) + 1
    for v in views:
        lies = state.lies.get(v.name)
        if lies is None or not isinstance(v.type, TensorType) or lies.root in taken or alone[lies.root] > 1:
            continue
        root = state.roots[lies.root]
        strides = whole(lies, v.type, root.elements) if root.kind == "made" else None
        if strides is not None:
            found[v.name] = _Result(v, lies.root, strides)
    return found


def _behind(names: Iterable[str], graph: Graph, maker: Mapping[str, int], own: Mapping[str, int]) -> tuple[set[int], set[str]]:
    """The nodes that give these values, down to results of kernels, and those results."""
    exits: set[int] = set()
    bases: set[str] = set()
    waiting = [maker[n] for n in names]
    while waiting:
        i = waiting.pop()
        if i in exits:
            continue
        exits.add(i)
        for v in graph.nodes[i].ins:
            if v.name in own:
                bases.add(v.name)
            elif v.name in maker:
                waiting.append(maker[v.name])
    return exits, bases


# -- memory


class _Placed:
    """Gives every buffer its memory."""

    def __init__(
        self, state: RunState, results: Sequence[_Result], sizes: Mapping[str, int], forks: Sequence[Fork] = ()
    ) -> None:
        self.state = state
        self.output = {self._final(r.root): i for i, r in enumerate(results)}
        self.input = {i: k for k, i in enumerate(j for j, r in enumerate(state.roots) if r.kind == "input")}
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.clock = 0
        self.calls: list[tuple[int, PlannedCall]] = []
        self.addresses: list[Dim] = []
        """All arithmetic on sizes that native code does."""
        ends = [0]
        for step in state.steps:
            self._walk((step,))
            ends.append(self.clock)
        spans: list[ForkSpan] = []
        for f in forks:
            lanes = [frozenset(self._final(r) for i in lane for r in touched(state.steps[i])) for lane in f.lanes]
            spans.append(ForkSpan(ends[f.first] + 1, ends[f.last], tuple(lanes)))
        lives = [Live(i, bytes_of(state.roots[i]), at, self.last[i]) for i, at in self.first.items() if self._inner(i)]
        found = allocate_lanes(lives, self._inplace(), sizes, spans)
        self.offsets = found.offsets
        self.arena = rounded(found.bytes, LINE)
        needs = list(dict.fromkeys(c.scratch for _, c in self.calls if c.scratch != 0))
        self.scratch: Dim = 0 if not needs else needs[0] if len(needs) == 1 else expr("max", *needs)

    def _final(self, root: int) -> int:
        while root in self.state.into:
            root = self.state.into[root]
        return root

    def _inner(self, root: int) -> bool:
        return self.state.roots[root].kind == "made" and root not in self.output

    def _touch(self, root: int) -> None:
        root = self._final(root)
        self.first.setdefault(root, self.clock)
        self.last[root] = self.clock

    def _walk(self, steps: Sequence[PlannedStep]) -> None:
        for step in steps:
            match step:
                case PlannedCall():
                    self.clock += 1
                    for root, _ in (*step.reads, *step.writes):
                        self._touch(root)
                    self.calls.append((self.clock, step))
                case PlannedChoice():
                    self.clock += 1
                    self.addresses.append(step.size)
                    for call in step.calls:
                        for root, _ in (*call.reads, *call.writes):
                            self._touch(root)
                        self.calls.append((self.clock, call))
                case PlannedBranch():
                    self.clock += 1
                    for root in (step.condition.root, *step.outs):
                        self._touch(root)
                    self._walk(step.then or ())
                    self._walk(step.other or ())
                    for root in step.outs:
                        self._touch(root)
                case PlannedLoop():
                    self._walk_loop(step)
                case PlannedMove():
                    self.clock += 1
                    for root in (step.source.root, step.into.root):
                        self._touch(root)
                    self.addresses.append(step.bytes)
                case PlannedMark():
                    pass

    def _walk_loop(self, loop: PlannedLoop) -> None:
        """What there was before is needed until the last iteration is over, whichever step of the body reads it."""
        self.clock += 1
        begin = self.clock
        if not isinstance(loop.trips, Pointer) and loop.trips is not None:
            self.addresses.append(loop.trips)
        if loop.exactly is not None:
            self.addresses.append(loop.exactly)
        kept = [*loop.outs, *(p.root for p in (loop.iteration, loop.go) if p is not None)]
        for root in (*kept, *(p.root for p in (loop.trips, loop.condition) if isinstance(p, Pointer))):
            self._touch(root)
        self._walk(loop.steps)
        self.clock += 1
        for root in (*kept, *(p.root for p in (loop.again,) if p is not None)):
            self._touch(root)
        for root, first in self.first.items():
            if first <= begin < self.last[root]:
                self.last[root] = self.clock

    def _inplace(self) -> list[tuple[int, int]]:
        """(made, dying) buffers of calls that may write over what they read."""
        pairs: list[tuple[int, int]] = []
        for clock, call in self.calls:
            reads = [(self._final(r), name) for r, name in call.reads]
            for written, into in call.writes:
                made = self._final(written)
                for dying, name in reads:
                    alone = sum(r == dying for r, _ in reads) == 1
                    if alone and self._inner(made) and self._inner(dying) and self.last[dying] == clock == self.first[made] and (
                        may_overwrite(call.pointwise, name, into)
                    ):
                        pairs.append((made, dying))
        return pairs

    def address(self, p: Pointer) -> MemoryAddress:
        """Where a pointer points."""
        if p.word >= 0:
            return MemoryAddress(Base.TABLE, p.word, 0)
        root = self._final(p.root)
        about: Root = self.state.roots[root]
        behind = mul(p.offset, size_of(about.dtype))
        self.addresses.append(behind)
        if about.kind == "param":
            return MemoryAddress(Base.TABLE, about.word, behind)
        if about.kind == "input":
            return MemoryAddress(Base.INPUT, self.input[root], behind)
        if root in self.output:
            return MemoryAddress(Base.OUTPUT, self.output[root], behind)
        return MemoryAddress(Base.ARENA, 0, add(self.offsets[root], behind))

    def _call(self, step: PlannedCall) -> Call:
        return Call(step.word, tuple(self.address(p) for p in step.buffers), step.scratch != 0, step.sizes, step.made)

    def steps(self, planned: Sequence[PlannedStep], first: int) -> tuple[Step, ...]:
        """The steps with all addresses."""
        made: list[Step] = []
        for step in planned:
            match step:
                case PlannedCall():
                    made.append(self._call(step))
                case PlannedChoice():
                    variants = tuple(None if w is None else self._call(w) for w in step.variants)
                    made.append(ChoiceStep(step.size, step.ends, variants))
                case PlannedBranch():
                    sides = [None if side is None else self.steps(side, first) for side in (step.then, step.other)]
                    made.append(BranchStep(self.address(step.condition), sides[0], sides[1], step.name))
                case PlannedLoop():
                    trips = self.address(step.trips) if isinstance(step.trips, Pointer) else step.trips
                    found = (step.condition, step.again, step.iteration, step.go)
                    condition, again, iteration, go = (None if p is None else self.address(p) for p in found)
                    inside = self.steps(step.steps, first)
                    made.append(LoopStep(step.var, trips, condition, again, iteration, go, inside, step.name, step.exactly))
                case PlannedMove():
                    made.append(MoveStep(self.address(step.source), self.address(step.into), step.bytes))
                case PlannedMark():
                    made.append(Mark(step.part - first))
        return tuple(made)


# -- sizes


def _used(placed: _Placed, outputs: Sequence[OutputSpec]) -> set[str]:
    dims: list[Dim] = [placed.arena, placed.scratch, *placed.addresses]
    for _, call in placed.calls:
        dims += call.sizes
    for out in outputs:
        dims += [*out.shape, *out.strides]
    return {s for s in set[str]().union(*(symbols(d) for d in dims)) if not s.startswith(LOOP_VAR)}


def _sizes(graph: Graph, state: RunState, given: list[Value], wanted: set[str]) -> tuple[SizeSpec, ...]:
    """Where each symbol is read; inputs of the graph that show one are inputs of the run then, added to `given`."""
    found: list[SizeSpec] = []
    for name in sorted(wanted):
        if name in state.strided:
            at, dim = state.strided[name]
            found.append(SizeSpec(name, at, stride=True, dim=dim))
            continue
        place = _shown(given, name)
        if place is None:
            source = next((v for v in graph.inputs if _shown([v], name) is not None), None)
            if source is None:
                raise CannotLower(f"no input shows the size {name}")
            given.append(source)
            place = _shown(given, name)
        assert place is not None
        found.append(SizeSpec(name, place[0], stride=False, dim=place[1]))
    return tuple(found)


def _shown(values: Sequence[Value], name: str) -> tuple[int, int] | None:
    for i, v in enumerate(values):
        for d, n in enumerate(v.type.shape if isinstance(v.type, TensorType) else ()):
            if not isinstance(n, int) and n.op == "sym" and n.args[0] == name:
                return i, d
    return None
