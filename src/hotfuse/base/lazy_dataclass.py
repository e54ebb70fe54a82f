"""Dataclasses whose methods are generated when they are first used.

The standard library compiles the text of six methods for every class while a module is imported: half a millisecond a class, which
was half of what it took to import what serves (decision 102). A process that serves uses few of them. So a class is made with its
fields, slots and `__match_args__` at once. Its methods are generated at their first use, and what that makes takes their place.
They do what the standard library's do, each compiled by itself: to have the library make them for a class of the same fields took
0.4 ms of the first call each, a fifth of the processor time of a second start (decision 300).

What differs: before the first use `inspect.signature` knows no parameters, and a frozen class lets no subclass assign attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, weakref_slot=False):
        """As `dataclasses.dataclass`."""

        def make(cls):
            return _made(cls, frozen=frozen, slots=slots, eq=eq, weakref_slot=weakref_slot)

        return make if cls is None else make(cls)


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


class _Factory:
    """Stands for an argument that was not given, and whose value is made in each call."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY, _SET = _Factory(), "_hotfuse_set"


def _generated(cls: type[Any], name: str, *, frozen: bool, slots: bool) -> Callable[..., Any]:
    """What the standard library would make of a class with these fields: one function, compiled by itself."""
    every = dataclasses.fields(cls)
    names: dict[str, Any] = {"__name__": cls.__module__, _SET: object.__setattr__}
    annotations: dict[str, Any] = {}
    match name:
        case "__init__":
            text = _init(cls, every, names, frozen=frozen, slots=slots)
            annotations = {f.name: f.type for f in every if f.init} | {"return": None}
        case "__repr__":
            shown = ", ".join(f"{f.name}={{self.{f.name}!r}}" for f in every if f.repr)
            text = f"def __repr__(self):\n return f\"{{self.__class__.__qualname__}}({shown})\""
        case "__hash__":
            hashed = [f for f in every if (f.compare if f.hash is None else f.hash)]
            text = f"def __hash__(self):\n return hash({_values('self', hashed)})"
        case _:
            compared = [f for f in every if f.compare]
            text = (f"def __eq__(self, other):\n if other.__class__ is self.__class__:\n"
                    f"  return {_values('self', compared)} == {_values('other', compared)}\n return NotImplemented")
    exec(text, names)
    made = names[name]
    made.__qualname__, made.__annotations__ = f"{cls.__qualname__}.{name}", annotations
    return recursive_repr()(made) if name == "__repr__" else made


def _init(cls: type[Any], every: Sequence[dataclasses.Field[Any]], names: dict[str, Any], *, frozen: bool, slots: bool) -> str:
    """The text of `__init__`; what it refers to goes to `names`."""
    myself = "self" if all(f.name != "self" for f in every) else "_hotfuse_self"
    taken: dict[bool, list[str]] = {False: [], True: []}
    lines: list[str] = []
    for i, f in enumerate(every):
        default, value = "", f.name
        if f.default_factory is not dataclasses.MISSING:
            names[f"_hotfuse_{i}"], names["_hotfuse_factory"] = f.default_factory, _FACTORY
            default = "=_hotfuse_factory"
            value = f"_hotfuse_{i}() if {f.name} is _hotfuse_factory else {f.name}" if f.init else f"_hotfuse_{i}()"
        elif f.default is not dataclasses.MISSING:
            names[f"_hotfuse_{i}"] = f.default
            default = f"=_hotfuse_{i}"
            value = f.name if f.init else f"_hotfuse_{i}"
        if f.init:
            taken[bool(f.kw_only)].append(f.name + default)
        elif not default or (not slots and f.default_factory is dataclasses.MISSING):
            continue  # nobody sets it here, or the class has it
        lines.append(f" {_SET}({myself}, {f.name!r}, {value})" if frozen else f" {myself}.{f.name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append(f" {myself}.__post_init__()")
    arguments = ", ".join([myself, *taken[False], *(["*", *taken[True]] if taken[True] else [])])
    return "\n".join([f"def __init__({arguments}):", *(lines or [" pass"])])


def _values(of: str, fields: Sequence[dataclasses.Field[Any]]) -> str:
    return f"({''.join(f'{of}.{f.name}, ' for f in fields)})"


def _refuse_to_set(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for f, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, f.name, value)
