"""Resize and Upsample, axis by axis: where each output position lies in the input, which inputs it reads, how much.

torch's `interpolate` is used whole where its rule is the same in every position; else each axis is a sum of a few
gathers with weights. Positions are computed in float64 so that ties fall as the definition says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.registry import Ctx, onnx_op


@dataclass(frozen=True, slots=True)
class _How:
    """The attributes that say how positions and weights come about."""

    mode: str
    coordinates: str
    nearest: str
    cubic_a: float
    exclude_outside: bool
    antialias: bool
    extrapolation: float


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis to resize: sizes may be symbolic; `scale * size` is the exact output width before rounding."""

    axis: int
    size: Any
    out: Any
    scale: Any
    width: Any
    roi: tuple[float, float] | None


def _positions(a: _Axis, how: _How, device: torch.device) -> Tensor:
    """Where each output position lies in input coordinates."""
    x = torch.arange(a.out, dtype=torch.float64, device=device)
    if how.coordinates == "align_corners":
        return x * (a.size - 1) / torch.sym_max(a.width - 1, 1e-9)
    if how.coordinates == "asymmetric":
        return x / a.scale
    if how.coordinates == "tf_crop_and_resize":
        start, end = a.roi if a.roi is not None else (0.0, 1.0)
        if a.width == 1:
            return x * 0 + (start + end) * (a.size - 1) / 2
        return x * ((end - start) * (a.size - 1)) / (a.width - 1) + start * (a.size - 1)
    if how.coordinates == "pytorch_half_pixel" and a.width == 1:
        return x * 0
    if how.coordinates in ("half_pixel", "pytorch_half_pixel"):
        return (x + 0.5) / a.scale - 0.5
    if how.coordinates == "half_pixel_symmetric":
        return a.size / 2 * (1 - a.out / a.width) + (x + 0.5) / a.scale - 0.5
    if how.coordinates == "tf_half_pixel_for_nn":
        return (x + 0.5) / a.scale
    raise ModelError(
        f"Resize: coordinate_transformation_mode is {how.coordinates!r}", because="ONNX defines no such one"
    )


def _nearest(at: Tensor, mode: str, a: _Axis) -> Tensor:
    if mode == "round_prefer_floor":
        return torch.ceil(at - 0.5)
    if mode == "round_prefer_ceil":
        return torch.floor(at + 0.5)
    if mode == "simple":
        # version 10 said nothing; runtimes take the floor, and the ceiling when shrinking
        return torch.ceil(at) if a.scale < 1 else torch.floor(at)
    if mode == "floor":
        return torch.floor(at)
    if mode == "ceil":
        return torch.ceil(at)
    raise ModelError(f"Resize: nearest_mode is {mode!r}", because="ONNX defines no such one")


def _cubic(x: Tensor, a: float) -> Tensor:
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _taps(at: Tensor, a: _Axis, how: _How) -> list[tuple[Tensor, Tensor]]:
    """(index, weight) pairs over the output; when shrinking with antialias the kernel widens by 1/scale."""
    reach = 1 if how.mode == "linear" else 2
    shrink = min(float(a.scale), 1.0) if how.antialias else 1.0
    first = math.floor(-reach / shrink) + 1
    # the pixel on the left is preferred: the ratio is in (0, 1]
    base = torch.ceil(at) - 1
    ratio = at - base
    taps: list[tuple[Tensor, Tensor]] = []
    for i in range(first, 2 - first):
        d = (i - ratio) * shrink
        weight = (1 - d.abs()).clamp(0, 1) if how.mode == "linear" else _cubic(d, how.cubic_a)
        index = base + i
        if how.exclude_outside:
            weight = torch.where((index >= 0) & (index < a.size), weight, torch.zeros_like(weight))
        taps.append((index.clamp(0, a.size - 1).long(), weight))
    if how.exclude_outside or how.antialias:
        total = sum((w for _, w in taps), torch.zeros_like(ratio))
        taps = [(i, w / total) for i, w in taps]
    return taps


def _along(x: Tensor, a: _Axis, how: _How) -> Tensor:
    at = _positions(a, how, x.device)
    if how.mode == "nearest":
        return x.index_select(a.axis, _nearest(at, how.nearest, a).clamp(0, a.size - 1).long())
    shape = [1] * x.dim()
    shape[a.axis] = -1
    total: Any = None
    for index, weight in _taps(at, a, how):
        part = x.index_select(a.axis, index) * weight.to(x.dtype).reshape(shape)
        total = part if total is None else total + part
    return total


def _outside(axes: Sequence[_Axis], how: _How, y: Tensor) -> Tensor:
    """What tf_crop_and_resize reads beyond the image is the extrapolation value."""
    for a in axes:
        at = _positions(a, how, y.device)
        shape = [1] * y.dim()
        shape[a.axis] = -1
        beyond = ((at < 0) | (at > a.size - 1)).reshape(shape)
        y = torch.where(beyond, torch.full_like(y, how.extrapolation), y)
    return y


def _plain_number(v: Any) -> bool:
    return isinstance(v, int | float)


def _whole(x: Tensor, axes: Sequence[_Axis], how: _How, *, scaled: bool) -> Tensor | None:
    """torch's operator where it is the same function; None where it is not known to be."""
    n = x.dim() - 2
    if not 1 <= n <= 3 or not x.dtype.is_floating_point or any(a.axis < 2 for a in axes) or how.antialias:
        return None
    if not scaled and any(a.width is not a.out for a in axes):
        return None  # one scale kept for all axes: the sizes were rounded from it
    by_axis = {a.axis: a for a in axes}
    size = [by_axis[i].out if i in by_axis else x.shape[i] for i in range(2, x.dim())]
    factor = [float(by_axis[i].scale) if i in by_axis else 1.0 for i in range(2, x.dim())] if scaled else None
    if how.mode == "nearest":
        twos = factor is not None and all(f >= 1 and math.log2(f).is_integer() for f in factor)
        if how.coordinates != "asymmetric" or how.nearest not in ("floor", "simple") or not twos:
            return None
        return F.interpolate(x, scale_factor=factor, mode="nearest")
    if how.exclude_outside or (how.mode == "cubic" and (n != 2 or how.cubic_a != -0.75)):
        return None
    name = "bicubic" if how.mode == "cubic" else ("linear", "bilinear", "trilinear")[n - 1]
    if how.coordinates == "align_corners":
        exact = all(not scaled or (_plain_number(a.width) and a.width == a.out) for a in axes)
        return F.interpolate(x, size, mode=name, align_corners=True) if exact else None
    if how.coordinates not in ("half_pixel", "pytorch_half_pixel"):
        return None
    if how.coordinates == "pytorch_half_pixel" and any(_plain_number(a.width) and a.width <= 1 for a in axes):
        return None
    if scaled:
        return F.interpolate(x, scale_factor=factor, mode=name, align_corners=False)
    return F.interpolate(x, size, mode=name, align_corners=False)


def _resize(x: Tensor, axes: Sequence[_Axis], how: _How, *, scaled: bool) -> Tensor:
    y = _whole(x, axes, how, scaled=scaled)
    if y is not None:
        return y
    work = x if how.mode == "nearest" or x.dtype.is_floating_point else x.double()
    for a in axes:
        work = _along(work, a, how)
    if how.coordinates == "tf_crop_and_resize":
        work = _outside(axes, how, work)
    return work.to(x.dtype)


def _by_scales(x: Tensor, axes: Sequence[int], scales: Sequence[float], roi: Sequence[float] | None) -> list[_Axis]:
    out: list[_Axis] = []
    for i, (axis, s) in enumerate(zip(axes, scales, strict=True)):
        size: Any = x.shape[axis]
        crop = None if roi is None else (roi[i], roi[i + len(axes)])
        if s == 1 and crop is None:
            continue
        whole = isinstance(s, int) or float(s).is_integer()
        width = size * int(s) if whole else size * s
        count = width if whole else (math.floor(width) if _plain_number(width) else torch.sym_int(width))
        out.append(_Axis(axis, size, count, s, width, crop))
    return out


def _by_sizes(
    x: Tensor, axes: Sequence[int], sizes: Sequence[Any], policy: str, roi: Sequence[float] | None
) -> list[_Axis]:
    """With a policy other than stretch, one scale for all axes: the smallest or largest that the sizes ask for."""
    out: list[_Axis] = []
    shared: Any = None
    if policy != "stretch":
        asked = [s / x.shape[a] for a, s in zip(axes, sizes, strict=True)]
        pick = torch.sym_min if policy == "not_larger" else torch.sym_max
        shared = asked[0]
        for s in asked[1:]:
            shared = pick(shared, s)
    for i, (axis, want) in enumerate(zip(axes, sizes, strict=True)):
        size: Any = x.shape[axis]
        crop = None if roi is None else (roi[i], roi[i + len(axes)])
        if shared is not None:
            width = shared * size
            count = math.floor(width + 0.5) if _plain_number(width) else torch.sym_int(width + 0.5)
            out.append(_Axis(axis, size, count, shared, width, crop))
        elif crop is not None or want != size:
            out.append(_Axis(axis, size, want, want / size, want, crop))
    return out


@onnx_op("Resize", since=11)
def resize(
    ctx: Ctx,
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    over = [a % x.dim() for a in axes] if axes else list(range(x.dim()))
    crop = coordinate_transformation_mode == "tf_crop_and_resize"
    box = [float(v) for v in ctx.ints(roi)] if crop and roi is not None else None
    given = ctx.ints(scales) if scales is not None and scales.dim() and scales.shape[0] else None
    how = _How(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        bool(exclude_outside),
        bool(antialias),
        extrapolation_value,
    )
    if given is not None:
        return _resize(x, _by_scales(x, over, given, box), how, scaled=True)
    if sizes is None:
        raise ModelError("Resize: neither scales nor sizes are given", because="one of them must be")
    return _resize(x, _by_sizes(x, over, ctx.ints(sizes), keep_aspect_ratio_policy, box), how, scaled=False)


def _old(x: Tensor, scales: Sequence[float], mode: str) -> Tensor:
    linear = mode in ("linear", "bilinear", "trilinear")
    mode = "linear" if linear else "nearest"
    how = _How(mode, "asymmetric", "simple", -0.75, exclude_outside=False, antialias=False, extrapolation=0.0)
    return _resize(x, _by_scales(x, range(x.dim()), scales, None), how, scaled=True)


@onnx_op("Resize", since=10)
@onnx_op("Upsample", since=9)
def resize_10(ctx: Ctx, x: Tensor, scales: Tensor, *, mode: str = "nearest") -> Tensor:
    return _old(x, ctx.ints(scales), mode)


@onnx_op("Upsample", since=7)
def upsample_7(ctx: Ctx, x: Tensor, *, scales: Sequence[float], mode: str = "nearest") -> Tensor:
    return _old(x, scales, mode)
