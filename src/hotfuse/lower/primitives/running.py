"""Rules for what runs along a dim: every element together with those before it.

    cumsum(x)    ->   lower.scan.sum(x)
    cummax(x)    ->   value = lower.scan.max(x);  index = lower.scan.max(j where x[j] is the largest so far, else 0)

The largest so far may be an older one of the same size; torch gives the place of the newest, and a NaN is larger (and smaller) than
everything and stays: the place of the newest NaN from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.expand import FLOATS, HALVES
from hotfuse.lower.ops.views import shape_of
from hotfuse.lower.primitives.index import either, equal
from hotfuse.lower.primitives.resize import scalar
from hotfuse.lower.primitives.rules import Draft, decomposes, dtype


def _along(d: Draft, x: Value) -> int | None:
    """The dim that is followed; None where it has one element, or there is no dim."""
    dim, rank = d.arg("dim"), len(shape_of(x))
    if not isinstance(dim, int):
        raise CannotLower(f"a running result along {dim}")
    return None if not rank or shape_of(x)[dim] == 1 else dim % rank


def _scan(d: Draft, function: str, x: Value, dim: int) -> Value:
    return d.add(f"lower.scan.{function}", (x,), dtype(x), shape_of(x), {"dim": dim})


@decomposes("cumsum cumprod")
def _cumsum(d: Draft, node: Node) -> Sequence[Value]:
    out = dtype(node.outs[0])
    x = d.cast(d.value(), DType.F32 if out in HALVES else out)
    dim = _along(d, x)
    return (x if dim is None else _scan(d, node.op.split(".")[1][3:], x, dim),)


@decomposes("cummax cummin")
def _cummax(d: Draft, node: Node) -> Sequence[Value]:
    x = d.value()
    x = d.cast(x, DType.U8) if dtype(x) is DType.BOOL else d.wide(x)
    dim = _along(d, x)
    if dim is None:
        return x, d.add("aten.full.default", ((), 0), DType.I64, shape_of(x), {"dtype": DType.I64})
    value = _scan(d, node.op.split(".")[1][3:], x, dim)
    here = equal(d, x, value)
    if dtype(x) in FLOATS:
        here = d.add("aten.logical_or.default", (here, d.add("aten.isnan.default", (x,), DType.BOOL, shape_of(x))),
                     DType.BOOL, shape_of(x))  # fmt: skip
    count = shape_of(x)[dim]
    numbers = d.add("aten.arange.default", (scalar(count),), DType.I64, (count,))
    places = d.reshape(numbers, tuple(count if i == dim else 1 for i in range(len(shape_of(x)))))
    return value, _scan(d, "max", either(d, here, places, 0), dim)
