"""ONNX element types, and values in their three forms: TensorProto, NumPy and torch.

Inside the interpreter a value is a torch tensor wherever torch has the element type. Strings are NumPy object arrays
of `str`; 4-, 6- and 2-bit numbers are NumPy arrays of the `ml_dtypes` types; sequences are lists; an absent optional is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from hotfuse.base.errors import InputError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.types import DType

Value = Any
"""torch.Tensor | np.ndarray | list[Value] | dict | None."""


@dataclass(frozen=True, slots=True)
class Elem:
    """One ONNX element type in every vocabulary; `torch` is None where torch cannot compute with it."""

    code: int
    name: str
    """As ONNX Runtime spells it, in `tensor(name)`."""
    np: np.dtype[Any]
    torch: torch.dtype | None
    ir: DType
    bits: int
    field: str
    """The TensorProto field that holds it when it is not raw."""


def _elem(code: int, name: str, np_type: Any, torch_type: torch.dtype | None, ir: DType, bits: int, field: str) -> Elem:
    return Elem(code, name, np.dtype(np_type), torch_type, ir, bits, field)


_I32, _I64, _U64, _F32, _F64 = "int32_data", "int64_data", "uint64_data", "float_data", "double_data"

ELEMS: tuple[Elem, ...] = (
    _elem(1, "float", np.float32, torch.float32, DType.F32, 32, _F32),
    _elem(2, "uint8", np.uint8, torch.uint8, DType.U8, 8, _I32),
    _elem(3, "int8", np.int8, torch.int8, DType.I8, 8, _I32),
    _elem(4, "uint16", np.uint16, torch.uint16, DType.U16, 16, _I32),
    _elem(5, "int16", np.int16, torch.int16, DType.I16, 16, _I32),
    _elem(6, "int32", np.int32, torch.int32, DType.I32, 32, _I32),
    _elem(7, "int64", np.int64, torch.int64, DType.I64, 64, _I64),
    _elem(8, "string", np.object_, None, DType.STR, 0, "string_data"),
    _elem(9, "bool", np.bool_, torch.bool, DType.BOOL, 8, _I32),
    _elem(10, "float16", np.float16, torch.float16, DType.F16, 16, _I32),
    _elem(11, "double", np.float64, torch.float64, DType.F64, 64, _F64),
    _elem(12, "uint32", np.uint32, torch.uint32, DType.U32, 32, _U64),
    _elem(13, "uint64", np.uint64, torch.uint64, DType.U64, 64, _U64),
    _elem(14, "complex64", np.complex64, torch.complex64, DType.C64, 64, _F32),
    _elem(15, "complex128", np.complex128, torch.complex128, DType.C128, 128, _F64),
    _elem(16, "bfloat16", ml_dtypes.bfloat16, torch.bfloat16, DType.BF16, 16, _I32),
    _elem(17, "float8e4m3fn", ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn, DType.F8E4M3FN, 8, _I32),
    _elem(18, "float8e4m3fnuz", ml_dtypes.float8_e4m3fnuz, torch.float8_e4m3fnuz, DType.F8E4M3FNUZ, 8, _I32),
    _elem(19, "float8e5m2", ml_dtypes.float8_e5m2, torch.float8_e5m2, DType.F8E5M2, 8, _I32),
    _elem(20, "float8e5m2fnuz", ml_dtypes.float8_e5m2fnuz, torch.float8_e5m2fnuz, DType.F8E5M2FNUZ, 8, _I32),
    _elem(21, "uint4", ml_dtypes.uint4, None, DType.U4, 4, _I32),
    _elem(22, "int4", ml_dtypes.int4, None, DType.I4, 4, _I32),
    _elem(23, "float4e2m1", ml_dtypes.float4_e2m1fn, None, DType.F4E2M1, 4, _I32),
    _elem(24, "float8e8m0", ml_dtypes.float8_e8m0fnu, torch.float8_e8m0fnu, DType.F8E8M0FNU, 8, _I32),
    _elem(25, "uint2", ml_dtypes.uint2, None, DType.U2, 2, _I32),
    _elem(26, "int2", ml_dtypes.int2, None, DType.I2, 2, _I32),
    _elem(27, "float6e2m3", ml_dtypes.float6_e2m3fn, None, DType.F6E2M3, 6, _I32),
    _elem(28, "float6e3m2", ml_dtypes.float6_e3m2fn, None, DType.F6E3M2, 6, _I32),
)
BY_CODE: dict[int, Elem] = {e.code: e for e in ELEMS}
BY_NUMPY: dict[np.dtype[Any], Elem] = {e.np: e for e in ELEMS}
BY_TORCH: dict[torch.dtype, Elem] = {e.torch: e for e in ELEMS if e.torch is not None}

_SAME_BITS: dict[int, Any] = {8: np.uint8, 16: np.uint16}
_NATIVE = frozenset("?bhilqBHILQefdFD")


def is_tensor(v: Value) -> bool:
    """Whether a value is a tensor of any element type, torch's or NumPy's."""
    return isinstance(v, (torch.Tensor, np.ndarray))


def elem_of(v: torch.Tensor | np.ndarray[Any, Any]) -> Elem:
    """The element type of a tensor in either form."""
    found = BY_TORCH.get(v.dtype) if isinstance(v, torch.Tensor) else BY_NUMPY.get(_canonical(v).dtype)
    if found is None:
        raise InputError(f"element type {v.dtype} has no ONNX counterpart")
    return found


def _canonical(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Strings as objects, native byte order."""
    if a.dtype.kind in "US" or a.dtype.kind == "T":
        return a.astype(object)
    if not a.dtype.isnative:
        return a.astype(a.dtype.newbyteorder("="))
    return a


def from_numpy(array: Any, *, copy: bool = False) -> torch.Tensor | np.ndarray[Any, Any]:
    """A NumPy array as the interpreter wants it; shares memory with a writable array unless asked to copy."""
    a = _canonical(np.asarray(array))
    elem = BY_NUMPY.get(a.dtype)
    if elem is None:
        raise InputError(f"element type {a.dtype} has no ONNX counterpart", hint="pass a numeric, bool or string array")
    if elem.torch is None:
        if elem.code == 8 and a.size and any(isinstance(s, bytes) for s in a.flat):
            a = np.array([s.decode("utf-8") if isinstance(s, bytes) else s for s in a.flat], dtype=object).reshape(
                a.shape
            )
        return a.copy() if copy else a
    if copy or not a.flags.writeable or any(s < 0 for s in a.strides):
        a = a.copy()
    if a.dtype.char in _NATIVE:
        return torch.from_numpy(a)
    return torch.from_numpy(np.ascontiguousarray(a).view(_SAME_BITS[elem.bits]).reshape(a.shape)).view(elem.torch)


def from_any(v: Value) -> Value:
    """NumPy arrays, scalars and lists of them as interpreter values; tensors, None and dicts stay."""
    if v is None or isinstance(v, (torch.Tensor, dict)):
        return v
    if isinstance(v, (list, tuple)):
        items: Sequence[Any] = v
        return [from_any(x) for x in items]
    return from_numpy(v)


def to_numpy(v: Value) -> Value:
    """An interpreter value with every tensor as a NumPy array."""
    if isinstance(v, torch.Tensor):
        t = v.detach().cpu().resolve_conj().resolve_neg()
        elem = BY_TORCH[t.dtype]
        if elem.np.char in _NATIVE:
            return t.numpy()
        return t.contiguous().view(torch.uint8 if elem.bits == 8 else torch.uint16).numpy().view(elem.np)
    if isinstance(v, (list, tuple)):
        items: Sequence[Any] = v
        return [to_numpy(x) for x in items]
    return v
