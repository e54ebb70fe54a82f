"""Bytes and what they stand for, in one pass over memory (`native.byte_kernels`); until those are there, in few of the library's.

torch has one pass each from quantized tensors to floats and back, but rounds other than ONNX does: by the scale's reciprocal, and
with the zero point added before. So there the division and the rounding are passes of their own; the library shifts and saturates.
A quantized tensor is here a view: bytes that it shares with the tensor that programs see.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotfuse.base.faults import faults
from hotfuse.frontends.onnx.registry import Ctx, Prepared, Varies
from hotfuse.native.byte_kernels import ByteKernels, background

QUANTIZED = {torch.uint8: torch.quint8, torch.int8: torch.qint8}
"""Types of bytes, and those of the library's tensors that know their scale."""
LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
ONE_THREAD = 1 << 20
"""Elements that one thread goes through as fast as a team of the library goes several times."""


def passes(elements: int) -> ByteKernels | None:
    """The compiled passes, for so many elements; None until they are there, and where a team of threads is faster."""
    found = background.kernels
    return found if elements <= ONE_THREAD or torch.get_num_threads() <= 2 else None


def dense(x: Tensor) -> Tensor:
    """A tensor without gaps, in the order of its memory: what `empty_like` makes lies the same way."""
    if x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)):
        return x
    return x.contiguous()


def quantized(x: Tensor, scale: float, zero: int, dtype: torch.dtype) -> Tensor:
    """Bytes of floats, by ONNX's rounding."""
    if (native := passes(x.numel())) is None:
        return stored(x / scale, zero, dtype)
    x = dense(x)
    y = torch.empty_like(x, dtype=dtype)
    low, high = LIMITS[dtype]
    native.quantize(x.data_ptr(), y.data_ptr(), scale, zero, low, high, x.numel())
    return y


def dequantized(x: Tensor, scale: float, zero: int) -> Tensor:
    """Floats of bytes."""
    if (native := passes(x.numel())) is None:
        return quantized_view(x, scale, zero).dequantize()
    x = dense(x)
    y = torch.empty_like(x, dtype=torch.float32)
    run = native.dequantize_u if x.dtype is torch.uint8 else native.dequantize_s
    run(x.data_ptr(), y.data_ptr(), scale, zero, x.numel())
    return y


@functools.cache
def available() -> bool:
    """Whether this torch has quantized tensors; they are announced to go. The announcement is heard here, once, not in a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bytes_of(torch.quantize_per_tensor(torch.zeros(1, dtype=torch.float32), 1.0, 0, torch.quint8))
            return bool(quantized_view(torch.ones(1, dtype=torch.uint8), 2.0, 0).dequantize() == 2.0)
        except (AttributeError, NotImplementedError, RuntimeError) as e:
            faults.note("torch's quantized tensors", e)
            return False


def quantized_view(x: Tensor, scale: float, zero: int) -> Tensor:
    """The same bytes as one of the library's quantized tensors."""
    made = torch._empty_affine_quantized([0], scale=scale, zero_point=zero, dtype=QUANTIZED[x.dtype])  # pyright: ignore[reportPrivateUsage]
    return made.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def bytes_of(x: Tensor) -> Tensor:
    """A quantized tensor's bytes."""
    dtype = torch.uint8 if x.dtype is torch.quint8 else torch.int8
    return torch.empty(0, dtype=dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def stored(y: Tensor, zero: int, dtype: torch.dtype) -> Tensor:
    """Real numbers in units of the scale, rounded half to even, shifted and saturated; `y` is overwritten. What is no number is the
    lowest one, as in ONNX Runtime. Saturated here: the library's last elements, taken one by one, pass through 32-bit integers."""
    low, high = (float(limit - zero) for limit in LIMITS[dtype])
    y.round_().clamp_(low, high).nan_to_num_(nan=low)
    return bytes_of(torch.quantize_per_tensor(y, 1.0, zero, QUANTIZED[dtype]))


def number(value: Any) -> Any:
    """The number in a constant of one element; None for others."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else None


def byte_zero(value: Any, dtype: torch.dtype | None) -> tuple[int, torch.dtype] | None:
    """A zero point of one byte, and its type; without one (`dtype` is then the data's) it is zero."""
    if value is None and dtype in QUANTIZED:
        return 0, dtype
    at = number(value)
    return (int(at), value.dtype) if at is not None and value is not None and value.dtype in QUANTIZED else None


def _scale_and_zero(inputs: Sequence[Any]) -> list[Any]:
    """Scale and zero point."""
    return [*inputs[1:], None][:2]


def prepare_quantize(
    ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any], plain: Callable[..., Any]
) -> Prepared | None:
    """`QuantizeLinear` of floats into bytes with one constant scale; `plain` takes whatever else a call brings."""
    scale, zero = _scale_and_zero(inputs)
    if isinstance(scale, Varies) or isinstance(zero, Varies) or set(attrs) - {"axis", "saturate"} or not available():
        return None
    found = byte_zero(zero, torch.uint8)
    if found is None or number(scale) is None or scale.dtype is not torch.float32:
        return None
    (shift, dtype), unit = found, float(scale)
    background.begin()

    def call(x: Tensor, *rest: Any) -> Tensor:
        if x.dtype is not torch.float32 or x.dim() == 0:
            return plain(ctx, x, *rest, **attrs)
        return quantized(x, unit, shift, dtype)

    return Prepared(call, 0)


def prepare_dequantize(
    ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any], plain: Callable[..., Any]
) -> Prepared | None:
    """`DequantizeLinear` of bytes with one constant scale."""
    scale, zero = _scale_and_zero(inputs)
    if not isinstance(inputs[0], Varies) or isinstance(scale, Varies) or isinstance(zero, Varies):
        return None
    if set(attrs) - {"axis"} or not available():
        return None
    at = 0 if zero is None else number(zero)
    if at is None or number(scale) is None or scale.dtype is not torch.float32:
        return None
    unit = float(scale)
    background.begin()

    def call(x: Any, *rest: Any) -> Tensor:
        if not isinstance(x, Tensor) or x.dtype not in QUANTIZED or x.dim() == 0:
            return plain(ctx, x, *rest, **attrs)
        return dequantized(x, unit, int(at))

    return Prepared(call, 0)
