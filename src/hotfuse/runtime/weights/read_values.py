"""What a model's code reads that no dict or list of its own shows: functions' defaults, slots, sets, arrays, the environment.

Noted once, with references, so that no identity can be used again, and compared at every call: by the native sweep of the model's
guard, or here.
"""

from __future__ import annotations

import contextvars
import copy
import operator
import os
import types
from collections.abc import Iterable
from typing import Any

from hotfuse.native.model_guard import NOT_SET, NotedValues
from hotfuse.runtime.weights.containers import Reads

_PARTS = tuple(map(operator.attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))


def _environment() -> dict[Any, Any]:
    """The dict behind `os.environ`."""
    return vars(os.environ)["_data"]


def _here(variable: contextvars.ContextVar[Any]) -> Any:
    """What a variable holds in this context; `get` with a default would not give the variable's own."""
    try:
        return variable.get()
    except LookupError:
        return NOT_SET


class ReadValues:
    """A snapshot of such values."""

    def __init__(self, found: Reads) -> None:
        self._functions: list[types.FunctionType] = []
        self._parts: list[list[Any]] = []
        self._slots = [(o, n, getattr(o, n, NOT_SET)) for o, n in found.slots]
        self._sets = [(s, copy.copy(s)) for s in found.sets]
        self._arrays = [(a, a.tobytes()) for a in found.arrays]
        self._context = [(v, _here(v)) for v in found.context]
        self._kept = found.kept
        self.kept_dicts = [k.entries for k in found.kept]
        self.environment: list[dict[Any, Any]] = [_environment()] if found.variables or found.every_variable else []
        self._variables = [dict(d) for d in self.environment]
        self._named = None if found.every_variable else list(map(os.environ.encodekey, found.variables))

    def take(self, functions: Iterable[Any]) -> None:
        """Note functions as they are now."""
        self._functions = [f for f in functions if isinstance(f, types.FunctionType)]
        self._parts = [list(map(part, self._functions)) for part in _PARTS]

    def difference(self) -> str:
        """What is another one than it was, in words; empty where nothing is."""
        for part, held in zip(_PARTS, self._parts, strict=True):
            if not all(map(operator.is_, map(part, self._functions), held)):
                changed = next(f for f, before in zip(self._functions, held, strict=True) if part(f) is not before)
                return f"the code or defaults of {changed.__qualname__}"
        for o, name, held in self._slots:
            if getattr(o, name, NOT_SET) is not held:
                return f"{type(o).__name__}.{name}"
        if any(now != before for now, before in self._sets):
            return "a set or queue that its code reads"
        if any(a.tobytes() != before for a, before in self._arrays):
            return "a NumPy array that its code reads"
        for v, held in self._context:
            if _here(v) is not held:
                return f"the context variable {v.name}"
        for kept in self._kept:
            if kept.forgotten():
                return f"the results that {kept.function.__name__} keeps"
        return "the environment" if self._others() else ""

    def _others(self) -> bool:
        """Whether variables that count are others; those that do not are noted as they are now."""
        now = [dict(d) for d in self.environment]
        if now == self._variables:
            return False
        if self._named is None or any(d.get(n) != b.get(n) for d, b in zip(now, self._variables, strict=True) for n in self._named):
            return True
        self._variables = now
        return False

    def noted(self, *, tagged: bool) -> NotedValues:
        """For the native sweep; the environment is compared whole where dicts have no tags."""
        environment = [] if tagged else zip(self.environment, self._variables, strict=True)
        return NotedValues(
            list(zip(self._functions, *self._parts, strict=True)),
            self._slots,
            [*self._sets, *environment],
            [(a.ctypes.data, before) for a, before in self._arrays],
            self._context,
        )
