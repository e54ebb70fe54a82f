"""Python's `max` and `min` of tensors, while a model is traced.

They ask `b > a` and give one of the two back, so `max(1e-6, x.std())` is 1e-6 where the deviation is NaN. torch's export has
`torch.maximum` and `torch.clamp` in their place, which give NaN there, and which read nothing where a call that was recorded did
(`frontends.paths`). So a choice is written that gives what Python gives,

    max(a, b)   ->   where(b > a, b, a)

where both are numbers of one type. For numbers of two types the result's type depends on data, and along a recorded path all data
was read, so there Python's own function runs. Symbols keep torch's form, which reads nothing.
"""

from __future__ import annotations

import builtins
import functools
import operator
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_REAL: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Any]]] = {
    "max": (builtins.max, operator.gt),
    "min": (builtins.min, operator.lt),
}


@contextmanager
def extremes_as_in_eager(*, followed: bool) -> Generator[None]:
    """Around the traced call, on this thread; `followed`: it reads what a recorded call read."""
    thread = threading.get_ident()
    before = {name: getattr(builtins, name) for name in _REAL}

    def made(name: str) -> Callable[..., Any]:
        real, beats = _REAL[name]
        traced = before[name]

        @functools.wraps(real)
        def extreme(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or kwargs or not _of_tensors(args):
                return traced(*args, **kwargs)
            if followed or len(args) < 2 or not _one_kind(args):
                return real(*args)
            return functools.reduce(lambda a, b: torch.where(beats(b, a), b, a), args)

        return extreme

    for name in _REAL:
        setattr(builtins, name, made(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(builtins, name, function)


def _of_tensors(args: tuple[Any, ...]) -> bool:
    found = args[0] if len(args) == 1 and isinstance(args[0], list | tuple | Tensor) else args
    return any(isinstance(a, Tensor) for a in found)


def _one_kind(args: tuple[Any, ...]) -> bool:
    """Whether all are numbers, some of them tensors, whose choice has a type that does not depend on data."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if any(t.dim() or t.dtype != tensors[0].dtype for t in tensors):
        return False
    kind = float if tensors[0].is_floating_point() else int
    return all(isinstance(a, Tensor) or type(a) is kind for a in args)
