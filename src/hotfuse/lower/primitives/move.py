"""Rules for movements that are several simple ones behind each other.

    roll(x, (1, 2), (1, 2))     ->   lower.roll(lower.roll(x, 1, 1), 2, 2)
    pixel_shuffle(x, r)         ->   [.., C, r, r, H, W] -> [.., C, H, r, W, r], counted through
    diff(x, prepend=p)          ->   y[1:] - y[:-1] of y = cat(p, x)
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import divide, mul
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.views import shape_of
from hotfuse.lower.primitives.rules import Draft, decomposes, dtype


def _numbers(given: object) -> tuple[int, ...]:
    several = given if isinstance(given, tuple) else (given,)
    found = tuple(n for n in several if isinstance(n, int))
    if len(found) != len(several):
        raise CannotLower(f"a movement by {given}")
    return found


@decomposes("roll")
def _roll(d: Draft, node: Node) -> Sequence[Value]:
    x, by, dims = d.value(), _numbers(d.arg("shifts")), _numbers(d.arg("dims", ()))
    shape = shape_of(x)
    if not dims:
        raise CannotLower("a roll of all elements, counted through")
    for shift, dim in zip(by, dims, strict=True):
        x = _rolled(d, x, shift, dim % len(shape))
    return (x,)


def _rolled(d: Draft, x: Value, shift: int, dim: int) -> Value:
    return d.add("lower.roll", (x, shift, dim), dtype(x), shape_of(x))


def _turned(d: Draft, x: Value, order: tuple[int, ...]) -> Value:
    shape = shape_of(x)
    return d.add("aten.permute.default", (x, order), dtype(x), tuple(shape[i] for i in order))


def _quotient(n: Dim, by: int) -> Dim:
    found = divide(n, by)
    if found is None:
        raise CannotLower(f"{n} in parts of {by}")
    return found


@decomposes("pixel_shuffle")
def _pixel_shuffle(d: Draft, node: Node) -> Sequence[Value]:
    x, (r,) = d.value(), _numbers(d.arg("upscale_factor"))
    *front, channels, high, wide = shape_of(x)
    rank, each = len(front), _quotient(channels, r * r)
    parts = d.reshape(x, (*front, each, r, r, high, wide))
    turned = _turned(d, parts, (*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2))
    return (d.reshape(turned, (*front, each, mul(high, r), mul(wide, r))),)


@decomposes("pixel_unshuffle")
def _pixel_unshuffle(d: Draft, node: Node) -> Sequence[Value]:
    x, (r,) = d.value(), _numbers(d.arg("downscale_factor"))
    *front, channels, high, wide = shape_of(x)
    rank, rows, columns = len(front), _quotient(high, r), _quotient(wide, r)
    parts = d.reshape(x, (*front, channels, rows, r, columns, r))
    turned = _turned(d, parts, (*range(rank), rank, rank + 2, rank + 4, rank + 1, rank + 3))
    return (d.reshape(turned, (*front, mul(channels, r * r), rows, columns)),)


@decomposes("channel_shuffle native_channel_shuffle")
def _channel_shuffle(d: Draft, node: Node) -> Sequence[Value]:
    x, (groups,) = d.value(), _numbers(d.arg("groups"))
    first, channels, *rest = shape_of(x)
    parts = d.reshape(x, (first, groups, _quotient(channels, groups), *rest))
    return (d.reshape(_turned(d, parts, (0, 2, 1, *range(3, 3 + len(rest)))), (first, channels, *rest)),)


@decomposes("diff")
def _diff(d: Draft, node: Node) -> Sequence[Value]:
    times, (dim,) = d.arg("n", 1), _numbers(d.arg("dim", -1))
    x, many = d.value(), len(shape_of(d.value()))
    if times != 1 or dtype(x) is DType.BOOL or not many:
        raise CannotLower(f"differences of {dtype(x).value}, {times} times")
    dim %= many
    parts = tuple(v for v in (d.maybe("prepend"), x, d.maybe("append")) if v is not None)
    if len(parts) > 1:
        if any(dtype(v) is not dtype(x) for v in parts):
            raise CannotLower("differences of several element types")
        joined = expr("+", 0, *(shape_of(v)[dim] for v in parts))
        shape = tuple(joined if i == dim else n for i, n in enumerate(shape_of(x)))
        x = d.add("aten.cat.default", (parts, dim), dtype(x), shape)
    length = expr("+", shape_of(x)[dim], -1)
    fewer = tuple(length if i == dim else n for i, n in enumerate(shape_of(x)))
    ends = [d.add("aten.slice.Tensor", (x, dim, a, b), dtype(x), fewer) for a, b in ((1, 2**63 - 1), (0, -1))]
    return (d.pointwise("sub.Tensor", *ends),)
