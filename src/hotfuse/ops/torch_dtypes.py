"""torch's element types as ours, and back."""

from __future__ import annotations

import torch

from hotfuse.base.errors import CaptureError
from hotfuse.ir.types import DType

_TORCH_NAMES = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8E4M3FN: "float8_e4m3fn",
    DType.F8E4M3FNUZ: "float8_e4m3fnuz",
    DType.F8E5M2: "float8_e5m2",
    DType.F8E5M2FNUZ: "float8_e5m2fnuz",
    DType.F8E8M0FNU: "float8_e8m0fnu",
    DType.C128: "complex128",
    DType.C64: "complex64",
    DType.C32: "complex32",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.I4: "int4",
    DType.I2: "int2",
    DType.U64: "uint64",
    DType.U32: "uint32",
    DType.U16: "uint16",
    DType.U8: "uint8",
    DType.U4: "uint4",
    DType.U2: "uint2",
    DType.BOOL: "bool",
}
_TO_TORCH: dict[DType, torch.dtype] = {d: getattr(torch, n) for d, n in _TORCH_NAMES.items() if hasattr(torch, n)}
_FROM_TORCH: dict[torch.dtype, DType] = {t: d for d, t in _TO_TORCH.items()}


def dtype_of(dtype: torch.dtype) -> DType:
    """Our name of a torch dtype."""
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise CaptureError(f"element type {dtype} has no place in the graph") from None


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's dtype for ours; strings and four-bit floats have none."""
    try:
        return _TO_TORCH[dtype]
    except KeyError:
        raise CaptureError(f"element type {dtype.value} has no torch dtype") from None


def named_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name (`float32`), and of no other attribute of torch."""
    for dtype in _FROM_TORCH:
        if str(dtype) == f"torch.{name}":
            return dtype
    raise CaptureError(f"no element type {name!r}")
