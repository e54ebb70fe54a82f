"""The functions and values of classes that a model's `forward` is made of: somebody may put others there."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Set
from typing import Any, cast

from torch import nn

_NAMESPACES = frozenset({"types", "argparse", "collections", "weakref"})
_FOREIGN = (sys.stdlib_module_names | {"torch", "builtins", "numpy", "hotfuse"}) - _NAMESPACES
_PLAIN = (int, float, complex, str, bytes, type(None))
_HEAP = 1 << 9
"""Of a type's flags: it was made while Python ran."""
_OF_OTHERS = frozenset({
    "__init__", "__new__", "__init_subclass__", "__post_init__", "__set_name__", "__class_getitem__", "__subclasshook__",
    "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__",
    "__getnewargs_ex__", "__del__", "__repr__", "__dir__", "__sizeof__", "__setattr__", "__delattr__", "__setitem__",
    "__delitem__", "__eq__", "__ne__", "__hash__",
})  # fmt: skip
"""Special methods of making, copying, showing, writing and comparing objects: what a model reads is not in them."""


def foreign(thing: Any) -> bool:
    """Whether a class or function is torch's or the standard library's: such objects are not looked into. What `exec` defined in a
    dict has no module, or passes for a builtin, and is the user's.
    """
    module = getattr(thing, "__module__", None)
    if module in (None, "builtins") and _made_by_python(thing):
        return False
    return str(module or "builtins").partition(".")[0] in _FOREIGN


def _made_by_python(thing: Any) -> bool:
    return isinstance(thing, types.FunctionType) or (isinstance(thing, type) and bool(thing.__flags__ & _HEAP))


def special_methods(cls: type) -> frozenset[str]:
    """Methods of a class, and of those of its bases that are not torch's, which run without being named: `d[k]`, `a.b`, `a + b`."""
    own = [c for c in cls.__mro__ if not foreign(c)]
    found = (n for c in own for n, v in vars(c).items() if n.startswith("__") and isinstance(v, types.FunctionType))
    return frozenset(found) - _OF_OTHERS


def unwrapped(value: Any) -> Any:
    """The function behind an entry of a class."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def places_of(cls: type, names: Set[str]) -> list[tuple[dict[str, Any], str]]:
    """Where a class has what these names stand for: dicts of classes, and names in them. Somebody may put others there
    (`LlamaAttention.forward = ...`, `Block.scale = 2`).
    """
    owners = [c for c in cls.__mro__ if c not in (nn.Module, object)]
    return [(d, n) for c in owners if not names.isdisjoint(c.__dict__) for d in behind(c) for n in sorted(names & d.keys())]


def dicts_of(cls: type) -> list[dict[str, Any]]:
    """Those of a class and of its bases that are not torch's: a name that one of them gets hides what it names in the others."""
    return [d for c in cls.__mro__ if not foreign(c) for d in behind(c)]


def behind(cls: type) -> list[dict[str, Any]]:
    """The dict behind a class's proxy, whose tag shows every change; nothing where there is another thing."""
    entries = gc.get_referents(cls.__dict__)
    return [cast(dict[str, Any], entries[0])] if len(entries) == 1 and type(entries[0]) is dict else []


def same_entry(new: Any, old: Any) -> bool:
    """Whether two entries of a class are the same, or copies of one: a class that is pickled by value and unpickled in its own
    process has copies of its methods and values from then on.
    """
    if new is old:
        return True
    if type(new) is not type(old):
        return False
    if isinstance(new, _PLAIN):
        return new == old
    if isinstance(new, property | staticmethod | classmethod):
        return same_entry(unwrapped(new), unwrapped(old))
    return isinstance(new, types.FunctionType) and new.__code__ == old.__code__ and _bound(new) == _bound(old)


def _bound(function: types.FunctionType) -> list[Any]:
    """Defaults and closed-over values: plain ones as they are, others by identity."""
    cells = [c.cell_contents for c in function.__closure__ or () if c != types.CellType()]
    values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells)
    return [v if isinstance(v, int | float | str | None) else id(v) for v in values]
