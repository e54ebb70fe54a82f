"""com.microsoft quantized operators: 8-bit layers between scales, dynamic quantization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.domains import microsoft as ops_microsoft
from hotfuse.frontends.onnx.int8 import layers
from hotfuse.frontends.onnx.int8.byte_tables import lookup
from hotfuse.frontends.onnx.int8.storage import (
    LIMITS,
    available,
    byte_zero,
    number,
    prepare_dequantize,
    prepare_quantize,
)
from hotfuse.frontends.onnx.int8.sums import ByteScale, BytesOfTwo
from hotfuse.frontends.onnx.native_floats.native_lstm import LstmWeights, NativeLstm, native_lstm
from hotfuse.frontends.onnx.ops import pool as ops_pool
from hotfuse.frontends.onnx.ops import recurrent as ops_recurrent
from hotfuse.frontends.onnx.ops.quant import (
    dequantize_linear,
    dynamic_quantize_linear,
    matmul_integer,
    quantize_linear,
    shifted,
)
from hotfuse.frontends.onnx.registry import VARIES, Ctx, Prepared, Varies, onnx_op

_MS = "com.microsoft"
KEPT_SPREAD = 1 << 18
"""Bytes of a bias that stay spread out to the sizes of the last call."""


def _real(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """What quantized numbers stand for, one scale for all."""
    whole = x.float() if zero is None else x.float() - zero.reshape(-1)[0].float()
    return whole * scale.reshape(-1)[0]


def _stored(y: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rounded half to even, shifted, saturated."""
    return _shifted(torch.round(y / scale.reshape(-1)[0]), zero, dtype)


def _shifted(whole: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    info = torch.iinfo(dtype)
    shifted = whole if zero is None else whole + zero.reshape(-1)[0].float()
    return shifted.clamp(info.min, info.max).to(dtype)


def _byte_scale(scale: Any, zero: Any) -> ByteScale | None:
    """A scale and zero point that are constants; None where they are not, or not of bytes."""
    told = byte_zero(zero, None)
    if told is None or number(scale) is None or scale.dtype is not torch.float32:
        return None
    return ByteScale(float(scale), *told)


def _with_constant(run: BytesOfTwo, a: Any, b: Any, constant: Any, otherwise: Callable[..., Tensor]) -> Prepared | None:
    """A node with a constant side: a single number makes a function of one byte, a bias a pass over two tensors of one shape, of
    which the second is spread out once for sizes that come again."""
    first, varies = isinstance(a, Varies), isinstance(a, Varies) or isinstance(b, Varies)
    if not varies or not isinstance(constant, Tensor) or not constant.numel():
        return None

    def both(x: Tensor, other: Tensor) -> Tensor:
        return run(x, other) if first else run(other, x)

    if constant.numel() == 1 and run.reads(first=first) in LIMITS:
        reads, rank = run.reads(first=first), constant.dim()
        low, high = LIMITS[reads]
        look = lookup(both(torch.arange(low, high + 1, device="cpu").to(reads), constant.reshape(1)), reads)

        def fast(a: Tensor, a_scale: Tensor, a_zero: Tensor | None, b: Tensor, *rest: Any) -> Tensor:
            x = a if first else b
            return look(x) if run.fits(a, b) and x.dim() >= rank else otherwise(a, a_scale, a_zero, b, *rest)

        return Prepared(fast, 256)
    spread = constant

    def wide(a: Tensor, a_scale: Tensor, a_zero: Tensor | None, b: Tensor, *rest: Any) -> Tensor:
        nonlocal spread
        x = a if first else b
        if not run.fits(a, b) or not x.is_contiguous():
            return otherwise(a, a_scale, a_zero, b, *rest)
        if (held := spread).shape != x.shape:
            if torch.broadcast_shapes(x.shape, constant.shape) != x.shape:
                return otherwise(a, a_scale, a_zero, b, *rest)
            held = constant.expand(x.shape).contiguous()
            if x.numel() <= KEPT_SPREAD:
                spread = held
        return both(x, held)

    return Prepared(wide, 0)


def _binary(name: str, op: str, fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    def prepare(ctx: Ctx, inputs: Sequence[Any], _attrs: Mapping[str, Any]) -> Prepared | None:
        a, a_scale, a_zero, b, b_scale, b_zero, c_scale, c_zero = [*inputs, None][:8]
        found = [_byte_scale(*told) for told in ((a_scale, a_zero), (b_scale, b_zero), (c_scale, c_zero))]
        left, right, made = found
        if not available() or left is None or right is None or made is None or made.dtype is not left.dtype:
            return None
        run = BytesOfTwo(op, left, right, made)
        if (constant := b if isinstance(a, Varies) else a) is not VARIES:
            return _with_constant(run, a, b, constant, partial(call, ctx))

        def fast(a: Tensor, a_scale: Tensor, a_zero: Tensor | None, b: Tensor, *rest: Any) -> Tensor:
            return run(a, b) if run.fits(a, b) else call(ctx, a, a_scale, a_zero, b, *rest)

        return Prepared(fast, 0)

    def call(
        ctx: Ctx,
        a: Tensor,
        a_scale: Tensor,
        a_zero: Tensor | None,
        b: Tensor,
        b_scale: Tensor,
        b_zero: Tensor | None,
        c_scale: Tensor,
        c_zero: Tensor | None = None,
    ) -> Tensor:
        return _stored(fn(_real(a, a_scale, a_zero), _real(b, b_scale, b_zero)), c_scale, c_zero, a.dtype)

    onnx_op(name, domain=_MS, prepare=prepare)(call)


_binary("QLinearAdd", "Add", torch.add)
_binary("QLinearMul", "Mul", torch.mul)


@onnx_op("QLinearSigmoid", domain=_MS)
def qlinear_sigmoid(
    ctx: Ctx, x: Tensor, x_scale: Tensor, x_zero: Tensor | None, y_scale: Tensor, y_zero: Tensor | None = None
) -> Tensor:
    return _stored(torch.sigmoid(_real(x, x_scale, x_zero)), y_scale, y_zero, x.dtype)


@onnx_op("QLinearLeakyRelu", domain=_MS)
def qlinear_leaky_relu(
    ctx: Ctx,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
    *,
    alpha: float = 0.01,
) -> Tensor:
    return _stored(F.leaky_relu(_real(x, x_scale, x_zero), alpha), y_scale, y_zero, x.dtype)


@onnx_op("QLinearSoftmax", domain=_MS)
def qlinear_softmax(
    ctx: Ctx,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
    *,
    axis: int = -1,
    opset: int = 13,
) -> Tensor:
    """Before opset 13 softmax took all axes from `axis` on as one."""
    real = _real(x, x_scale, x_zero)
    if opset < 13:
        y = torch.softmax(real.flatten(axis % x.dim()), -1).reshape(x.shape)
    else:
        y = torch.softmax(real, axis)
    return _stored(y, y_scale, y_zero, x.dtype)


@onnx_op("QLinearAveragePool", domain=_MS)
def qlinear_average_pool(
    ctx: Ctx,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None = None,
    *,
    channels_last: int = 0,
    **attrs: Any,
) -> Tensor:
    real = _real(x, x_scale, x_zero)
    y = ops_pool.average_pool(ctx, real.movedim(-1, 1) if channels_last else real, **attrs)
    return _stored(y.movedim(1, -1) if channels_last else y, y_scale, y_zero, x.dtype)


@onnx_op("QLinearGlobalAveragePool", domain=_MS)
def qlinear_global_average_pool(
    ctx: Ctx,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor | None,
    y_scale: Tensor,
    y_zero: Tensor | None,
    *,
    channels_last: int = 0,
) -> Tensor:
    """Sums of integers, which floats hold exactly up to 65,793 pixels, and one factor as ONNX Runtime has it: means close to the
    middle between two results fall as there."""
    dims = list(range(1, x.dim() - 1)) if channels_last else list(range(2, x.dim()))
    whole = x.float() if x_zero is None else x.float() - x_zero.reshape(-1)[0].float()
    factor = x_scale.reshape(-1)[0] / (y_scale.reshape(-1)[0] * math.prod(x.shape[d] for d in dims))
    return _shifted(torch.round(whole.sum(dims, keepdim=True) * factor), y_zero, x.dtype)


@onnx_op("QLinearConcat", domain=_MS)
def qlinear_concat(ctx: Ctx, y_scale: Tensor, y_zero: Tensor, *inputs: Tensor, axis: int) -> Tensor:
    """The inputs come in threes: data, scale, zero point."""
    parts = [_real(*inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    return _stored(torch.cat(parts, axis), y_scale, y_zero, inputs[0].dtype)


def _prepare_gemm(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """Constant weights: a layer of bytes."""
    given: list[Any] = [*inputs, None, None, None]
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = given[:9]
    constants = (a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero)
    if not isinstance(a, Varies) or not all(isinstance(t, Tensor) for t in constants) or isinstance(c, Varies):
        return None
    if attrs.get("alpha", 1.0) != 1.0 or attrs.get("transA") or b.dim() != 2 or b.dtype is not b_zero.dtype:
        return None
    scales = layers.layer_scales((a_scale, a_zero), (b_scale, b_zero), (y_scale, y_zero))
    weight = b if attrs.get("transB") else b.t()
    if scales is None or not (c is None or c.numel() == weight.shape[0]):
        return None
    made = layers.linear(scales, weight, None if c is None else c.reshape(-1))
    if made is None:
        return None
    run, size = made

    def call(a: Tensor, *rest: Any) -> Tensor:
        return run(a) if a.dtype is scales.x_dtype and a.dim() == 2 and a.numel() else qgemm(ctx, a, *rest, **attrs)

    return Prepared(call, size)


@onnx_op("QGemm", domain=_MS, prepare=_prepare_gemm)
def qgemm(
    ctx: Ctx,
    a: Tensor,
    a_scale: Tensor,
    a_zero: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_zero: Tensor | None,
    c: Tensor | None = None,
    y_scale: Tensor | None = None,
    y_zero: Tensor | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """The bias is in units of the product; without an output scale the result is float."""
    left = a.t() if transA else a
    if transB:  # the weight as it lies, so that its bytes are seen to be multiplied
        total = F.linear(shifted(left, a_zero, rows=True), shifted(b, b_zero, rows=True)).to(torch.int32)
    else:
        total = matmul_integer(ctx, left, b, a_zero, b_zero)
    if c is not None:
        total = total + c
    y = total.float() * (alpha * a_scale * b_scale)
    if y_scale is None:
        return y
    return _stored(y, y_scale, y_zero, a.dtype if y_zero is None else y_zero.dtype)


@onnx_op("MatMulIntegerToFloat", domain=_MS)
def matmul_integer_to_float(
    ctx: Ctx,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    b_zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    y = matmul_integer(ctx, a, b, a_zero, b_zero).float() * (a_scale * b_scale)
    return y if bias is None else y + bias


@onnx_op("DynamicQuantizeMatMul", domain=_MS)
def dynamic_quantize_matmul(
    ctx: Ctx, a: Tensor, b: Tensor, b_scale: Tensor, b_zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """The left side is quantized by its own range at each call."""
    q, scale, zero = dynamic_quantize_linear(ctx, a)
    return matmul_integer_to_float(ctx, q, b, scale, b_scale, zero, b_zero, bias)


def _prepare_quantize(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    return prepare_quantize(ctx, inputs, attrs, quantize)


@onnx_op("QuantizeLinear", domain=_MS, prepare=_prepare_quantize)
def quantize(ctx: Ctx, x: Tensor, scale: Tensor, zero: Any = None, *, axis: int = 1) -> Any:
    return quantize_linear(ctx, x, scale, zero, axis=axis)


def _prepare_dequantize(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    return prepare_dequantize(ctx, inputs, attrs, dequantize)


@onnx_op("DequantizeLinear", domain=_MS, prepare=_prepare_dequantize)
def dequantize(ctx: Ctx, x: Any, scale: Tensor, zero: Any = None, *, axis: int = 1) -> Any:
    return dequantize_linear(ctx, x, scale, zero, axis=axis)


def _widened(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Weights (directions, inputs, gates) as floats, in the order of LSTM's."""
    wide: Sequence[int] = (-1, 1, 1) if scale.dim() == 1 else (scale.shape[0], 1, scale.shape[1])
    return ((q.float() - zero.float().reshape(wide)) * scale.reshape(wide)).transpose(1, 2)


def _prepare_lstm(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """Constant weights are widened once. Not where sequences have lengths: those may need the weights step by step."""
    x, w, r, b, lens, h, c, p, *scales = inputs
    if lens is not None or any(isinstance(t, Varies) for t in (w, r, b, *scales)):
        return None
    if 4 * (w.numel() + r.numel()) > layers.WIDENED_BYTES:
        return None
    made = ops_recurrent.prepare_lstm(ctx, [x, _widened(w, *scales[:2]), _widened(r, *scales[2:]), b, lens, h, c, p], attrs)
    if made is None:
        return None

    widened = made.call.plain if isinstance(made.call, NativeLstm) else made.call

    def call(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        return widened(x, w.transpose(1, 2), r.transpose(1, 2), b, *rest[:4])  # their sizes are all that is read of w and r

    plain: Callable[..., Any] = call
    if (bytes_ := _byte_weights(w, r, scales)) is not None:
        plain = native_lstm(bytes_, b, attrs, call, int(w.shape[1]), int(r.shape[1])) or call
    return Prepared(plain, made.bytes, f"{made.note}, widened from bytes" if made.note else "")


def _byte_weights(w: Tensor, r: Tensor, scales: Sequence[Tensor]) -> list[LstmWeights] | None:
    """The weights of each direction: bytes less their zero points; None where the differences are no signed bytes."""
    wides: list[tuple[Callable[[int], Tensor], Tensor]] = []
    for q, scale, zero in ((w, *scales[:2]), (r, *scales[2:])):
        shift = zero.to(torch.int32).reshape((-1, 1, 1) if zero.dim() == 1 else (zero.shape[0], 1, zero.shape[1]))
        least, most = (q.to(torch.int32) - shift).aminmax() if q.numel() else (torch.zeros(()), torch.zeros(()))
        if least < -128 or most > 127:
            return None

        def of(d: int, q: Tensor = q, shift: Tensor = shift) -> Tensor:
            return (q[d].to(torch.int32) - shift[d % len(shift)]).to(torch.int8).t()

        wides.append((of, scale))
    (w_of, w_scale), (r_of, r_scale) = wides
    return [
        LstmWeights(partial(w_of, d), partial(r_of, d), w_scale[d % len(w_scale)], r_scale[d % len(r_scale)])
        for d in range(int(w.shape[0]))
    ]


@onnx_op("DynamicQuantizeLSTM", domain=_MS, prepare=_prepare_lstm)
def dynamic_quantize_lstm(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    sequence_lens: Tensor | None,
    initial_h: Tensor | None,
    initial_c: Tensor | None,
    p: Tensor | None,
    w_scale: Tensor,
    w_zero: Tensor,
    r_scale: Tensor,
    r_zero: Tensor,
    **attrs: Any,
) -> tuple[Tensor, ...]:
    """Weights (directions, inputs, gates) are expanded; the activations stay float, closer to the unquantized layer."""
    return ops_recurrent.lstm(
        ctx,
        x,
        _widened(w, w_scale, w_zero),
        _widened(r, r_scale, r_zero),
        b,
        sequence_lens,
        initial_h,
        initial_c,
        p,
        **attrs,
    )


@onnx_op("QLinearWhere", domain=_MS)
def qlinear_where(
    ctx: Ctx,
    condition: Tensor,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    y: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    z_scale: Tensor,
    z_zero: Tensor,
) -> Tensor:
    picked = torch.where(condition, _real(x, x_scale, x_zero), _real(y, y_scale, y_zero))
    return _stored(picked, z_scale, z_zero, x.dtype)


@onnx_op("QEmbedLayerNormalization", domain=_MS)
def qembed_layer_norm(
    ctx: Ctx,
    input_ids: Tensor,
    segment_ids: Tensor | None,
    *rest: Tensor | None,
    epsilon: float = 1e-12,
) -> tuple[Tensor, ...]:
    """Five tables (words, positions, segments, gamma, beta), the mask, then the tables' scales and zero points."""
    tables, mask, scales, zeros = rest[:5], rest[5], rest[6:11], rest[11:16]
    real = [None if t is None or s is None else _real(t, s, z) for t, s, z in zip(tables, scales, zeros, strict=True)]
    word, position, segment, gamma, beta = real
    if word is None or position is None or gamma is None or beta is None:
        raise ModelError("com.microsoft::QEmbedLayerNormalization", because="a table or its scale is not given")
    out = ops_microsoft.embed_layer_norm(
        ctx, input_ids, segment_ids, word, position, segment, gamma, beta, mask, epsilon=epsilon
    )
    return out[:2]
