"""Nested arguments and results, taken apart into tensors and put together again.

    spec ::= tensor | number | count | constant | slice(children) | container(children) | object(children) | ref(number)

A spec is hashable and says everything about a call but its tensors: two calls with equal specs differ only in tensor
contents, shapes and dtypes. Containers are tuples, lists, dicts, named tuples and whatever is registered
with torch's pytree (which is how Hugging Face's `ModelOutput` comes in). Objects are dataclasses and plain Python objects, taken
apart into their attributes (which is how key/value caches come in). Constants compare with their type, since `1`, `1.0` and
`True` steer a model differently.

Lists, dicts and objects are **holders**: a call may change what they hold (`base.changed_arguments`). They are numbered as they are
met; what is met again is a `ref` to its number, so that what was one object before is one object after.

In results, numbers are leaves too: a model may return a size, which changes from call to call. In arguments, an integer that an
object holds is a **count**: it travels as the size of a tensor without elements. What is known of sizes thus holds of
counts: one that changes from call to call becomes a symbol, and guards read it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils import _pytree as pytree

from hotfuse.base.errors import InputError
from hotfuse.base.lazy_dataclass import dataclass

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format,
              torch.layout, Enum, type(Ellipsis), type, np.integer, np.bool_)
_BARE = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype})
"""Objects of other classes may hold more than they equal each other by: `class Name(str)` with attributes is no constant."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a nested object: what kind, its class, its keys or constant, and its children."""

    kind: str
    cls: type | None = None
    detail: Any = None
    children: tuple[Spec, ...] = ()


TENSOR = Spec("tensor")
NUMBER = Spec("number")
COUNT = Spec("count")
_MADE_BY_PYTHON = 1 << 9
"""Of a type's flags: a `class` statement made it."""
MAX_NODES = 20_000
"""Parts of one call's arguments: an object that holds more (a dataset, a tree of configurations) is not taken apart."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What was taken apart: its leaves in a fixed order, its spec, and the lists, dicts and objects in it as they are numbered."""

    leaves: list[Any]
    spec: Spec
    holders: list[Any]


def flatten(obj: Any, *, numbers: bool = False) -> tuple[list[Any], Spec]:
    """The leaves in a fixed order, and the spec; raises InputError for an object nobody can take apart."""
    taken = take(obj, numbers=numbers)
    return taken.leaves, taken.spec


def take(obj: Any, *, numbers: bool = False, known: Sequence[Any] = ()) -> Taken:
    """Take an object apart; `known` are holders that have their numbers already."""
    taker = Taker(numbers=numbers, known=known)
    spec = taker.take(obj)
    return Taken(taker.leaves, spec, taker.holders)


def take_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Taken:
    """Take a call's arguments apart; the dict of those given by name is no holder: the caller does not hold it."""
    taker = Taker(numbers=False)
    positional = Spec("tuple", tuple, None, tuple([taker.take(a) for a in args]))
    named = Spec("named", dict, tuple(kwargs), tuple([taker.take(a) for a in kwargs.values()]))
    return Taken(taker.leaves, Spec("tuple", tuple, None, (positional, named)), taker.holders)


@functools.lru_cache(maxsize=4096)
def count_tensor(n: int) -> torch.Tensor:
    """A tensor without elements whose first size is a count."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return torch.empty((n, 0), dtype=torch.bool)
    return torch.empty((n, 0), dtype=torch.bool)  # entering the mode takes longer, and a count that goes on is always new


class Taker:
    """Takes objects apart, one after the other, into the same leaves."""

    def __init__(self, *, numbers: bool, known: Sequence[Any] = ()) -> None:
        self.leaves: list[Any] = []
        self.holders: list[Any] = list(known)
        self._numbers = numbers
        self._met = {id(h): k for k, h in enumerate(known)}
        self._nodes = 0

    def take(self, obj: Any, *, inside: bool = False) -> Spec:
        """The spec of an object; `inside` says that an object holds it."""
        if isinstance(obj, torch.Tensor):
            self.leaves.append(obj)
            return TENSOR
        cls: type[Any] = type(obj)
        if cls is bool and inside:
            return Spec("constant", cls, obj)
        if self._numbers and isinstance(obj, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
            self.leaves.append(obj)
            return NUMBER
        if inside and cls is int and obj >= 0:
            self.leaves.append(count_tensor(obj))
            return COUNT
        if isinstance(obj, slice):
            return Spec("slice", cls, None, (self.take(obj.start), self.take(obj.stop), self.take(obj.step)))
        if isinstance(obj, _CONSTANTS) and (cls in _BARE or isinstance(obj, Enum | type) or not getattr(obj, "__dict__", None)):
            if isinstance(obj, float):  # by text, so that -0.0 differs from 0.0 and nan equals itself
                return Spec("float", cls, float.__repr__(obj))
            if isinstance(obj, complex):
                return Spec("float", cls, complex.__repr__(obj))
            return Spec("constant", cls, obj)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise InputError(f"cannot take apart an object with more than {MAX_NODES} parts")
        return self._several(obj, cls, inside=inside)

    def _several(self, obj: Any, cls: type[Any], *, inside: bool) -> Spec:
        """A container or an object."""
        if cls is tuple:
            return Spec("tuple", cls, None, tuple([self.take(o, inside=inside) for o in obj]))
        if cls is torch.Size:
            return Spec("size", cls, None, tuple([self.take(o, inside=inside) for o in obj]))
        if cls is list or cls is dict:
            if (ref := self._hold(obj)) is not None:
                return ref
            keys = _keys(obj) if cls is dict else None
            parts = obj if keys is None else obj.values()
            return Spec(cls.__name__, cls, keys, tuple([self.take(o, inside=inside) for o in parts]))
        if isinstance(obj, tuple) and hasattr(cls, "_fields"):
            return Spec("namedtuple", cls, None, tuple([self.take(o, inside=inside) for o in obj]))
        registered = pytree.SUPPORTED_NODES.get(cls)
        if registered is None or is_plain(cls):
            if (keys := attributes(obj)) is None:
                raise InputError(
                    f"cannot take apart an object of type {cls.__module__}.{cls.__qualname__}",
                    because="it is neither a tensor, a constant, a container, a plain object nor registered with torch's pytree",
                    hint="register it with torch.utils._pytree.register_pytree_node, or pass its tensors",
                )
            if (ref := self._hold(obj)) is not None:
                return ref
            return Spec("object", cls, keys, tuple([self.take(getattr(obj, k), inside=True) for k in keys]))
        children, context = registered.flatten_fn(obj)
        return Spec("pytree", cls, _Context(context), tuple([self.take(o, inside=inside) for o in children]))

    def _hold(self, obj: Any) -> Spec | None:
        """Number a holder; a ref where it has been met before."""
        if (number := self._met.get(id(obj))) is not None:
            return Spec("ref", None, number)
        self._met[id(obj)] = len(self.holders)
        self.holders.append(obj)
        return None


def text_base(cls: type[Any]) -> type[Any]:
    """Whose text says what a number of a class is; NumPy's are of classes of their own."""
    return float if issubclass(cls, float) else complex


def held_by_objects(spec: Spec) -> frozenset[int]:
    """The places, among all leaves, of those that objects hold: a program seldom looks at these itself."""
    found: list[int] = []
    leaves = itertools.count()

    def walk(part: Spec, *, inside: bool) -> None:
        if part in (TENSOR, NUMBER, COUNT):
            place = next(leaves)
            found.extend([place] if inside else [])
        for child in part.children:
            walk(child, inside=inside or part.kind == "object")

    walk(spec, inside=False)
    return frozenset(found)


def read_beside(spec: Spec) -> list[Any]:
    """Classes of a program's own among arguments, and members of enumerations: code reads more of them than any spec says
    (`config.LIMIT`, methods, `mode.factor`), and that may change between two calls."""
    found: dict[int, Any] = {}

    def walk(part: Spec) -> None:
        given = part.detail if part.kind == "constant" and isinstance(part.detail, Enum | type) else part.cls
        for each in (given, type(given)) if isinstance(given, Enum) else (given,):
            if isinstance(each, Enum) or (isinstance(each, type) and each.__flags__ & _MADE_BY_PYTHON):
                found.setdefault(id(each), each)
        for child in part.children:
            walk(child)

    walk(spec)
    return list(found.values())


def counts_in(spec: Spec) -> bool:
    """Whether objects hold a count."""
    return spec.kind == COUNT.kind or any(map(counts_in, spec.children))


@functools.cache
def is_plain(cls: type) -> bool:
    """Whether an instance is its attributes and nothing else: ordinary Python all the way up, copied in the ordinary way.

    Tensors that a class itself holds may change without any instance of it showing that.
    """
    ordinary = all(c is object or (c.__flags__ & _MADE_BY_PYTHON and not c.__dict__.get("__slots__")) for c in cls.__mro__)
    own = ("__getstate__", "__reduce__", "__reduce_ex__", "__del__", "__getattribute__")
    return (
        ordinary
        and cls.__dictoffset__ != 0
        and not issubclass(cls, torch.nn.Module)
        and not hasattr(cls, "__setstate__")
        and not any(isinstance(v, torch.Tensor) for c in cls.__mro__ for v in vars(c).values())
        and all(getattr(cls, name, None) is getattr(object, name, None) for name in own)
    )


def attributes(obj: Any) -> tuple[str, ...] | None:
    """The names of what an object holds; None where it is no plain object."""
    cls: type[Any] = type(obj)
    if is_plain(cls):
        return tuple(vars(obj))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return tuple(f.name for f in dataclasses.fields(obj))
    return None


class _TypedKeys(tuple[Any, ...]):
    """Keys of a dict that compare with their types, as constants do: `1`, `1.0` and `True` are one key to a dict."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and repr(self) == repr(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)


def _keys(of: dict[Any, Any]) -> tuple[Any, ...]:
    keys = tuple(of)
    return keys if all(type(k) is str for k in keys) else _TypedKeys(keys)


class _Context:
    """A pytree context made hashable: equal contexts are equal, whatever they contain."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


def unflatten(spec: Spec, leaves: list[Any] | tuple[Any, ...]) -> Any:
    """The object that `flatten` took apart, with these leaves."""
    return StructureBuilder(leaves).build(spec)


def builder(spec: Spec) -> Callable[[tuple[Any, ...]], Any]:
    """`unflatten` for one spec, with the usual ones made short."""
    if all(c in (TENSOR, NUMBER) for c in spec.children):
        if spec.kind == "tuple":
            return tuple
        if spec.kind == "list":
            return list
        if spec.kind == "dict":
            keys = spec.detail
            return lambda leaves: dict(zip(keys, leaves, strict=True))
    return lambda leaves: unflatten(spec, leaves)


class StructureBuilder:
    """Puts objects together, one after the other, of the same leaves."""

    def __init__(self, leaves: Sequence[Any], holders: Sequence[Any] = ()) -> None:
        self._leaves = iter(leaves)
        self.holders: list[Any] = list(holders)

    def build(self, spec: Spec) -> Any:
        """What a spec describes."""
        return self._KINDS[spec.kind](self, spec)

    def _leaf(self, _: Spec) -> Any:
        return next(self._leaves)

    def _ref(self, spec: Spec) -> Any:
        return self.holders[spec.detail]

    def _several(self, spec: Spec) -> list[Any]:
        return [self.build(c) for c in spec.children]

    def _hold(self, made: Any) -> Any:
        self.holders.append(made)  # before what it holds, which may refer to it
        return made

    def _list(self, spec: Spec) -> Any:
        made = self._hold([])
        made.extend(self.build(c) for c in spec.children)
        return made

    def _dict(self, spec: Spec) -> Any:
        made = self._hold({})
        for key, child in zip(spec.detail, spec.children, strict=True):
            made[key] = self.build(child)
        return made

    def _object(self, spec: Spec) -> Any:
        assert spec.cls is not None
        made = self._hold(object.__new__(spec.cls))
        for key, child in zip(spec.detail, spec.children, strict=True):
            object.__setattr__(made, key, self.build(child))
        return made

    def _pytree(self, spec: Spec) -> Any:
        assert spec.cls is not None
        return pytree.SUPPORTED_NODES[spec.cls].unflatten_fn(self._several(spec), spec.detail.value)

    _KINDS: ClassVar[dict[str, Callable[[StructureBuilder, Spec], Any]]] = {
        "tensor": _leaf,
        "number": _leaf,
        "count": lambda b, s: b._leaf(s).shape[0],
        "ref": _ref,
        "constant": lambda _, s: s.detail,
        "slice": lambda b, s: slice(*b._several(s)),
        "float": lambda _, s: s.cls(text_base(s.cls)(s.detail)),  # type: ignore[misc]
        "tuple": lambda b, s: tuple(b._several(s)),
        "size": lambda b, s: torch.Size(b._several(s)),
        "list": _list,
        "dict": _dict,
        "named": lambda b, s: dict(zip(s.detail, b._several(s), strict=True)),
        "namedtuple": lambda b, s: s.cls(*b._several(s)),  # type: ignore[misc]
        "object": _object,
        "pytree": _pytree,
    }


def describe(spec: Spec) -> str:
    """A short text: `(tensor, {mask: tensor, scale: 2})`."""
    match spec.kind:
        case "tensor" | "number" | "count":
            return spec.kind
        case "ref":
            return f"^{spec.detail}"
        case "constant":
            return repr(spec.detail)
        case "dict" | "object" | "named":
            inner = ", ".join(f"{k}: {describe(c)}" for k, c in zip(spec.detail, spec.children, strict=True))
            return "{" + inner + "}"
        case _:
            return "(" + ", ".join(describe(c) for c in spec.children) + ")"
