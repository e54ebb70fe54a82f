"""Rules for sorting short dims: every element counts those that come before it, then every place asks who belongs there.

    sort(x, -1)     ->   rank[j] = sum over l of (x[l] comes before x[j]);  value[p] = x[j] and index[p] = j where rank[j] == p
    topk(x, k)      ->   the same for the first k places

    lower.stored(x)      x, computed before the loops that read it, into the kernel's own memory

Equal elements stay in their order; NaN counts as larger than everything, as in torch. That is n * n comparisons without a
branch, many at once, so it is for short dims (experts, classes, beams); longer ones stay with the library (`analysis.sorts`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hotfuse.analysis.sorts import refusal
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.expand import FLOATS
from hotfuse.lower.ops.views import is_move, shape_of
from hotfuse.lower.primitives.index import either, equal, once, places
from hotfuse.lower.primitives.rules import Draft, broadcast, decomposes, dtype
from hotfuse.ops.table import packet


def _map(d: Draft, op: str, a: Value, b: Value | None = None) -> Value:
    """A comparison, or a function of truth values."""
    operands = (a,) if b is None else (a, b)
    shape = shape_of(a) if b is None else broadcast(shape_of(a), shape_of(b))
    return d.add(f"aten.{op}", operands, DType.BOOL, shape)


def _stored(d: Draft, x: Value) -> Value:
    """In memory, if it is computed here."""
    maker = {v.name: n for n in d.nodes for v in n.outs}
    made = x
    while made.name in maker and is_move(maker[made.name].op) and len(maker[made.name].ins) == 1:
        made = maker[made.name].ins[0]
    return d.add("lower.stored", (x,), dtype(x), shape_of(x)) if made.name in maker else x


def _first(d: Draft, x: Value, dim: int, many: int, *, largest: bool) -> tuple[Value, Value]:
    """(values, indexes) of the first so many places along a dim."""
    shape = shape_of(x)
    rank, order = len(shape), [i for i in range(len(shape)) if i != dim] + [dim]
    rest, n = tuple(shape[i] for i in order[:-1]), shape[dim]
    assert isinstance(n, int)
    own = x if order[-1] == rank - 1 == dim else d.add("aten.permute.default", (x, tuple(order)), dtype(x), (*rest, n))
    own = _stored(d, d.wide(own) if dtype(own) is not DType.BOOL else d.cast(own, DType.U8))
    mine, other = d.reshape(own, (*rest, n, 1)), d.reshape(own, (*rest, 1, n))
    here, there = places(d, n, rank + 1, rank - 1), places(d, n, rank + 1, rank)
    before = _map(d, "gt.Tensor" if largest else "lt.Tensor", other, mine)
    alike = _map(d, "eq.Tensor", other, mine)
    if dtype(own) in FLOATS:
        nan, others = _map(d, "isnan.default", mine), _map(d, "isnan.default", other)
        greater, less = (others, nan) if largest else (nan, others)
        before = _map(d, "logical_or.default", before, _map(d, "gt.Tensor", greater, less))
        alike = _map(d, "logical_or.default", alike, _map(d, "logical_and.default", nan, others))
    earlier = _map(d, "logical_and.default", alike, _map(d, "lt.Tensor", there, here))
    counted = d.cast(_map(d, "logical_or.default", before, earlier), DType.I32)
    ranks = d.add("lower.stored", (d.reduce("sum", counted, (rank,)),), DType.I32, (*rest, n, 1))
    hit = equal(d, d.cast(d.reshape(ranks, (*rest, 1, n)), DType.I64), places(d, many, rank + 1, rank - 1))
    floats = dtype(own) in FLOATS
    value = once(d, "max" if floats else "sum", either(d, hit, other, -math.inf if floats else 0), rank)
    index = once(d, "max", either(d, hit, there, -1), rank)
    back = tuple(order.index(i) for i in range(rank))
    out = tuple(many if i == dim else s for i, s in enumerate(shape))
    if back == tuple(range(rank)):
        return value, index
    turned = [d.add("aten.permute.default", (v, back), dtype(v), out) for v in (value, index)]
    return turned[0], turned[1]


@decomposes("topk sort argsort")
def _sort(d: Draft, node: Node) -> Sequence[Value]:
    if (why := refusal(node)) is not None:
        raise CannotLower(why, where=str(node.loc))
    x, given, top = d.value(), d.arg("dim", -1), packet(node.op) == "aten.topk"
    assert isinstance(given, int)
    dim = given % len(shape_of(x))
    many = d.arg("k") if top else shape_of(x)[dim]
    assert isinstance(many, int)
    largest = d.arg("largest", default=True) if top else d.arg("descending", default=False)
    values, indexes = _first(d, x, dim, many, largest=bool(largest))
    return (indexes,) if packet(node.op) == "aten.argsort" else (values, indexes)
