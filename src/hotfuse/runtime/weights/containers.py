"""Dicts, lists and plain objects that a model's code reads: what it means may change without any attribute of a module being set.

    model.config.use_bias = False        self.options["scale"] = 2.0        steps.append(3)

What is looked through are the attributes that code of a module's class names, and the variables that functions name: a trainer
that a module holds for others, and its counters, are none of the captured graph's business. Followed from there: dicts, lists,
tuples, and objects of classes that are neither torch's nor the standard library's (namespaces are). There are bounds, because a
look is taken at every call: containers of many entries (vocabularies) are left out, as are those with keys or look-ups of
their own, and all beyond the first so many.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

MAX_CONTAINERS = 1024
MAX_ENTRIES = 256
_NAMESPACES = frozenset({"types", "argparse"})
_FOREIGN = (sys.stdlib_module_names | {"torch", "builtins"}) - _NAMESPACES
"""Packages whose objects are not looked into."""
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, torch.Tensor)


@functools.lru_cache(maxsize=1024)
def names_in_code(cls: type) -> frozenset[str]:
    """Names of attributes that a class's `forward` uses, and the methods it names, and those that they name."""
    found: set[str] = set()
    left = ["forward"]
    while left:
        method = getattr(cls, left.pop(), None)
        if isinstance(method, property):
            method = method.fget
        if isinstance(method, types.FunctionType):
            new = _names(method.__code__) - found
            found |= new
            left.extend(new)
    return frozenset(found)


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def methods_of(cls: type) -> list[tuple[dict[str, Any], str]]:
    """Where the functions and values stand that a class's `forward` is made of: dicts of classes, and names in them. Somebody may
    put others there (`LlamaAttention.forward = ...`, `Block.scale = 2`).
    """
    found: list[tuple[dict[str, Any], str]] = []
    for name in ("forward", *sorted(names_in_code(cls))):
        owner = next((c for c in cls.__mro__ if name in c.__dict__), None)
        if owner is None or owner in (nn.Module, object):
            continue
        found += [(entries, name) for entries in _behind(owner)]
    return found


def dicts_of(cls: type) -> list[dict[str, Any]]:
    """Those of a class and of its bases that are not torch's: a name that one of them gets hides what it names in the others."""
    return [d for c in cls.__mro__ if c.__module__.partition(".")[0] not in _FOREIGN for d in _behind(c)]


def _behind(cls: type) -> list[dict[str, Any]]:
    """The dict behind a class's proxy, whose tag shows every change; nothing where there is another thing."""
    entries = gc.get_referents(cls.__dict__)
    return [cast(dict[str, Any], entries[0])] if len(entries) == 1 and type(entries[0]) is dict else []


def same_function(new: Any, old: Any) -> bool:
    """Whether two are the same method, or copies of one: a class that is pickled by value and unpickled in its own process has
    copies of its methods from then on.
    """
    if new is old:
        return True
    if not isinstance(new, types.FunctionType) or not isinstance(old, types.FunctionType):
        return False
    return new.__code__ == old.__code__ and _bound(new) == _bound(old)


def _bound(function: types.FunctionType) -> list[Any]:
    """Defaults and closed-over values: plain ones as they are, others by identity."""
    cells = [c.cell_contents for c in function.__closure__ or () if c != types.CellType()]
    values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells)
    return [v if isinstance(v, int | float | str | None) else id(v) for v in values]


def read_by(modules: Sequence[nn.Module]) -> list[Any]:
    """What modules hold under names that their own code uses."""
    return [v for m in modules for k, v in vars(m).items() if k in names_in_code(type(m))]


def containers(values: Iterable[Any]) -> tuple[list[dict[Any, Any]], list[list[Any]]]:
    """The dicts (those of objects among them) and lists that these values are or lead to, each once, within bounds."""
    dicts: list[dict[Any, Any]] = []
    lists: list[list[Any]] = []
    seen: set[int] = set()
    entered: set[int] = set()
    left = list(values)[::-1]
    while left and len(dicts) + len(lists) < MAX_CONTAINERS:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is tuple:
            left.extend(cast(tuple[Any, ...], value)[:MAX_ENTRIES])
        elif type(value) is list:
            items = cast(list[Any], value)
            if len(items) <= MAX_ENTRIES:
                lists.append(items)
                left.extend(items)
        elif (entries := _entries(value)) is not None and id(entries) not in entered:
            entered.add(id(entries))
            dicts.append(entries)
            left.extend(list(entries.values()))
    return dicts, lists


def _entries(value: Any) -> dict[Any, Any] | None:
    """A dict whose look-ups native code can do, or an object's own; None where that is nothing to look into."""
    if type(value) not in (dict, OrderedDict):
        if isinstance(value, _OPAQUE) or type(value).__module__.partition(".")[0] in _FOREIGN:
            return None
        value = getattr(value, "__dict__", None)
        if type(value) is not dict:
            return None
    found = cast(dict[Any, Any], value)
    return found if len(found) <= MAX_ENTRIES and all(type(k) in (str, int) for k in list(found)) else None
