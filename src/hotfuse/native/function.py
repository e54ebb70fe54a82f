"""Native code as a Python function object: `ptr name(ptr self, ptr args, i64 count)`, called with borrowed references.

The object keeps the code alive, and whatever else the code knows only by address; the interpreter holds a reference to a function
while it runs, so code that is entered this way cannot be freed under a call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from hotfuse.native.jit import Loaded

_METH_FASTCALL = 0x80


class _MethodDef(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


class _Self:
    """What a function object holds on to: the interpreter reads its description to the very end."""

    __slots__ = ("keep", "loaded", "method")

    def __init__(self, method: _MethodDef, loaded: Loaded, keep: tuple[Any, ...]) -> None:
        self.method, self.loaded, self.keep = method, loaded, keep


@functools.cache
def _maker() -> Any:
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return make(("PyCFunction_NewEx", ctypes.pythonapi))


def python_function(loaded: Loaded, name: str, *keep: Any) -> Callable[..., Any]:
    """A function object over code that takes its arguments as a C array of objects and returns a new reference or null."""
    method = _MethodDef(name.encode(), loaded.address(name), _METH_FASTCALL, None)
    return _maker()(ctypes.addressof(method), _Self(method, loaded, keep), None)


def python_symbols(*names: str) -> dict[str, int]:
    """Addresses of functions of Python's C interface, and of `None`."""
    found = {name: ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0 for name in names}
    return {**found, "_Py_NoneStruct": id(None)}


class _Words(int):
    """The address of some words; as a function's `self`, it keeps everything alive as long as the function."""

    keep: tuple[Any, ...]


def word_function(loaded: Loaded, name: str, words: Sequence[int], *keep: Any) -> Callable[..., Any]:
    """The same, one piece of code for many functions: its `self` is the address of words of its own (`PyLong_AsVoidPtr`)."""
    array = (ctypes.c_int64 * max(1, len(words)))(*words)
    return function_at(loaded, name, ctypes.addressof(array), array, *keep)


def function_at(loaded: Loaded, name: str, address: int, *keep: Any) -> Callable[..., Any]:
    """The same over words that are already there."""
    method = _MethodDef(name.encode(), loaded.address(name), _METH_FASTCALL, None)
    at = _Words(address)
    at.keep = (method, loaded, *keep)
    return _maker()(ctypes.addressof(method), at, None)
