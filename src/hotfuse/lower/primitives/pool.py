"""Rules for pools: a window along each spatial dim, folded place by place, so that vectors run along channels or pixels.

    max_pool2d(x, 3, 2, 1)   ->   per dim, the maximum of 3 windows: places -1, 0, 1 of every second element

Folding one dim after the other is exact for maxima, and for sums an order like any other. A window that covers a whole dim is
a reduction; one of many places runs in a loop (`lower.unfold`). What a mean divides by is counted with the same windows over
ones where borders make it differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import add, divide, mul, same, sub
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.expand import FLOATS
from hotfuse.lower.ops.views import shape_of
from hotfuse.lower.primitives.resize import scalar
from hotfuse.lower.primitives.rules import Draft, decomposes, dtype
from hotfuse.tile.memory import NUMPY

_WRITTEN_OUT = 40
"""Most places of a window that are computed one after the other in one loop body."""


def each(d: Draft, name: str, rank: int, default: int | None = None) -> list[int]:
    """One number per spatial dim."""
    given = d.arg(name)
    if given is None or given == ():
        if default is None:
            raise CannotLower(f"{d.node.op} without {name}")
        return [default] * rank
    if isinstance(given, int):
        return [int(given)] * rank
    if not isinstance(given, tuple) or not all(isinstance(g, int) for g in given):
        raise CannotLower(f"{name} of {d.node.op} is {given}")
    numbers = [int(g) for g in given]  # type: ignore[arg-type]
    return numbers * rank if len(numbers) == 1 else numbers


def _rank(node: Node) -> int:
    """How many spatial dims: the digit in the op's name."""
    return int(node.op.split(".")[1].partition("pool")[2][0])


def _windows(
    d: Draft, x: Value, sizes: Sequence[int], strides: Sequence[int], pads: Sequence[int], steps: Sequence[int],
    out: Sequence[Dim], combine: str, outside: float,
) -> Value:  # fmt: skip
    """Windows over the last dims folded with a pointwise op, or with a reduction where there are many places."""
    first = len(shape_of(x)) - len(sizes)
    if math.prod(sizes) > _WRITTEN_OUT:
        return _looped(d, x, sizes, strides, pads, steps, out, combine, outside)
    for i in reversed(range(len(sizes))):
        dim, shape = first + i, shape_of(x)
        if sizes[i] == 1 and strides[i] == 1 and pads[i] == 0:
            continue
        target = (*shape[:dim], out[i], *shape[dim + 1:])
        belongs = combine == "maximum.default" and steps[i] == 1
        places = [
            d.add("lower.window", (x, dim, k * steps[i] - pads[i], strides[i], outside, belongs), dtype(x), target,
                  {"cut": d.cuts})
            for k in range(sizes[i])
        ]  # fmt: skip
        x = places[0]
        for other in places[1:]:
            x = d.pointwise(combine, x, other)
    return x


def _looped(
    d: Draft, x: Value, sizes: Sequence[int], strides: Sequence[int], pads: Sequence[int], steps: Sequence[int],
    out: Sequence[Dim], combine: str, outside: float,
) -> Value:  # fmt: skip
    first = len(shape_of(x)) - len(sizes)
    for i, size in enumerate(sizes):
        dim, shape = first + 2 * i, shape_of(x)
        target = (*shape[:dim], out[i], size, *shape[dim + 1:])
        x = d.add("lower.unfold", (x, dim, -pads[i], strides[i], steps[i], outside), dtype(x), target)
    inside = [first + 2 * i + 1 for i in range(len(sizes))]
    folded = d.reduce("max" if combine == "maximum.default" else "sum", x, inside)
    return d.reshape(folded, (*shape_of(folded)[:first], *out))


def _least(t: DType) -> float:
    return -math.inf if t in FLOATS else int(np.iinfo(NUMPY[t]).min)


@decomposes("max_pool1d max_pool2d max_pool3d")
def _max_pool(d: Draft, node: Node) -> Sequence[Value]:
    x, rank = d.value(), _rank(node)
    sizes = each(d, "kernel_size", rank)
    strides = sizes if d.arg("stride") in (None, ()) else each(d, "stride", rank)
    pads, steps = each(d, "padding", rank, 0), each(d, "dilation", rank, 1)
    out = shape_of(node.outs[0])[-rank:]
    if dtype(x) is DType.BOOL:
        raise CannotLower("a pool of truth values")
    return (_windows(d, x, sizes, strides, pads, steps, out, "maximum.default", _least(dtype(x))),)


@decomposes("avg_pool1d avg_pool2d avg_pool3d")
def _avg_pool(d: Draft, node: Node) -> Sequence[Value]:
    x, rank = d.wide(d.value()), _rank(node)
    sizes = each(d, "kernel_size", rank)
    strides = sizes if d.arg("stride") in (None, ()) else each(d, "stride", rank)
    pads, out = each(d, "padding", rank, 0), shape_of(node.outs[0])[-rank:]
    if dtype(x) not in FLOATS:
        raise CannotLower("a mean of integers")
    extents = shape_of(x)[-rank:]
    if all(same(n, s) and o == 1 and p == 0 for n, s, o, p in zip(extents, sizes, out, pads, strict=True)):
        return (_mean(d, x, rank),)
    ones = [1] * rank
    total = _windows(d, x, sizes, strides, pads, ones, out, "add.Tensor", 0.0)
    override = d.arg("divisor_override")
    if override is not None:
        if not isinstance(override, int | float):
            raise CannotLower(f"divisor_override is {override}")
        return (d.pointwise("div.Tensor", total, float(override)),)
    pads_count = d.arg("count_include_pad", default=True) is not False
    return (_divided(d, total, extents, sizes, strides, pads, out, pads_count=pads_count),)


def _divided(
    d: Draft, total: Value, extents: Sequence[Dim], sizes: Sequence[int], strides: Sequence[int], pads: Sequence[int],
    out: Sequence[Dim], *, pads_count: bool,
) -> Value:  # fmt: skip
    """By how many elements each window holds: the padding too where that counts, what lies behind it never."""
    fixed = 1.0
    counts: list[Value] = []
    rank = len(sizes)
    for i in range(rank):
        reach, pad = mul(strides[i], sub(out[i], 1)), pads[i]
        if pads_count:
            whole = sub(add(extents[i], 2 * pad), add(reach, sizes[i]))
            length, start = add(extents[i], 2 * pad), 0
        else:
            whole = -1 if pad else sub(extents[i], add(reach, sizes[i]))
            length, start = extents[i], -pad
        if isinstance(whole, int) and whole >= 0:
            fixed *= sizes[i]
            continue
        ones = d.add("aten.ones.default", ((scalar(length),),), dtype(total), (length,))
        count = _windows(d, ones, [sizes[i]], [strides[i]], [-start], [1], [out[i]], "add.Tensor", 0.0)
        counts.append(d.reshape(count, (out[i], *(1,) * (rank - 1 - i))))
    for c in counts:
        total = d.pointwise("div.Tensor", total, c)
    return total if fixed == 1 else d.pointwise("mul.Tensor", total, 1 / fixed) if _exact(fixed) else (
        d.pointwise("div.Tensor", total, fixed)
    )


def _exact(n: float) -> bool:
    """Whether 1/n is exact, so that multiplying is the same as dividing."""
    return math.frexp(n)[0] == 0.5


def _mean(d: Draft, x: Value, rank: int) -> Value:
    shape = shape_of(x)
    return d.reduce("mean", x, range(len(shape) - rank, len(shape)))


@decomposes("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d")
def _adaptive_avg_pool(d: Draft, node: Node) -> Sequence[Value]:
    x, rank = d.wide(d.value()), _rank(node)
    if dtype(x) not in FLOATS:
        raise CannotLower("a mean of integers")
    extents, out = shape_of(x)[-rank:], shape_of(node.outs[0])[-rank:]
    if all(o == 1 for o in out):
        return (_mean(d, x, rank),)
    sizes = [divide(n, o) for n, o in zip(extents, out, strict=True)]
    if not all(isinstance(s, int) for s in sizes):
        raise CannotLower(f"an adaptive pool of {extents} to {out}")
    each = [s for s in sizes if isinstance(s, int)]
    total = _windows(d, x, each, each, [0] * rank, [1] * rank, out, "add.Tensor", 0.0)
    return (_divided(d, total, extents, each, each, [0] * rank, out, pads_count=True),)
