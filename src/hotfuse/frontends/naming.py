# pyright: reportPrivateUsage=false
# Torch and cloudpickle keep what a front end needs private.
"""A name for a model's structure: equal for models that capture would see as the same, whatever their weights hold.

    what it is made of   attributes of all its parts, in order; tensors by type, shape and strides; small plain tensors by their
                         data, as capture may read those
    what it runs         code of its classes and functions and of those that they name, with the values of other names they read;
                         of installed packages the files' sizes and times, and what the names in them stand for now, so that a
                         rebinding shows
    around it            versions of the packages those are from, and what of torch's state tracing depends on

What cannot be named (state that does not pickle, sets without order) has no name, and is captured anew. A name that is equal by
mistake is found out by the first call, whose answer the captured graph must give.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import nn

from hotfuse.base.bytecode import globals_of
from hotfuse.base.errors import CaptureError
from hotfuse.base.faults import error_text
from hotfuse.frontends.ship import MAX_SHIPPED_ELEMENTS, PLAIN_TYPES, describe, operator_named, refuse_files

MAX_CODE = 4096
"""Functions, classes and modules that a model's code may be spread over."""
_HASH_FROM = 1 << 40
"""Numbers of buckets and of hash functions are below it, and one hash of eight millions."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_INSTALLED = ("site-packages", "dist-packages")
_OF_CLASSES = ("__doc__", "__dict__", "__weakref__", "__module__", "__annotations__", "__annotate__", "__firstlineno__",
               "__static_attributes__", "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__")
_OPAQUE = frozenset({"_abc", "logging", "typing"})
"""Where objects are from that say nothing of what a model computes beyond their type."""
_KNOWN = frozenset({"torch", "hotfuse", "numpy", "cloudpickle", *sys.stdlib_module_names})
"""Packages that a version speaks for; those of torch, Python and Hotfuse are in every address."""


class Unnamed(Exception):
    """A model that has no name, and why."""


def structure_name(target: Any, without: Mapping[int, Collection[str]] | None = None) -> str:
    """The name of a module or function; raises Unnamed. `without` has names of attributes by the ids of modules: what a model keeps
    there from call to call is not what it is made of."""
    sink = io.BytesIO()
    namer = _ModelPickler(sink, without or {})
    try:
        namer.dump(target)
        said = _Code(namer.code).said
    except Unnamed:
        raise
    except (CaptureError, RecursionError) as e:
        raise Unnamed(e.what if isinstance(e, CaptureError) else "it is nested too deeply") from e
    except Exception as e:  # whatever a user's object does when it is looked at
        raise Unnamed(error_text(e)) from e
    state = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"))
    made = hashlib.sha256(sink.getvalue())
    made.update(repr((state, said)).encode())
    return made.hexdigest()


class _ModelPickler(cloudpickle.Pickler):
    """Writes what a model is made of; code goes by its name and is noted with where it is from."""

    def __init__(self, file: io.BytesIO, without: Mapping[int, Collection[str]] | None = None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._without = without or {}
        self.code: list[Any] = []
        """Classes and functions met on the way."""
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []
        self._registered: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        refuse_files(obj)
        if isinstance(obj, torch._ops.OpOverload):
            return operator_named, (obj.namespace, obj._opname, obj._overloadname)
        if isinstance(obj, torch._ops.OpOverloadPacket):
            return operator_named, (*obj._qualified_op_name.split("::"), None)
        if isinstance(obj, nn.Module) and (names := self._without.get(id(obj))):
            return _without_attributes(obj, names)
        if (kept := _without_hashes(obj)) is not None:
            return kept
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> Any:
        kind: Any = type(obj)
        if kind in PLAIN_TYPES:
            return None
        if isinstance(obj, nn.Module):
            self._registered.update(id(b) for b in obj._buffers.values() if b is not None)
            self.code.append(kind)
            return None
        if isinstance(obj, torch.Tensor):
            self._held.append(obj)  # so that no other tensor gets its id
            number = self._numbers.setdefault(id(obj), len(self._numbers))
            plain = not isinstance(obj, nn.Parameter) and id(obj) not in self._registered
            return "tensor", number, describe(obj, with_data=plain and obj.numel() <= MAX_SHIPPED_ELEMENTS)
        if kind in (set, frozenset):
            return kind.__name__, _ordered(obj)
        if isinstance(obj, type):
            self.code.append(obj)
            return "class", obj.__module__, obj.__qualname__
        if kind is types.FunctionType:
            self.code.append(obj)
            return "function", obj.__module__, obj.__qualname__
        return None


def _without_hashes(obj: Any) -> Any:
    """How an object that keeps a hash is written: without it. None for all others.

    Configurations note their hash to see later whether somebody changed them, as those of models that generate do. Hashes of text
    differ from process to process, so such a model would never be known again.
    """
    kind = type(obj)
    if kind.__hash__ in (None, object.__hash__) or kind.__reduce_ex__ is not object.__reduce_ex__:
        return None
    state = getattr(obj, "__dict__", None)
    if not isinstance(state, dict) or not any(_is_hash(n, v) for n, v in state.items()):
        return None
    made = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(made, tuple) or len(made) < 3 or not isinstance(made[2], dict):
        return None
    return (*made[:2], {n: v for n, v in made[2].items() if not _is_hash(n, v)}, *made[3:])


def _without_attributes(module: nn.Module, names: Collection[str]) -> Any:
    """How a module is written: without these of its attributes and buffers."""
    made = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if not isinstance(made, tuple) or len(made) < 3 or not isinstance(made[2], dict):
        return made
    state: dict[str, Any] = {n: v for n, v in made[2].items() if n not in names}
    state["_buffers"] = {n: v for n, v in module._buffers.items() if n not in names}
    return (*made[:2], state, *made[3:])


def _is_hash(name: Any, value: Any) -> bool:
    """Whether an attribute is the hash of something: a number of nearly as many bits as there are, in a name that says so."""
    return type(value) is int and abs(value) >= _HASH_FROM and isinstance(name, str) and "hash" in name


def _ordered(items: Iterable[Any]) -> list[Any]:
    found = list(items)
    if not all(isinstance(x, _PLAIN) for x in found):
        raise Unnamed("it holds a set of things that have no order")
    return sorted(found, key=lambda x: (type(x).__name__, repr(x)))


def _code_name(code: types.CodeType) -> str:
    """What code does, wherever it stands."""
    made = hashlib.sha256(code.co_code)
    for const in code.co_consts:
        said = _code_name(const) if isinstance(const, types.CodeType) else (
            repr(_ordered(const)) if isinstance(const, frozenset) else repr(const)
        )
        made.update(said.encode())
    made.update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags)).encode())
    return made.hexdigest()[:24]


def _read_by(f: types.FunctionType) -> list[tuple[str, Any]]:
    """The global and closure variables that a function names, and what they are."""
    found = [(n, f.__globals__[n]) for n in globals_of(f.__code__) if n in f.__globals__]
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        if name != "__class__":
            found.append((name, cell.cell_contents))
    return found


class _Code:
    """What classes and functions do, and what they name."""

    def __init__(self, begin: Iterable[Any]) -> None:
        self.said: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._waiting = list(begin)
        while self._waiting:
            obj = self._waiting.pop(0)
            if id(obj) in self._seen:
                continue
            self._seen[id(obj)] = obj
            if len(self._seen) > MAX_CODE:
                raise Unnamed(f"its code is spread over more than {MAX_CODE} functions and classes")
            self._look(obj)

    def _look(self, obj: Any) -> None:
        if isinstance(obj, types.ModuleType):
            self.said.append(_installed_name(obj))
            return
        package = str(obj.__module__)
        if package.partition(".")[0] in _KNOWN:
            return
        module = sys.modules.get(package)
        if module is not None and _is_installed(module):
            self._waiting.append(module)
        elif isinstance(obj, type):
            self.said.append(("class", package, obj.__qualname__))
            self._waiting += obj.__mro__[1:]
            for name, value in sorted(vars(obj).items()):
                if name not in _OF_CLASSES:
                    self._name(name, value)
        else:
            self._function(obj)

    def _function(self, f: types.FunctionType) -> None:
        self.said.append(("function", f.__module__, f.__qualname__, _code_name(f.__code__)))
        self._name("defaults", (f.__defaults__, f.__kwdefaults__))
        for name, value in _read_by(f):
            if isinstance(value, types.ModuleType) and not _is_installed(value):
                if value.__name__.partition(".")[0] not in _KNOWN:  # what of a module of the user's own is read is among the names
                    for n in f.__code__.co_names:
                        if n in vars(value):
                            self._name(n, vars(value)[n])
            else:
                self._name(name, value)

    def _name(self, name: str, value: Any) -> None:
        """What a name stands for."""
        if isinstance(value, types.FunctionType | type | types.ModuleType):
            self.said.append((name, getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__)))
            if not isinstance(value, types.ModuleType) or _is_installed(value):
                self._waiting.append(value)
        elif isinstance(value, staticmethod | classmethod):
            self._name(name, value.__func__)
        elif isinstance(value, property):
            for f in (value.fget, value.fset):
                self._name(name, f)
        elif isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):  # a cache around a function, say
            self._name(name, wrapped)
        elif isinstance(value, _PLAIN):
            self.said.append((name, repr(value)))
        elif type(value).__module__.partition(".")[0] in _OPAQUE:
            self.said.append((name, type(value).__qualname__))
        else:
            sink = io.BytesIO()
            namer = _ModelPickler(sink)
            namer.dump(value)
            self.said.append((name, hashlib.sha256(sink.getvalue()).hexdigest()))
            self._waiting += namer.code


def _is_installed(module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return bool(path) and any(part in _INSTALLED for part in Path(str(path)).parts)


def _installed_name(module: types.ModuleType) -> Any:
    """A module of a package: its file, the package's version, and what functions and classes its names stand for."""
    top = sys.modules.get(module.__name__.partition(".")[0])
    if top is None or top.__name__ in _KNOWN:
        return module.__name__
    path = Path(str(module.__file__))
    about = (path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else None
    names: list[Any] = []
    for name, value in sorted(vars(module).items()):
        if isinstance(value, types.FunctionType):
            names.append((name, value.__module__, value.__qualname__, value.__code__.co_firstlineno, len(value.__code__.co_code)))
        elif isinstance(value, type):
            own = value.__module__ == module.__name__
            functions = [(n, f.__code__) for n, f in sorted(vars(value).items()) if own and isinstance(f, types.FunctionType)]
            inside = [(n, c.co_firstlineno, c.co_filename == module.__file__) for n, c in functions]
            names.append((name, value.__module__, value.__qualname__, inside))
    return module.__name__, about, str(getattr(top, "__version__", "")), names
