"""What could be built instead of what there is: for each pair of neighbours several variants, each with reasons for and against.

    vertical     a producer and its consumer, both over rows, as one kernel
    epilogue     arithmetic on the result of a product or convolution, inside it
    prologue     arithmetic on what a product or convolution reads, inside it
    horizontal   two that read the same and do not wait for each other, as one kernel
    tiling       both over blocks of rows, so that what passes between them stays in a cache
    recompute    a cheap value inside each of its readers, stored by nobody
    split        one kernel as two, where it holds more than registers or caches do
    library      the library's kernels instead of a generated one
    layout       convolutions with channels innermost, conversions where the order has to change

Reasons say what can be known without building anything; the engine weighs the candidates that are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

from hotfuse.analysis.convolution import is_convolution
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.fusion.closed import Key, UseIndex
from hotfuse.fusion.criteria import ANCHORS, Criterion, Reason, fails, holds
from hotfuse.fusion.forecast import live_values
from hotfuse.fusion.groups import MAX_NODES, Group, node_kind
from hotfuse.fusion.kinds import WHOLE_GROUPS, CandidateKind, GroupKind
from hotfuse.fusion.layout import CONVERTS
from hotfuse.fusion.order import GroupOrder
from hotfuse.fusion.rewrites import Rewritten, recomputed, rows_of, tiled
from hotfuse.fusion.seen_costs import SeenCosts
from hotfuse.hpm.work import CoreShape
from hotfuse.ir.graph import Kind as NodeKind
from hotfuse.ir.graph import Node
from hotfuse.ir.types import TensorType
from hotfuse.ops.own.experts import EXPERT_OPS
from hotfuse.ops.own.nibbles import PRODUCT as NIBBLE_PRODUCT
from hotfuse.ops.schema import draws_random
from hotfuse.ops.table import Access, lookup, packet

CHEAP_NODES = 4
"""Most nodes that are computed again rather than stored."""
MAX_SIBLINGS = 3
"""Neighbours in the list of a value's readers that are looked at for a common kernel."""


@dataclass(frozen=True, slots=True)
class FusionCandidate:
    """Groups that would take the place of others; with `rewritten`, in another graph."""

    kind: CandidateKind
    old: tuple[Group, ...]
    new: tuple[Group, ...]
    reasons: tuple[Reason, ...]
    rewritten: Rewritten | None = None
    key: Key = ()
    """Equal for the same candidate at another place."""

    @property
    def viable(self) -> bool:
        """Whether every reason that can rule it out holds."""
        return all(r.holds for r in self.reasons if r.criterion in _DECIDING)

    @property
    def because(self) -> str:
        """Why it is not viable."""
        return "; ".join(str(r) for r in self.reasons if not r.holds and r.criterion in _DECIDING)


_DECIDING = frozenset({
    Criterion.DEPENDENCE, Criterion.LIMITS, Criterion.PREDICTABLE, Criterion.LOWERING, Criterion.PARALLEL, Criterion.OVERLAP,
})  # fmt: skip
"""Reasons that rule a candidate out; the others go into its value."""


_ANCHORS = {
    Access.CONTRACTION: GroupKind.GEMM_WEIGHT, Access.ATTENTION: GroupKind.ATTENTION, Access.RECURRENT: GroupKind.RECURRENT,
}  # fmt: skip


def anchor_kind(node: Node) -> GroupKind:
    """The kind of kernel a node asks for; ROWS where it fits into others."""
    if is_convolution(node):
        return GroupKind.CONVOLUTION
    if packet(node.op) in EXPERT_OPS:
        return GroupKind.EXPERTS
    if packet(node.op) == NIBBLE_PRODUCT:
        return GroupKind.NIBBLES
    return _ANCHORS.get(lookup(node.op).access, GroupKind.ROWS)


def kind_of(index: UseIndex, nodes: Sequence[int], whole: GroupKind = GroupKind.ROWS) -> GroupKind:
    """The kind of a group of nodes that may be generated; `whole` is that of the group they are cut from, whose anchor keeps it."""
    anchors = [h for i in nodes if (h := node_kind(index.graph.nodes[i], index.params)) in ANCHORS]
    if anchors:
        return anchors[0] if whole == GroupKind.ROWS else whole
    moves = all(lookup(index.graph.nodes[i].op).access is Access.MOVEMENT for i in nodes)
    return GroupKind.LIBRARY if moves else GroupKind.ROWS


@dataclass(slots=True)
class Generator:
    """All candidates around groups of one graph."""

    index: UseIndex
    order: GroupOrder
    core: CoreShape
    threads: int
    seen: SeenCosts = field(default_factory=SeenCosts)

    # --- pairs ---------------------------------------------------------------------------------------------

    def pairs(self, dirty: set[Group]) -> Iterator[FusionCandidate]:
        """Candidates for neighbours of which at least one is new."""
        for a, b in self.order.edges():
            if a not in dirty and b not in dirty:
                continue
            if GroupKind.LIBRARY not in (a.kind, b.kind):
                yield self._joined(a, b)
            if heavy := self._tiling(a, b):
                yield heavy
        for a, b in self.order.siblings(MAX_SIBLINGS):
            if (a in dirty or b in dirty) and GroupKind.LIBRARY not in (a.kind, b.kind):
                yield self._siblings(a, b)

    def _joined(self, a: Group, b: Group) -> FusionCandidate:
        """A producer and its consumer as one kernel."""
        anchors = [g for g in (a, b) if g.kind in ANCHORS]
        kind = CandidateKind.VERTICAL if not anchors else CandidateKind.EPILOGUE if anchors[0] is a else CandidateKind.PROLOGUE
        nodes = tuple(sorted((*a.nodes, *b.nodes)))
        made = Group(nodes, anchors[0].kind if anchors else GroupKind.ROWS)
        between = self.index.between(a.nodes, b.nodes)
        reasons = [self._convex(a, b), self._sizes(nodes), self._limits(a, b, nodes), self._parallel(a, b)]
        reasons.append(self._passes(between))
        if kind is CandidateKind.EPILOGUE:
            bad = self._not_epilogue(a, b)
            fine = "every element is finished where it is summed"
            reasons.append(fails(Criterion.OVERLAP, bad) if bad else holds(Criterion.OVERLAP, fine))
        elif kind is CandidateKind.PROLOGUE:
            reasons.append(self._prologue(a, b))
        return FusionCandidate(kind, (a, b), (made,), tuple(reasons), None, (kind, self.index.key(nodes)))

    def _siblings(self, a: Group, b: Group) -> FusionCandidate:
        nodes = tuple(sorted((*a.nodes, *b.nodes)))
        shared = {v.name: v for v in self.index.entering(a.nodes)}.keys() & {v.name for v in self.index.entering(b.nodes)}
        sizes = [self.index.size(v) or 0 for v in self.index.entering(a.nodes) if v.name in shared]
        reasons = [self._convex(a, b), self._sizes(nodes), self._parallel(a, b)]
        if a.kind != b.kind or a.kind not in (GroupKind.ROWS, GroupKind.GEMM_WEIGHT):
            reasons.append(fails(Criterion.LIMITS, f"{a.kind} and {b.kind} are loops of different forms"))
        else:
            reasons.append(self._limits(a, b, nodes, siblings=True))
        same = a.kind == GroupKind.GEMM_WEIGHT or self._domain(a) == self._domain(b)
        text = f"{len(shared)} values, {sum(sizes)} bytes, are read by both"
        evidence = {"shared_bytes": sum(sizes)}
        reasons.append(Reason(Criterion.OVERLAP, same, text if same else "they run over different extents", evidence))
        return FusionCandidate(CandidateKind.HORIZONTAL, (a, b), (Group(nodes, a.kind),), tuple(reasons), None,
                         (CandidateKind.HORIZONTAL, self.index.key(nodes)))

    def _tiling(self, a: Group, b: Group) -> FusionCandidate | None:
        """Both over blocks of rows; nothing is offered where what passes is small beside the caches."""
        between = self.index.between(a.nodes, b.nodes)
        if between is None or between <= self.core.l2:
            return None
        nodes = tuple(sorted((*a.nodes, *b.nodes)))
        rows = next((r for v in self.index.leaving(nodes) if (r := rows_of(v)) is not None), None)
        each = between // rows if rows else between
        block = max(16, self.core.l2 // 2 // max(each, 1) // 16 * 16)
        made = tiled(self.index, a.nodes, b.nodes, (a.kind, b.kind), block)
        key: Key = (CandidateKind.TILING, self.index.key(nodes))
        stays = holds(Criterion.LOCALITY, f"{block} rows of {each} bytes stay in the second-level cache", bytes=between)
        if isinstance(made, str):
            return FusionCandidate(
                CandidateKind.TILING,
                (a, b),
                (),
                (self._convex(a, b), fails(Criterion.LOWERING, made), stays),
                None,
                key,
            )
        reasons = (self._convex(a, b), holds(Criterion.LOWERING, "row by row"), stays)
        return FusionCandidate(CandidateKind.TILING, (a, b), made.groups, reasons, made, key)

    # --- one group -----------------------------------------------------------------------------------------

    def singles(self, dirty: set[Group]) -> Iterator[FusionCandidate]:
        """Candidates for one group by itself."""
        for g in self.order.groups:
            if g not in dirty or g.kind == GroupKind.LIBRARY:
                continue
            key = self.index.key(g.nodes)
            yield FusionCandidate(
                CandidateKind.LIBRARY,
                (g,),
                (Group(g.nodes, GroupKind.LIBRARY),),
                (self._sizes(g.nodes),),
                None,
                (CandidateKind.LIBRARY, key),
            )
            if g.kind not in WHOLE_GROUPS and len(g.nodes) > 1:
                yield from self._splits(g, key)
            if len(g.nodes) <= CHEAP_NODES and g.kind == GroupKind.ROWS and (again := self._again(g, key)):
                yield again

    def _splits(self, g: Group, key: Key) -> Iterator[FusionCandidate]:
        """Behind the anchor, and where the least passes from one half to the other."""
        places: set[int] = set()
        anchors = [n for n, i in enumerate(g.nodes) if anchor_kind(self.index.graph.nodes[i]) != GroupKind.ROWS]
        if anchors and anchors[-1] + 1 < len(g.nodes):
            places.add(anchors[-1] + 1)
        passing = [(self.index.between(g.nodes[:n], g.nodes[n:]), n) for n in range(1, len(g.nodes))]
        known = [(b, abs(n - len(g.nodes) / 2), n) for b, n in passing if b is not None]
        if known:
            places.add(min(known)[2])
        held = live_values(self.index, g.nodes)
        for n in sorted(places):
            new = tuple(Group(p, kind_of(self.index, p, g.kind)) for p in (g.nodes[:n], g.nodes[n:]))
            pressure = holds(Criterion.LIMITS, f"{held} values at once, {self.core.registers} registers", live=held)
            yield FusionCandidate(
                CandidateKind.SPLIT, (g,), new, (self._sizes(g.nodes), pressure), None, (CandidateKind.SPLIT, n, key)
            )

    def _again(self, g: Group, key: Key) -> FusionCandidate | None:
        readers = [r for r in self.order.readers(g) if r.kind == GroupKind.ROWS]
        if len(readers) < 2 or len(readers) != len(self.order.readers(g)):
            return None
        made = recomputed(self.index, g.nodes, readers)
        if isinstance(made, str):
            return FusionCandidate(
                CandidateKind.RECOMPUTE,
                (g, *readers),
                (),
                (fails(Criterion.LOWERING, made),),
                None,
                (CandidateKind.RECOMPUTE, key),
            )
        stored = self.index.stored(g.nodes) or 0
        total = sum(len(r.nodes) for r in readers)
        fits = all(len(r.nodes) + len(g.nodes) <= MAX_NODES for r in readers)
        limit = Reason(Criterion.LIMITS, fits, f"{len(readers)} readers of {total} nodes", {"readers": len(readers)})
        reasons = (self._sizes(g.nodes), limit, holds(Criterion.LOCALITY, f"{stored} bytes are not stored", bytes=stored))
        keys = tuple(self.index.key(r.nodes) for r in readers)
        return FusionCandidate(
            CandidateKind.RECOMPUTE, (g, *readers), made.groups, reasons, made, (CandidateKind.RECOMPUTE, key, keys)
        )

    # --- reasons -------------------------------------------------------------------------------------------

    def _convex(self, a: Group, b: Group) -> Reason:
        through = self.order.between(a, b)
        if through is None:
            return holds(Criterion.DEPENDENCE, "nothing lies between them")
        op = packet(self.index.graph.nodes[through.nodes[0]].op).removeprefix("aten.")
        return fails(Criterion.DEPENDENCE, f"{op} needs the first and the second needs it")

    def _sizes(self, nodes: Sequence[int]) -> Reason:
        graph = self.index.graph
        for i in nodes:
            node = graph.nodes[i]
            if node.kind is not NodeKind.OPERATOR:
                return fails(Criterion.PREDICTABLE, f"{node.op} decides at run time")
            if draws_random(node.op, node.args, dict(node.attrs)):
                return fails(Criterion.PREDICTABLE, f"{node.op} draws random numbers")
            if unknown := [v for v in (*node.ins, *node.outs) if self.index.size(v) is None]:
                nobody_saw = fails(Criterion.PREDICTABLE, f"the size of %{unknown[0].name} depends on data")
                return self.seen.boundary(unknown) or nobody_saw
        passing = (v for i in nodes for v in graph.nodes[i].outs)
        return self.seen.boundary(passing) or holds(Criterion.PREDICTABLE, "all sizes are known")

    def _limits(self, a: Group, b: Group, nodes: Sequence[int], *, siblings: bool = False) -> Reason:
        anchors = [g.kind for g in (a, b) if g.kind in ANCHORS]
        if len(anchors) == 2 and not siblings:
            return fails(Criterion.LIMITS, f"{anchors[0]} and {anchors[1]} each need the registers for themselves")
        if any(h in WHOLE_GROUPS for h in anchors):
            return fails(Criterion.LIMITS, f"{anchors[0]} leaves no registers for others")
        if len(nodes) > MAX_NODES:
            return fails(Criterion.LIMITS, f"{len(nodes)} nodes, at most {MAX_NODES}", nodes=len(nodes))
        live = live_values(self.index, nodes)
        if not anchors and live > self.core.registers:
            return fails(Criterion.LIMITS, f"{live} values at once, {self.core.registers} registers", live=live)
        return holds(Criterion.LIMITS, "they fit one kernel", nodes=len(nodes), live=live)

    def _parallel(self, a: Group, b: Group) -> Reason:
        one, two = self._rows(a), self._rows(b)
        before, after = max(one, two), min(one, two)
        if after < self.threads <= before:
            return fails(Criterion.PARALLEL, f"{after} rows left for {self.threads} threads", before=before, after=after)
        return holds(Criterion.PARALLEL, f"{after} rows for {self.threads} threads", before=before, after=after)

    def _passes(self, between: int | None) -> Reason:
        if between is None:
            return fails(Criterion.LOCALITY, "what passes depends on data")
        fits = between <= self.core.l2 // 2
        text = f"{between} bytes pass and {'stay in' if fits else 'outgrow'} the second-level cache"
        return Reason(Criterion.LOCALITY, not fits, text, {"bytes": between})

    def _not_epilogue(self, a: Group, b: Group) -> str:
        """Why a group is no epilogue of a product; empty if it is one."""
        made = {v.name: v for i in a.nodes for v in self.index.graph.nodes[i].outs}
        for i in b.nodes:
            node = self.index.graph.nodes[i]
            fits = lookup(node.op).access is Access.POINTWISE or packet(node.op) == "aten.batch_norm"
            if not fits:
                return f"{packet(node.op).removeprefix('aten.')} is no arithmetic on single elements"
            read = [made[v.name] for v in node.ins if v.name in made]
            if read and _shape(node) != _shape_of(read[0].type):
                return f"{packet(node.op).removeprefix('aten.')} changes the shape"
        return ""

    def _prologue(self, a: Group, b: Group) -> Reason:
        """What a product reads once for every panel of columns must not be computed as often."""
        bad = [i for i in a.nodes if lookup(self.index.graph.nodes[i].op).access not in (Access.POINTWISE, Access.MOVEMENT)]
        if bad:
            op = packet(self.index.graph.nodes[bad[0]].op).removeprefix("aten.")
            return fails(Criterion.OVERLAP, f"{op} needs whole rows before the product begins")
        if b.kind == GroupKind.CONVOLUTION and any(self.index.graph.nodes[i].op == CONVERTS for i in a.nodes):
            return fails(Criterion.OVERLAP, "an image that is converted as it is read is read plane by plane")
        return holds(Criterion.OVERLAP, "its elements are computed where they are read")

    def _rows(self, g: Group) -> int:
        """Independent rows of a group's largest result."""
        most = 1
        for v in self.index.leaving(g.nodes):
            if isinstance(v.type, TensorType) and v.type.shape and (size := self.index.size(v)):
                last = v.type.shape[-1]
                width = last if isinstance(last, int) else 1
                most = max(most, size // 4 // max(width, 1))
        return most

    def _domain(self, g: Group) -> object:
        """The extents that a group of rows runs over: the largest shape in it."""
        values = [v for i in g.nodes for v in (*self.index.graph.nodes[i].outs, *self.index.graph.nodes[i].ins)]
        return _shape_of(max(values, key=lambda v: self.index.size(v) or 0).type)


def _shape(node: Node) -> object:
    return _shape_of(node.outs[0].type) if node.outs else None


def _shape_of(t: object) -> object:
    return t.shape if isinstance(t, TensorType) else None
