"""Dataclasses whose methods are generated when they are first used.

The standard library compiles the text of six methods for every class while a module is imported: half a millisecond a class, which
was half of what it took to import what serves (decision 102). A process that serves uses few of them. So a class is made with its
fields, slots and `__match_args__` at once. Its methods have the standard library generate them at their first use, in a class of
the same fields; what that makes takes their place.

What differs: before the first use `inspect.signature` knows no parameters, and a frozen class lets no subclass assign attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, weakref_slot=False):
        """As `dataclasses.dataclass`."""

        def make(cls):
            return _made(cls, frozen=frozen, slots=slots, eq=eq, weakref_slot=weakref_slot)

        return make if cls is None else make(cls)


_OF_FIELDS = ("default", "default_factory", "init", "repr", "hash", "compare", "kw_only")


def _made(cls: type[Any], *, frozen: bool, slots: bool, eq: bool, weakref_slot: bool) -> type[Any]:
    own = cls.__dict__
    if own.get("__doc__") is None:
        cls.__doc__ = cls.__name__  # otherwise its signature is looked up, for a line that nobody reads
    says_hash = "__hash__" in own and not (own["__hash__"] is None and "__eq__" in own)
    wanted = [n for n in ("__init__", "__repr__") if n not in own]
    if eq:
        wanted += [n for n in ("__eq__",) if n not in own]
        if frozen and not says_hash:
            wanted.append("__hash__")
    derived = any(dataclasses.is_dataclass(base) for base in cls.__mro__[1:])  # then it is checked that all or none are frozen
    asked = {"init": False, "repr": False, "eq": False, "slots": slots, "weakref_slot": weakref_slot}
    found: Any = dataclasses.dataclass(**asked, frozen=frozen and derived)(cls)
    found.__dataclass_params__.frozen = frozen
    for name in wanted:
        setattr(found, name, _deferred(found, name, frozen=frozen, slots=slots))
    if eq and not frozen and not says_hash:
        found.__hash__ = None
    if frozen:
        found.__setattr__, found.__delattr__ = _refuse_to_set, _refuse_to_delete
        if slots and "__getstate__" not in own:
            found.__getstate__, found.__setstate__ = _state, _set_state
    return found


def _deferred(cls: type[Any], name: str, *, frozen: bool, slots: bool) -> Callable[..., Any]:
    """A method that is generated when it is called, and then stands in its own place."""

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        made = _generated(cls, name, frozen=frozen, slots=slots)
        setattr(cls, name, made)
        return made(self, *args, **kwargs)

    method.__name__, method.__qualname__, method.__module__ = name, f"{cls.__qualname__}.{name}", cls.__module__
    return method


def _generated(cls: type[Any], name: str, *, frozen: bool, slots: bool) -> Callable[..., Any]:
    """The standard library's method for a class with these fields."""
    every = dataclasses.fields(cls)
    body: dict[str, Any] = {"__annotations__": {f.name: f.type for f in every}, "__module__": cls.__module__, "__doc__": "its like"}
    for f in every:
        kept: dict[str, Any] = {n: getattr(f, n) for n in _OF_FIELDS}
        body[f.name] = dataclasses.field(**kept)
    if hasattr(cls, "__post_init__"):
        body["__post_init__"] = cls.__post_init__
    like = type(cls.__name__, (), body)
    asked: dict[str, bool] = {"init": False, "repr": False, "eq": False, "match_args": False}
    match name:
        case "__init__":  # which also sets defaults that a class with slots cannot have
            unset = any(not f.init and f.default is not dataclasses.MISSING for f in every)
            asked |= {"init": True, "frozen": frozen, "slots": slots and unset}
        case "__hash__":
            asked |= {"eq": True, "unsafe_hash": True}
        case _:
            asked[name.strip("_")] = True
    made = getattr(dataclasses.dataclass(**asked)(like), name)
    made.__qualname__ = f"{cls.__qualname__}.{name}"
    return made


def _refuse_to_set(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for f, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, f.name, value)
