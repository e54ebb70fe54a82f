"""Rules for resizing and for borders other than a constant.

The place that an output pixel is read from is computed as torch computes it, in single precision, and looked up (`lower.pick`);
where an image grows by a whole factor, it is a quotient of the pixel's own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Node, Value
from hotfuse.ir.types import DType, ScalarKind, ScalarType
from hotfuse.lower.common.algebra import add, divide, same, sub
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.views import shape_of, size
from hotfuse.lower.primitives.rules import Draft, decomposes, dtype

_F32 = DType.F32


def _spatial(d: Draft, node: Node) -> tuple[Value, int, tuple[Dim, ...], tuple[Dim, ...]]:
    """(image, its first spatial dim, its extents, the result's)."""
    name = "input" if node.op.endswith(".vec") else "self"
    x = d.value(name)
    return x, 2, shape_of(x)[2:], shape_of(node.outs[0])[2:]


def _given_scales(d: Draft, node: Node, rank: int) -> list[float | None]:
    """Scale factors as far as the call says them."""
    if node.op.endswith(".vec"):
        given = d.arg("scale_factors")
        found = list(given) if isinstance(given, tuple) else [None] * rank
    elif rank == 1:
        found = [d.arg("scales")]
    else:
        found = [d.arg(f"scales_{letter}") for letter in "dhw"[3 - rank:]]
    scales: list[float | None] = []
    for f in found:
        if f is not None and not isinstance(f, int | float):
            raise CannotLower(f"a scale of {f}")
        scales.append(None if f is None or f <= 0 else float(f))
    return scales


def _number(d: Draft, n: Dim) -> Value:
    """A size as a float that the kernel computes with."""
    return d.cast(d.add("aten.full.default", ((), scalar(n)), DType.I64, ()), _F32)


def scalar(n: Dim) -> Arg:
    """A size as an argument."""
    return n if isinstance(n, int) else Value(f"size {n}", ScalarType(ScalarKind.INT, n))


def _scale(d: Draft, given: float | None, extent: Dim, out: Dim) -> Value | float:
    """How far one output pixel is in input pixels, rounded to single precision as torch does."""
    if given is not None:
        return float(np.float32(1.0 / given))
    if isinstance(extent, int) and isinstance(out, int):
        return float(np.float32(extent / out))
    return _ratio(d, extent, out)


def _ratio(d: Draft, a: Dim, b: Dim) -> Value:
    return d.pointwise("div.Tensor", _number(d, a), _number(d, b))


def _places(d: Draft, out: Dim, dim: int, rank: int) -> Value:
    """0, 1, ... along an output dim, as floats that broadcast against the image."""
    count = d.add("aten.arange.default", (scalar(out),), DType.I64, (out,))
    shaped = d.reshape(count, (out, *(1,) * (rank - 1 - dim)))
    return d.cast(shaped, _F32)


def _at_most(d: Draft, x: Value, n: Dim) -> Value:
    return d.add("aten.clamp.default", (x, None, scalar(sub(n, 1))), DType.I64, shape_of(x))


@decomposes(
    """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d"""
)
def _nearest(d: Draft, node: Node) -> Sequence[Value]:
    x, first, extents, out = _spatial(d, node)
    exact = "exact" in node.op
    scales = _given_scales(d, node, len(extents))
    picks: list[tuple[int, Value]] = []
    for i, (n, m) in enumerate(zip(extents, out, strict=True)):
        dim, factor = first + i, divide(m, n)
        if isinstance(factor, int) and factor >= 1 and scales[i] in (None, factor):  # both formulas are the quotient then
            if factor != 1:
                shape = shape_of(x)
                grown = (*shape[:dim], m, *shape[dim + 1:])
                x = d.add("aten.repeat_interleave.self_int", (x, factor, dim), dtype(x), grown)
            continue
        if same(n, m) and not exact:  # torch does not look at the scale then
            continue
        at = _places(d, m, dim, 2 + len(out))
        if exact:
            at = d.pointwise("add.Tensor", at, 0.5)
        at = d.pointwise("floor.default", d.pointwise("mul.Tensor", at, _scale(d, scales[i], n, m)))
        picks.append((dim, _at_most(d, d.cast(at, DType.I64), n)))
    return (_picked(d, x, picks, shape_of(node.outs[0])),)


def _picked(d: Draft, x: Value, picks: Sequence[tuple[int, Value]], shape: tuple[Dim, ...]) -> Value:
    if not picks:
        return x
    return d.add("lower.pick", (x, *(i for _, i in picks)), dtype(x), shape, {"dims": tuple(dim for dim, _ in picks)})


@decomposes("upsample_linear1d upsample_bilinear2d upsample_trilinear3d")
def _linear(d: Draft, node: Node) -> Sequence[Value]:
    """A weighted mean of the two neighbours along every dim."""
    x, first, extents, out = _spatial(d, node)
    if dtype(x) not in (_F32, DType.F16, DType.BF16):
        raise CannotLower(f"resizing {dtype(x).value}")
    corners = d.arg("align_corners", default=False)
    scales = _given_scales(d, node, len(extents))
    rank = 2 + len(out)
    neighbours: list[tuple[Value, Value, Value]] = []
    for i, (n, m) in enumerate(zip(extents, out, strict=True)):
        at = _places(d, m, first + i, rank)
        if corners:
            if m == 1:
                step: Value | float = 0.0
            elif isinstance(m, int):
                step = _scale(d, None, sub(n, 1), m - 1)
            else:
                raise CannotLower(f"whether {m} pixels have two corners is not known")
            real = d.pointwise("mul.Tensor", at, step)
        else:
            middle = d.pointwise("add.Tensor", at, 0.5)
            real = d.pointwise("sub.Tensor", d.pointwise("mul.Tensor", middle, _scale(d, scales[i], n, m)), 0.5)
            real = d.pointwise("relu.default", real)
        low = _at_most(d, d.cast(d.pointwise("floor.default", real), DType.I64), n)
        high = _at_most(d, d.add("aten.add.Tensor", (low, 1), DType.I64, shape_of(low)), n)
        share = d.pointwise("sub.Tensor", real, d.cast(low, _F32))
        neighbours.append((low, high, d.pointwise("clamp.default", share, 0.0, 1.0)))
    shape = shape_of(node.outs[0])
    dims = [first + i for i in range(len(out))]
    parts: list[Value] = []
    for sides in product((0, 1), repeat=len(out)):
        picks = [(dim, pair[side]) for dim, pair, side in zip(dims, neighbours, sides, strict=True)]
        parts.append(d.wide(_picked(d, x, picks, shape)))
    for _, _, share in reversed(neighbours):  # the last dim's neighbours stand next to each other
        rest = d.pointwise("rsub.Scalar", share, 1.0)
        parts = [
            d.pointwise("add.Tensor", d.pointwise("mul.Tensor", a, rest), d.pointwise("mul.Tensor", b, share))
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
    return (parts[0],)


@decomposes(
    """reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"""
)
def _borders(d: Draft, node: Node) -> Sequence[Value]:
    return (bordered(d, d.value(), d.arg("padding"), "reflect" if "reflection" in node.op else "replicate"),)


def bordered(d: Draft, x: Value, amounts: Arg, mode: str) -> Value:
    """One dim after the other; `amounts` lists them from the last one on."""
    if not isinstance(amounts, tuple):
        raise CannotLower(f"padding with {amounts}")
    shape = list(shape_of(x))
    for i in range(0, len(amounts), 2):
        dim, before, after = len(shape) - 1 - i // 2, amounts[i], amounts[i + 1]
        if (before, after) != (0, 0):
            shape[dim] = add(shape[dim], size(before), size(after))
            x = d.add("lower.border", (x, dim, before, mode), dtype(x), tuple(shape))
    return x
