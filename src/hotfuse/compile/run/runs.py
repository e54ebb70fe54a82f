"""The request of kind `runs`: a body with its kernels becomes native runs, in the worker.

Library parts between kernels are looked at once more. Views need no code. Small groups may have lost to the library only by the
cost of leaving the run and entering a kernel from Python; inside a run that cost is gone, so they become kernels after all.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from hotfuse.backends.protocol import CompiledKernel
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.passes import Pass, Where, run_all
from hotfuse.compile.answer_bodies import Answered, MadeKernel, RunsAnswer
from hotfuse.compile.kept import verdict
from hotfuse.compile.request_bodies import RunsRequest
from hotfuse.compile.request_context import backend_name, kernels, threads, wanted
from hotfuse.compile.run.loops import LoopPlanner
from hotfuse.compile.run.run_layout import FinishedRun, finish
from hotfuse.compile.run.run_plan import RunPlanner, copy_graph
from hotfuse.compile.run.run_steps import LevelParts, PlannedBranch, PlannedLoop
from hotfuse.compile.unit.kernel_cache import MAX_KEPT, NormalGroup, keep, kernel_cache, piece_of
from hotfuse.compile.variants.trial import Outcome, attempt
from hotfuse.compile.variants.variant_table import VariantTable
from hotfuse.compile.workers.checked_json import decoded, encoded
from hotfuse.hpm.bottleneck import Strategy
from hotfuse.ir import dims
from hotfuse.ir.dims import Dim, evaluate, expr, symbols
from hotfuse.ir.graph import Graph, Kind, Node
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse, show
from hotfuse.ir.types import DType, Layout, TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower.common.codec import to_json
from hotfuse.lower.common.effort import OutOfSteps
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.common.own_sizes import anchored
from hotfuse.lower.run.description import LoopStep, branches, calls, word_to_json
from hotfuse.lower.run.places import does_nothing, is_view
from hotfuse.ops.movement import APPEND
from hotfuse.ops.table import packet

Message = tuple[dict[str, Any], list[bytes]]

ENTRY_US = 8.0
"""What a kernel alone costs and one in a run does not (glue in Python, memory for results), and what leaving the run for the
library and entering another one costs. That is more yet: a product by factors per channel that took the library 11 us in its trial
took it 39 between two runs, whose values lie in memory of their own and not in one warm arena."""
MAX_RETRIED_ELEMENTS = 1 << 20
"""Most elements that a group without a kernel may move to be tried again for the sake of a run: larger ones take so long that a run
matters little."""
MAX_NODES = 24
UNFINISHED = -math.inf
"""Instead of a time: what has no kernel yet may get one."""
BRIDGES_S = 20.0
"""Seconds of one request for kernels that runs need besides those they are made of: what comes later stays with the library."""


@dataclass(slots=True)
class _RunKernels:
    """Kernels by number: those that exist, and those that runs need besides."""

    given: list[Lowered]
    chosen: list[VariantTable | None]
    """Per kernel, those that serve its group at other sizes."""
    sizes: Mapping[str, int]
    threads: int
    kernels: list[MadeKernel] = field(default_factory=list[MadeKernel])
    codes: list[bytes] = field(default_factory=list[bytes])
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    refused: dict[str, HotfuseError] = field(default_factory=dict[str, HotfuseError])
    notes: list[str] = field(default_factory=list[str])
    until: float = math.inf
    """When to stop trying kernels that runs could do without; UNFINISHED for not to begin."""

    def lowered(self, kernel: int) -> Lowered:
        """A kernel by its number."""
        return self.given[kernel]

    def variants(self, kernel: int) -> VariantTable | None:
        """The kernels that serve its group at other sizes."""
        return self.chosen[kernel] if kernel < len(self.chosen) else None

    def copying(self, dtype: DType, shape: tuple[Dim, ...], layout: Layout) -> tuple[int, Graph]:
        """A kernel that copies into a layout."""
        piece = copy_graph(dtype, shape, layout)
        return self._kernel(piece, float("inf")), piece

    def bridge(self, graph: Graph, nodes: range) -> int:
        """A kernel for nodes that have none; -1 where there is none that pays inside a run."""
        chosen = [graph.nodes[i] for i in nodes]
        if len(chosen) > MAX_NODES or any(n.kind is not Kind.OPERATOR or not n.outs for n in chosen):
            return -1
        if max(self._elements(n) for n in chosen) > MAX_RETRIED_ELEMENTS:
            return -1
        try:
            if self.until == UNFINISHED:
                raise CannotLower("the plan is unfinished: nodes without a kernel may still get one")
            if time.monotonic() > self.until:
                raise CannotLower("no time is left for kernels between runs")
            return self._kernel(anchored(graph, extract(graph, nodes, "group")), ENTRY_US)
        except HotfuseError as e:
            self.notes.append(f"{packet(chosen[0].op).removeprefix('aten.')} interrupts a run: {e.because or e.what}")
            return -1

    def reach(self, graph: Graph, nodes: range) -> int:
        """How many of these nodes, from the first, one kernel can be made of; at least 1, also where not even that one can.

        Found by bisection: what makes a group impossible rarely becomes possible with more nodes.
        """
        good, bad = 1, len(nodes) + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            if self._lowers(graph, nodes[:middle]):
                good = middle
            else:
                bad = middle
        return good

    def _lowers(self, graph: Graph, nodes: range) -> bool:
        return time.monotonic() <= self.until and not kernel_cache().lowers(piece_of(graph, nodes, self.sizes))

    def _elements(self, node: Node) -> int:
        most = 0
        for v in (*node.ins, *node.outs):
            if isinstance(v.type, TensorType):
                known = all(symbols(d) <= self.sizes.keys() for d in v.type.shape)
                size = 1
                for d in v.type.shape:
                    size *= evaluate(d, self.sizes) if known else MAX_RETRIED_ELEMENTS + 1
                most = max(most, size)
        return most

    def _kernel(self, group: Graph, allowance_us: float) -> int:
        piece = piece_of(group, range(len(group.nodes)), self.sizes)
        text = piece.text
        if math.isfinite(allowance_us) and Strategy.LIBRARY.value in wanted(text):  # copies are asked for whatever they take
            raise CannotLower("the library is to be tried alone")
        if (known := self.refused.get(text)) is not None:
            raise known
        if text not in self.numbers:
            try:
                self._add(piece, allowance_us)
            except HotfuseError as e:  # what twelve layers have in common is tried once
                self.refused[text] = e
                raise
        return self.numbers[text]

    def _add(self, piece: NormalGroup, allowance_us: float) -> None:
        from hotfuse.compile.unit import kernel_text  # a worker's, as below

        def make() -> Message:
            lowered, compiled, outcome = _tried(piece, allowance_us)
            ops = "+".join(dict.fromkeys(packet(n.op).removeprefix("aten.") for n in piece.normal.nodes))
            made = MadeKernel(
                **to_json(lowered), ops=ops, compile_s=round(sum(compiled.seconds.values()), 4), multiplies=compiled.multiplies,
                kernel_us=round(outcome.kernel_us, 1), library_us=round(outcome.library_us, 1),
            )  # fmt: skip
            return encoded(made), [compiled.code]

        core = kernel_cache().core
        options = (allowance_us, core.precision, core.lean, backend_name())
        basis = {"threads": str(self.threads), "sizes": repr(sorted(piece.sizes.items())), "options": repr(options)}
        about, codes = verdict("bridge", piece.text, basis, make)
        self.kernels.append(decoded(MadeKernel, about, "a kept kernel"))
        self.codes += codes
        self.given.append(kernel_text.from_json(about))
        self.numbers[piece.text] = len(self.given) - 1


_outcomes: OrderedDict[str, tuple[Lowered, CompiledKernel, Outcome] | CannotLower] = OrderedDict()
"""What became of kernels that runs asked for: the runs of a plan of some parts and of the whole one ask for the same."""


def _tried(piece: NormalGroup, allowance_us: float) -> tuple[Lowered, CompiledKernel, Outcome]:
    """A kernel that won its trial; raises a HotfuseError where there is none."""

    def make() -> tuple[Lowered, CompiledKernel, Outcome] | CannotLower:
        try:
            made = kernel_cache().kernel(piece)
            return made.lowered, made.compiled, attempt(piece.normal, made.lowered, made.compiled, piece.sizes, allowance_us)
        except OutOfSteps:
            raise
        except CannotLower as e:
            return e

    core = kernel_cache().core
    allowed = f"{core.precision} {core.lean} {core.threads} {backend_name()}"
    found = keep(_outcomes, f"{piece.key} {allowance_us} {allowed}", make, MAX_KEPT)
    if isinstance(found, CannotLower):
        raise CannotLower(found.because, where=found.where)
    return found


def _level(data: dict[str, Any]) -> LevelParts:
    parts = [(int(a), int(b), int(k)) for a, b, k in data["parts"]]
    nested = {int(i): [_level(b) for b in bodies] for i, bodies in data["branches"].items()}
    return LevelParts(verify(parse(data["graph"])), parts, nested)


def _refined(level: LevelParts, bench: _RunKernels) -> LevelParts:
    """The level with views apart from what has to be computed, and with kernels for small groups between others."""
    parts: list[tuple[int, int, int]] = []
    nested: dict[int, list[LevelParts]] = {}
    for i, (first, last, kernel) in enumerate(level.parts):
        if i in level.branches:
            nested[len(parts)] = [_refined(b, bench) for b in level.branches[i]]
        if kernel >= 0 or i in level.branches:
            parts.append((first, last, kernel))
        else:
            parts += _segments(level.graph, first, last, bench)
    return LevelParts(level.graph, parts, nested)


def _segments(graph: Graph, first: int, last: int, bench: _RunKernels) -> list[tuple[int, int, int]]:
    free = [is_view(n) or does_nothing(n) or n.op == APPEND for n in graph.nodes[first:last]]
    if all(free):
        return [(first, last, -1)]
    begin = first + free.index(False)
    end = last - free[::-1].index(False)
    around = ([(first, begin, -1)] if begin > first else []), ([(end, last, -1)] if end < last else [])
    blocks: list[list[int]] = []
    for i in range(begin, end):
        if blocks and free[i - first] == free[i - first - 1]:
            blocks[-1][1] = i + 1
        else:
            blocks.append([i, i + 1])
    if len(blocks) > 1:
        said = len(bench.notes)
        kernel = bench.bridge(graph, range(begin, end))
        if kernel >= 0:
            return [*around[0], (begin, end, kernel), *around[1]]
        del bench.notes[said:]  # what is between views says what becomes of it
    inner: list[tuple[int, int, int]] = []
    for a, b in blocks:
        inner += [(a, b, -1)] if free[a - first] else _pieces(graph, a, b, bench)
    return [*around[0], *inner, *around[1]]


def _pieces(graph: Graph, begin: int, end: int, bench: _RunKernels) -> list[tuple[int, int, int]]:
    """Nodes without a kernel, as the fewest kernels that can be made of them: a convolution and what is behind it, then the next.

    What is one group to the library, which takes what lies side by side, may be several to native code.
    """
    said = len(bench.notes)
    kernel = bench.bridge(graph, range(begin, end))
    if kernel >= 0 or end - begin > MAX_NODES:
        return [(begin, end, kernel)]
    cut = begin + bench.reach(graph, range(begin, end))
    if cut == end:  # one kernel could do all of it, and does not pay
        return [(begin, end, -1)]
    del bench.notes[said:]  # the two parts say what becomes of them
    return [(begin, cut, bench.bridge(graph, range(begin, cut))), *_pieces(graph, cut, end, bench)]


def _planned(level: LevelParts, bench: _RunKernels) -> tuple[list[tuple[int, int, FinishedRun]], set[int]]:
    """Runs as (first part, end, run), and the branching parts that are native on both sides."""
    found: list[tuple[int, int, FinishedRun]] = []
    native: set[int] = set()
    at, count = 0, len(level.parts)
    while at < count:
        planner, begin, end = LoopPlanner(level, bench), at, at
        kept = planner.state
        while at < count:
            try:
                planner.add(at)
            except CannotLower:
                break
            at += 1
            if level.parts[at - 1][2] >= 0 or at - 1 in level.branches or _appends(level, at - 1):  # views alone are the library's
                end, kept = at, planner.state
        if end > begin:
            planner.state = kept
            try:
                found.append((begin, end, finish(planner, begin, end, bench.sizes, bench.threads)))
                native |= _native(planner, level, begin, end)
            except CannotLower as e:
                bench.notes.append(f"parts {begin} to {end - 1} are entered one by one: {e.because or e.what}")
        if at == begin:
            at += 1
    return found, native


def _appends(level: LevelParts, part: int) -> bool:
    first, last, _ = level.parts[part]
    return any(n.op == APPEND for n in level.graph.nodes[first:last])


def _native(planner: RunPlanner, level: LevelParts, begin: int, end: int) -> set[int]:
    """Parts that branch inside a run, with native code on both sides, and loops in it."""
    complete = [s for s in planner.state.steps if isinstance(s, PlannedBranch | PlannedLoop)]
    parts = [i for i in range(begin, end) if i in level.branches]
    whole = [isinstance(s, PlannedLoop) or (s.then is not None and s.other is not None) for s in complete]
    return {i for i, native in zip(parts, whole, strict=True) if native}


def _answer(level: LevelParts, bench: _RunKernels, codes: list[bytes]) -> dict[str, Any]:
    """A level as JSON: its parts, its runs, and the levels inside; library parts that no run covers are one again."""
    found, native = _planned(level, bench)
    covered = {i for begin, end, _ in found for i in range(begin, end)}
    parts: list[list[int]] = []
    number: dict[int, int] = {}
    nested: dict[str, Any] = {}
    for i, (first, last, kernel) in enumerate(level.parts):
        plain = kernel < 0 and i not in level.branches and i not in covered
        before = i - 1
        if plain and before >= 0 and level.parts[before][2] < 0 and before not in level.branches and (
            before not in covered
        ):
            parts[-1][1] = last
        else:
            parts.append([first, last, kernel])
        number[i] = len(parts) - 1
        if i in level.branches:
            nested[str(number[i])] = [_answer(b, bench, codes) if i not in native else _without(b) for b in level.branches[i]]
    runs: list[dict[str, Any]] = []
    for begin, end, done in found:
        codes.append(kernels().compile_run(done.run))
        runs.append({**_to_json(done), "first": number[begin], "last": number[end - 1] + 1, "code": len(codes) - 1})
    return {"graph": show(level.graph), "parts": parts, "branches": nested, "runs": runs}


def _without(level: LevelParts) -> dict[str, Any]:
    """A level without runs: it is inside one."""
    nested = {str(i): [_without(b) for b in levels] for i, levels in level.branches.items()}
    return {"graph": show(level.graph), "parts": [list(p) for p in level.parts], "branches": nested, "runs": []}


def _to_json(done: FinishedRun) -> dict[str, Any]:
    run = done.run
    return {
        "inputs": [[i.name, i.dtype.value, i.rank, i.order] for i in run.inputs],
        "sizes": [[s.symbol, s.input, s.stride, s.dim] for s in run.sizes],
        "outputs": [[o.name, o.dtype.value, _shown(o.shape), _shown(o.strides), o.grows] for o in run.outputs],
        "words": [word_to_json(w) for w in done.words],
        "exits": done.exits,
        "returned": done.returned,
        "branches": [b.name for b in branches(run.steps)],
        "loops": [b.name for b in branches(run.steps) if isinstance(b, LoopStep)],
        "made": [[c.word, c.made] for c in calls(run.steps)],
        "arena": dims.show(run.arena),
        "scratch": dims.show(expr("*", run.scratch, run.lanes)),
        "forks": [len(f.lanes) for f in run.forks],
    }


def _shown(ds: Sequence[Dim]) -> list[str]:
    return [dims.show(d) for d in ds]


@dataclass(frozen=True, slots=True)
class RunBodies:
    """A graph with its runs, as JSON, and the code of their drivers."""

    body: dict[str, Any]
    drivers: list[bytes]


def _drivers(level: LevelParts, bench: _RunKernels) -> RunBodies:
    codes: list[bytes] = []
    return RunBodies(_answer(level, bench, codes), codes)


RUNS = (
    Pass("bridges", LevelParts, LevelParts, _refined, lambda level, _: verify(level.graph), Where.WORKER),
    Pass("drivers", LevelParts, RunBodies, _drivers, where=Where.WORKER),
)
"""From kernels to native runs."""


def handle(request: RunsRequest) -> Answered:
    """A body and its kernels in; the body with runs, and the kernels that it needs besides, out."""
    from hotfuse.compile.unit import kernel_text  # a worker's: the serving process imports none of it

    variants = [VariantTable.from_json(k.get("variants")) for k in request.kernels]
    seconds = BRIDGES_S if request.bridges_s is None else request.bridges_s
    bench = _RunKernels([kernel_text.from_json(dict(k)) for k in request.kernels], variants, request.dims, threads(),
                        until=time.monotonic() + seconds if seconds > 0 else UNFINISHED)  # fmt: skip
    made: RunBodies = run_all(RUNS, _level(dict(request.body)), bench)
    answer = RunsAnswer(made.body, tuple(bench.kernels), len(made.drivers), tuple(dict.fromkeys(bench.notes)))
    return answer, [*bench.codes, *made.drivers]
