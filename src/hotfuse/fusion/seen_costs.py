"""Costs as calls showed them: what pieces took while they served, what masks hide, and whether a boundary's data are predictable.

    measured      a piece that served, at the same sizes: its time stands in the place of a prediction
    off           how far predictions of measured pieces were off: those of what nobody has built are corrected by it
    open keys     attention with a mask computes the part of its keys that the mask leaves open
    boundary      a size that only data tell is planned for where it is about the same in most calls; where it is not, kernels
                  would be cut for a size that calls do not have, and what passes is not fused across
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from hotfuse.fusion.closed import Key, UseIndex
from hotfuse.fusion.criteria import Criterion, Reason, fails, holds
from hotfuse.fusion.worth import PredictedCost
from hotfuse.ir.dims import symbols
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.text import parse
from hotfuse.ir.types import TensorType, dims_of
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.profile.traffic import NOTHING_SEEN, MaskShare, MeasuredPiece, TrafficSeen

DOUBT = 4.0
"""Samples that a correction of nothing counts as."""
MAX_OFF = 4.0
"""Predictions are corrected by no more than this factor: what is off further was measured beside something else."""
MIN_KEYS, MIN_HEADS = 64, 4
"""Attention looks for hidden keys from so many keys and heads on (`lower.cpu.attention.seen_keys`)."""
_MASK = {"aten.scaled_dot_product_attention": (3, "attn_mask")}
MIN_OPEN = 0.05
"""Looking at a mask and the panels around what it leaves cost something, however little that is."""
MASK_STEPS = 12
"""Nodes between a mask of the calls and the attention that it is for, at most."""


class SeenCosts:
    """What was seen of one graph's calls, for a planner; says nothing where nothing was."""

    def __init__(self, seen: TrafficSeen = NOTHING_SEEN) -> None:
        self.seen = seen
        self._sizes = {s.symbol: s for s in seen.sizes}
        self._masks = {m.value: m for m in seen.masks if m.n}

    @cached_property
    def _pieces(self) -> Mapping[tuple[Key, bool], MeasuredPiece]:
        found: dict[tuple[Key, bool], MeasuredPiece] = {}
        for piece in self.seen.pieces:
            graph = parse(piece.graph)
            key = (UseIndex(graph, piece.dims).sized_key(range(len(graph.nodes))), piece.library)
            if key not in found or found[key].n < piece.n:
                found[key] = piece
        return found

    def measured(self, index: UseIndex, nodes: Sequence[int], *, library: bool) -> MeasuredPiece | None:
        """What a piece took while it served; None where it did not."""
        return self._pieces.get((index.sized_key(nodes), library)) if self.seen.pieces else None

    def open_keys(self, index: UseIndex, nodes: Sequence[int]) -> MaskShare | None:
        """The mask that decides how much attention among nodes computes; None where there is none, or every key is computed."""
        if not self._masks:
            return None
        return next((m for i in nodes if (m := self._mask(index, index.graph.nodes[i])) is not None), None)

    def _mask(self, index: UseIndex, node: Node) -> MaskShare | None:
        place = _MASK.get(packet(node.op))
        if place is None or not _looks(node):
            return None
        at, name = place
        given = node.args[at] if len(node.args) > at else node.attr(name)
        value: object = given
        for _ in range(MASK_STEPS):  # masks are made of what calls bring by arithmetic and views
            if not isinstance(value, Value):
                return None
            if value.name in self._masks:
                return self._masks[value.name]
            maker = index.maker.get(value.name)
            if maker is None or lookup(index.graph.nodes[maker].op).access not in (Access.POINTWISE, Access.MOVEMENT):
                return None
            read = [v for v in index.graph.nodes[maker].ins if isinstance(v.type, TensorType) and v.name not in index.params]
            value = read[0] if len(read) == 1 else next((v for v in read if v.name in self._masks), None)
        return None

    def boundary(self, values: Iterable[Value]) -> Reason | None:
        """Whether what passes at a boundary is predictable; None where its sizes do not depend on data, or nobody saw them."""
        found = [self._sizes[s] for v in values for d in dims_of(v.type) for s in sorted(symbols(d)) if s in self._sizes]
        if not found:
            return None
        worst = min(found, key=lambda s: (s.predictable, s.near))
        make = holds if worst.predictable else fails
        return make(Criterion.PREDICTABLE, str(worst), size=worst.size, near=round(worst.near, 3), samples=worst.n)


def correction(pairs: Iterable[tuple[MeasuredPiece, float]]) -> float:
    """How far predictions of pieces were off, by all of their time: measured over predicted, shrunk where samples are few."""
    known = [(p, s) for p, s in pairs if math.isfinite(s) and s > 0]
    if not known:
        return 1.0
    ratio = sum(p.us * 1e-6 for p, _ in known) / sum(s for _, s in known)
    n = sum(p.n for p, _ in known)
    return min(MAX_OFF, max(1 / MAX_OFF, math.exp(math.log(ratio) * n / (n + DOUBT))))


def served(predicted: PredictedCost, piece: MeasuredPiece) -> PredictedCost:
    """A cost as it was measured, as far as its samples are believed: no further than what would replace it is corrected by them."""
    made = predicted.times(correction([(piece, predicted.seconds)]))
    return replace(made, deviation=min(made.deviation, made.seconds * piece.noise))


def masked(predicted: PredictedCost, mask: MaskShare) -> PredictedCost:
    """The part of a cost that a mask leaves, as uncertain as that part is."""
    part = max(mask.live, MIN_OPEN)
    made = predicted.times(part)
    return replace(made, deviation=math.hypot(made.deviation, predicted.seconds * mask.deviation))


def _looks(node: Node) -> bool:
    """Whether its kernel looks for keys that the mask hides: heads share the look, and there are keys enough."""
    q, k = node.args[0], node.args[1]
    if not (isinstance(q, Value) and isinstance(k, Value) and isinstance(q.type, TensorType) and isinstance(k.type, TensorType)):
        return False
    if len(q.type.shape) < 3 or len(k.type.shape) < 3:
        return False
    heads, keys = q.type.shape[-3], k.type.shape[-2]
    return (not isinstance(heads, int) or heads >= MIN_HEADS) and (not isinstance(keys, int) or keys >= MIN_KEYS)
