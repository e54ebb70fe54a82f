"""Convolutions: plain, transposed, deformable, causal with state, and folding columns back into an image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.registry import Ctx, onnx_op
from hotfuse.frontends.onnx.windows import pad_spatial, per_axis, pooled_size, same_pads, symmetric, window_pads

_CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_T: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _widened(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Float16 on the host is computed in float32 and rounded once: torch's own loops over it take 20 times as long there, where the
    processor has no arithmetic for it. Casts of images go into the kernels around them, those of weights are done once."""

    def run(x: Tensor, w: Tensor, b: Tensor | None, *rest: Any) -> Tensor:
        if x.dtype is not torch.float16 or x.device.type != "cpu":
            return fn(x, w, b, *rest)
        return fn(x.float(), w.float(), None if b is None else b.float(), *rest).to(x.dtype)

    return run


def _by_rank(table: dict[int, Callable[..., Tensor]], what: str, n: int) -> Callable[..., Tensor]:
    if n not in table:
        raise ModelError(f"{what} over {n} spatial axes", because="torch has kernels for one, two and three")
    return _widened(table[n])


@onnx_op("Conv")
def conv(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Padding goes into the operator when both ends are equal, before it when not."""
    n = x.dim() - 2
    fn = _by_rank(_CONV, "convolution", n)
    stride, dilation = per_axis(strides, n), per_axis(dilations, n)
    around = window_pads(auto_pad, pads, x.shape[2:], w.shape[2:], stride, dilation)
    even = symmetric(around)
    if even is not None:
        return fn(x, w, b, stride, even, dilation, group)
    return fn(pad_spatial(x, around), w, b, stride, 0, dilation, group)


@onnx_op("ConvTranspose")
def conv_transpose(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Uneven padding is cut from the full result; what lies beyond it holds only the bias."""
    n = x.dim() - 2
    fn = _by_rank(_CONV_T, "transposed convolution", n)
    stride, dilation, extra = per_axis(strides, n), per_axis(dilations, n), per_axis(output_padding, n, 0)
    full = [
        (size - 1) * s + (k - 1) * d + 1
        for size, k, s, d in zip(x.shape[2:], w.shape[2:], stride, dilation, strict=True)
    ]
    same = auto_pad in ("SAME_UPPER", "SAME_LOWER")
    if output_shape or same:
        want = output_shape[-n:] if output_shape else [size * s for size, s in zip(x.shape[2:], stride, strict=True)]
        around = [same_pads(f + e - o, lower=auto_pad != "SAME_UPPER") for f, e, o in zip(full, extra, want, strict=True)]
    else:
        around = window_pads(auto_pad, pads, x.shape[2:], w.shape[2:], stride, dilation)
    even = symmetric(around)
    if even is not None and all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)):
        return fn(x, w, b, stride, even, extra, group, dilation)
    y = fn(x, w, None, stride, 0, 0, group, dilation)
    y = pad_spatial(y, [(-start, e - end) for (start, end), e in zip(around, extra, strict=True)])
    return y if b is None else y + b.reshape([-1] + [1] * n)


@onnx_op("CausalConvWithState")
def causal_conv_with_state(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    past: Tensor | None = None,
    *,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """Depthwise over the past positions and the new ones; the last of them are the next state."""
    keep = w.shape[2] - 1
    seen = F.pad(x, [keep, 0]) if past is None else torch.cat([past, x], 2)
    y = F.conv1d(seen, w, b, groups=w.shape[0])
    if activation in ("silu", "swish"):
        y = F.silu(y)
    elif activation != "none":
        raise ModelError(f"CausalConvWithState: activation is {activation!r}", because="it is none, silu or swish")
    return y, seen[:, :, seen.shape[2] - keep :]


def _bilinear_zero(x: Tensor, py: Tensor, px: Tensor) -> Tensor:
    """x (N, G, C, H, W) sampled at (N, G, P) positions; corners outside the image count as zero."""
    h, w = x.shape[-2], x.shape[-1]
    flat = x.flatten(-2)
    y0, x0 = torch.floor(py), torch.floor(px)
    out: Any = 0.0
    for dy in (0, 1):
        for dx in (0, 1):
            yy, xx = y0 + dy, x0 + dx
            weight = (1 - (py - yy).abs()) * (1 - (px - xx).abs())
            inside = (yy >= 0) & (yy <= h - 1) & (xx >= 0) & (xx <= w - 1)
            at = (yy.clamp(0, h - 1) * w + xx.clamp(0, w - 1)).long().unsqueeze(2)
            taken = torch.gather(flat, 3, at.expand(-1, -1, x.shape[2], -1))
            out = out + taken * (weight * inside).unsqueeze(2).to(x.dtype)
    return out


@onnx_op("DeformConv")
def deform_conv(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    b: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    offset_group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """Every kernel tap reads at its own shifted place: sample all taps, then one grouped product."""
    if x.dim() != 4:
        raise ModelError(f"DeformConv over {x.dim() - 2} spatial axes", because="only images (two axes) are supported")
    stride, dilation = per_axis(strides, 2), per_axis(dilations, 2)
    around = window_pads("NOTSET", pads, x.shape[2:], w.shape[2:], stride, dilation)
    batch, channels = x.shape[0], x.shape[1]
    kh, kw = int(w.shape[2]), int(w.shape[3])
    oh, ow = (pooled_size(x.shape[2 + i], around[i], (kh, kw)[i], stride[i], dilation[i], ceil=False) for i in (0, 1))
    shift = offset.reshape(batch, offset_group, kh * kw, 2, oh, ow)
    places: list[Tensor] = []
    for axis, (count, taps) in enumerate(((oh, kh), (ow, kw))):
        start = torch.arange(count, dtype=x.dtype, device=x.device) * stride[axis] - around[axis][0]
        tap = torch.arange(taps, dtype=x.dtype, device=x.device) * dilation[axis]
        grid = tap.reshape((-1, 1, 1, 1) if axis == 0 else (1, -1, 1, 1)) + start.reshape(
            (1, 1, -1, 1) if axis == 0 else (1, 1, 1, -1)
        )
        places.append((shift[:, :, :, axis] + grid.expand(kh, kw, oh, ow).reshape(kh * kw, oh, ow)).flatten(2))
    columns = _bilinear_zero(
        x.reshape(batch, offset_group, channels // offset_group, x.shape[2], x.shape[3]), places[0], places[1]
    )
    if mask is not None:
        columns = columns * mask.reshape(batch, offset_group, 1, -1)
    columns = columns.reshape(batch, group, channels // group * kh * kw, oh * ow)
    y = torch.matmul(w.reshape(group, w.shape[0] // group, -1), columns).reshape(batch, w.shape[0], oh, ow)
    return y if b is None else y + b.reshape(-1, 1, 1)


@onnx_op("Col2Im")
def col2im(
    ctx: Ctx,
    x: Tensor,
    image_shape: Tensor,
    block_shape: Tensor,
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Tensor:
    """`fold` for images with even padding; for any rank, an add into the flattened padded image."""
    image, block = ctx.ints(image_shape), ctx.ints(block_shape)
    n = len(image)
    stride, dilation = per_axis(strides, n), per_axis(dilations, n)
    around = window_pads("NOTSET", pads, image, block, stride, dilation)
    even = symmetric(around)
    if n == 2 and even is not None:
        return F.fold(x, tuple(image), tuple(block), tuple(dilation), tuple(even), tuple(stride))
    padded = [size + a + b for size, (a, b) in zip(image, around, strict=True)]
    index = torch.zeros([1] * (2 * n), dtype=torch.int64, device=x.device)
    for i in range(n):
        taps = torch.arange(block[i], device=x.device) * dilation[i]
        count = (padded[i] - ((block[i] - 1) * dilation[i] + 1)) // stride[i] + 1
        at = taps[:, None] + torch.arange(count, device=x.device) * stride[i]
        shape: list[Any] = [1] * (2 * n)
        shape[i], shape[n + i] = block[i], count
        index = index + at.reshape(shape) * math.prod(padded[i + 1 :])
    batch, channels = x.shape[0], x.shape[1] // math.prod(block)
    out = x.new_zeros([batch, channels, math.prod(padded)]).index_add(
        2, index.flatten(), x.reshape(batch, channels, -1)
    )
    return pad_spatial(out.reshape([batch, channels, *padded]), [(-a, -b) for a, b in around])
