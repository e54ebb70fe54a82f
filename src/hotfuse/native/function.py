"""Native code as a Python function object: `ptr name(ptr self, ptr args, i64 count)`, called with borrowed references.

The object keeps the code alive, and whatever else the code knows only by address; the interpreter holds a reference to a function
while it runs, so code that is entered this way cannot be freed under a call.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from hotfuse.base.errors import InternalError
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


_DECLARED = """declare ptr @PyLong_AsVoidPtr(ptr)
declare double @PyFloat_AsDouble(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyErr_Occurred()
declare i32 @PyErr_BadArgument()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
@_Py_NoneStruct = external global i8"""
_API = ("PyLong_AsVoidPtr", "PyFloat_AsDouble", "PyLong_FromLongLong", "PyErr_Occurred", "PyErr_BadArgument", "PyEval_SaveThread",
        "PyEval_RestoreThread", "Py_IncRef")  # fmt: skip
_READ = {"i64": "ptrtoint ptr {0} to i64", "float": "fptrunc double {0} to float"}
"""How an argument of a type becomes of what Python's interface gives, where it is not that itself."""


def _entry_text(module: str, name: str) -> str:
    """`ptr py_name(ptr self, ptr args, i64 count)` for a function of a module's text: of addresses, numbers and floats, and giving
    nothing or a number."""
    head = re.search(rf"^define (void|i64) @{name}\(([^)]*)\)", module, re.MULTILINE)
    if head is None:
        raise InternalError(f"no function {name} of addresses and numbers in the text")
    kinds = [part.split()[0] for part in head[2].split(",")]
    lines = [
        f"define ptr @py_{name}(ptr %self, ptr %args, i64 %count) {{", f"  %fits = icmp eq i64 %count, {len(kinds)}",
        "  br i1 %fits, label %read, label %wrong", "wrong:", "  %said = call i32 @PyErr_BadArgument()", "  ret ptr null", "read:",
    ]  # fmt: skip
    given: list[str] = []
    for i, kind in enumerate(kinds):
        lines += [f"  %at{i} = getelementptr ptr, ptr %args, i64 {i}", f"  %object{i} = load ptr, ptr %at{i}"]
        if kind == "float":
            lines.append(f"  %read{i} = call double @PyFloat_AsDouble(ptr %object{i})")
        else:
            lines.append(f"  %read{i} = call ptr @PyLong_AsVoidPtr(ptr %object{i})")
        if kind == "i32":
            lines += [f"  %wide{i} = ptrtoint ptr %read{i} to i64", f"  %value{i} = trunc i64 %wide{i} to i32"]
        elif kind in _READ:
            lines.append(f"  %value{i} = {_READ[kind].format(f'%read{i}')}")
        given.append(f"{kind} %read{i}" if kind == "ptr" else f"{kind} %value{i}")
    call = f"call {head[1]} @{name}({', '.join(given)})"
    lines += [
        "  %error = call ptr @PyErr_Occurred()", "  %right = icmp eq ptr %error, null",
        "  br i1 %right, label %go, label %failed", "failed:", "  ret ptr null", "go:", "  %thread = call ptr @PyEval_SaveThread()",
        f"  {call}" if head[1] == "void" else f"  %result = {call}", "  call void @PyEval_RestoreThread(ptr %thread)",
    ]  # fmt: skip
    if head[1] == "void":
        lines += ["  call void @Py_IncRef(ptr @_Py_NoneStruct)", "  ret ptr @_Py_NoneStruct"]
    else:
        lines += ["  %number = call ptr @PyLong_FromLongLong(i64 %result)", "  ret ptr %number"]
    return "\n".join((*lines, "}"))


def with_entries(module: str, names: Sequence[str]) -> str:
    """A module's text with what Python enters these functions by (`entered`): a call takes a fifth of what it takes through
    `ctypes`, which matters to functions of a few microseconds. The interpreter lock is let go meanwhile."""
    return "\n".join((module, _DECLARED, *(_entry_text(module, name) for name in names)))


def entry_symbols() -> dict[str, int]:
    """What those refer to."""
    return python_symbols(*_API)


def entered(loaded: Loaded, name: str) -> Callable[..., Any]:
    """A function of a module with entries, as a Python function."""
    return python_function(loaded, f"py_{name}")
