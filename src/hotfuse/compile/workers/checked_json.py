"""Frozen dataclasses as JSON and back, checked field by field: what a message says, or a clear refusal of it.

    int  float  bool  str  None  a dataclass  A | B  tuple[A, ...]  tuple[A, B]  Mapping[str, A]  Any (plain JSON)

A field that is not declared, one that is missing and has no default, and a value of another type are refused by name: settings
that get lost on the way would be noticed by nobody otherwise.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hotfuse.base.errors import InternalError

T = TypeVar("T")


def encoded(value: Any) -> Any:
    """A value as plain JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encoded(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): encoded(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [encoded(v) for v in cast("tuple[Any, ...]", value)]
    return value.value if isinstance(value, Enum) else value


def decoded(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    """A dataclass of plain JSON; raises InternalError where the two do not agree."""
    types_ = _types(kind)
    if unknown := sorted(set(data) - types_.keys()):
        raise InternalError(f"{where} has fields that its format lacks", because=f"{kind.__name__} has no {', '.join(unknown)}")
    given: dict[str, Any] = {}
    for f in fields(cast(Any, kind)):
        if f.name in data:
            given[f.name] = _value(types_[f.name], data[f.name], f"{where}, {f.name}")
        elif not _optional(f):
            raise InternalError(f"{where} is not complete", because=f"{kind.__name__} needs {f.name}")
    return kind(**given)


def described(kind: type[Any]) -> str:
    """The schema in one line, as it is compared between versions: `name: type`, with `?` where there is a default."""
    types_ = _types(kind)
    shown = [f"{f.name}{'?' if _optional(f) else ''}: {_shown(types_[f.name])}" for f in fields(kind)]
    return f"{kind.__name__}({', '.join(shown)})"


@cache
def _types(kind: type[Any]) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _optional(f: Field[Any]) -> bool:
    return f.default is not MISSING or f.default_factory is not MISSING


def _shown(kind: Any) -> str:
    if isinstance(kind, type) and not get_args(kind):
        return kind.__name__
    return str(kind).replace("typing.", "").replace("collections.abc.", "")


def _value(kind: Any, value: Any, where: str) -> Any:
    """One value of a declared type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (kind,) = (k for k in inner if k is not type(None))
        return _value(kind, value, where)
    if origin is Literal and value in inner:
        return value
    if is_dataclass(kind) and isinstance(value, Mapping):
        return decoded(cast("type[Any]", kind), cast("Mapping[str, Any]", value), where)
    if origin is Mapping and isinstance(value, Mapping):
        return {str(k): _value(inner[1], v, where) for k, v in cast("Mapping[Any, Any]", value).items()}
    if origin is tuple and isinstance(value, list | tuple):
        several = cast("list[Any]", value)
        each = [inner[0]] * len(several) if len(inner) == 2 and inner[1] is Ellipsis else inner
        if len(each) == len(several):
            return tuple(_value(k, v, where) for k, v in zip(each, several, strict=True))
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (int, bool, str) and type(value) is kind:
        return value
    raise InternalError(f"{where} is not {_shown(kind)}", because=f"it is {value!r}"[:200])
