"""NumPy in, NumPy out: what a feed may be, and results that nobody else holds.

A feed is judged exactly as ONNX Runtime judges it (names, then element type, then rank and sizes; names of symbolic
sizes are not compared across inputs; a declared rank of zero means that nothing is known). Two things are
kinder than there: arrays in foreign byte order are converted instead of misread, and element types that only
`ml_dtypes` has are taken.

Arrays go in without a copy where they can, since nothing below writes to them. Results come out as fresh, contiguous,
writable arrays: one that shares memory with an input, a weight or another result is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.model_file import DeclaredDim, Port, PortType
from hotfuse.frontends.onnx.values import BY_CODE, BY_NUMPY, ELEMS, Elem, Value, from_any, from_numpy, to_numpy
from hotfuse.session.args import tensor_shape
from hotfuse.session.ort_errors import Fail, InvalidArgument, UnsupportedFeed
from hotfuse.session.ortvalue import OrtValue

Array = np.ndarray[Any, Any]
_FIX = "Please fix either the inputs/outputs or the model."
_STRING = 8
_SEQUENCE_CODE = 3
"""ONNX Runtime's number for sequences, which its messages show."""

_from_numpy = torch.from_numpy
_storage_use_count = cast(Callable[[int], int], torch._C._storage_Use_Count)  # pyright: ignore[reportPrivateUsage]
_NATIVE = frozenset(e.code for e in ELEMS if e.np.isbuiltin == 1 and e.np.kind in "fiub")
_PLAIN = frozenset(e.torch for e in ELEMS if e.code in _NATIVE)
_MAX_COPIED_BYTES = 1 << 14
"""Up to here a result is copied: cheaper than finding out who else holds it."""
_SOLE = 2
"""The count of a storage that one tensor holds: the tensor, and the handle made to ask."""


@dataclass(frozen=True, slots=True)
class InputSlot:
    """One input, with its declared type taken apart once so that a call need not."""

    name: str
    kind: str
    optional: bool
    elem: Elem | None
    dims: tuple[DeclaredDim, ...]
    fixed: tuple[tuple[int, int], ...]
    """The dims that are numbers, with their places."""
    native: bool
    """NumPy itself has the element type, so that torch takes arrays of it as they are."""
    used: bool
    """Whether any node reads it: only then must it have a value."""
    plain: np.dtype[Any] | None
    """The element type of arrays that torch takes as they are; None where the input is no tensor of such a type."""


def slot(port: Port, *, used: bool = True) -> InputSlot:
    """Prepare an input for `admit`."""
    declared: PortType = port.type
    optional = declared.kind == "optional"
    inner = declared.of if optional and declared.of is not None else declared
    leaf = inner.of if inner.kind == "sequence" and inner.of is not None else inner
    dims, elem = tensor_shape(declared), BY_CODE.get(leaf.elem)
    fixed = tuple((i, d) for i, d in enumerate(dims) if isinstance(d, int))
    native = elem is not None and elem.code in _NATIVE
    plain = elem.np if elem is not None and native and inner.kind == "tensor" else None
    return InputSlot(port.name, inner.kind, optional, elem, dims, fixed, native, used, plain)


def admit(s: InputSlot, value: object) -> Value:
    """A feed as the model takes it, or the error ONNX Runtime would raise."""
    if s.plain is not None and type(value) is np.ndarray:
        array = cast(Array, value)
        if array.dtype == s.plain and array.flags.carray and _fits(s, array.shape):
            return _from_numpy(array)  # what nearly every feed is
    if isinstance(value, OrtValue):
        value = value.value
    if isinstance(value, torch.Tensor) and s.kind == "tensor" and s.elem is not None:
        return _there(s, s.elem, value)
    if value is None:
        if s.optional or not s.used:
            return None
        raise Fail(f"Missing Input: {s.name}", because="it was fed as None and its type is not optional")
    if s.kind == "tensor" and s.elem is not None:
        return _tensor(s, s.elem, value)
    if s.kind == "sequence":
        return _sequence(s, value)
    return from_any(value)


def _tensor(s: InputSlot, elem: Elem, value: object) -> Value:
    if isinstance(value, np.ndarray):
        array = np.asarray(cast(Array, value))
    else:
        array = _listed(s, elem, value)
    if array.dtype != elem.np:
        array = _same_type(elem, array)
    if not _fits(s, array.shape):
        _refuse_shape(s, array.shape)
    if s.native and array.flags.carray:
        return torch.from_numpy(array)
    return _enter(array)


def _there(s: InputSlot, elem: Elem, value: torch.Tensor) -> Value:
    """A tensor that an OrtValue holds on a device."""
    if value.dtype is not elem.torch:
        raise InvalidArgument(f"Unexpected input data type. Actual: ({value.dtype}) , expected: (tensor({elem.name}))")
    if not _fits(s, tuple(value.shape)):
        _refuse_shape(s, tuple(value.shape))
    return value


def _fits(s: InputSlot, shape: tuple[int, ...]) -> bool:
    """Whether an array's sizes are as declared; a declared rank of zero says nothing."""
    if not s.dims:
        return True
    if len(shape) != len(s.dims):
        return False
    for i, size in s.fixed:  # noqa: SIM110  a generator would take longer than all it looks at
        if shape[i] != size:
            return False
    return True


def _enter(array: Array) -> Value:
    if array.dtype.kind == "O" and not all(isinstance(x, str) for x in array.flat):
        array = np.array([_text(x) for x in array.flat], dtype=object).reshape(array.shape)
    if not (array.flags.c_contiguous and array.flags.aligned):
        array = array.copy(order="C")
    return from_numpy(array)


def _text(x: object) -> str:
    return x.decode("utf-8", errors="replace") if isinstance(x, bytes) else str(x)


def _listed(s: InputSlot, elem: Elem, value: object) -> Array:
    """Lists of numbers are taken as arrays of the declared type; other objects are not."""
    if isinstance(value, list):
        try:
            array = np.array(cast(list[object], value), dtype=elem.np)
        except (ValueError, TypeError, OverflowError) as e:
            raise UnsupportedFeed(
                "Could not create tensor from given input list", where=f"input {s.name!r}", because=str(e)
            ) from e
        return array
    if isinstance(value, dict):
        raise InvalidArgument(
            f"Unexpected input data type. Actual: (map) , expected: (tensor({elem.name}))", where=f"input {s.name!r}"
        )
    if hasattr(value, "__iter__"):
        raise UnsupportedFeed(
            f"Input must be a list of dictionaries or a single numpy array for input '{s.name}'.",
            because=f"it is a {type(value).__name__}", hint="pass a numpy array",
        )
    raise UnsupportedFeed(
        f"Unable to handle object of type {type(value)}", where=f"input {s.name!r}", hint="pass a numpy array"
    )


def _same_type(elem: Elem, array: Array) -> Array:
    """The array in native form if its element type is the declared one; refused otherwise."""
    kind = array.dtype.kind
    if kind in "UST":
        array = array.astype(object)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    found = BY_NUMPY.get(array.dtype)
    if found is None or (found.np.kind == "c" and found.code != elem.code):  # no operator of ONNX Runtime takes complex numbers
        raise UnsupportedFeed(
            f"Element type {array.dtype} can't be converted to an ONNX type.", hint="a numeric, bool or string array"
        )
    if found.code != elem.code:
        raise InvalidArgument(
            f"Unexpected input data type. Actual: (tensor({found.name})) , expected: (tensor({elem.name}))",
            hint=f"convert it with .astype({elem.np.name!r})" if elem.code != _STRING else "",
        )
    return array


def _refuse_shape(s: InputSlot, shape: tuple[int, ...]) -> None:
    if len(shape) != len(s.dims):
        raise InvalidArgument(f"Invalid rank for input: {s.name} Got: {len(shape)} Expected: {len(s.dims)} {_FIX}")
    wrong = "".join(
        f" index: {i} Got: {got} Expected: {want}\n"
        for i, (got, want) in enumerate(zip(shape, s.dims, strict=True))
        if isinstance(want, int) and got != want
    )
    raise InvalidArgument(f"Got invalid dimensions for input: {s.name} for the following indices\n{wrong} {_FIX}")


def _sequence(s: InputSlot, value: object) -> Value:
    if isinstance(value, np.ndarray):
        raise InvalidArgument(
            f"input with name: '{s.name}' expected to be of type: {_SEQUENCE_CODE} but received a tensor",
            hint="pass a list of arrays",
        )
    if not isinstance(value, list):
        raise UnsupportedFeed(
            f"Iterable of arrays should be given as a list for input '{s.name}'.",
            because=f"it is a {type(value).__name__}",
        )
    items: list[Value] = []
    for item in cast(list[object], value):
        if not isinstance(item, np.ndarray):
            raise UnsupportedFeed("Input is not a tensor", where=f"input {s.name!r}, a sequence",
                                  because=f"an element is a {type(item).__name__}")
        array: Array = np.asarray(cast(Array, item))
        if s.elem is not None and array.dtype != s.elem.np:
            try:
                array = _same_type(s.elem, array)
            except InvalidArgument as e:
                raise UnsupportedFeed("tensor to be added has a different data type", where=f"input {s.name!r}",
                                      because=e.what) from e
        items.append(_enter(array))
    return items


def _references(values: list[Value], i: int) -> int:
    return sys.getrefcount(values[i])


_ONE_OWNER = _references([torch.empty(0)], 0)
"""What `_references` counts when the list alone holds a value."""


def release(values: list[Value], places: Sequence[torch.device | None] = ()) -> list[Any]:
    """Results as NumPy arrays of their own, or, where a device is named, as tensors of their own there.

    The caller must hold the results in this list alone, and still hold the inputs, so that any other holder shows up in
    a count: of the tensor object, or of the memory behind it. Counting too many only costs a copy.
    """
    if any(places):
        return [_release(values, i) if at is None else _on_device(values, i, at) for i, at in enumerate(places)]
    return [_release(values, i) for i in range(len(values))]


def _on_device(values: list[Value], i: int, device: torch.device) -> torch.Tensor:
    mine = _references(values, i) == _ONE_OWNER
    t = values[i]
    if not isinstance(t, torch.Tensor):
        raise Fail(f"output {i} cannot be on {device}", because="it is no tensor")
    mine = mine and _storage_use_count(t.untyped_storage()._cdata) == _SOLE  # pyright: ignore[reportPrivateUsage]
    return t.to(device).contiguous() if mine or t.device != device else t.clone(memory_format=torch.contiguous_format)


def _release(values: list[Value], i: int) -> Any:
    v = values[i]
    if isinstance(v, torch.Tensor):
        if not v.is_cpu:
            return to_numpy(v.detach().contiguous().cpu())
        if v.dtype in _PLAIN and v.nbytes <= _MAX_COPIED_BYTES and not v.requires_grad:
            return v.numpy().copy()
        del v
        mine = _references(values, i) == _ONE_OWNER
        t: torch.Tensor = values[i]
        storage = t.untyped_storage()
        mine = mine and _storage_use_count(storage._cdata) == _SOLE  # pyright: ignore[reportPrivateUsage]
        if not t.is_contiguous():
            t = t.contiguous()
        elif not mine or storage.nbytes() > 2 * t.nbytes + 64:
            t = t.clone()  # also a small piece that would keep a large block alive
        return to_numpy(t)
    if isinstance(values[i], (list, tuple)):
        return [_copy(x) for x in values[i]]
    return _copy(values[i])


def _copy(v: Value) -> Any:
    if isinstance(v, torch.Tensor):
        return to_numpy(v.clone(memory_format=torch.contiguous_format))
    return np.array(cast(Array, v)) if isinstance(v, np.ndarray) else v
