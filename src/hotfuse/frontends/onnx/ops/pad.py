"""Padding and cropping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.elements import Value, moves, norm_axis, zero_of
from hotfuse.frontends.onnx.registry import Ctx, onnx_op


@onnx_op("Pad", since=2)
def pad_2(ctx: Ctx, x: Tensor, *, pads: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    fill = torch.tensor(value, dtype=x.dtype, device=x.device) if mode == "constant" and value else None
    return _pad(ctx, x, fill, pads=pads, axes=None, mode=mode)


@onnx_op("Pad", since=11)
def pad(
    ctx: Ctx,
    x: Value,
    pads: Tensor,
    constant_value: Value | None = None,
    axes: Tensor | None = None,
    *,
    mode: str = "constant",
) -> Value:
    if isinstance(x, np.ndarray) and constant_value is None:
        constant_value = zero_of(x)
    return _pad(ctx, x, constant_value, pads=ctx.ints(pads), axes=None if axes is None else ctx.ints(axes), mode=mode)


@moves(0, 1)
def _pad(
    ctx: Ctx, x: Tensor, fill: Tensor | None, *, pads: Sequence[Any], axes: Sequence[int] | None, mode: str
) -> Tensor:
    dims = list(range(x.dim())) if axes is None else [norm_axis(a, x.dim()) for a in axes]
    n = len(dims)
    if len(pads) != 2 * n:
        raise ModelError(f"Pad has {len(pads)} numbers for {n} axes", hint="give a begin and an end for each axis")
    ends = {d: (pads[i], pads[n + i]) for i, d in enumerate(dims)}
    if mode == "constant":
        return _pad_constant(ctx, x, fill, ends)
    if mode not in _SOURCES:
        raise ModelError(f"Pad has mode {mode!r}", because=f"ONNX knows constant, {', '.join(_SOURCES)}")
    for d, (before, after) in ends.items():
        if isinstance(before, int) and isinstance(after, int) and before == after == 0:
            continue
        size: Any = x.shape[d]
        # a crop (negative) is taken before the rest is mirrored, as ONNX Runtime does
        x = x.narrow(d, *_cropped(size, before, after)) if _crops(before, after) else x
        size = x.shape[d]
        before, after = (max(p, 0) if isinstance(p, int) else p for p in (before, after))
        at = torch.arange(-before, size + after, device=x.device)
        x = torch.index_select(x, d, _SOURCES[mode](at, size))
    return x


def _crops(before: Any, after: Any) -> bool:
    return any(isinstance(p, int) and p < 0 for p in (before, after))


def _cropped(size: Any, before: Any, after: Any) -> tuple[Any, Any]:
    start = -min(before, 0)
    return start, size - start + min(after, 0)


def _edge(at: Tensor, size: Any) -> Tensor:
    return torch.clamp(at, 0, size - 1)


def _wrap(at: Tensor, size: Any) -> Tensor:
    return torch.remainder(at, size)


def _reflect(at: Tensor, size: Any) -> Tensor:
    """There and back without repeating the ends; a single element just repeats."""
    period = torch.sym_max(2 * size - 2, 1)
    at = torch.remainder(at, period)
    return torch.minimum(at, period - at) if not isinstance(size, int) or size > 1 else at


_SOURCES = {"edge": _edge, "wrap": _wrap, "reflect": _reflect}


def _pad_constant(ctx: Ctx, x: Tensor, fill: Tensor | None, ends: dict[int, tuple[Any, Any]]) -> Tensor:
    flat = [p for d in reversed(range(x.dim())) for p in ends.get(d, (0, 0))]
    if fill is None:
        return torch.constant_pad_nd(x, flat, 0)
    if ctx.known(fill):
        return torch.constant_pad_nd(x, flat, ctx.ints(fill)[0])
    inside = torch.constant_pad_nd(torch.ones_like(x, dtype=torch.bool), flat, 0)
    return torch.where(inside, torch.constant_pad_nd(x, flat, 0), fill.reshape(()))


@onnx_op("CenterCropPad")
def center_crop_pad(ctx: Ctx, x: Value, shape: Tensor, *, axes: Sequence[int] | None = None) -> Value:
    """Each axis is cropped or padded with zeros to its target, the odd one at the end."""
    dims = list(range(x.ndim)) if axes is None else [norm_axis(a, x.ndim) for a in axes]
    before: list[Any] = []
    after: list[Any] = []
    for d, want in zip(dims, ctx.ints(shape), strict=True):
        extra = want - x.shape[d]
        first = extra // 2 if extra >= 0 else -((-extra) // 2)
        before.append(first)
        after.append(extra - first)
    fill = zero_of(x) if isinstance(x, np.ndarray) else None
    return _pad(ctx, x, fill, pads=[*before, *after], axes=dims, mode="constant")
