"""Bytes and what they stand for, in as few passes over memory as the library needs.

torch has one pass each from quantized tensors to floats and back, but rounds other than ONNX does: by the scale's reciprocal, and
with the zero point added before. So the division and the rounding stay passes of their own; the library shifts and saturates.
A quantized tensor is here a view: bytes that it shares with the tensor that programs see.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotfuse.frontends.onnx.registry import Ctx, Prepared, Varies

QUANTIZED = {torch.uint8: torch.quint8, torch.int8: torch.qint8}
"""Types of bytes, and those of the library's tensors that know their scale."""
LIMITS = {torch.uint8: (0, 255), torch.int8: (-128, 127)}


@functools.cache
def available() -> bool:
    """Whether this torch has quantized tensors; they are announced to go. The announcement is heard here, once, not in a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bytes_of(torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8))
            return bool(quantized_view(torch.ones(1, dtype=torch.uint8), 2.0, 0).dequantize() == 2.0)
        except (AttributeError, NotImplementedError, RuntimeError):
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
    lowest one, as in ONNX Runtime."""
    y.round_().nan_to_num_(nan=float(LIMITS[dtype][0] - zero))
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


def _told(inputs: Sequence[Any]) -> list[Any]:
    """Scale and zero point."""
    return [*inputs[1:], None][:2]


def prepare_quantize(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any], plain: Callable[..., Any]) -> Prepared | None:
    """`QuantizeLinear` of floats into bytes with one constant scale; `plain` takes whatever else a call brings."""
    scale, zero = _told(inputs)
    if isinstance(scale, Varies) or isinstance(zero, Varies) or set(attrs) - {"axis", "saturate"} or not available():
        return None
    found = byte_zero(zero, torch.uint8)
    if found is None or number(scale) is None or scale.dtype is not torch.float32:
        return None
    (shift, dtype), unit = found, scale.reshape(())

    def call(x: Tensor, *rest: Any) -> Tensor:
        if x.dtype is not torch.float32 or x.dim() == 0:
            return plain(ctx, x, *rest, **attrs)
        return stored(x / unit, shift, dtype)

    return Prepared(call, 0)


def prepare_dequantize(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any], plain: Callable[..., Any]) -> Prepared | None:
    """`DequantizeLinear` of bytes with one constant scale."""
    scale, zero = _told(inputs)
    if not isinstance(inputs[0], Varies) or isinstance(scale, Varies) or isinstance(zero, Varies):
        return None
    if set(attrs) - {"axis"} or not available():
        return None
    at = 0 if zero is None else number(zero)
    if at is None or number(scale) is None or scale.dtype is not torch.float32:
        return None
    unit = float(scale)

    def call(x: Any, *rest: Any) -> Tensor:
        if not isinstance(x, Tensor) or x.dtype not in QUANTIZED or x.dim() == 0:
            return plain(ctx, x, *rest, **attrs)
        return quantized_view(x, unit, int(at)).dequantize()

    return Prepared(call, 0)
