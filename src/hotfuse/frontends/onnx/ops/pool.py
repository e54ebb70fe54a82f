"""Pooling: torch's operators where their rules meet ONNX's, explicit padding and counting where not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.registry import Ctx, onnx_op
from hotfuse.frontends.onnx.windows import Pads, pad_spatial, per_axis, pooled_size, symmetric, window_pads

_MAX: dict[int, Callable[..., Any]] = {1: torch.max_pool1d, 2: torch.max_pool2d, 3: torch.max_pool3d}
_MAX_AT: dict[int, Callable[..., Any]] = {
    1: torch.max_pool1d_with_indices,
    2: torch.ops.aten.max_pool2d_with_indices,
    3: torch.ops.aten.max_pool3d_with_indices,
}
_AVG: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


MIN_PLANES = 1 << 13
"""Elements of an image; the calls for smaller ones cost more than they save."""


def _rank(x: Tensor) -> int:
    if not 1 <= x.dim() - 2 <= 3:
        raise ModelError(f"pooling over {x.dim() - 2} spatial axes", because="torch has kernels for one, two and three")
    return x.dim() - 2


def _padded(
    x: Tensor, around: Pads, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], *, ceil: bool, v: float
) -> Tensor:
    """x padded (or cropped) to exactly what the windows read."""
    need: Pads = []
    for i, k in enumerate(kernel):
        size = x.shape[2 + i]
        count = pooled_size(size, around[i], k, stride[i], dilation[i], ceil=ceil)
        need.append((around[i][0], (count - 1) * stride[i] + (k - 1) * dilation[i] + 1 - size - around[i][0]))
    return pad_spatial(x, need, v)


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _in_planes(x: Tensor, around: Pads, kernel: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether images lie plane by plane, and a window fits into them."""
    if x.dim() != 4 or x.dtype is not torch.float32 or x.numel() < MIN_PLANES or not x.is_contiguous() or math.prod(kernel) < 2:
        return False
    spans = ((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    return all(size + sum(pads) >= span for size, pads, span in zip(x.shape[2:], around, spans, strict=True))


def _axis_maxima(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Maxima over windows that all lie inside x, along one axis after the other.

    torch goes through planes one window at a time: on one core 875 us for 64 planes of 56x56 in windows of two, 4,270 for windows
    of three at every pixel; these are 62 and 220. Channels that lie innermost it takes many at once.
    """
    for axis in (2, 3):
        k, step, apart = kernel[axis - 2], stride[axis - 2], dilation[axis - 2]
        last = (x.shape[axis] - (k - 1) * apart - 1) // step * step + 1
        parts = [x[(slice(None),) * axis + (slice(t * apart, t * apart + last, step),)] for t in range(k)]
        x = parts[0]
        for part in parts[1:]:
            x = torch.maximum(x, part)
    return x.contiguous()


@onnx_op("MaxPool")
def max_pool(
    ctx: Ctx,
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    storage_order: int = 0,
    strides: Sequence[int] | None = None,
) -> Any:
    """Whole when torch accepts the padding; the second output counts positions over the whole tensor."""
    if not x.dtype.is_floating_point:
        # exact in double for the 8-bit types ONNX allows, and torch pools few integer types
        args = dict(kernel_shape=kernel_shape, auto_pad=auto_pad, ceil_mode=ceil_mode, dilations=dilations)
        got = max_pool(ctx, x.float(), **args, pads=pads, storage_order=storage_order, strides=strides)
        return (got[0].to(x.dtype), got[1]) if isinstance(got, tuple) else got.to(x.dtype)
    n = _rank(x)
    stride, dilation = per_axis(strides, n), per_axis(dilations, n)
    around = window_pads(auto_pad, pads, x.shape[2:], kernel_shape, stride, dilation)
    even = symmetric(around)
    ceil = bool(ceil_mode) and auto_pad in ("NOTSET", "")
    fits = even is not None and all(p <= k // 2 for p, k in zip(even, kernel_shape, strict=True))
    kernel = list(kernel_shape)
    if ctx.n_outputs == 1:
        if not ctx.traced and _in_planes(x, around, kernel, dilation):
            data = _padded(x, around, kernel, stride, dilation, ceil=ceil, v=_lowest(x.dtype))
            return _axis_maxima(data, kernel, stride, dilation)
        if fits:
            return _MAX[n](x, kernel, stride, even, dilation, ceil)
        return _MAX[n](
            _padded(x, around, kernel, stride, dilation, ceil=ceil, v=_lowest(x.dtype)), kernel, stride, 0, dilation
        )
    if fits:
        y, at = _MAX_AT[n](x, kernel, stride, even, dilation, ceil)
        wide, before = list(x.shape[2:]), [0] * n
    else:
        data = _padded(x, around, kernel, stride, dilation, ceil=ceil, v=_lowest(x.dtype))
        y, at = _MAX_AT[n](data, kernel, stride, [0] * n, dilation, False)
        wide, before = list(data.shape[2:]), [a for a, _ in around]
    return y, _global_index(x, at, wide, before, storage_order)


def _global_index(x: Tensor, at: Tensor, wide: list[Any], before: list[Any], storage_order: int) -> Tensor:
    """From a position in the padded plane to one in the whole flattened input."""
    n, sizes = len(wide), list(x.shape[2:])
    places: list[Tensor] = []
    for i in reversed(range(n)):
        places.insert(0, at % wide[i] - before[i])
        at = at // wide[i]
    plane = torch.zeros_like(places[0])
    for i in range(n):
        step = math.prod(sizes[:i]) if storage_order else math.prod(sizes[i + 1 :])
        plane = plane + places[i] * step
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device).reshape([x.shape[0], x.shape[1]] + [1] * n)
    return plane + planes * math.prod(sizes)


def _window_mean(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The mean over windows that all lie inside x."""
    n = len(kernel)
    if all(d == 1 for d in dilation):
        return _AVG[n](x, list(kernel), list(stride))
    total: Any = None
    for tap in itertools.product(*(range(k) for k in kernel)):
        part = x
        for i in range(n):
            start = tap[i] * dilation[i]
            stop = x.shape[2 + i] - (kernel[i] - 1 - tap[i]) * dilation[i]
            part = part[(slice(None),) * (2 + i) + (slice(start, stop, stride[i]),)]
        total = part if total is None else total + part
    return total / math.prod(kernel)


@onnx_op("AveragePool")
def average_pool(
    ctx: Ctx,
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Where torch cannot pad so, the mean of padded data is divided by the mean of what counts."""
    n = _rank(x)
    kernel, stride, dilation = list(kernel_shape), per_axis(strides, n), per_axis(dilations, n)
    around = window_pads(auto_pad, pads, x.shape[2:], kernel, stride, dilation)
    even = symmetric(around)
    ceil = bool(ceil_mode) and auto_pad in ("NOTSET", "")
    plain = all(d == 1 for d in dilation)
    if plain and even is not None and all(p <= k // 2 for p, k in zip(even, kernel, strict=True)):
        return _AVG[n](x, kernel, stride, even, ceil, bool(count_include_pad))
    ones = x.new_ones([1, 1, *x.shape[2:]])
    if count_include_pad:
        counted = _padded(pad_spatial(ones, around, 1.0), [(0, 0)] * n, kernel, stride, dilation, ceil=ceil, v=0.0)
        if ceil:
            counted = _like(counted, _padded(ones, around, kernel, stride, dilation, ceil=ceil, v=0.0), n)
    else:
        counted = _padded(ones, around, kernel, stride, dilation, ceil=ceil, v=0.0)
    data = _padded(x, around, kernel, stride, dilation, ceil=ceil, v=0.0)
    return _window_mean(data, kernel, stride, dilation) / _window_mean(counted, kernel, stride, dilation)


def _like(counted: Tensor, other: Tensor, n: int) -> Tensor:
    """Cropped to the windows' extent: rounding up over padded sizes may have counted one window more."""
    return pad_spatial(counted, [(0, other.shape[2 + i] - counted.shape[2 + i]) for i in range(n)])


@onnx_op("LpPool")
def lp_pool(
    ctx: Ctx,
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Sequence[int] | None = None,
    p: int = 2,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    n = _rank(x)
    kernel, stride, dilation = list(kernel_shape), per_axis(strides, n), per_axis(dilations, n)
    around = window_pads(auto_pad, pads, x.shape[2:], kernel, stride, dilation)
    ceil = bool(ceil_mode) and auto_pad in ("NOTSET", "")
    powers = _padded(x.abs() ** p, around, kernel, stride, dilation, ceil=ceil, v=0.0)
    return (_window_mean(powers, kernel, stride, dilation) * math.prod(kernel)) ** (1.0 / p)


@onnx_op("GlobalAveragePool")
def global_average_pool(ctx: Ctx, x: Tensor) -> Tensor:
    return x.mean(list(range(2, x.dim())), keepdim=True)


@onnx_op("GlobalMaxPool")
def global_max_pool(ctx: Ctx, x: Tensor) -> Tensor:
    return x.amax(list(range(2, x.dim())), keepdim=True)


@onnx_op("GlobalLpPool")
def global_lp_pool(ctx: Ctx, x: Tensor, *, p: int = 2) -> Tensor:
    return torch.linalg.vector_norm(x, p, list(range(2, x.dim())), keepdim=True)


@onnx_op("MaxUnpool")
def max_unpool(
    ctx: Ctx,
    x: Tensor,
    at: Tensor,
    output_shape: Tensor | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Positions count over the shape the kernel implies; a larger output shape only adds zeros at the end."""
    n = x.dim() - 2
    stride = per_axis(strides, n)
    around = window_pads("NOTSET", pads, x.shape[2:], kernel_shape, stride, [1] * n)
    sizes = [(x.shape[2 + i] - 1) * stride[i] - around[i][0] - around[i][1] + kernel_shape[i] for i in range(n)]
    shape = [x.shape[0], x.shape[1], *sizes]
    y = x.new_zeros([math.prod(shape)]).scatter(0, at.flatten(), x.flatten()).reshape(shape)
    if output_shape is None:
        return y
    want = ctx.ints(output_shape)
    return pad_spatial(y, [(0, want[2 + i] - sizes[i]) for i in range(n)])
