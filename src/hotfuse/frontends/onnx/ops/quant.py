"""Quantization: to and from integers and small floats, and the products of quantized tensors.

Integer products are computed in float64, where sums of products of 8-bit numbers are exact, or in float32 where they are so few
that they are exact there too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.elements import FLOAT8, Value, norm_axis, torch_dtype
from hotfuse.frontends.onnx.int8 import layers
from hotfuse.frontends.onnx.int8.storage import (
    QUANTIZED,
    available,
    dense,
    dequantized,
    passes,
    prepare_dequantize,
    prepare_quantize,
    stored,
)
from hotfuse.frontends.onnx.ops.cast import convert
from hotfuse.frontends.onnx.ops.conv import conv
from hotfuse.frontends.onnx.registry import Ctx, Prepared, Varies, onnx_op
from hotfuse.frontends.onnx.values import BY_CODE, Elem, elem_of
from hotfuse.frontends.onnx.windows import conv_window
from hotfuse.native.byte_kernels import background

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


def _store(y: Tensor, zero: Tensor | None, elem: Elem, *, saturate: bool = True) -> Value:
    """Round, shift and saturate real numbers into a quantized type."""
    if "int" not in elem.name:
        return convert(y if zero is None or elem.torch in FLOAT8 else y + zero, elem, saturate=saturate)
    y = torch.round(y.float())
    low, high = _limits(elem)
    y = torch.clamp(y if zero is None else y + zero, low, high)
    return convert(y.to(torch.int32), elem)


def _prepare_quantize(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    return prepare_quantize(ctx, inputs, attrs, quantize_linear)


@onnx_op("QuantizeLinear", prepare=_prepare_quantize)
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
    return _store(y, zero, elem, saturate=bool(saturate))


def _prepare_dequantize(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    return prepare_dequantize(ctx, inputs, attrs, dequantize_linear)


@onnx_op("DequantizeLinear", prepare=_prepare_dequantize)
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


_WIDEST = 3e38
"""The widest range whose width is a float32."""


def _prepare_dynamic(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """The range is two numbers: what follows from them is reckoned as numbers, in float32 as the tensors would be."""
    if not available():
        return None
    background.begin()

    def call(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.dtype is not torch.float32 or not x.numel():
            return dynamic_quantize_linear(ctx, x)
        if (native := passes(x.numel())) is not None:
            x = dense(x)
            y, found = torch.empty_like(x, dtype=torch.uint8), x.new_empty(2)
            if native.dynamic(x.data_ptr(), y.data_ptr(), found.data_ptr(), 0.0, x.numel()):
                return y, found[0], found[1].to(torch.uint8)
            return dynamic_quantize_linear(ctx, x)
        ends = torch.aminmax(x)
        low, high = min(float(ends.min), 0.0), max(float(ends.max), 0.0)
        if not high - low <= _WIDEST:  # nor where there are no numbers
            return dynamic_quantize_linear(ctx, x)
        one = np.float32
        scale = one(1.0 if high == low else one(high) - one(low)) / one(255)
        if scale == 0:
            return dynamic_quantize_linear(ctx, x)
        zero = round(min(max(float(one(-low) / scale), 0.0), 255.0))  # half to even
        unit = torch.tensor(float(scale), dtype=torch.float32)
        return stored(x / unit, zero, torch.uint8), unit, torch.tensor(zero, dtype=torch.uint8)

    return Prepared(call, 0)


@onnx_op("DynamicQuantizeLinear", prepare=_prepare_dynamic)
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


def shifted(x: Tensor, zero_point: Tensor | None, *, rows: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    """A quantized tensor less its zero point, or points of its columns (of its `rows`), exactly."""
    y = x.to(dtype) if x.dtype not in FLOAT8 else x.float().to(dtype)
    if zero_point is None:
        return y
    zero = zero_point.float().to(dtype)
    return y - (_per_row(zero) if rows else zero)


_MAX_DIFFERENCE = 255
"""The largest difference of two bytes."""
_EXACT = (1 << 24) // (255 * 255)
"""Products of differences of bytes whose sum fp32 still holds exactly, in whatever order they are added."""


def _prepare_integer(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """Constant weights, one matrix: their differences as floats, once, where no sum leaves what floats hold."""
    given: list[Any] = [*inputs, None, None]
    a, b, _, zero = given[:4]
    if not isinstance(a, Varies) or isinstance(b, Varies) or isinstance(zero, Varies) or b.dim() != 2 or b.dtype not in QUANTIZED:
        return None
    wide = layers.exact_weights(b.t().contiguous(), zero, _MAX_DIFFERENCE)
    if wide is None:
        return None

    def call(a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None) -> Tensor:
        if a.dtype not in QUANTIZED or a.dim() < 2:
            return matmul_integer(ctx, a, b, a_zero, b_zero)
        return F.linear(shifted(a, a_zero, rows=True, dtype=torch.float32), wide).to(torch.int32)

    return Prepared(call, wide.nbytes)


@onnx_op("MatMulInteger", prepare=_prepare_integer)
def matmul_integer(
    ctx: Ctx, a: Tensor, b: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None
) -> Tensor:
    return torch.matmul(shifted(a, a_zero_point, rows=True), shifted(b, b_zero_point)).to(torch.int32)


def _prepare_matmul(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """Constant weights, one matrix: a layer of bytes. Two sides that vary, with a scale each: as floats, where sums are exact."""
    x, xs, xz, w, ws, wz, ys, yz = inputs
    if isinstance(x, Varies) and isinstance(w, Varies):
        return _product_of_two(ctx, (xs, xz), (ws, wz), (ys, yz))
    if not isinstance(x, Varies) or any(isinstance(t, Varies) for t in inputs[1:]) or w.dim() != 2:
        return None
    scales = layers.layer_scales((xs, xz), (ws, wz), (ys, yz))
    if scales is None or w.dtype is not wz.dtype or (made := layers.linear(scales, w.t(), None)) is None:
        return None
    run, size = made

    def call(a: Tensor, *rest: Any) -> Value:
        return run(a) if a.dtype is scales.x_dtype and a.dim() > 1 and a.numel() else qlinear_matmul(ctx, a, *rest)

    return Prepared(call, size)


def _product_of_two(ctx: Ctx, x: Sequence[Any], w: Sequence[Any], y: Sequence[Any]) -> Prepared | None:
    """Scores of an attention, and what they weigh: nothing is prepared but the numbers, which each call read in twelve steps."""
    scales = layers.layer_scales(x, w, y) if not any(isinstance(t, Varies) for t in (*x, *w, *y)) else None
    if scales is None or scales.w.numel() != 1 or scales.w_zero.numel() != 1 or not available():
        return None
    (xs, _), (ws, w_zero), (ys, _) = x, w, y
    factor, w_at, w_dtype = float(xs.reshape(()) * ws.reshape(()) / ys.reshape(())), int(scales.w_zero), w_zero.dtype
    background.begin()

    def call(a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, *rest: Any) -> Value:
        odd = a.dtype is not scales.x_dtype or b.dtype is not w_dtype or min(a.dim(), b.dim()) < 2
        if odd or not a.numel() or not b.numel() or a.shape[-1] > _EXACT:
            return qlinear_matmul(ctx, a, a_scale, a_zero, b, *rest)
        total = torch.matmul(dequantized(a, 1.0, scales.x_zero), dequantized(b, 1.0, w_at))
        return stored(total.mul_(factor), scales.y_zero, scales.y_dtype)

    return Prepared(call, 0)


@onnx_op("QLinearMatMul", prepare=_prepare_matmul)
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


def _exact(w: Tensor, group: int) -> torch.dtype:
    """The narrowest type in which a convolution's sums are exact. In groups there are few products, and nobody transforms them."""
    few = w.dtype in (torch.int8, torch.uint8) and group > 1 and math.prod(w.shape[1:]) <= _EXACT
    return torch.float32 if few else torch.float64


def _prepare_conv_integer(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """Constant weights: their differences as floats, once, where no sum leaves what floats hold."""
    given: list[Any] = [*inputs, None, None]
    x, w, _, zero = given[:4]
    if not isinstance(x, Varies) or isinstance(w, Varies) or isinstance(zero, Varies) or w.dtype not in QUANTIZED or w.dim() < 3:
        return None
    wide = layers.exact_weights(w, zero, _MAX_DIFFERENCE)
    if wide is None:
        return None

    def call(x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None) -> Tensor:
        if x.dtype not in QUANTIZED:
            return conv_integer(ctx, x, w, x_zero, w_zero, **attrs)
        return conv(ctx, shifted(x, x_zero, dtype=torch.float32), wide, **attrs).to(torch.int32)

    return Prepared(call, wide.nbytes)


@onnx_op("ConvInteger", prepare=_prepare_conv_integer)
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


def prepare_qlinear_conv(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """Constant weights, images or signals with the same padding at both ends: a layer of bytes."""
    given: list[Any] = [*inputs, None]
    x, xs, xz, w, ws, wz, ys, yz, bias = given[:9]
    if not isinstance(x, Varies) or any(isinstance(t, Varies) for t in inputs[1:]) or w.dim() not in (3, 4):
        return None
    scales, window = layers.layer_scales((xs, xz), (ws, wz), (ys, yz)), conv_window(w, attrs)
    if scales is None or window is None or w.dtype is not wz.dtype:
        return None
    rank = w.dim()
    made = layers.conv(scales, w if rank == 4 else w.unsqueeze(2), bias, window)
    if made is None:
        return None
    run, size = made

    def call(x: Tensor, *rest: Any) -> Value:
        if x.dtype is not scales.x_dtype or x.dim() != rank or not x.numel():
            return qlinear_conv(ctx, x, *rest, **attrs)
        return run(x) if rank == 4 else run(x.unsqueeze(2)).squeeze(2)

    return Prepared(call, size)


@onnx_op("QLinearConv", prepare=prepare_qlinear_conv)
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
    y = conv(ctx, shifted(x, x_zero_point, dtype=dtype), weight, **attrs)
    if bias is not None:  # as an integer: it may be larger than what fp32 holds exactly, and kernels need no doubles for it
        y = y.to(torch.int32) + _per_filter(bias, w.dim() - 1)
    scale = x_scale.float() * _per_filter(w_scale.float(), w.dim() - 1) / y_scale.float()
    return _store(y.float() * scale, _number(y_zero_point), elem_of(y_zero_point))
