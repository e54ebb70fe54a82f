# pyright: reportPrivateUsage=false
# Torch and cloudpickle keep what a front end needs private.
"""A name for a model's structure: equal for models that capture would see as the same, whatever their weights hold.

    what it is made of   attributes of all its parts, in order; tensors by type, shape and strides; small plain tensors by their
                         data, as capture may read those
    what it runs         code of its classes and functions and of those that they name, with the values of other names they read,
                         in whatever module those stand and however it is reached, and of variables of the environment;
                         of installed packages the files, and what the names in them stand for now, so that a rebinding shows;
                         of torch's and the standard library's modules what somebody else put there
    around it            versions of the packages those are from, and what of torch's state tracing depends on

What cannot be named (state that does not pickle, sets without order) has no name, and is captured anew. A name that is equal by
mistake may be found out by the first call, whose answer the captured graph must give; but a limit that changed shows only in
calls that exceed it. So what code might read counts, whether it does or not (decision 505).
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import io
import os
import pickle
import secrets
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import nn

from hotfuse.base.bytecode import globals_of, imports_of, names_of, texts_of
from hotfuse.base.environment_reads import NAMES, variables_of
from hotfuse.base.errors import CaptureError
from hotfuse.base.faults import error_text
from hotfuse.base.structure import Spec, read_beside
from hotfuse.frontends.ship import MAX_SHIPPED_ELEMENTS, PLAIN_TYPES, describe, operator_named, refuse_files

MAX_CODE = 4096
"""Functions, classes and modules that a model's code may be spread over."""
_HASH_FROM = 1 << 40
"""Numbers of buckets and of hash functions are below it, and one hash of eight millions."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
MAX_FILE = 4 << 20
"""Larger ones are libraries, which a package's version speaks for."""
MAX_READ = 1 << 16
"""Attributes of modules that are looked at."""
_INSTALLED_PARTS = frozenset({"site-packages", "dist-packages"})
_OF_CLASSES = ("__doc__", "__dict__", "__weakref__", "__module__", "__annotations__", "__annotate__", "__firstlineno__",
               "__static_attributes__", "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__")
_OPAQUE = frozenset({"_abc", "logging", "typing"})
"""Where objects are from that say nothing of what a model computes beyond their type."""
_LIKE_NO_OTHER = secrets.token_hex(16)
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
        said = _Code(namer.code, namer.spaces).said
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


def call_name(spec: Spec) -> str:
    """What the cache knows calls of a structure by: what code may read of its arguments' classes, and of members of enumerations,
    belongs to that. Those that have no name are like no others."""
    if not (things := read_beside(spec)):
        return repr(spec)
    namer = _ModelPickler(sink := io.BytesIO())
    try:
        namer.dump(things)
        said = repr(_Code(namer.code, namer.spaces).said)
    except Exception:  # whatever a user's object does when it is looked at
        return f"{spec!r} {_LIKE_NO_OTHER}"
    return f"{spec!r} {hashlib.sha256(sink.getvalue() + said.encode()).hexdigest()}"


class _ModelPickler(cloudpickle.Pickler):
    """Writes what a model is made of; code goes by its name and is noted with where it is from."""

    def __init__(self, file: io.BytesIO, without: Mapping[int, Collection[str]] | None = None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._without = without or {}
        self.code: list[Any] = []
        """Classes and functions met on the way."""
        self.spaces: list[types.ModuleType] = []
        """Modules that are among the values."""
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
        if isinstance(obj, types.ModuleType):
            self.spaces.append(obj)
            return "module", obj.__name__
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
    made.update(code.co_exceptiontable)
    made.update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags)).encode())
    return made.hexdigest()[:24]


def _read_by(f: types.FunctionType) -> list[tuple[str, Any]]:
    """The global and closure variables that a function names, and what they are."""
    put = vars(builtins)
    found = [(n, f.__globals__.get(n, put.get(n))) for n in globals_of(f.__code__) if n in f.__globals__ or _was_put(put.get(n))]
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
        if name != "__class__":
            found.append((name, cell.cell_contents))
    return found


_BY_TEXT = frozenset({"getattr", "hasattr", "globals", "vars", "__dict__", "attrgetter", "import_module", "__import__"})
"""What finds things by texts."""


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Names of what code may read: texts are some where it finds things by them."""
    names = names_of(code)
    return names if _BY_TEXT.isdisjoint(names) else names | texts_of(code)


def _is_known(thing: Any) -> bool:
    """Whether it is from a package that a version speaks for."""
    return str(thing).partition(".")[0] in _KNOWN


def _was_put(value: Any) -> bool:
    """Whether it is not Python's or torch's own: somebody put it where it was found."""
    if isinstance(value, types.FunctionType | type):
        return not _is_known(value.__module__) and value.__module__ != "builtins"
    return isinstance(value, int | float | str) and type(value) in _PLAIN


class _Code:
    """What classes and functions do, and what they name."""

    def __init__(self, begin: Iterable[Any], spaces: Iterable[types.ModuleType] = ()) -> None:
        self.said: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._waiting = list(begin)
        self._names: set[str] = set()
        """In the code of functions that are not installed."""
        self._functions: list[types.FunctionType] = []
        """Those, whose attributes may be read."""
        self._spaces: dict[str, types.ModuleType] = {}
        """Modules that values hold: any of that code may read from them."""
        self._read: set[tuple[int, str]] = set()
        """Attributes of modules and functions that were looked at."""
        self._hold(spaces)
        known = (-1, -1, -1)
        while self._waiting or known != self._known():
            while self._waiting:
                self._next(self._waiting.pop(0))
            known = self._known()
            for _, space in sorted(self._spaces.items()):
                self._space(space, self._names, self._tried)
            for f in list(self._functions):
                self._attributes(f, sorted(self._names & f.__dict__.keys()), self._tried)

    def _known(self) -> tuple[int, int, int]:
        """How much there is to look at under names: all three only grow, and are bounded by what there is."""
        return len(self._names), len(self._spaces), len(self._functions)

    def _next(self, obj: Any) -> None:
        if id(obj) in self._seen:
            return
        self._seen[id(obj)] = obj
        if len(self._seen) > MAX_CODE:
            raise Unnamed(f"its code is spread over more than {MAX_CODE} functions and classes")
        self._look(obj)

    def _look(self, obj: Any) -> None:
        if isinstance(obj, types.ModuleType):
            self.said.append(_installed_name(obj))
            return
        package = str(obj.__module__)
        if _is_known(package):
            self._put_into(obj)
            return
        module = sys.modules.get(package)
        if module is not None and _is_installed(module):
            self._waiting.append(module)
        elif isinstance(obj, type):
            self.said.append(("class", package, obj.__qualname__))
            self._waiting += (*obj.__mro__[1:], type(obj))
            for name, value in sorted(vars(obj).items()):
                if name not in _OF_CLASSES:
                    self._name(name, value)
        else:
            self._function(obj)

    def _put_into(self, obj: Any) -> None:
        """What somebody else put into a class of torch's or of the standard library's, and what closures of functions made there
        hold."""
        if isinstance(obj, type):
            put = ((c, n, v) for c in obj.__mro__ for n, v in sorted(vars(c).items()) if isinstance(v, types.FunctionType))
            for owner, name, value in put:
                if _was_put(value):
                    self.said.append(owner.__qualname__)
                    self._name(name, value)
        elif isinstance(obj, types.FunctionType):
            for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
                if cell != types.CellType():
                    self._tried(name, cell.cell_contents)

    def _function(self, f: types.FunctionType) -> None:
        code, names = f.__code__, _names_in(f.__code__)
        self.said.append(("function", f.__module__, f.__qualname__, _code_name(code)))
        self._names |= names
        self._functions.append(f)
        self._name("defaults", (f.__defaults__, f.__kwdefaults__))
        for name, value in _read_by(f):
            if isinstance(value, types.ModuleType) and not _is_installed(value):
                self._space(value, names, self._name)
            else:
                self._name(name, value)
                if isinstance(value, types.ModuleType):
                    self._space(value, names, self._name)
        if "globals" in names:
            self._attributes(f.__globals__, sorted(texts_of(code) & f.__globals__.keys()), self._name)
        if not NAMES.isdisjoint(names):
            self.said.append(_environment(code))
        asked = texts_of(code) if not names.isdisjoint({"import_module", "__import__"}) else ()
        for name in sorted({*imports_of(code), *asked}):
            self._imported(name, str(f.__globals__.get("__package__") or ""), names)

    def _space(self, space: types.ModuleType, names: Collection[str], read: Callable[[str, Any], None]) -> None:
        """What of a module is among the names; of one of torch's, the standard library's or a package's what somebody put there."""
        own = not _is_known(space.__name__) and not _is_installed(space)
        held = vars(space)
        for name in sorted({"__getattr__", *names} & held.keys()):
            value = held[name]
            if isinstance(value, types.ModuleType):
                if value is not space and self._is_new(value, f"{name} by {hash(frozenset(names))}"):
                    self._space(value, names, read)
            elif (own or _was_put(value)) and self._is_new(space, name):
                self.said.append(space.__name__)
                read(name, value)

    def _attributes(self, owner: Any, names: Iterable[str], read: Callable[[str, Any], None]) -> None:
        """Values under names, of a function or of a module's variables."""
        held = owner if isinstance(owner, dict) else vars(owner)
        for name in names:
            if self._is_new(owner, name):
                read(name, held[name])

    def _is_new(self, owner: Any, name: str) -> bool:
        key = (id(owner), name)
        if key in self._read:
            return False
        if len(self._read) >= MAX_READ:
            raise Unnamed(f"its code reads more than {MAX_READ} attributes of modules")
        self._read.add(key)
        return True

    def _hold(self, spaces: Iterable[types.ModuleType]) -> None:
        """Modules that are among values, and are the user's own."""
        self._spaces |= {m.__name__: m for m in spaces if not _is_known(m.__name__) and not _is_installed(m)}

    def _imported(self, name: str, package: str, names: Collection[str]) -> None:
        """What code imports when it runs. It may not have run yet: so the files count, and what those import."""
        parts = package.split(".") if package else []
        for full in [name, *(".".join([*parts[: n + 1], name]).rstrip(".") for n in range(len(parts)))]:
            if not full or _is_known(full) or not self._is_new(self, f"import {full}"):
                continue
            module, path = sys.modules.get(full), _file_of(full)
            if path is None and module is None:
                continue
            if module is not None and not _is_installed(module):
                self._space(module, names, self._tried)
            if path is None:
                continue
            self.said.append((full, _said_by_file(path)))
            if _INSTALLED_PARTS & {*path.parts} or path.suffix != ".py":
                continue
            source = path.read_bytes()
            inside = full if path.name == "__init__.py" else full.rpartition(".")[0]
            code = compile(source, str(path), "exec", dont_inherit=True)
            for further in sorted(imports_of(code)):
                self._imported(further, inside, names_of(code))

    def _tried(self, name: str, value: Any) -> None:
        """What a name stands for, where it is not sure that it is read at all: then its type will do if it has no name."""
        try:
            self._name(name, value)
        except Exception:  # whatever a user's object does when it is pickled
            self.said.append((name, type(value).__qualname__))

    def _name(self, name: str, value: Any) -> None:
        """What a name stands for."""
        if isinstance(value, types.FunctionType | type | types.ModuleType):
            self.said.append((name, getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__)))
            if not isinstance(value, types.ModuleType) or _is_installed(value):
                self._waiting.append(value)
            else:
                self._hold([value])
        elif isinstance(value, staticmethod | classmethod):
            self._name(name, value.__func__)
        elif isinstance(value, functools.cached_property):
            self._name(name, value.func)
        elif isinstance(value, property):
            for f in (value.fget, value.fset):
                self._name(name, f)
        elif _is_known(type(value).__module__) and isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
            self._name(name, wrapped)  # a cache around a function, say
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
            self._hold(namer.spaces)


def _environment(code: types.CodeType) -> Any:
    """What variables that code reads hold; all of them where it does not name them."""
    asked = variables_of(code)
    names = sorted(os.environ) if asked is None else sorted(asked)
    return "environment", [(n, os.environ.get(n)) for n in names]


def _file_of(module: str) -> Path | None:
    """Where a module comes from, whether it is imported or not; nothing is imported for that."""
    where, name, spec = None, "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, where)
        if spec is None:
            return None
        where = spec.submodule_search_locations
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin and Path(origin).is_file() else None


def _said_by_file(path: Path) -> Any:
    """What a file says: the same on every machine that has it, whenever it was installed there."""
    about = path.stat()
    return about.st_size if about.st_size > MAX_FILE else _digest_of(str(path), about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _digest_of(path: str, _size: int, _changed_ns: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _is_installed(module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return bool(path) and not _INSTALLED_PARTS.isdisjoint(Path(str(path)).parts)


def _installed_name(module: types.ModuleType) -> Any:
    """A module of a package: its file, the package's version, and what functions and classes its names stand for."""
    top = sys.modules.get(module.__name__.partition(".")[0])
    if top is None or top.__name__ in _KNOWN:
        return module.__name__
    path = Path(str(module.__file__))
    about = _said_by_file(path) if path.exists() else None
    names: list[Any] = []
    for name, value in sorted(vars(module).items()):
        if isinstance(value, types.FunctionType):
            if not NAMES.isdisjoint(value.__code__.co_names) and variables_of(value.__code__) is not None:
                names.append(_environment(value.__code__))  # all of it, for one function of many, would make every process another
            names.append((name, value.__module__, value.__qualname__, value.__code__.co_firstlineno, len(value.__code__.co_code)))
        elif isinstance(value, type):
            own = value.__module__ == module.__name__
            functions = [(n, f.__code__) for n, f in sorted(vars(value).items()) if own and isinstance(f, types.FunctionType)]
            inside = [(n, c.co_firstlineno, c.co_filename == module.__file__) for n, c in functions]
            names.append((name, value.__module__, value.__qualname__, inside))
    return module.__name__, about, str(getattr(top, "__version__", "")), names
