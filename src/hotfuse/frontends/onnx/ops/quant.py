"""Quantization: to and from integers and small floats, and the products of quantized tensors.

Integer products are computed in float64, where sums of products of 8-bit numbers are exact, or in float32 where they are so few
that they are exact there too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.elements import FLOAT8, Value, norm_axis, torch_dtype
from hotfuse.frontends.onnx.ops.cast import convert
from hotfuse.frontends.onnx.ops.conv import conv
from hotfuse.frontends.onnx.registry import Ctx, onnx_op
from hotfuse.frontends.onnx.values import BY_CODE, Elem, elem_of

_UINT8 = 2


def _number(x: Value) -> Tensor:
    """A quantized value as float32, whatever its type."""
    return x.float() if isinstance(x, Tensor) else torch.from_numpy(x.astype(np.float32))


def _spread(v: Tensor, x: Value, axis: int, block_size: int) -> Tensor:
    """A scale or zero point made to broadcast with the data: per tensor, per slice of an axis, or per block."""
    if v.dim() == 0 or (v.dim() == 1 and (x.ndim == 1 or v.shape[0] == 1) and not block_size):
        return v.reshape(()) if v.dim() == 0 or v.shape[0] == 1 else v
    axis = norm_axis(axis, x.ndim)
    if not block_size:
        if v.dim() != 1:
            raise ModelError(f"a scale of rank {v.dim()} needs a block size")
        return v.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return torch.repeat_interleave(v, block_size, dim=axis).narrow(axis, 0, x.shape[axis])


def _limits(elem: Elem) -> tuple[int, int]:
    return (0, 2**elem.bits - 1) if elem.name.startswith("u") else (-(2 ** (elem.bits - 1)), 2 ** (elem.bits - 1) - 1)


def _store(y: Tensor, zero: Tensor | None, elem: Elem, saturate: bool = True) -> Value:
    """Round, shift and saturate real numbers into a quantized type."""
    if "int" not in elem.name:
        return convert(y if zero is None or elem.torch in FLOAT8 else y + zero, elem, saturate)
    y = torch.round(y.float())
    low, high = _limits(elem)
    y = torch.clamp(y if zero is None else y + zero, low, high)
    return convert(y.to(torch.int32), elem)


@onnx_op("QuantizeLinear")
def quantize_linear(
    ctx: Ctx,
    x: Tensor,
    scale: Tensor,
    zero_point: Value | None = None,
    *,
    axis: int = 1,
    saturate: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
) -> Value:
    """The division happens in the precision asked for, else in the scale's own."""
    elem = BY_CODE[output_dtype or _UINT8] if zero_point is None else elem_of(zero_point)
    if precision:
        dtype = torch_dtype(precision)
    else:
        dtype = scale.dtype if scale.is_floating_point() and scale.dtype not in FLOAT8 else torch.float32
    y = x.to(dtype) / _spread(scale.to(dtype), x, axis, block_size)
    zero = None if zero_point is None else _spread(_number(zero_point), x, axis, block_size)
    return _store(y, zero, elem, bool(saturate))


@onnx_op("DequantizeLinear")
def dequantize_linear(
    ctx: Ctx,
    x: Value,
    scale: Tensor,
    zero_point: Value | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    y = _number(x)
    if zero_point is not None:
        y = y - _spread(_number(zero_point), x, axis, block_size)
    y = y * _spread(scale.float(), x, axis, block_size)
    return y.to(torch_dtype(output_dtype) if output_dtype else scale.dtype)


@onnx_op("DynamicQuantizeLinear")
def dynamic_quantize_linear(ctx: Ctx, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The range always holds zero, so that zero stays exact."""
    high = torch.clamp(torch.amax(x), min=0)
    low = torch.clamp(torch.amin(x), max=0)
    scale = torch.where(high == low, 1.0, high - low) / 255
    zero = torch.round(torch.clamp(-low / scale, 0, 255))
    y = torch.clamp(torch.round(x / scale) + zero, 0, 255)
    return y.to(torch.uint8), scale.to(x.dtype), zero.to(torch.uint8)


def _per_row(v: Tensor) -> Tensor:
    """A vector about the left operand has one number per row."""
    return v.unsqueeze(-1) if v.dim() == 1 else v


def shifted(x: Tensor, zero_point: Tensor | None, rows: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    """A quantized tensor less its zero point, or points of its columns (of its `rows`), exactly."""
    y = x.to(dtype) if x.dtype not in FLOAT8 else x.float().to(dtype)
    if zero_point is None:
        return y
    zero = zero_point.float().to(dtype)
    return y - (_per_row(zero) if rows else zero)


@onnx_op("MatMulInteger")
def matmul_integer(
    ctx: Ctx, a: Tensor, b: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None
) -> Tensor:
    return torch.matmul(shifted(a, a_zero_point, rows=True), shifted(b, b_zero_point)).to(torch.int32)


@onnx_op("QLinearMatMul")
def qlinear_matmul(
    ctx: Ctx,
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
) -> Value:
    y = torch.matmul(shifted(a, a_zero_point, rows=True), shifted(b, b_zero_point)).float()
    y = y * (_per_row(a_scale.float()) * b_scale.float() / _per_row(y_scale.float()))
    return _store(y, _per_row(_number(y_zero_point)), elem_of(y_zero_point))


def _per_filter(v: Tensor, rank: int) -> Tensor:
    """A vector about the filters, shaped to broadcast with the weight."""
    return v.reshape([-1] + [1] * (rank - 1)) if v.dim() == 1 else v


_EXACT = (1 << 24) // (255 * 255)
"""Products of differences of bytes whose sum fp32 still holds exactly, in whatever order they are added."""


def _exact(w: Tensor, group: int) -> torch.dtype:
    """The narrowest type in which a convolution's sums are exact. In groups there are few products, and nobody transforms them."""
    few = w.dtype in (torch.int8, torch.uint8) and group > 1 and math.prod(w.shape[1:]) <= _EXACT
    return torch.float32 if few else torch.float64


@onnx_op("ConvInteger")
def conv_integer(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    x_zero_point: Tensor | None = None,
    w_zero_point: Tensor | None = None,
    **attrs: Any,
) -> Tensor:
    zero = None if w_zero_point is None else _per_filter(w_zero_point, w.dim())
    dtype = _exact(w, attrs.get("group", 1))
    return conv(ctx, shifted(x, x_zero_point, dtype=dtype), shifted(w, zero, dtype=dtype), **attrs).to(torch.int32)


@onnx_op("QLinearConv")
def qlinear_conv(
    ctx: Ctx,
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    bias: Tensor | None = None,
    **attrs: Any,
) -> Value:
    dtype = _exact(w, attrs.get("group", 1))
    weight = shifted(w, _per_filter(w_zero_point, w.dim()), dtype=dtype)
    wide = None if bias is None or dtype is torch.float32 else bias.to(dtype)
    y = conv(ctx, shifted(x, x_zero_point, dtype=dtype), weight, wide, **attrs)
    if bias is not None and wide is None:  # a bias may be larger than what fp32 holds exactly
        y = y.to(torch.int32) + _per_filter(bias, w.dim() - 1)
    scale = x_scale.float() * _per_filter(w_scale.float(), w.dim() - 1) / y_scale.float()
    return _store(y.float() * scale, _number(y_zero_point), elem_of(y_zero_point))
