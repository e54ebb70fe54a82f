"""Versions of operators that files before ONNX 1.2 (opset 7) may have, in terms of later ones.

Sizes were attributes; and where two tensors differ in shape, the second one's axes had to be a run of the first one's, which
begins at the attribute `axis`, or ends at the last one. At the end are operators that ONNX has dropped since, which files made by
tools of that time have and ONNX Runtime still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotfuse.base.errors import InternalError, ModelError
from hotfuse.frontends.onnx.elements import moves
from hotfuse.frontends.onnx.ops import contract, logical, math, movement, norm, pad, resize
from hotfuse.frontends.onnx.registry import Ctx, find, onnx_op

_MADE_OF = (math, logical)  # their rows are what older ones are made of
_PAIRS = ("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Less", "Greater")


def _aligned(a: Any, b: Any, axis: int | None) -> Any:
    """`b` with as many axes behind its own as `a` has."""
    if axis is None:
        return b
    behind = a.dim() - (axis + a.dim() if axis < 0 else axis) - b.dim()
    if behind < 0:
        raise ModelError(f"a tensor of rank {b.dim()} does not fit into axes {axis} and on of one of rank {a.dim()}")
    return b.reshape([*b.shape, *[1] * behind])


def _pair(name: str) -> None:
    later = find("", name, 7)
    if later is None:
        raise InternalError(f"ONNX operator {name} has no row for version 7")
    fn = later.fn

    @onnx_op(name)
    def op(ctx: Ctx, a: Any, b: Any, *, axis: int | None = None, broadcast: int = 0) -> Any:
        return fn(ctx, a, _aligned(a, b, axis) if broadcast else b)

    op.__name__ = name


for _name in _PAIRS:
    _pair(_name)


@onnx_op("Gemm")
def gemm_1(
    ctx: Ctx, a: Tensor, b: Tensor, c: Tensor, *, alpha: float = 1.0, beta: float = 1.0, broadcast: int = 0, transA: int = 0,
    transB: int = 0,
) -> Tensor:  # fmt: skip
    """What `broadcast` allows is always allowed later."""
    return contract.gemm(ctx, a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


@onnx_op("Reshape")
@moves(0)
def reshape_1(ctx: Ctx, x: Tensor, *, shape: Sequence[int] = ()) -> Tensor:
    return movement.reshaped(x, list(shape))


@onnx_op("Pad")
def pad_1(ctx: Ctx, x: Tensor, *, paddings: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    return pad.pad_2(ctx, x, pads=paddings, mode=mode, value=value)


@onnx_op("Split")
def split_1(ctx: Ctx, x: Tensor, split: Tensor | None = None, **attrs: Any) -> tuple[Tensor, ...]:
    """Sizes may be a tensor of the first one's type."""
    if split is not None:
        attrs["split"] = ctx.ints(split.to(torch.int64))
    return movement.split_2(ctx, x, **attrs)


@onnx_op("Tile")
@moves(0)
def tile_1(ctx: Ctx, x: Tensor, tiles: Tensor, axis: Tensor) -> Tensor:
    """Along one axis; both numbers come as tensors of the first one's type."""
    (times,), (along,) = ctx.ints(tiles.to(torch.int64)), ctx.ints(axis.to(torch.int64))
    counts = [1] * x.dim()
    counts[along] = times
    return x.repeat(counts)


@onnx_op("Upsample")
def upsample_1(ctx: Ctx, x: Tensor, *, height_scale: float, width_scale: float, mode: str = "nearest") -> Tensor:
    """Images alone, with a scale for each side."""
    return resize.upsample_7(ctx, x, scales=[1.0, 1.0, height_scale, width_scale], mode=mode)


@onnx_op("BatchNormalization")
def batch_norm_1(
    ctx: Ctx, x: Tensor, scale: Tensor, b: Tensor, mean: Tensor, var: Tensor, *, is_test: int = 0, **attrs: Any
) -> Any:
    """Outputs say whether it is trained, as later; `is_test` says the same once more."""
    return norm.batch_norm_7(ctx, x, scale, b, mean, var, **attrs)


@onnx_op("MeanVarianceNormalization")
def mean_variance_norm_1(ctx: Ctx, x: Tensor, *, across_channels: int = 0, normalize_variance: int = 1) -> Tensor:
    axes = [0, 1, 2, 3] if across_channels else [0, 2, 3]
    if normalize_variance:
        return norm.mean_variance_norm(ctx, x, axes=axes)
    return x - x.mean(axes, keepdim=True)


@onnx_op("Affine")
def affine(ctx: Ctx, x: Tensor, *, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    return x * alpha + beta


@onnx_op("ScaledTanh")
def scaled_tanh(ctx: Ctx, x: Tensor, *, alpha: float, beta: float) -> Tensor:
    return torch.tanh(x * beta) * alpha


@onnx_op("ParametricSoftplus")
def parametric_softplus(ctx: Ctx, x: Tensor, *, alpha: float, beta: float) -> Tensor:
    return torch.nn.functional.softplus(x * beta) * alpha


@onnx_op("ImageScaler")
def image_scaler(ctx: Ctx, x: Tensor, *, bias: Sequence[float], scale: float = 1.0) -> Tensor:
    """A factor for all channels of images, and a term for each."""
    return x * scale + torch.tensor(list(bias), dtype=x.dtype, device=x.device).reshape(-1, 1, 1)


@onnx_op("Crop")
def crop(ctx: Ctx, x: Tensor, *, border: Sequence[int], scale: Sequence[int] | None = None) -> Tensor:
    """Images without so many pixels left, above, right and below; with `scale`, so many rows and columns from there on."""
    left, top, right, bottom = border
    height, width = scale if scale else (x.shape[2] - top - bottom, x.shape[3] - left - right)
    return x[:, :, top : top + height, left : left + width]
