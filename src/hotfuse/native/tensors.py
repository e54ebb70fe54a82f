# pyright: reportPrivateUsage=false
# Torch shows the keys of a tensor, and where its C++ part lies, only through private names.
"""Native code that reads a torch tensor from its Python object, without a call back into Python.

Torch exports a C interface (`aoti_torch_get_sizes` and its like) that takes the address of an `at::Tensor`: a word that points
at the tensor's C++ part. Every Python tensor holds such a word. Where in the object it lies, where the object's type lies and where
the C++ part keeps its dispatch keys is *found* on live tensors (`native.tensor_layout`). Then everything that native code asks is
compared with what Python says. Where any of this fails, `unavailable()` says why, and callers stay with Python, which they count.

    declare i32 @hf_plain(ptr)         1 if the object is exactly a Tensor or Parameter: on the CPU, strided, with memory of its own
                                       and with the numbers that lie there (no lazy negation, conjugation or zeros, no wrapper)
    declare i64 @hf_rank(ptr)          the rest may be asked only of an object that is plain
    declare ptr @hf_sizes(ptr)         rank numbers of 64 bits; valid while the tensor is alive and not resized
    declare ptr @hf_strides(ptr)
    declare i32 @hf_dtype(ptr)         torch's number of the dtype, `dtype_code`
    declare i64 @hf_numel(ptr)
    declare ptr @hf_data(ptr)          the first element, to read from
    declare i32 @hf_contiguous(ptr)    1 if row-major, as `is_contiguous()`
    declare ptr @hf_empty(i64, ptr, ptr, i32)    a new tensor of (rank, sizes, strides, dtype), or null with a Python error set
    declare ptr @hf_view(ptr, i64, ptr, ptr)     a tensor of (rank, sizes, strides) in the memory of another, from its first element
    declare i32 @hf_copy(ptr, ptr)     0 if all elements of the second are those of the first now; they have the same sizes
    declare i64 @hf_room(ptr)          bytes of its memory from its first element on
    declare i32 @hf_of_now(ptr)        1 if a tensor made now would be of inference mode exactly if this one is

All need the interpreter lock. Offsets stand in the helpers, which are compiled once per process, and not in the code that calls
them: object code that outlives the process does not depend on torch's layout.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hotfuse.base.errors import InternalError
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.tensor_layout import Places, find_places, keys_of, plain_keys, specimens
from hotfuse.native.toolchain import helper_object

_C = torch._C
_NAMES = ("hf_plain", "hf_rank", "hf_sizes", "hf_strides", "hf_dtype", "hf_numel", "hf_data", "hf_contiguous", "hf_empty",
          "hf_view", "hf_copy", "hf_room", "hf_of_now")
DECLARATIONS = """
declare i32 @hf_plain(ptr)
declare i64 @hf_rank(ptr)
declare ptr @hf_sizes(ptr)
declare ptr @hf_strides(ptr)
declare i32 @hf_dtype(ptr)
declare i64 @hf_numel(ptr)
declare ptr @hf_data(ptr)
declare i32 @hf_contiguous(ptr)
declare ptr @hf_empty(i64, ptr, ptr, i32)
declare ptr @hf_view(ptr, i64, ptr, ptr)
declare i32 @hf_copy(ptr, ptr)
declare i64 @hf_room(ptr)
declare i32 @hf_of_now(ptr)
"""
"""What a generated module says to use the helpers; link it with `symbols()`."""


@dataclass(frozen=True, slots=True)
class TensorHelpers:
    """The compiled helpers of this process."""

    places: Places
    symbols: Mapping[str, int]
    loaded: Loaded


def _ask(name: str, shim: str, kind: str) -> str:
    """A helper that has torch's C interface write one value."""
    return f"""
define {kind} @{name}(ptr %object) {{
  %slot = alloca {kind}
  store {kind} zeroinitializer, ptr %slot
  %tensor = getelementptr i8, ptr %object, i64 IMPL
  %failed = call i32 @{shim}(ptr %tensor, ptr %slot)
  %value = load {kind}, ptr %slot
  ret {kind} %value
}}
"""


_TEXT = """
@hf_type_tensor = external global i8
@hf_type_parameter = external global i8
declare i32 @aoti_torch_get_sizes(ptr, ptr)
declare i32 @aoti_torch_get_strides(ptr, ptr)
declare i32 @aoti_torch_get_dim(ptr, ptr)
declare i32 @aoti_torch_get_dtype(ptr, ptr)
declare i32 @aoti_torch_get_numel(ptr, ptr)
declare i32 @hf_shim_data(ptr, ptr)
declare i32 @aoti_torch_empty_strided(i64, ptr, ptr, i32, i32, i32, ptr)
declare i32 @aoti_torch_delete_tensor_object(ptr)
declare ptr @hf_shim_wrap(ptr)
declare ptr @PyErr_NoMemory()
declare i32 @aoti_torch__reinterpret_tensor(ptr, i64, ptr, ptr, i64, ptr)
declare i32 @aoti_torch_copy_(ptr, ptr, i32)
declare i32 @aoti_torch_get_storage_size(ptr, ptr)
declare i32 @aoti_torch_get_storage_offset(ptr, ptr)
declare i64 @aoti_torch_dtype_element_size(i32)
declare zeroext i1 @hf_inference_mode()

define i32 @hf_plain(ptr %object) {
entry:
  %type.at = getelementptr i8, ptr %object, i64 TYPE
  %type = load ptr, ptr %type.at
  %tensor = icmp eq ptr %type, @hf_type_tensor
  %parameter = icmp eq ptr %type, @hf_type_parameter
  %either = or i1 %tensor, %parameter
  br i1 %either, label %look, label %no
look:
  %impl.at = getelementptr i8, ptr %object, i64 IMPL
  %impl = load ptr, ptr %impl.at
  %keys.at = getelementptr i8, ptr %impl, i64 KEYS
  %keys = load i64, ptr %keys.at
  %more = and i64 %keys, NOT_MAY
  %base = and i64 %keys, MUST
  %nothing.more = icmp eq i64 %more, 0
  %all = icmp eq i64 %base, MUST
  %plain = and i1 %nothing.more, %all
  br i1 %plain, label %memory, label %no
memory:
  %data = call ptr @hf_data(ptr %object)
  %there = icmp ne ptr %data, null
  br i1 %there, label %yes, label %gone
gone:
  %count = call i64 @hf_numel(ptr %object)
  %empty = icmp eq i64 %count, 0
  br i1 %empty, label %yes, label %no
yes:
  ret i32 1
no:
  ret i32 0
}

define i32 @hf_contiguous(ptr %object) {
entry:
  %rank = call i64 @hf_rank(ptr %object)
  %sizes = call ptr @hf_sizes(ptr %object)
  %strides = call ptr @hf_strides(ptr %object)
  %count = call i64 @hf_numel(ptr %object)
  %empty = icmp eq i64 %count, 0
  br i1 %empty, label %yes, label %next
next:
  %left = phi i64 [%rank, %entry], [%d, %step]
  %dense = phi i64 [1, %entry], [%dense1, %step]
  %done = icmp eq i64 %left, 0
  br i1 %done, label %yes, label %step
step:
  %d = sub i64 %left, 1
  %size.at = getelementptr i64, ptr %sizes, i64 %d
  %size = load i64, ptr %size.at
  %stride.at = getelementptr i64, ptr %strides, i64 %d
  %stride = load i64, ptr %stride.at
  %one = icmp eq i64 %size, 1
  %fits = icmp eq i64 %stride, %dense
  %good = or i1 %one, %fits
  %dense1 = mul i64 %dense, %size
  br i1 %good, label %next, label %no
yes:
  ret i32 1
no:
  ret i32 0
}

define ptr @hf_view(ptr %object, i64 %rank, ptr %sizes, ptr %strides) {
entry:
  %slot = alloca ptr
  %tensor = getelementptr i8, ptr %object, i64 IMPL
  %failed = call i32 @aoti_torch__reinterpret_tensor(ptr %tensor, i64 %rank, ptr %sizes, ptr %strides, i64 0, ptr %slot)
  %good = icmp eq i32 %failed, 0
  br i1 %good, label %wrap, label %none
wrap:
  %handle = load ptr, ptr %slot
  %made = call ptr @hf_shim_wrap(ptr %handle)
  %ignored = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  ret ptr %made
none:
  %null = call ptr @PyErr_NoMemory()
  ret ptr null
}

define i32 @hf_copy(ptr %to, ptr %from) {
  %one = getelementptr i8, ptr %to, i64 IMPL
  %other = getelementptr i8, ptr %from, i64 IMPL
  %failed = call i32 @aoti_torch_copy_(ptr %one, ptr %other, i32 0)
  ret i32 %failed
}

define i64 @hf_room(ptr %object) {
  %size.at = alloca i64
  %offset.at = alloca i64
  store i64 0, ptr %size.at
  store i64 0, ptr %offset.at
  %tensor = getelementptr i8, ptr %object, i64 IMPL
  %asked = call i32 @aoti_torch_get_storage_size(ptr %tensor, ptr %size.at)
  %asked.too = call i32 @aoti_torch_get_storage_offset(ptr %tensor, ptr %offset.at)
  %dtype = call i32 @hf_dtype(ptr %object)
  %width = call i64 @aoti_torch_dtype_element_size(i32 %dtype)
  %size = load i64, ptr %size.at
  %offset = load i64, ptr %offset.at
  %before = mul i64 %offset, %width
  %room = sub i64 %size, %before
  ret i64 %room
}

define i32 @hf_of_now(ptr %object) {
  %impl.at = getelementptr i8, ptr %object, i64 IMPL
  %impl = load ptr, ptr %impl.at
  %keys.at = getelementptr i8, ptr %impl, i64 KEYS
  %keys = load i64, ptr %keys.at
  %autograd = and i64 %keys, AUTOGRAD
  %of.inference = icmp eq i64 %autograd, 0
  %now = call zeroext i1 @hf_inference_mode()
  %differs = xor i1 %of.inference, %now
  %same = xor i1 %differs, true
  %answer = zext i1 %same to i32
  ret i32 %answer
}

define ptr @hf_empty(i64 %rank, ptr %sizes, ptr %strides, i32 %dtype) {
entry:
  %slot = alloca ptr
  %failed = call i32 @aoti_torch_empty_strided(i64 %rank, ptr %sizes, ptr %strides, i32 %dtype, i32 CPU, i32 0, ptr %slot)
  %good = icmp eq i32 %failed, 0
  br i1 %good, label %wrap, label %none
wrap:
  %handle = load ptr, ptr %slot
  %object = call ptr @hf_shim_wrap(ptr %handle)
  %ignored = call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  ret ptr %object
none:
  %null = call ptr @PyErr_NoMemory()
  ret ptr null
}
""" + "".join(
    (
        _ask("hf_rank", "aoti_torch_get_dim", "i64"),
        _ask("hf_sizes", "aoti_torch_get_sizes", "ptr"),
        _ask("hf_strides", "aoti_torch_get_strides", "ptr"),
        _ask("hf_dtype", "aoti_torch_get_dtype", "i32"),
        _ask("hf_numel", "aoti_torch_get_numel", "i64"),
        _ask("hf_data", "hf_shim_data", "ptr"),
    )
)
_SHIMS = tuple(f"aoti_torch_{n}" for n in ("get_sizes", "get_strides", "get_dim", "get_dtype", "get_numel", "empty_strided",
                                           "delete_tensor_object", "_reinterpret_tensor", "copy_", "get_storage_size",
                                           "get_storage_offset", "dtype_element_size"))  # fmt: skip
_WRAP = "_Z16THPVariable_WrapRKN2at10TensorBaseE"
_INFERENCE = "_ZN3c1013InferenceMode10is_enabledEv"


def _address(name: str) -> int:
    """Where a function of torch's libraries is, among all that the process has loaded."""
    for library in _libraries():
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        except AttributeError:
            continue
    raise InternalError(f"torch {torch.__version__} does not export {name}")


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """Torch's extension module, through which its libraries are found whatever they are called here."""
    return (ctypes.CDLL(_C.__file__), ctypes.CDLL(None))


def _first(*names: str) -> int:
    for name in names[:-1]:
        try:
            return _address(name)
        except InternalError:
            continue
    return _address(names[-1])


def _imports() -> dict[str, int]:
    found = {name: _address(name) for name in _SHIMS}
    # Reading must not unshare memory that torch shares until somebody writes, so the reader's function comes first.
    found["hf_shim_data"] = _first("torch_get_const_data_ptr", "aoti_torch_get_data_ptr")
    found["hf_shim_wrap"] = _address(_WRAP)
    found["hf_inference_mode"] = _address(_INFERENCE)
    found["PyErr_NoMemory"] = ctypes.cast(ctypes.pythonapi.PyErr_NoMemory, ctypes.c_void_p).value or 0
    found["hf_type_tensor"], found["hf_type_parameter"] = id(torch.Tensor), id(nn.Parameter)
    return found


def _cpu() -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(_address("aoti_torch_device_type_cpu"))())


def _compiled(places: Places) -> TensorHelpers:
    keys = plain_keys()
    words = {"TYPE": places.type_at, "IMPL": places.impl_at, "KEYS": places.keys_at, "NOT_MAY": _signed(~keys.may),
             "MUST": _signed(keys.must), "AUTOGRAD": _signed(keys.may & ~keys.must), "CPU": _cpu()}  # fmt: skip
    text = _TEXT
    for word, number in words.items():
        text = text.replace(f" {word}\n", f" {number}\n").replace(f" {word},", f" {number},")
    loaded = load_object(helper_object(text), _NAMES, _imports())
    return TensorHelpers(places, {n: loaded.address(n) for n in _NAMES}, loaded)


def _signed(word: int) -> int:
    return ctypes.c_int64(word & (2**64 - 1)).value


class TensorReader:
    """The helpers as Python functions, for tests and the self-test."""

    def __init__(self, symbols: Mapping[str, int]) -> None:
        number, address = ctypes.c_int64, ctypes.c_void_p

        def function(name: str, kind: Any) -> Any:
            return ctypes.PYFUNCTYPE(kind, ctypes.py_object)(symbols[name])

        self._plain, self._contiguous = function("hf_plain", ctypes.c_int32), function("hf_contiguous", ctypes.c_int32)
        self._rank, self._numel = function("hf_rank", number), function("hf_numel", number)
        self._dtype, self._data = function("hf_dtype", ctypes.c_int32), function("hf_data", address)
        self._sizes, self._strides = function("hf_sizes", address), function("hf_strides", address)
        self._empty = ctypes.PYFUNCTYPE(ctypes.py_object, number, address, address, ctypes.c_int32)(symbols["hf_empty"])
        self._room, self._of_now = function("hf_room", number), function("hf_of_now", ctypes.c_int32)
        of, two = ctypes.py_object, ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.py_object, ctypes.py_object)
        self._view = ctypes.PYFUNCTYPE(of, of, number, address, address)(symbols["hf_view"])
        self._copy = two(symbols["hf_copy"])

    def plain(self, value: object) -> bool:
        """Whether native code may read the object."""
        return bool(self._plain(value))

    def read(self, t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int, int, int, bool]:
        """Sizes, strides, dtype's number, number of elements, address, whether row-major; of a plain tensor."""
        rank = int(self._rank(t))
        sizes, strides = (tuple((ctypes.c_int64 * rank).from_address(f(t))) if rank else ()
                          for f in (self._sizes, self._strides))  # fmt: skip
        return sizes, strides, int(self._dtype(t)), int(self._numel(t)), self._data(t) or 0, bool(self._contiguous(t))

    def empty(self, sizes: Sequence[int], strides: Sequence[int], dtype: int) -> torch.Tensor:
        """A new tensor."""
        array = ctypes.c_int64 * max(1, len(sizes))
        size, stride = array(*sizes), array(*strides)
        return self._empty(len(sizes), ctypes.addressof(size), ctypes.addressof(stride), dtype)


    def view(self, t: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        """A tensor in another one's memory."""
        array = ctypes.c_int64 * max(1, len(sizes))
        size, stride = array(*sizes), array(*strides)
        return self._view(t, len(sizes), ctypes.addressof(size), ctypes.addressof(stride))

    def copies(self, to: torch.Tensor, source: torch.Tensor) -> bool:
        """Copy all elements; whether that was done."""
        return not self._copy(to, source)

    def memory(self, t: torch.Tensor) -> tuple[int, bool]:
        """Bytes from its first element on, and whether a tensor made now would be of inference mode exactly if this one is."""
        return int(self._room(t)), bool(self._of_now(t))


@functools.cache
def dtype_code(dtype: torch.dtype) -> int:
    """Torch's number of a dtype, as `hf_dtype` gives it."""
    probe = torch.empty(0, dtype=dtype)
    handle, code = ctypes.c_void_p(probe._cdata), ctypes.c_int32(-1)
    ask = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(_address("aoti_torch_get_dtype"))
    if ask(ctypes.addressof(handle), ctypes.addressof(code)):
        raise InternalError(f"torch does not tell the number of {dtype}")
    return code.value


def _proven(access: TensorHelpers, tensors: Sequence[torch.Tensor]) -> None:
    """Compare every answer with Python's; raises at the first that differs."""
    reader = TensorReader(access.symbols)
    cpu = plain_keys()
    for t in tensors:
        plain = keys_of(t) & ~cpu.may == 0 and keys_of(t) & cpu.must == cpu.must
        if reader.plain(t) is not plain:
            raise InternalError("native code does not recognize a plain tensor", because=str(_C._dispatch_keys(t)))
        if not plain:
            continue
        want = (tuple(t.shape), t.stride(), dtype_code(t.dtype), t.numel(), t.data_ptr(), t.is_contiguous())
        if reader.read(t) != want:
            raise InternalError("native code reads other facts of a tensor than Python", because=f"{reader.read(t)}, not {want}")
        made = reader.empty(t.shape, t.stride(), dtype_code(t.dtype))
        if type(made) is not torch.Tensor or (made.shape, made.stride(), made.dtype) != (t.shape, t.stride(), t.dtype):
            raise InternalError("native code makes another tensor than it was asked for")
        if not t.numel():
            continue
        behind = t.untyped_storage().nbytes() - t.storage_offset() * t.element_size()
        if reader.memory(t) != (behind, t.is_inference() == torch.is_inference_mode_enabled()):
            raise InternalError("native code finds another memory behind a tensor than there is")
        seen = reader.view(t, t.shape, t.stride())
        if (seen.data_ptr(), seen.shape, seen.stride(), seen.dtype) != (t.data_ptr(), t.shape, t.stride(), t.dtype):
            raise InternalError("native code sees another memory than it was asked for")
        if not reader.copies(made := reader.empty(t.shape, torch.empty(t.shape).stride(), dtype_code(t.dtype)), t) or not (
            torch.equal(made, t)
        ):
            raise InternalError("native code copies other numbers than it was asked for")
    for other in (None, 1, object(), [1]):
        if reader.plain(other):
            raise InternalError(f"native code takes {other!r} for a tensor")


@once
def _found() -> TensorHelpers | str:
    try:
        tensors = specimens()
        access = _compiled(find_places(tensors))
        _proven(access, tensors)
        return access
    except Exception as e:  # whatever another torch does otherwise is a reason to stay with Python
        return error_text(e)


def unavailable() -> str:
    """Why native code cannot read tensors in this process; empty if it can."""
    found = _found()
    return found if isinstance(found, str) else ""


def access() -> TensorHelpers:
    """The helpers; raises InternalError where there are none."""
    found = _found()
    if isinstance(found, str):
        raise InternalError("native code cannot read tensors here", because=found)
    return found


def symbols() -> Mapping[str, int]:
    """Addresses of the helpers by name, for `load_object`."""
    return access().symbols
