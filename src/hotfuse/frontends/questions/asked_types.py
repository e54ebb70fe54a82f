"""`type(n)`, asked of a number or a tensor while a model is traced.

    if type(n) is int: ...
    handlers[type(x)](x)

Nothing of an object is asked there, so a symbol cannot answer. The name `type` can: in the namespaces of functions that the model
leads to and that name it, it is a class that answers as in eager, and that else does what `type` does.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hotfuse.frontends.plain_numbers import TRACED
from hotfuse.frontends.watched_state import names_in

_PLAIN: dict[type[Any], type[Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
NAME = "type"


def naming(name: str, functions: Iterable[types.FunctionType]) -> list[dict[str, Any]]:
    """The namespaces of those functions that have a name."""
    found = {id(f.__globals__): f.__globals__ for f in functions if name in names_in(f.__code__)}
    return list(found.values())


@contextmanager
def types_as_in_eager(spaces: Iterable[dict[str, Any]], asked: Callable[[Any], None]) -> Generator[None]:
    """Around the traced call, on this thread: `type` in the namespaces given; `asked` is told of tensors that are asked."""
    thread = threading.get_ident()

    class Asked(type):
        """How the class that stands for `type` is called, compared and asked for instances."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs:
                return type(*args, **kwargs)
            found: type[Any] = type(args[0])
            if threading.get_ident() != thread:
                return found
            if issubclass(found, TRACED):
                asked(args[0])
                return nn.Parameter if isinstance(args[0], nn.Parameter) else Tensor
            return cls if found is type else _PLAIN.get(found, found)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, type)

        def __subclasscheck__(cls, subclass: Any) -> bool:
            return issubclass(subclass, type)

        def __eq__(cls, other: object) -> bool:
            return other is type or other is cls

        def __hash__(cls) -> int:
            return hash(type)

        def __getitem__(cls, item: Any) -> Any:
            return type[item]

    class Stand(type, metaclass=Asked):
        """What the name means meanwhile."""

    found = [space for space in spaces if NAME not in space]
    for space in found:
        space[NAME] = Stand
    try:
        yield
    finally:
        for space in found:
            if space.get(NAME) is Stand:
                del space[NAME]
