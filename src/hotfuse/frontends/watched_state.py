"""The Python objects that a model's code may change: what they hold is compared before and after it is traced.

Walked from the model: attributes of modules and objects, entries of dicts, lists, sets and deques, variables that functions close
over or name, attributes of classes and functions. Of a class those methods are looked at whose names the code uses. Of what is made
in native code (files, arrays, iterators) `native_state` tells; other objects of torch's and of most of the standard library are
none of the model's business. Values are compared by identity, plain ones by equality: an attribute that is set to what it was is
no change.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.derived_weights import derived_names
from hotfuse.frontends.native_state import attributes_are_state, led_to, native_state

MAX_OBJECTS = 100_000
"""Objects that are looked at; what is beyond them is not."""
_FOLLOWED = frozenset({"__main__", "types", "argparse", "queue", "collections"})
_FOREIGN = (sys.stdlib_module_names | {"torch", "numpy", "builtins", "hotfuse"}) - _FOLLOWED
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
"""What torch keeps in a module. What is registered there is looked at one by one: tracing has exchanged it before the code runs,
and torch's export tells of no buffer that an inner module binds anew. Writes to tensors are seen otherwise."""
_ENTRIES = ("forward", "__call__")
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.Size, torch.dtype, torch.device)
_Read = Callable[[], dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class Holder:
    """Something that holds values: what to call it, how to read it, and what it held."""

    name: str
    read: _Read
    held: dict[Any, Any]


@dataclass(frozen=True, slots=True)
class Reached:
    """What a model's code leads to."""

    holders: list[Holder]
    """Everything that it may change, as it is now."""
    functions: list[types.FunctionType]
    """Those that are neither torch's nor of the standard library."""


def changed(before: Reached) -> list[str]:
    """What holds something else than before, in words."""
    return [_difference(h.name, h.held, now) for h in before.holders if not _same(h.held, now := h.read())]


def _difference(name: str, held: dict[Any, Any], now: dict[Any, Any]) -> str:
    keys = [k for k in {**held, **now} if k not in held or k not in now or not _same_value(held[k], now[k])]
    return f"{name}{keys[0]}" if keys and isinstance(keys[0], str) and name.endswith((".", " ")) else name.rstrip(". ")


def _same(held: dict[Any, Any], now: dict[Any, Any]) -> bool:
    return len(held) == len(now) and all(k in now and _same_value(v, now[k]) for k, v in held.items())


def _same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same_value, a, b))
    return isinstance(a, _PLAIN) and (a == b or a != a)


def watched_state(target: Any, beside: Iterable[Any] = ()) -> Reached:
    """What is found from `target`; `beside` are classes of its arguments, and members of enumerations."""
    walk = _Walk([*beside, target])
    return Reached(walk.holders, walk.functions)


class _Walk:
    """One walk over what a model reaches."""

    def __init__(self, begin: list[Any]) -> None:
        self.holders: list[Holder] = []
        self.functions: list[types.FunctionType] = []
        self._seen: set[int] = set()
        self._classes: dict[type, None] = {}
        self._names: set[str] = set(_ENTRIES)
        self._left: list[Any] = begin
        self._methods: set[tuple[type, str]] = set()
        while self._left and len(self._seen) < MAX_OBJECTS:
            while self._left and len(self._seen) < MAX_OBJECTS:
                self._look(self._left.pop())
            self._left.extend(self._new_methods())

    def _new_methods(self) -> Iterator[Any]:
        """Functions of classes whose names the code uses; those use further names."""
        for cls in list(self._classes):
            for name in self._names & cls.__dict__.keys():
                if (cls, name) not in self._methods:
                    self._methods.add((cls, name))
                    yield _function(cls.__dict__[name])

    def _note(self, name: str, read: _Read) -> dict[Any, Any]:
        held = read()
        self.holders.append(Holder(name, read, held))
        self._left.extend(held.values())
        return held

    def _look(self, obj: Any) -> None:
        if isinstance(obj, (*_PLAIN, torch.Tensor)) or id(obj) in self._seen:
            return
        self._seen.add(id(obj))
        if isinstance(obj, nn.Module):
            self._module(obj)
        elif isinstance(obj, dict) and not isinstance(obj, OrderedDict):
            self._note("a dict that it reaches, at ", lambda: dict(dict.items(obj)))  # whatever its class makes of look-ups
        elif isinstance(obj, list | tuple | deque):
            self._note(f"a {type(obj).__name__} that it reaches", lambda: dict(enumerate(obj)))
        elif isinstance(obj, set | frozenset):
            self._note("a set that it reaches", lambda: dict.fromkeys(obj))
            self._left.extend(obj)
        elif isinstance(obj, types.FunctionType):
            self._function(obj)
        elif isinstance(obj, random.Random):
            self._note("the state of a random generator", lambda: {"": obj.getstate()})
        elif isinstance(obj, np.random.Generator):
            self._note("the state of a random generator", lambda: {"": repr(obj.bit_generator.state)})
        elif isinstance(obj, np.random.RandomState):
            self._note("the state of a random generator", lambda: {"": repr(obj.get_state(legacy=False))})
        elif isinstance(obj, types.BuiltinMethodType):
            self._left.append(obj.__self__)
        elif isinstance(obj, types.MethodType):
            self._left += [obj.__self__, obj.__func__]
        elif isinstance(obj, functools.partial):
            self._left += [obj.func, obj.args, obj.keywords]
        elif isinstance(obj, type):
            self._class(obj)
        elif (read := native_state(obj)) is not None:
            self._note(f"what a {type(obj).__name__} holds", read)
            self._left += led_to(obj)
        elif not isinstance(obj, types.ModuleType) and (not _foreign(type(obj)) or attributes_are_state(type(obj))):
            self._object(obj)
        else:
            self._left += led_to(obj)

    def _module(self, module: nn.Module) -> None:
        kind = type(module)
        own = _kept_by_torch(kind) | derived_names(module)
        self._note(f"{kind.__name__}.", lambda: {k: v for k, v in module.__dict__.items() if k not in own})
        registered = [module._buffers, module._parameters, module._modules]  # pyright: ignore[reportPrivateUsage]
        self._note(f"{kind.__name__}.", lambda: {k: v for held in registered for k, v in held.items() if k not in own})
        self._left.extend(m for m in module._modules.values() if m is not None)  # pyright: ignore[reportPrivateUsage]
        for hook in itertools.chain(module._forward_hooks.values(), module._forward_pre_hooks.values()):  # pyright: ignore[reportPrivateUsage]
            self._left.append(hook)
        self._class(kind)

    def _object(self, obj: Any) -> None:
        kind = type(obj)
        if isinstance(entries := getattr(obj, "__dict__", None), dict):
            self._note(f"{kind.__name__}.", lambda: dict(entries))
        slots = [n for c in kind.__mro__ for n in _slots(c)]
        if slots:
            self._note(f"{kind.__name__}.", lambda: {n: getattr(obj, n) for n in slots if hasattr(obj, n)})
        self._class(kind)

    def _class(self, cls: type) -> None:
        for each in cls.__mro__:
            if each in self._classes or _foreign(each):
                continue
            self._classes[each] = None
            self._note(f"{each.__name__}.", lambda each=each: _attributes(each))

    def _function(self, function: types.FunctionType) -> None:
        if _foreign(function):
            return
        code = function.__code__
        self.functions.append(function)
        if function.__dict__:
            self._note(f"{function.__name__}.", lambda: dict(function.__dict__))
        self._left += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if function.__closure__:
            cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
            self._note("the variable ", lambda: {n: c.cell_contents for n, c in cells.items() if c != types.CellType()})
        names, space = names_in(code), function.__globals__
        self._names |= names
        if here := sorted(names & space.keys()):
            self._note("the variable ", lambda: {n: space[n] for n in here if n in space})
        for n in here:
            if isinstance(module := space[n], types.ModuleType) and not _foreign_name(module.__name__):
                self._variables(module, names)

    def _variables(self, module: types.ModuleType, names: frozenset[str]) -> None:
        if there := sorted(names & vars(module).keys()):
            space = vars(module)
            self._note(f"{module.__name__}.", lambda: {n: space[n] for n in there if n in space})


@functools.lru_cache(maxsize=4096)
def _kept_by_torch(kind: type) -> frozenset[str]:
    """Attributes of a kind of module that are torch's own: those of every module, and private ones that code of its classes there
    names. A recurrent layer keeps its weights a second time, as a list, which follows when tracing exchanges them.
    """
    own = [c for c in kind.__mro__ if _foreign(c) and c not in (nn.Module, object)]
    functions = (_function(v) for c in own for v in c.__dict__.values())
    names = {n for f in functions if isinstance(f, types.FunctionType) for n in names_in(f.__code__)}
    return _INTERNAL | {n for n in names if n.startswith("_") and not n.startswith("__")}


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of variables and attributes that code has, functions inside of it included."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))


def _function(value: Any) -> Any:
    """What stands behind a class's entry."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _attributes(cls: type) -> dict[str, Any]:
    """A class's own attributes, without those that every class has; its methods are looked at where they are used."""
    made = (
        types.FunctionType,
        property,
        staticmethod,
        classmethod,
        types.MemberDescriptorType,
        types.GetSetDescriptorType,
    )
    return {
        k: v for k, v in vars(cls).items() if not (k.startswith("__") or k.startswith("_abc_") or isinstance(v, made))
    }


def _slots(cls: type) -> tuple[str, ...]:
    found = cls.__dict__.get("__slots__", ())
    return tuple(n for n in ((found,) if isinstance(found, str) else found) if not n.startswith("__"))


def _foreign(thing: Any) -> bool:
    return _foreign_name(getattr(thing, "__module__", None) or "")


def _foreign_name(name: str) -> bool:
    return name.partition(".")[0] in _FOREIGN
