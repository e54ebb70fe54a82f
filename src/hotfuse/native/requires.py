"""Whether the same tensors require gradients as did before, answered by one native sweep: `same() -> bool`.

Torch keeps the flag in a part of its own behind a pointer in the tensor's C++ part, which plain tensors do not have. Neither place
is documented, so both are *found* on live tensors and compared with what Python says. Where that fails there is a reason instead,
and callers ask Python, tensor by tensor. Only leaves may be asked about: of others the flag follows from what made them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from hotfuse.base.errors import InternalError
from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.native import tensors
from hotfuse.native.function import python_symbols, word_function
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object

_IMPL_WORDS = 24


@dataclass(frozen=True, slots=True)
class FlagPlaces:
    """Where the flag lies, in bytes."""

    meta_at: int
    """The pointer to the part for gradients, in the C++ part; null for tensors that never required any."""
    flag_at: int
    """The flag, one byte, in there."""


def _words(t: torch.Tensor) -> list[int]:
    return list((ctypes.c_uint64 * _IMPL_WORDS).from_address(t._cdata))  # pyright: ignore[reportPrivateUsage]


def _bytes(address: int) -> list[int]:
    """All of a block that torch allocated."""
    usable = ctypes.CDLL(None).malloc_usable_size
    usable.restype, usable.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    return list((ctypes.c_uint8 * usable(address)).from_address(address))


def _leaves() -> list[torch.Tensor]:
    with torch.inference_mode(False):
        return [torch.zeros(3, 4), torch.zeros((), dtype=torch.float64), nn.Parameter(torch.zeros(5)), torch.zeros(0, 2)]


@functools.cache
def flag_places() -> FlagPlaces | str:
    """Where the flags lie, or why that is not known."""
    if why := tensors.unavailable():
        return why
    try:
        return _found()
    except Exception as e:  # whatever another torch does otherwise is a reason to ask Python
        return error_text(e)


def _found() -> FlagPlaces:
    metas = set(range(_IMPL_WORDS))
    for t in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64)):
        before = _words(t)
        after = _words(t.requires_grad_())
        metas &= {i for i in range(_IMPL_WORDS) if before[i] == 0 and after[i] != 0}
    if len(metas) != 1:
        raise InternalError(f"{len(metas)} places may lead to a tensor's part for gradients")
    meta_at = 8 * metas.pop()
    flags: set[int] | None = None
    for t in _leaves():
        for flag in (True, False, True, True, False):
            seen = _bytes(_words(t.requires_grad_(flag))[meta_at // 8])
            now = {i for i, byte in enumerate(seen) if byte == flag}
            flags = now if flags is None else flags & now
    if flags is None or len(flags) != 1:
        raise InternalError(f"{len(flags or ())} places may say whether a tensor requires gradients")
    places = FlagPlaces(meta_at, flags.pop())
    # of no layer, which would draw them and move the program's generator
    weights = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    for t in (*_leaves(), *weights, torch.zeros(3).requires_grad_(), weights[0].detach()):
        if read_flag(t, places) is not t.requires_grad:
            raise InternalError("native code reads another flag of a tensor than Python")
    return places


def read_flag(t: torch.Tensor, places: FlagPlaces) -> bool:
    """What native code would read."""
    meta = _words(t)[places.meta_at // 8]
    return bool(meta) and bool(ctypes.c_uint8.from_address(meta + places.flag_at).value)


def _text(places: FlagPlaces) -> str:
    return f"""
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyBool_FromLong(i64)
@none = private constant i8 0

define ptr @same(ptr %self, ptr %args, i64 %n) {{
entry:
  %job = call ptr @PyLong_AsVoidPtr(ptr %self)
  %count = load i64, ptr %job
  %rows.at = getelementptr i64, ptr %job, i64 1
  %rows = load ptr, ptr %rows.at
  br label %next
next:
  %i = phi i64 [0, %entry], [%i1, %on]
  %end = icmp eq i64 %i, %count
  br i1 %end, label %yes, label %look
look:
  %word = mul i64 %i, 2
  %object.at = getelementptr i64, ptr %rows, i64 %word
  %object = load ptr, ptr %object.at
  %known.at = getelementptr i64, ptr %object.at, i64 1
  %known = load i64, ptr %known.at
  %impl.at = getelementptr i8, ptr %object, i64 {tensors.access().places.impl_at}
  %impl = load ptr, ptr %impl.at
  %meta.at = getelementptr i8, ptr %impl, i64 {places.meta_at}
  %meta = load ptr, ptr %meta.at
  %bare = icmp eq ptr %meta, null
  %flag.there = getelementptr i8, ptr %meta, i64 {places.flag_at}
  %flag.at = select i1 %bare, ptr @none, ptr %flag.there
  %flag8 = load i8, ptr %flag.at
  %flag = zext i8 %flag8 to i64
  %equal = icmp eq i64 %flag, %known
  br i1 %equal, label %on, label %no
on:
  %i1 = add i64 %i, 1
  br label %next
yes:
  %true = call ptr @PyBool_FromLong(i64 1)
  ret ptr %true
no:
  %false = call ptr @PyBool_FromLong(i64 0)
  ret ptr %false
}}
"""


@once
def _stub() -> Loaded:
    places = flag_places()
    if isinstance(places, str):
        raise InternalError("native code cannot read flags here", because=places)
    return load_object(helper_object(_text(places)), ["same"], python_symbols("PyLong_AsVoidPtr", "PyBool_FromLong"))


def native_same(leaves: Sequence[torch.Tensor], flags: Sequence[bool]) -> Callable[[], bool] | str:
    """Whether these tensors require gradients as the flags say, as a native question, or why there is none. For the background."""
    if any(type(t) not in (torch.Tensor, nn.Parameter) or not t.is_leaf for t in leaves):
        return "a tensor of another type, or no leaf"
    try:
        stub = _stub()
    except InternalError as e:
        return e.because or e.what
    rows = [w for t, flag in zip(leaves, flags, strict=True) for w in (id(t), int(flag))]
    array = (ctypes.c_int64 * max(1, len(rows)))(*rows)
    return word_function(stub, "same", [len(leaves), ctypes.addressof(array)], array, list(leaves))
