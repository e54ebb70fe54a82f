"""What a model's code reads besides modules and tensors: what it means may change without any attribute of a module being set.

    model.config.use_bias = False        self.options["scale"] = 2.0        steps.append(3)        settings.SCALE = 3
    forward.__defaults__ = (2.0,)        os.environ["SCALE"] = "3"          flags.add("fast")      table[:] = 0

The code is that of modules' classes (`class_code`), of the functions that are served, and of every function that those name, call
through objects, or close over, and special methods of the classes met (`d[k]` runs `__getitem__`). What is looked through are the
attributes that it names and its variables: a trainer that a module holds for others, and its counters, are none of the captured
graph's business. Followed from there: dicts, lists, tuples, small sets, queues, results that functions keep, and objects of classes
that are neither torch's nor the standard library's (namespaces and collections are). There are bounds, because a look is taken at
every call: containers of many entries (vocabularies) are left out, as are those with keys of their own, and all beyond the first so
many. What differs from thread to thread, and large NumPy arrays, no look can tell of: `blind` says so, and such a model keeps its
own code.
"""

from __future__ import annotations

import contextvars
import copy
import enum
import functools
import gc
import sys
import threading
import types
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import field
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from hotfuse.base.bytecode import globals_of, imports_of, names_of
from hotfuse.base.environment_reads import NAMES, variables_of
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.process_effects import STANDS_IN_FOR
from hotfuse.runtime.weights.cached_calls import CACHED, CachedCalls, cached_calls
from hotfuse.runtime.weights.class_code import foreign, places_of, special_methods, unwrapped

MAX_CONTAINERS = 1024
MAX_ENTRIES = 256
MAX_FUNCTIONS = 512
MAX_NAMES = 2048
MAX_ARRAY_BYTES = 1 << 14
"""Of all NumPy arrays together: they are compared whole at every call."""
_OPAQUE = (type, types.ModuleType)
_PLAIN = (str, int, float, complex, bytes, type(None))
_STOOD_IN_FOR = frozenset({
    ("torch.cuda", "is_current_stream_capturing"), ("torch.cuda", "synchronize"),
    ("sys", "stdout"), ("sys", "stderr"), ("warnings", "showwarning"), *STANDS_IN_FOR,
})  # fmt: skip
"""What recordings and captures have others stand in for, for a while: no change of the model."""


class ClosureCell:
    """A closure's variable, readable like a mapping."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, _key: str) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # not assigned yet
            return None


@dataclass(slots=True)
class Reads:
    """What code reads, each thing once, within bounds."""

    dicts: list[dict[Any, Any]] = field(default_factory=list[dict[Any, Any]])
    """Those of objects among them: any entry counts."""
    lists: list[list[Any]] = field(default_factory=list[list[Any]])
    names: list[tuple[Any, str]] = field(default_factory=list[tuple[Any, str]])
    """Variables: a dict of globals, of a module, or a `ClosureCell`, and the name."""
    entries: list[tuple[dict[str, Any], str]] = field(default_factory=list[tuple[dict[str, Any], str]])
    """Methods and values of classes: the class's dict and the name."""
    methods: list[tuple[dict[str, Any], str]] = field(default_factory=list[tuple[dict[str, Any], str]])
    """The same of tensors' own class, which somebody may have patched."""
    functions: list[types.FunctionType] = field(default_factory=list[types.FunctionType])
    """Whose code and defaults count; methods are among `entries`."""
    slots: list[tuple[Any, str]] = field(default_factory=list[tuple[Any, str]])
    sets: list[Any] = field(default_factory=list[Any])
    """Sets, deques, arrays: what is equal to a copy of it."""
    arrays: list[np.ndarray] = field(default_factory=list[np.ndarray])
    context: list[contextvars.ContextVar[Any]] = field(default_factory=list[contextvars.ContextVar[Any]])
    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Those that are read as they are: in dicts, lists, objects, classes, and results that are kept."""
    modules: list[nn.Module] = field(default_factory=list[nn.Module])
    """The same: modules that no module of the model has."""
    kept: list[CachedCalls] = field(default_factory=list[CachedCalls])
    """Of functions behind `functools.lru_cache`."""
    variables: set[str] = field(default_factory=set[str])
    """Environment variables that code names."""
    every_variable: bool = False
    """Whether it reads some without naming them."""
    cut: bool = False
    """Whether there was more code or data than is followed."""
    blind: str = ""
    """What is read whose changes no look would show, in words; empty where there is nothing."""


def _variables(function: types.FunctionType) -> list[tuple[Any, str]]:
    """The global and closure variables a function names: what it means when they are rebound."""
    space = function.__globals__
    cells = zip(function.__closure__ or (), function.__code__.co_freevars, strict=True)
    return [*((space, n) for n in globals_of(function.__code__) if n in space), *((ClosureCell(c), n) for c, n in cells)]


def reads(modules: Sequence[nn.Module], functions: Iterable[Callable[..., Any]] = (), values: Iterable[Any] = ()) -> Reads:
    """What the code of modules and functions reads; `values` are taken to be read, and classes among them to be those of objects
    that are."""
    given = list(values)
    kinds = [v for v in given if isinstance(v, type) and not foreign(v)]
    return _CodeWalk(modules, [*functions, *given], kinds).found


class _CodeWalk:
    """One walk from code to what it reads, and to the code of that."""

    def __init__(self, modules: Sequence[nn.Module], begin: list[Any], kinds: Sequence[type] = ()) -> None:
        self.found = Reads()
        self._seen: set[int] = set()
        self._places: set[tuple[int, str]] = set()
        self._names: set[str] = {"forward", "__call__"}
        """Of attributes and variables, in the code met so far."""
        self._classes: dict[type, None] = dict.fromkeys([*map(type, modules), *kinds])
        """Of modules and of objects that are read."""
        self._bytes = 0
        self._left: list[Any] = begin[::-1]
        known = (0, 0, 0)
        while self._left or known != self._known():
            while self._left:
                self._look(self._left.pop())
            if known != self._known():
                known = self._known()
                self._left += [v for m in modules for k, v in vars(m).items() if k in self._names]
                for kind in list(self._classes):
                    self._names |= special_methods(kind)
                    self._entries_of(kind, self._names)
                for function in list(self.found.functions):
                    self._attributes(function)
        self.found.methods = places_of(torch.Tensor, self._names)

    def _known(self) -> tuple[int, int, int]:
        """How much is to be looked at under names: all three only grow, and are bounded by what there is."""
        return len(self._names), len(self._classes), len(self.found.functions)

    def _entries_of(self, kind: type, names: Set[str]) -> None:
        """Methods and values of a class, under names that code uses."""
        for entries, name in places_of(kind, names):
            self._entry(entries, name)

    def _entry(self, entries: dict[str, Any], name: str) -> None:
        """A method or value of a class."""
        if self._new_place(entries, name):
            self.found.entries.append((entries, name))
            self._left.append(unwrapped(entries[name]))

    def _new_place(self, owner: Any, name: str) -> bool:
        """Whether a place was not met before, and there is room for it."""
        key = (id(owner.cell if isinstance(owner, ClosureCell) else owner), name)
        if key in self._places:
            return False
        if len(self._places) >= MAX_NAMES:
            self.found.cut = True
            return False
        self._places.add(key)
        return True

    def _look(self, value: Any) -> None:
        if isinstance(value, (*_PLAIN, *_OPAQUE)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self.found.tensors.append(value)
            return
        if isinstance(value, nn.Module):
            self.found.modules.append(value)
            return
        if type(value) is tuple:
            self._left.extend(cast(tuple[Any, ...], value)[:MAX_ENTRIES])
        elif isinstance(value, list):
            self._list(cast(list[Any], value))
        elif type(value) is set:
            self._set(cast(set[Any], value))
        elif isinstance(value, types.FunctionType):
            self._function(value)
            self._dispatched(value)
        elif isinstance(value, deque | bytearray | array):
            self._compared(cast(Any, value))
        elif isinstance(value, weakref.ref):
            self._left.append(cast(Any, value)())
        elif isinstance(value, types.MethodType):
            self._left += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            self._left += [value.keywords, value.args, value.func]
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, contextvars.ContextVar):
            self.found.context.append(cast(contextvars.ContextVar[Any], value))
        elif isinstance(value, threading.local):
            self.found.blind = self.found.blind or "values that each thread has for itself (threading.local)"
        elif type(value) is CACHED:
            self._cached(value)
        else:
            for held in _entries(value):
                self._dict(held)
        if not foreign(type(value)):
            self._object(value)

    def _cached(self, function: Any) -> None:
        """A function whose results are kept: code reads them, too, and whoever got one may write to it."""
        self._left.append(function.__wrapped__)
        if (kept := cached_calls(function)) is None or len(kept.entries) > MAX_ENTRIES:
            self.found.cut = True
        else:
            self.found.kept.append(kept)
            self._left += kept.results

    def _room(self) -> bool:
        left = len(self.found.dicts) + len(self.found.lists) + len(self.found.sets) < MAX_CONTAINERS
        self.found.cut |= not left
        return left

    def _list(self, items: list[Any]) -> None:
        if len(items) <= MAX_ENTRIES and self._room():
            self.found.lists.append(items)
            self._left.extend(items)

    def _dict(self, entries: dict[Any, Any]) -> None:
        if self._room() and (id(entries), "") not in self._places:
            self._places.add((id(entries), ""))
            self.found.dicts.append(entries)
            self._left.extend(list(entries.values()))

    def _set(self, items: set[Any]) -> None:
        if len(items) <= MAX_ENTRIES and self._room() and all(map(_plain, list(items))):
            self.found.sets.append(items)

    def _compared(self, items: deque[Any] | bytearray | array[Any]) -> None:
        """What is compared whole with a copy."""
        self._bytes += 8 * len(items)
        copied = copy.copy(items)
        if self._bytes <= MAX_ARRAY_BYTES and copied == items and all(map(_plain, items)):
            self.found.sets.append(items)
        else:
            kind, most = type(items).__name__, MAX_ARRAY_BYTES // 8
            self.found.blind = self.found.blind or f"a {kind} that holds more than {most} numbers or texts; make it a list"

    def _dispatched(self, function: types.FunctionType) -> None:
        """What a function behind `functools.singledispatch` calls for which type."""
        if isinstance(registry := getattr(function, "registry", None), types.MappingProxyType):
            self._left += gc.get_referents(registry)

    def _array(self, array: np.ndarray) -> None:
        """One whose numbers somebody can write; it is compared where it lies."""
        if not (array.flags.writeable or array.base is not None):
            return
        self._bytes += array.nbytes
        if self._bytes <= MAX_ARRAY_BYTES and array.flags.c_contiguous and not array.dtype.hasobject:
            self.found.arrays.append(array)
        else:
            looked_at = f"looked at are {MAX_ARRAY_BYTES} in all, without gaps, of numbers"
            self.found.blind = self.found.blind or f"a NumPy array of {array.nbytes} bytes ({looked_at}); make it a buffer"

    def _object(self, value: Any) -> None:
        kind = type(value)
        self._classes[kind] = None
        classes = [vars(c) for c in kind.__mro__ if "__slots__" in vars(c)]  # native classes make some values anew at every look
        names = [n for c in classes for n, v in c.items() if isinstance(v, types.MemberDescriptorType)]
        for name in names if len(names) <= MAX_ENTRIES and not foreign(kind) else ():
            if self._new_place(value, name):
                self.found.slots.append((value, name))
                self._left.append(getattr(value, name, None))

    def _function(self, function: types.FunctionType) -> None:
        """A function's variables, and those of modules that it names; torch's own are not followed."""
        if len(self.found.functions) >= MAX_FUNCTIONS:
            self.found.cut = True
            return
        own, names = not foreign(function), names_of(function.__code__)
        if own:
            self.found.functions.append(function)
            if not NAMES.isdisjoint(names):
                variables = variables_of(function.__code__)
                self.found.every_variable |= variables is None
                self.found.variables |= variables or set()
            self._names |= names
            self._left += [function.__kwdefaults__, function.__defaults__]
        for module in self._imported(function) if own else ():
            self._named(module, names, own=own)
        for owner, name in _variables(function):
            if self._new_place(owner, name):
                self.found.names.append((owner, name))
            self._named(owner[name], names, own=own)

    def _imported(self, function: types.FunctionType) -> list[types.ModuleType]:
        """Modules that code imports when it runs, as far as they are there."""
        package = str(function.__globals__.get("__package__") or "")
        parts = package.split(".") if package else []
        found: list[types.ModuleType] = []
        for name in imports_of(function.__code__):
            relative = (".".join([*parts[: n + 1], name]).rstrip(".") for n in range(len(parts)))
            found += [m for full in (name, *relative) if full and (m := sys.modules.get(full)) is not None]
        return found

    def _attributes(self, function: types.FunctionType) -> None:
        """Values that a function carries under names that code uses (`scaled.factor = 2`)."""
        held = function.__dict__
        for name in sorted(self._names & held.keys()):
            if self._new_place(held, name):
                self.found.names.append((held, name))
                self._left.append(held[name])

    def _named(self, value: Any, names: frozenset[str], *, own: bool) -> None:
        """What a variable is: of a module or class, the names that stand in the same code."""
        if isinstance(value, types.ModuleType):
            space = vars(value)
            for name in sorted(names & space.keys()):
                if (value.__name__, name) not in _STOOD_IN_FOR and self._new_place(space, name):
                    self.found.names.append((space, name))
                    if own:
                        self._named(space[name], names, own=own)
        elif isinstance(value, type):
            if not foreign(value) and own:
                self._entries_of(value, names)
                self._entries_of(type(value), names)  # a metaclass, whose values its classes show as theirs
        elif own:
            self._left.append(value)


def _plain(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, enum.Enum)) or (isinstance(value, tuple) and all(map(_plain, cast(tuple[Any, ...], value))))


def _entries(value: Any) -> list[dict[Any, Any]]:
    """Dicts whose look-ups native code can do: one, an object's own, or both of one that is a dict itself."""
    found = [value] if isinstance(value, dict) else []
    if not foreign(type(value)) and type(held := getattr(value, "__dict__", None)) is dict:
        found.append(held)
    return [d for d in found if len(d) <= MAX_ENTRIES and all(map(plain_key, list(d)))]


def plain_key(key: Any) -> bool:
    """Whether looking a key up runs no code of a user's."""
    if isinstance(key, weakref.ref):
        return type(cast(Any, key)()).__eq__ is object.__eq__  # it asks what it refers to
    return isinstance(key, (str, bytes, int, float, type(None), enum.Enum)) or type(key) is type or (
        type(key) is tuple and all(map(plain_key, cast(tuple[Any, ...], key)))
    )
