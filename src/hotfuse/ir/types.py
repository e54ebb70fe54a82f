"""What a value is: dtype, symbolic shape, layout and device.

    type   ::= tensor | scalar | seq<type> | opt<type> | object
    tensor ::= dtype[dim, ...] layout? device?      f32[s0, 3, 224, 224]{0,2,3,1}@cuda:0
    layout ::= {dim order}, outermost first | {*}   row-major is the default and is not written
    scalar ::= int(dim)? | float | bool             a number of the host, such as a size

`object` is a value whose type shows only at run time (an ONNX value of unknown rank, say).
"""

from __future__ import annotations

import functools
from enum import StrEnum

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim


class DType(StrEnum):
    """Element types, torch's and the ones that only ONNX has."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3FN = "f8e4m3fn"
    F8E4M3FNUZ = "f8e4m3fnuz"
    F8E5M2 = "f8e5m2"
    F8E5M2FNUZ = "f8e5m2fnuz"
    F8E8M0FNU = "f8e8m0fnu"
    F6E2M3 = "f6e2m3"
    F6E3M2 = "f6e3m2"
    F4E2M1 = "f4e2m1"
    C128 = "c128"
    C64 = "c64"
    C32 = "c32"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    I4 = "i4"
    I2 = "i2"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    U4 = "u4"
    U2 = "u2"
    BOOL = "bool"
    STR = "str"


_BITS = {"bool": 8, "str": 64, "f8e": 8, "bf": 16, "f6e": 6, "f4e": 4, "c1": 128, "c6": 64, "c3": 32}


@functools.cache
def bits(dtype: DType) -> int:
    """Size of one element as stored."""
    for prefix, size in _BITS.items():
        if dtype.value.startswith(prefix):
            return size
    return int(dtype.value[1:])


def size_of(dtype: DType) -> int:
    """Bytes of one number in memory."""
    return bits(dtype) // 8


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory: dense in a dimension order, or with strides known only at run time."""

    order: tuple[int, ...] | None = None
    """Dimensions from outermost to innermost; None is row-major."""
    strided: bool = False
    """True when the strides are not dense (an expanded or sliced view)."""


ROW_MAJOR = Layout()
STRIDED = Layout(strided=True)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor."""

    dtype: DType
    shape: tuple[Dim, ...] = ()
    layout: Layout = ROW_MAJOR
    device: str = "cpu"


class ScalarKind(StrEnum):
    """Numbers of the host."""

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A number of the host; an integer may carry the expression it equals."""

    kind: ScalarKind
    expr: Dim | None = None


@dataclass(frozen=True, slots=True)
class SequenceType:
    """A list of values of one type (ONNX sequences)."""

    elem: Type


@dataclass(frozen=True, slots=True)
class OptionalType:
    """A value or nothing (ONNX optionals)."""

    elem: Type


@dataclass(frozen=True, slots=True)
class ObjectType:
    """A value whose type shows only at run time."""


Type = TensorType | ScalarType | SequenceType | OptionalType | ObjectType


def dims_of(t: Type) -> tuple[Dim, ...]:
    """Every dimension a type mentions: a tensor's shape, an integer's expression, an element's."""
    match t:
        case TensorType(shape=shape):
            return shape
        case ScalarType(expr=expr):
            return () if expr is None else (expr,)
        case SequenceType(elem) | OptionalType(elem):
            return dims_of(elem)
        case ObjectType():
            return ()


def with_dims(t: Type, dims: tuple[Dim, ...]) -> Type:
    """The same type with other dimensions, as many as `dims_of` gives."""
    match t:
        case TensorType():
            return TensorType(t.dtype, dims, t.layout, t.device)
        case ScalarType(kind, expr):
            return t if expr is None else ScalarType(kind, dims[0])
        case SequenceType(elem):
            return SequenceType(with_dims(elem, dims))
        case OptionalType(elem):
            return OptionalType(with_dims(elem, dims))
        case ObjectType():
            return t
