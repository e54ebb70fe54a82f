"""Nested arguments and results, taken apart into tensors and put together again.

    spec ::= tensor | number | constant | container(children)

A spec is hashable and says everything about a call but its tensors: two calls with equal specs differ only in tensor
contents, shapes and dtypes. Containers are tuples, lists, dicts, named tuples, dataclasses and whatever is registered
with torch's pytree (which is how Hugging Face's `ModelOutput` and caches come in). Constants compare with
their type, since `1`, `1.0` and `True` steer a model differently.

In results, numbers are leaves too: a model may return a size, which changes from call to call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hotfuse.base.errors import InputError

_CONSTANTS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format,
              torch.layout, Enum, slice, type(Ellipsis), type)


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a nested object: what kind, its class, its keys or constant, and its children."""

    kind: str
    cls: type | None = None
    detail: Any = None
    children: tuple[Spec, ...] = ()


TENSOR = Spec("tensor")
NUMBER = Spec("number")


def flatten(obj: Any, *, numbers: bool = False) -> tuple[list[Any], Spec]:
    """The leaves in a fixed order, and the spec; raises InputError for an object nobody can take apart."""
    leaves: list[Any] = []
    return leaves, _take(obj, leaves, numbers)


def _take(obj: Any, leaves: list[Any], numbers: bool) -> Spec:
    if isinstance(obj, torch.Tensor):
        leaves.append(obj)
        return TENSOR
    if numbers and isinstance(obj, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
        leaves.append(obj)
        return NUMBER
    cls: type[Any] = type(obj)
    if isinstance(obj, slice):
        return Spec("constant", cls, (obj.start, obj.stop, obj.step))
    if cls in (float, complex):  # by text, so that -0.0 differs from 0.0 and nan equals itself
        return Spec("float", cls, repr(obj))
    if isinstance(obj, _CONSTANTS):
        return Spec("constant", cls, obj)
    if cls is torch.Size:
        return Spec("size", cls, None, tuple(_take(o, leaves, numbers) for o in obj))
    if cls in (tuple, list):
        return Spec(cls.__name__, cls, None, tuple(_take(o, leaves, numbers) for o in obj))
    if cls is dict:
        keys = tuple(obj)
        return Spec("dict", cls, keys, tuple(_take(obj[k], leaves, numbers) for k in keys))
    if isinstance(obj, tuple) and hasattr(cls, "_fields"):
        return Spec("namedtuple", cls, None, tuple(_take(o, leaves, numbers) for o in obj))
    registered = pytree.SUPPORTED_NODES.get(cls)
    if registered is not None:
        children, context = registered.flatten_fn(obj)
        return Spec("pytree", cls, _Context(context), tuple(_take(o, leaves, numbers) for o in children))
    if dataclasses.is_dataclass(obj):
        keys = tuple(f.name for f in dataclasses.fields(obj))
        return Spec("dataclass", cls, keys, tuple(_take(getattr(obj, k), leaves, numbers) for k in keys))
    raise InputError(
        f"cannot take apart an object of type {cls.__module__}.{cls.__qualname__}",
        because="it is neither a tensor, a constant, a container nor registered with torch's pytree",
        hint="register it with torch.utils._pytree.register_pytree_node, or pass its tensors",
    )


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
    return _build(spec, iter(leaves))


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


def _build(spec: Spec, leaves: Iterator[Any]) -> Any:
    return _BUILD[spec.kind](spec, leaves)


def _leaf(_: Spec, leaves: Iterator[Any]) -> Any:
    return next(leaves)


def _constant(spec: Spec, _: Iterator[Any]) -> Any:
    return slice(*spec.detail) if spec.cls is slice else spec.detail


def _dataclass(spec: Spec, leaves: Iterator[Any]) -> Any:
    assert spec.cls is not None
    obj = object.__new__(spec.cls)
    for key, child in zip(spec.detail, spec.children, strict=True):
        object.__setattr__(obj, key, _build(child, leaves))
    return obj


def _pytree(spec: Spec, leaves: Iterator[Any]) -> Any:
    assert spec.cls is not None
    registered = pytree.SUPPORTED_NODES[spec.cls]
    return registered.unflatten_fn([_build(c, leaves) for c in spec.children], spec.detail.value)


_BUILD: dict[str, Callable[[Spec, Iterator[Any]], Any]] = {
    "tensor": _leaf,
    "number": _leaf,
    "constant": _constant,
    "float": lambda s, _: s.cls(s.detail),  # type: ignore[misc]
    "tuple": lambda s, it: tuple(_build(c, it) for c in s.children),
    "size": lambda s, it: torch.Size(_build(c, it) for c in s.children),
    "list": lambda s, it: [_build(c, it) for c in s.children],
    "dict": lambda s, it: {k: _build(c, it) for k, c in zip(s.detail, s.children, strict=True)},
    "namedtuple": lambda s, it: s.cls(*(_build(c, it) for c in s.children)),  # type: ignore[misc]
    "dataclass": _dataclass,
    "pytree": _pytree,
}


def describe(spec: Spec) -> str:
    """A short text: `(tensor, {mask: tensor, scale: 2})`."""
    match spec.kind:
        case "tensor" | "number":
            return spec.kind
        case "constant":
            return repr(spec.detail)
        case "dict" | "dataclass":
            inner = ", ".join(f"{k}: {describe(c)}" for k, c in zip(spec.detail, spec.children, strict=True))
            return "{" + inner + "}"
        case _:
            return "(" + ", ".join(describe(c) for c in spec.children) + ")"
