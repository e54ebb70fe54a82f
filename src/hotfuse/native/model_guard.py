"""Whether anything of what a model is made of changed, answered by one native sweep: `unchanged() -> bool`.

    dicts     whose tag is another one: anything in them may have changed
    values    of which a dict has another object under a key than it had, or none
    sizes     of dicts, where there are no tags
    cells     that hold another object
    lengths   of lists
    items     of which a list has another object at a place than it had
    functions whose code or defaults are other ones
    slots     of an object that hold another value
    equals    that were equal to a copy: sets
    arrays    whose bytes differ from a copy
    context   variables that have another value here
    classes   of modules that are other ones
    tensors   whose memory lies elsewhere, or whose version is another one
    memory    the next chunk of weights that plans have copies of, by checksum (`checksums`)

True means that everything is as it was noted. False means that somebody should look: a dict's tag also changes when a value is
replaced by itself. What was noted is an array of the function's own, made anew when something is accepted, so a sweep never sees
half of it. Objects must be kept alive by the caller.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.once import once
from hotfuse.native import tensors
from hotfuse.native.checksums import turn_symbol
from hotfuse.native.function import python_symbols, word_function
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.toolchain import helper_object
from hotfuse.native.versions import dict_tag_at, version_places

_API = ("PyLong_AsVoidPtr", "PyBool_FromLong", "PyDict_GetItemWithError", "PyDict_Size", "PyCell_Get", "Py_DecRef", "PyErr_Clear",
        "PyList_Size", "PyList_GetItem", "PyFunction_GetCode", "PyFunction_GetDefaults", "PyFunction_GetKwDefaults",
        "PyObject_GenericGetAttr", "PyObject_RichCompareBool", "PyContextVar_Get", "memcmp")
NOT_SET = object()
"""What a slot or variable holds that holds nothing."""
UNVERSIONED = -1
"""The version of a tensor that has none."""
_TYPE_AT = object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p)
"""Where an object has its class: at the end of what every object has."""


@dataclass(frozen=True, slots=True)
class NotedValues:
    """What code reads that no dict or list shows."""

    functions: Sequence[tuple[types.FunctionType, types.CodeType, Any, Any]] = ()
    """A function, its code, its defaults and those of arguments by name; None where it has none."""
    slots: Sequence[tuple[Any, str, object]] = ()
    """An object, a name, and its value or `NOT_SET`."""
    equals: Sequence[tuple[Any, Any]] = ()
    """An object and an equal one."""
    arrays: Sequence[tuple[int, bytes]] = ()
    """An address and the bytes there."""
    context: Sequence[tuple[contextvars.ContextVar[Any], object]] = ()
    """A context variable, and its value or `NOT_SET`."""


@dataclass(frozen=True, slots=True)
class Noted:
    """What is compared; a dict is noted by its tag or by its size and values."""

    dicts: Sequence[dict[Any, Any]]
    places: Sequence[tuple[dict[Any, Any], Any, object]]
    """A dict, a key in it, and the value under it."""
    names: Sequence[tuple[dict[Any, Any], Any, object]]
    """The same of dicts that are no part of the model: most of what is written there does not concern it."""
    cells: Sequence[tuple[types.CellType, object]]
    """A closure's variable and its value; None also where it has none yet."""
    tensors: Sequence[tuple[torch.Tensor, int, int]]
    """A tensor, its address, and its version or `UNVERSIONED`."""
    lists: Sequence[tuple[list[Any], Sequence[object]]] = ()
    """A list and what was in it."""
    values: NotedValues = NotedValues()
    tags: Sequence[int] = ()
    """Tags of the dicts at a time when their values were those noted; empty where there are none."""
    sized: Sequence[dict[Any, Any]] = ()
    """Dicts that every call writes: beside tags of others, their size is compared, and the values in them that are `names`."""
    classes: Sequence[tuple[object, type]] = ()
    """An object and its class."""


def _sweep(name: str, width: int, check: str, then: str) -> str:
    """A loop over rows of `width` words; `check` sets %NAME.same from the row's words %NAME.0, %NAME.1 ..."""
    loads = "".join(
        f"  %{name}.{k}.at = getelementptr i64, ptr %{name}.row, i64 {k}\n  %{name}.{k} = load i64, ptr %{name}.{k}.at\n"
        for k in range(width)
    )
    return f"""
{name}:
  %{name}.count.at = getelementptr i64, ptr %job, i64 {2 * _SWEEPS.index(name)}
  %{name}.rows.at = getelementptr i64, ptr %job, i64 {2 * _SWEEPS.index(name) + 1}
  %{name}.count = load i64, ptr %{name}.count.at
  %{name}.rows = load ptr, ptr %{name}.rows.at
  br label %{name}.next
{name}.next:
  %{name}.i = phi i64 [0, %{name}], [%{name}.i1, %{name}.on]
  %{name}.end = icmp eq i64 %{name}.i, %{name}.count
  br i1 %{name}.end, label %{then}, label %{name}.look
{name}.look:
  %{name}.word = mul i64 %{name}.i, {width}
  %{name}.row = getelementptr i64, ptr %{name}.rows, i64 %{name}.word
{loads}{check}
  br i1 %{name}.same, label %{name}.on, label %no
{name}.on:
  %{name}.i1 = add i64 %{name}.i, 1
  br label %{name}.next
"""


_WIDTHS = {"tags": 2, "values": 3, "sizes": 2, "cells": 2, "lengths": 2, "items": 3, "functions": 4, "slots": 3, "equals": 2,
           "arrays": 3, "context": 2, "classes": 2, "tensors": 3}  # fmt: skip
_SWEEPS = tuple(_WIDTHS)
_TAGS = """  %tags.dict = inttoptr i64 %tags.0 to ptr
  %tags.at = getelementptr i8, ptr %tags.dict, i64 TAG
  %tags.now = load i64, ptr %tags.at
  %tags.same = icmp eq i64 %tags.now, %tags.1"""
_VALUES = """  %values.dict = inttoptr i64 %values.0 to ptr
  %values.key = inttoptr i64 %values.1 to ptr
  %values.held = inttoptr i64 %values.2 to ptr
  %values.now = call ptr @PyDict_GetItemWithError(ptr %values.dict, ptr %values.key)
  %values.same = icmp eq ptr %values.now, %values.held"""
_SIZES = """  %sizes.dict = inttoptr i64 %sizes.0 to ptr
  %sizes.now = call i64 @PyDict_Size(ptr %sizes.dict)
  %sizes.same = icmp eq i64 %sizes.now, %sizes.1"""
_CELLS = """  %cells.cell = inttoptr i64 %cells.0 to ptr
  %cells.held = inttoptr i64 %cells.1 to ptr
  %cells.now = call ptr @PyCell_Get(ptr %cells.cell)
  %cells.same = icmp eq ptr %cells.now, %cells.held
  call void @Py_DecRef(ptr %cells.now)"""
_LENGTHS = """  %lengths.list = inttoptr i64 %lengths.0 to ptr
  %lengths.now = call i64 @PyList_Size(ptr %lengths.list)
  %lengths.same = icmp eq i64 %lengths.now, %lengths.1"""
_ITEMS = """  %items.list = inttoptr i64 %items.0 to ptr
  %items.held = inttoptr i64 %items.2 to ptr
  %items.now = call ptr @PyList_GetItem(ptr %items.list, i64 %items.1)
  %items.same = icmp eq ptr %items.now, %items.held"""
_FUNCTIONS = """  %functions.object = inttoptr i64 %functions.0 to ptr
  %functions.code = call ptr @PyFunction_GetCode(ptr %functions.object)
  %functions.defaults = call ptr @PyFunction_GetDefaults(ptr %functions.object)
  %functions.named = call ptr @PyFunction_GetKwDefaults(ptr %functions.object)
  %functions.code.int = ptrtoint ptr %functions.code to i64
  %functions.defaults.int = ptrtoint ptr %functions.defaults to i64
  %functions.named.int = ptrtoint ptr %functions.named to i64
  %functions.a = icmp eq i64 %functions.code.int, %functions.1
  %functions.b = icmp eq i64 %functions.defaults.int, %functions.2
  %functions.c = icmp eq i64 %functions.named.int, %functions.3
  %functions.ab = and i1 %functions.a, %functions.b
  %functions.same = and i1 %functions.ab, %functions.c"""
_SLOTS = """  %slots.object = inttoptr i64 %slots.0 to ptr
  %slots.name = inttoptr i64 %slots.1 to ptr
  %slots.value = call ptr @PyObject_GenericGetAttr(ptr %slots.object, ptr %slots.name)
  %slots.int = ptrtoint ptr %slots.value to i64
  %slots.same = icmp eq i64 %slots.int, %slots.2
  call void @Py_DecRef(ptr %slots.value)
  call void @PyErr_Clear()"""
_EQUALS = """  %equals.object = inttoptr i64 %equals.0 to ptr
  %equals.copy = inttoptr i64 %equals.1 to ptr
  %equals.found = call i32 @PyObject_RichCompareBool(ptr %equals.object, ptr %equals.copy, i32 2)
  %equals.same = icmp eq i32 %equals.found, 1
  call void @PyErr_Clear()"""
_ARRAYS = """  %arrays.at = inttoptr i64 %arrays.0 to ptr
  %arrays.copy = inttoptr i64 %arrays.1 to ptr
  %arrays.found = call i32 @memcmp(ptr %arrays.at, ptr %arrays.copy, i64 %arrays.2)
  %arrays.same = icmp eq i32 %arrays.found, 0"""
_CONTEXT = """  %context.object = inttoptr i64 %context.0 to ptr
  store ptr null, ptr %found
  %context.code = call i32 @PyContextVar_Get(ptr %context.object, ptr null, ptr %found)
  %context.value = load ptr, ptr %found
  %context.int = ptrtoint ptr %context.value to i64
  %context.same = icmp eq i64 %context.int, %context.1
  call void @Py_DecRef(ptr %context.value)"""
_CLASSES = """  %classes.object = inttoptr i64 %classes.0 to ptr
  %classes.at = getelementptr i8, ptr %classes.object, i64 TYPE
  %classes.now = load i64, ptr %classes.at
  %classes.same = icmp eq i64 %classes.now, %classes.1"""
_TENSORS = """  %tensors.object = inttoptr i64 %tensors.0 to ptr
  %tensors.data = call ptr @hf_data(ptr %tensors.object)
  %tensors.address = ptrtoint ptr %tensors.data to i64
  %tensors.there = icmp eq i64 %tensors.address, %tensors.1
  %tensors.impl.at = getelementptr i8, ptr %tensors.object, i64 IMPL
  %tensors.impl = load ptr, ptr %tensors.impl.at
  %tensors.counter.at = getelementptr i8, ptr %tensors.impl, i64 COUNTER
  %tensors.counter = load ptr, ptr %tensors.counter.at
  %tensors.bare = icmp eq ptr %tensors.counter, null
  %tensors.version.at = getelementptr i8, ptr %tensors.counter, i64 NUMBER
  %tensors.version.or = select i1 %tensors.bare, ptr @none, ptr %tensors.version.at
  %tensors.version = load i32, ptr %tensors.version.or
  %tensors.known = trunc i64 %tensors.2 to i32
  %tensors.unwritten = icmp eq i32 %tensors.version, %tensors.known
  %tensors.same = and i1 %tensors.there, %tensors.unwritten"""


def _text() -> str:
    places, tag = version_places(), dict_tag_at()
    if isinstance(places, str):
        raise InternalError("native code cannot read versions here", because=places)
    words = {"TAG": tag if isinstance(tag, int) else 0, "IMPL": tensors.access().places.impl_at,
             "COUNTER": places.counter_at, "NUMBER": places.number_at, "TYPE": _TYPE_AT}  # fmt: skip
    checks = (_TAGS, _VALUES, _SIZES, _CELLS, _LENGTHS, _ITEMS, _FUNCTIONS, _SLOTS, _EQUALS, _ARRAYS, _CONTEXT, _CLASSES, _TENSORS)
    body = ""
    for name, then, check in zip(_SWEEPS, (*_SWEEPS[1:], "memory"), checks, strict=True):
        for word, number in words.items():
            check = check.replace(f"i64 {word}\n", f"i64 {number}\n")
        body += _sweep(name, _WIDTHS[name], check, then)
    return tensors.DECLARATIONS + f"""
declare ptr @PyLong_AsVoidPtr(ptr)
declare ptr @PyBool_FromLong(i64)
declare ptr @PyDict_GetItemWithError(ptr, ptr)
declare i64 @PyDict_Size(ptr)
declare ptr @PyCell_Get(ptr)
declare i64 @PyList_Size(ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare ptr @PyFunction_GetCode(ptr)
declare ptr @PyFunction_GetDefaults(ptr)
declare ptr @PyFunction_GetKwDefaults(ptr)
declare ptr @PyObject_GenericGetAttr(ptr, ptr)
declare i32 @PyObject_RichCompareBool(ptr, ptr, i32)
declare i32 @PyContextVar_Get(ptr, ptr, ptr)
declare i32 @memcmp(ptr, ptr, i64)
declare void @Py_DecRef(ptr)
declare void @PyErr_Clear()
declare i64 @hf_table_turn(ptr)
@none = private constant i32 {UNVERSIONED}

define ptr @unchanged(ptr %self, ptr %args, i64 %n) {{
entry:
  %found = alloca ptr
  %job = call ptr @PyLong_AsVoidPtr(ptr %self)
  br label %tags
{body}
memory:
  %memory.at = getelementptr i64, ptr %job, i64 {2 * len(_SWEEPS)}
  %memory.word = load ptr, ptr %memory.at
  %memory.any = icmp ne ptr %memory.word, null
  br i1 %memory.any, label %memory.some, label %yes
memory.some:
  %memory.table = load ptr, ptr %memory.word
  %memory.there = icmp ne ptr %memory.table, null
  br i1 %memory.there, label %memory.step, label %yes
memory.step:
  %memory.found = call i64 @hf_table_turn(ptr %memory.table)
  %memory.same = icmp eq i64 %memory.found, 0
  br i1 %memory.same, label %yes, label %no
yes:
  %true = call ptr @PyBool_FromLong(i64 1)
  ret ptr %true
no:
  call void @PyErr_Clear()
  %false = call ptr @PyBool_FromLong(i64 0)
  ret ptr %false
}}
"""


@once
def _stub() -> Loaded:
    symbols = {**tensors.symbols(), **python_symbols(*_API), **turn_symbol()}
    return load_object(helper_object(_text()), ["unchanged"], symbols)


@functools.cache
def unavailable() -> str:
    """Why there is no native sweep in this process; empty if there is one."""
    try:
        _stub()
    except (InternalError, AttributeError) as e:
        return str(e.because or e.what if isinstance(e, InternalError) else e).splitlines()[0]
    return ""


def refused(noted: Noted) -> str:
    """Why native code cannot tell of changes of these; empty if it can."""
    if why := unavailable():
        return why
    for d in (*noted.dicts, *(d for d, _, _ in (*noted.places, *noted.names))):
        if type(d) not in (dict, OrderedDict):
            return f"{type(d).__name__} has a way of its own to look things up"
    for t, address, version in noted.tensors:
        if type(t) not in (torch.Tensor, nn.Parameter) or t.device.type == "meta":
            return f"a tensor of type {type(t).__name__} on {t.device}"
        if not address and t.numel():
            return "a tensor without memory"
        if (version == UNVERSIONED) is not t.is_inference():
            return "a tensor of inference mode"
    return ""


def _bytes_at(copy: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(copy), ctypes.c_void_p).value or 0


def _empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is NOT_SET
    except ValueError:
        return True


def tags(dicts: Sequence[dict[Any, Any]]) -> list[int]:
    """The dicts' tags now; to be read before what is in them is compared. Empty where there are none."""
    at = dict_tag_at()
    return [ctypes.c_int64.from_address(id(d) + at).value for d in dicts] if isinstance(at, int) else []


def unchanged(noted: Noted, memory: int = 0) -> Callable[[], bool]:
    """The sweep, where it is not `refused`; `memory` is the address of a word that holds a table of checksums, or zero."""
    tagged = noted.tags
    looked_up = noted.names if tagged else (*noted.places, *noted.names)
    rows = {
        "tags": [w for d, tag in zip(noted.dicts, tagged, strict=True) for w in (id(d), tag)] if tagged else [],
        "values": [w for d, key, value in looked_up for w in (id(d), id(key), id(value))],
        "sizes": [w for d in (noted.sized if tagged else noted.dicts) for w in (id(d), len(d))],
        "cells": [w for cell, value in noted.cells for w in (id(cell), 0 if value is None and _empty(cell) else id(value))],
        "lengths": [w for held, items in noted.lists for w in (id(held), len(items))],
        "items": [w for held, items in noted.lists for k, item in enumerate(items) for w in (id(held), k, id(item))],
        "functions": [w for f, *parts in noted.values.functions for w in (id(f), *(0 if p is None else id(p) for p in parts))],
        "slots": [w for o, name, value in noted.values.slots for w in (id(o), id(name), 0 if value is NOT_SET else id(value))],
        "equals": [w for o, copy in noted.values.equals for w in (id(o), id(copy))],
        "arrays": [w for at, copy in noted.values.arrays for w in (at, _bytes_at(copy), len(copy))],
        "context": [w for v, value in noted.values.context for w in (id(v), 0 if value is NOT_SET else id(value))],
        "classes": [w for o, cls in noted.classes for w in (id(o), id(cls))],
        "tensors": [w for t, address, version in noted.tensors for w in (id(t), address, version)],
    }
    arrays = {n: (ctypes.c_int64 * max(1, len(w)))(*w) for n, w in rows.items()}
    head = [x for n in _SWEEPS for x in (len(rows[n]) // _WIDTHS[n], ctypes.addressof(arrays[n]))]
    return word_function(_stub(), "unchanged", [*head, memory], arrays, noted)
