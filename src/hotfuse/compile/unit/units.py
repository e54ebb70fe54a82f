"""Units of compilation in the worker: how a graph is grouped, and one group at a time from nodes to a kernel that won its trial.

    plan   the graph's groups, in order, each with a key that is equal for groups that are the same but for their names
    unit   one group: a kernel, or where to cut the group, or why it stays with the library

A group that cannot be lowered is cut at the node that prevents it; a group that loses to the library is cut in the middle. Lowered
and compiled kernels are kept by their text (`compile.unit.kernel_cache`), so that the same group at other sizes costs a trial only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotfuse.analysis.registers import parallel_iterations, vectors_at_once
from hotfuse.analysis.resources import library_seconds, roofline_seconds, used, work_of
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.passes import run_all
from hotfuse.base.settings import Objective
from hotfuse.compile import request_context
from hotfuse.compile.answer_bodies import (
    GroupedBody,
    GroupFacts,
    MadeKernel,
    PlanAnswer,
    UnitCut,
    UnitKernel,
    UnitMissing,
    UnitRefused,
    kept_body,
    message,
)
from hotfuse.compile.kept import Unkept, grouping, verdict
from hotfuse.compile.learn import strategy_history
from hotfuse.compile.learn.learned import foresight, notes, refresh
from hotfuse.compile.learn.measure import CompiledCandidate
from hotfuse.compile.request_bodies import PlanRequest, UnitRequest
from hotfuse.compile.request_context import backend_name, kernels, text_id, wanted
from hotfuse.compile.unit import weight_growth
from hotfuse.compile.unit.grouping import GROUPING, GroupedGraph, GroupingJob
from hotfuse.compile.unit.kernel_cache import (
    BuiltKernel,
    NormalGroup,
    foreseen,
    keep,
    kernel_cache,
    piece_of,
)
from hotfuse.compile.unit.kernel_text import to_json
from hotfuse.compile.unit.measuring_gate import UnitContests
from hotfuse.compile.unit.planning import Gate, asked_of_groups
from hotfuse.compile.variants import precision_variants, trial
from hotfuse.compile.variants.served_threads import apart, as_served
from hotfuse.compile.variants.skipping import Skipping, multiplied
from hotfuse.compile.variants.skips import SKIP, SPARSE, Skips
from hotfuse.compile.variants.variant_search import BUDGET_S, VariantDecision, VariantSearch
from hotfuse.compile.workers.wire import Message
from hotfuse.fusion.closed import UseIndex
from hotfuse.fusion.forecast import Predictor, RooflinePredictor, Trained
from hotfuse.fusion.groups import Group
from hotfuse.fusion.kinds import GroupKind
from hotfuse.fusion.seen_costs import SeenCosts
from hotfuse.hpm.bottleneck import Strategy
from hotfuse.ir.control_bodies import CAPTURES, branches
from hotfuse.ir.graph import Graph, Node
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify
from hotfuse.lower.common.own_sizes import symbols_of
from hotfuse.lower.cpu import scratch
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.profile.traffic import TrafficSeen
from hotfuse.tile.serial import one_thread

UnitAnswered = tuple[UnitMissing | UnitKernel | UnitCut | UnitRefused, list[bytes]]
WORTH_CUTTING = 6
"""Nodes in a group that loses to the library, from which on its halves are tried: those of a few fused ops lose as well."""
MAX_GRAPHS = 8


# -- the plan


def plan(request: PlanRequest) -> tuple[PlanAnswer, list[bytes]]:
    """A graph's groups."""
    return apart(request_context.threads(), lambda: _plan(request.graph, request.dims, request.seen))


def _plan(text: str, sizes: Mapping[str, int], seen: TrafficSeen) -> tuple[PlanAnswer, list[bytes]]:
    refresh()
    costs = SeenCosts(seen)

    def make() -> Message:
        bodies: list[GroupedBody] = []
        _body(verify(parse(text)), sizes, bodies, {}, request_context.request_settings().objective, measuring(sizes), costs)
        return message(PlanAnswer(tuple(bodies), kernel_cache().peaks, {}))

    ahead = foresight()
    model = "" if ahead is None else str(ahead.predictor.model.version)
    answer = grouping(text, sizes, asked_of_groups(), model, seen.address(), make)
    return replace(kept_body(answer, PlanAnswer, "a kept grouping"), history=strategy_history.states()), []


def measuring(sizes: Mapping[str, int]) -> Gate:
    """What decides about groups where no model is trained: kernels of this worker, timed within a budget."""

    def build(piece: Graph) -> tuple[CompiledCandidate, Graph, Mapping[str, int]]:
        found = piece_of(piece, range(len(piece.nodes)), sizes)
        made = kernel_cache().kernel(found)
        return CompiledCandidate(made.lowered, made.compiled), found.normal, found.sizes

    contests = (UnitContests(build, kernel_cache().core, sizes) for _ in range(2))
    return Gate(RooflinePredictor(kernel_cache().peaks), *contests)


def grouping_job(
    sizes: Mapping[str, int], objective: Objective, gate: Gate | None = None, seen: SeenCosts | None = None,
    told: frozenset[str] = frozenset(),
) -> GroupingJob:  # fmt: skip
    """What grouping needs to know, with this worker's kernels."""

    def lowers(piece: Graph) -> str:
        return kernel_cache().lowers(piece_of(piece, range(len(piece.nodes)), sizes))

    return GroupingJob(sizes, kernel_cache().core, lowers, objective, gate, seen, told)


def _body(
    graph: Graph, sizes: Mapping[str, int], bodies: list[GroupedBody], known: dict[str, GroupFacts], objective: Objective,
    gate: Gate | None = None, seen: SeenCosts | None = None, told: frozenset[str] = frozenset(),
) -> int:  # fmt: skip
    """A graph in the order its groups need, appended to `bodies`; control nodes name the bodies of their branches."""
    grouped: GroupedGraph = run_all(GROUPING, graph, grouping_job(sizes, objective, gate, seen, told))
    ordered, groups = grouped.graph, grouped.groups
    text = show(ordered)
    own = GroupedBody(text, hashlib.sha256(text.encode()).hexdigest()[:24], (), {}, ())
    place = len(bodies)
    bodies.append(own)  # its number comes before those of its branches
    keep(kernel_cache().graphs, own.id, lambda: ordered, MAX_GRAPHS)
    found: list[GroupFacts] = []
    inside: dict[str, tuple[int, ...]] = {}
    for i, g in enumerate(groups):
        found.append(described(ordered, g.nodes, g.kind, sizes, known, seen))
        first = ordered.nodes[g.nodes[0]]
        if first.op in CAPTURES:
            shared = told | symbols_of(ordered)
            nested = (b.graph for b in branches(ordered, first))
            inside[str(i)] = tuple(_body(g, sizes, bodies, known, objective, gate, seen, shared) for g in nested)
    us = None if place or foresight() is None else _predicted_us(ordered, found, sizes)
    choices = (*grouped.choices, *_growth(ordered, groups, sizes))
    bodies[place] = replace(own, groups=tuple(found), branches=inside, choices=choices, predicted_us=us)
    return place


def _growth(graph: Graph, groups: Sequence[Group], sizes: Mapping[str, int]) -> list[str]:
    """Where memory is asked for: what convolutions would keep otherwise."""
    if not kernel_cache().core.lean:
        return []
    pieces = [piece_of(graph, g.nodes, sizes) for g in groups if g.kind == GroupKind.CONVOLUTION]
    made = ((p.ops, lambda p=p: (kernel_cache().lowering(p), kernel_cache(lean=False).lowering(p))) for p in pieces)
    return weight_growth.lines(made)


def described(
    graph: Graph, nodes: Sequence[int], kind: str, sizes: Mapping[str, int], known: dict[str, GroupFacts],
    seen: SeenCosts | None = None,
) -> GroupFacts:  # fmt: skip
    """What the other side is told of a group: how many nodes, what kind, and for one that may get a kernel its key and its work.

    `known` holds what was said of the same group before, `seen` what calls showed: what the group took while it served stands in
    the place of what is predicted of it, and attention costs the part of its keys that masks left open.
    """
    if kind == GroupKind.LIBRARY or all(lookup(graph.nodes[i].op).access is Access.MOVEMENT for i in nodes):
        return GroupFacts(len(nodes), GroupKind.LIBRARY)  # what only moves data is views to torch, and those cost nothing
    piece = piece_of(graph, nodes, sizes)
    if piece.key not in known:
        work, peaks = work_of(piece.normal, piece.sizes), kernel_cache().peaks
        about = GroupFacts(
            len(nodes), kind, piece.key, piece.ops, work, library_seconds(piece.normal, piece.sizes, peaks),
            roofline_seconds(work, peaks),
        )  # fmt: skip
        if (ahead := foreseen(piece)) is not None:
            about = replace(about, library_s=ahead.library_s, kernel_s=ahead.kernel_s, high_s=ahead.high_s)
        known[piece.key] = about if seen is None or not seen.seen else _as_seen(about, UseIndex(graph, sizes), nodes, seen)
    return known[piece.key]


def _as_seen(about: GroupFacts, index: UseIndex, nodes: Sequence[int], seen: SeenCosts) -> GroupFacts:
    """A group's figures, with what calls showed otherwise."""
    mask, kernel = seen.open_keys(index, nodes), seen.measured(index, nodes, library=False)
    library = seen.measured(index, nodes, library=True)
    if kernel is not None:
        us = kernel.us
        about = replace(about, kernel_s=us * 1e-6, high_s=us * 1e-6 * (1 + kernel.noise), measured_us=us)
    elif mask is not None:
        taken = (about.kernel_s, about.high_s, about.roofline_s)
        kernel_s, high_s, roofline_s = (None if s is None else s * mask.live for s in taken)
        about = replace(about, kernel_s=kernel_s, high_s=high_s, roofline_s=roofline_s, open=mask.live)
    if library is not None:
        about = replace(about, library_s=library.us * 1e-6, library_measured=True)
    return about


def _predicted_us(graph: Graph, groups: Sequence[GroupFacts], sizes: Mapping[str, int]) -> float | None:
    """What a whole graph is predicted to take; None where no model knows this machine, or a part of it depends on data."""
    total, at = 0.0, 0
    for g in groups:
        nodes = range(at, at + g.nodes)
        at += len(nodes)
        if all(lookup(graph.nodes[i].op).access is Access.MOVEMENT for i in nodes):
            continue
        if g.kernel_s is None or g.library_s is None:
            seen = foreseen(piece_of(graph, nodes, sizes)) if graph.nodes[nodes[0]].op not in CAPTURES else None
            if seen is None:
                return None
            total += seen.library_s
        else:
            total += min(g.kernel_s, g.library_s)
    return round(total * 1e6, 2)


def _predictor() -> Predictor:
    """The trained model's forecasts, or rooflines where no model knows this machine."""
    ahead = foresight()
    return RooflinePredictor(kernel_cache().peaks) if ahead is None else Trained(ahead.predictor)


def _on_one_thread(made: BuiltKernel) -> BuiltKernel:
    """The same kernel without parallel loops; itself where it has none."""
    start = time.perf_counter()
    kernel = one_thread(made.lowered.kernel)
    if kernel is None:
        return made
    return BuiltKernel(replace(made.lowered, kernel=kernel), kernels().compile_kernel(kernel), time.perf_counter() - start)


# -- one unit


def unit(request: UnitRequest, blobs: Sequence[bytes]) -> UnitAnswered:
    """A kernel for a group, or where to cut it, or why it stays with the library."""
    return apart(request_context.threads(), lambda: _unit(request, blobs))


def _unit(request: UnitRequest, blobs: Sequence[bytes]) -> UnitAnswered:
    texts = dict(zip(request.texts, blobs, strict=True))
    wanted = {i for i, _ in request.alike}
    if missing := sorted(wanted - texts.keys() - kernel_cache().graphs.keys()):
        return UnitMissing(tuple(missing)), []
    graphs = {i: keep(kernel_cache().graphs, i, lambda i=i: verify(parse(texts[i].decode())), MAX_GRAPHS) for i in wanted}
    uses = [(graphs[i], nodes) for i, nodes in request.alike]
    return _Unit(uses, request.group, request.dims, request.split, request.joined, request.beat, request.variants,
                 request_context.threads()).answer()  # fmt: skip


@dataclass(slots=True)
class _Unit:
    uses: Sequence[tuple[Graph, Sequence[int]]]
    kind: str
    sizes: Mapping[str, int]
    may_split: bool
    joined: bool
    beat: float | None
    variants: bool = False
    """Whether other kernels for other sizes are looked for."""
    threads: int = 1
    """That calls have."""

    def answer(self) -> UnitAnswered:
        graph, nodes = self.uses[0]
        piece = piece_of(graph, nodes, self.sizes)
        if Strategy.LIBRARY.value in self._wanted(piece):
            return UnitRefused(f"{piece.ops} stays with the library: that is what is to be tried"), []
        # A recurrent layer has beside its centre only what prepares it, which is nothing to compile alone.
        several = len(nodes) > 1 and self.kind != GroupKind.RECURRENT and self.may_split
        why = kernel_cache().lowers(piece) if several else ""
        if why:
            first = self._blamed(graph, nodes)
            op = packet(graph.nodes[nodes[first]].op).removeprefix("aten.")
            return self._cut(first, f"a group of {len(nodes)} is cut before {op}: {why}")
        try:
            return self._kernel(piece)
        except HotfuseError as e:
            why = f"{piece.ops} stays with the library: {e.because or e.what}"
        first = _prefix(self.kind, [graph.nodes[i] for i in nodes]) if several else 0
        return self._cut(first, why) if first else (UnitRefused(why), [])

    def _kernel(self, piece: NormalGroup) -> UnitAnswered:
        """A kernel that won its trial, made now or by an earlier process; raises a HotfuseError where there is none."""
        core = kernel_cache().core
        around = (sorted((n, str(d)) for n, d in piece.meaning.items()), [str(g) for g in self.uses[0][0].guards])
        options = (core.precision, core.lean, self.variants, self._wanted(piece), backend_name())
        basis = {"threads": str(self.threads), "sizes": repr(sorted(piece.sizes.items())), "options": repr(options)}
        found = verdict("unit", f"{piece.text}\n{around}", basis, lambda: message(*self._made(piece)))
        answer = kept_body(found, UnitKernel, "a kept unit")
        if answer.kernel.kernel_us is not None:
            self._beaten(answer.kernel.kernel_us)
        return replace(answer, keys=tuple(self._keys())), found[1]

    def _wanted(self, piece: NormalGroup) -> tuple[str, ...]:
        """What is to be tried for this unit, which may be named by the values that products of one of its uses multiply."""
        return wanted(piece.text, {name for graph, nodes in self.uses for name in multiplied(graph, nodes)})

    def _beaten(self, us: float) -> None:
        if self.beat is not None and us >= self.beat:
            raise Unkept(f"one kernel takes {us:.1f} us where two take {self.beat:.1f}")

    def _made(self, piece: NormalGroup) -> tuple[UnitKernel, list[bytes]]:
        made = kernel_cache().kernel(piece)
        wanted = self._wanted(piece)
        if Strategy.THREADS.value in wanted:
            made = _on_one_thread(made)
        skips, said = None, list[str]()
        if what := next((w for w in (SKIP, SPARSE) if w in wanted), ""):
            made, skips, said = self._skipping(piece, made, what)
        saved = 0.0 if skips is None else skips.saved_us  # made-up data have no zeros, and the calls it is for have some
        outcome = trial.attempt(piece.normal, made.lowered, made.compiled, piece.sizes, saved, self.threads)
        if (kept := notes()) is not None:
            kept.tried(piece.key, piece.normal, piece.sizes, outcome.kernel_us, outcome.library_us, outcome.threads)
        if outcome.threads < self.threads:
            said.append(f"{piece.ops}: tried on {outcome.threads} of {self.threads} threads, as cores were busy")
        self._beaten(outcome.kernel_us)
        kernel = made.lowered.kernel
        plan = scratch.plan(kernel)
        own = sum(plan.stack.values()) + (plan.arena_bytes(piece.sizes, 1) if plan.needs_arena else 0)
        use = used(work_of(piece.normal, piece.sizes), outcome.kernel_us, kernel_cache().peaks, scratch=own,
                   vectors=vectors_at_once(kernel, kernel_cache().core.lanes * 4),
                   parallel=parallel_iterations(kernel, piece.sizes))
        seen, found = foreseen(piece), self._by_size(piece, made)
        about = MadeKernel(
            **to_json(made.lowered), ops=piece.ops, compile_s=round(made.seconds, 4), multiplies=made.compiled.multiplies,
            kinds=made.note, kernel_us=round(outcome.kernel_us, 1), library_us=round(outcome.library_us, 1), use=use.to_dict(),
            predicted_us=None if seen is None else round(seen.kernel_s * 1e6, 2),
            variants=None if found.variants is None else found.variants.to_json(), skips=None if skips is None else skips.to_json(),
        )  # fmt: skip
        also = tuple(
            MadeKernel(**to_json(m.lowered), ops=piece.ops, compile_s=round(sum(m.compiled.seconds.values()), 4))
            for m in found.kernels
        )
        answer = UnitKernel(about, text_id(piece.text), also, (*found.notes, *said))
        return answer, [made.compiled.code, *(m.compiled.code for m in found.kernels)]

    def _skipping(self, piece: NormalGroup, made: BuiltKernel, what: str) -> tuple[BuiltKernel, Skips | None, list[str]]:
        """The same product with a side that leaves zeros out, where that pays for some share of them; else why not."""
        start = time.perf_counter()
        try:
            with as_served(self.threads) as threads:
                here = kernel_cache()
                both, skips = Skipping(piece.normal, piece.sizes, here.core, here.peaks, _predictor(), threads, what).build()
        except HotfuseError as e:
            return made, None, [f"{what}: {e.because or e.what}"]
        return BuiltKernel(both.lowered, both.compiled, made.seconds + time.perf_counter() - start), skips, []

    def _by_size(self, piece: NormalGroup, made: BuiltKernel) -> VariantDecision:
        """Kernels that are better than this one at other sizes."""
        if not self.variants or not piece.meaning:
            return VariantDecision()
        predict = _predictor()
        general = CompiledCandidate(made.lowered, made.compiled)
        core = made.core or kernel_cache().core
        return VariantSearch(piece.normal, general, piece.sizes, core, kernel_cache().peaks, predict, self.uses[0][0].guards,
                        piece.meaning, threads=self.threads, until=time.perf_counter() + BUDGET_S,
                        also=precision_variants.kinds(kernel_cache().core)).decide()  # fmt: skip

    def _keys(self) -> list[str]:
        """The keys of all uses, where they may differ."""
        return [piece_of(g, n, self.sizes).key for g, n in self.uses] if self.joined else []

    def _cut(self, first: int, why: str) -> UnitAnswered:
        """The two pieces that each use becomes."""
        kinds, known = (self.kind, GroupKind.ROWS), dict[str, GroupFacts]()
        pieces = tuple(
            tuple(described(g, part, k, self.sizes, known) for part, k in zip((n[:first], n[first:]), kinds, strict=True))
            for g, n in self.uses
        )
        return UnitCut(first, why, pieces), []

    def _blamed(self, graph: Graph, nodes: Sequence[int]) -> int:
        """How many of a group's nodes, from the first, can be lowered together; at least 1, also where not even that one can.

        Found by bisection: what makes a group impossible rarely becomes possible with more nodes.
        """
        good, bad = 1, len(nodes)
        while bad - good > 1:
            middle = (good + bad) // 2
            if kernel_cache().lowers(piece_of(graph, nodes[:middle], self.sizes)):
                bad = middle
            else:
                good = middle
        return good


def _prefix(kind: str, nodes: Sequence[Node]) -> int:
    """Where to cut a group that loses: behind what it is around, in the middle of a long one; 0 for not at all."""
    if kind in (GroupKind.GEMM_WEIGHT, GroupKind.CONVOLUTION, GroupKind.EXPERTS):
        return 1 if len(nodes) > 1 else 0
    if kind == GroupKind.GEMM_ACTIVATION:
        behind = next((i for i, n in enumerate(nodes, 1) if lookup(n.op).access is Access.CONTRACTION), len(nodes))
        return behind if behind < len(nodes) else 0
    return len(nodes) // 2 if len(nodes) >= WORTH_CUTTING else 0
