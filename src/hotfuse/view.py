# pyright: reportPrivateUsage=false
# Torch keeps a module's hooks private.
"""A view of a module whose `forward` is served: methods that run on it (`generate`, `encode`) call the plans.

The view is an instance of a class derived from the module's own, and shares the module's attributes: the very same dict.
So it passes for the module itself (`isinstance`, `super()`, submodules, buffers, hooks, attributes that a method sets), and
nothing of the module itself is changed: calls of it run its own code. No context has to be entered and left, so any
number of threads may be in a method, and a method may call others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Serve = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def view_of(target: nn.Module, serve: Serve) -> nn.Module | str:
    """The view; a string says why a module has none."""
    cls: type[Any] = type(target)
    meta: Any = type(cls)
    if isinstance(target, torch.jit.ScriptModule):
        return "a scripted module's methods are compiled and call no Python"

    def __call__(_self: Any, *args: Any, **kwargs: Any) -> Any:
        return serve(args, kwargs)

    def forward(_self: Any, *args: Any, **kwargs: Any) -> Any:
        if target._forward_hooks or target._forward_pre_hooks:  # a direct call of forward runs none of them
            return target.forward(*args, **kwargs)
        return serve(args, kwargs)

    def __reduce_ex__(_self: Any, protocol: Any) -> Any:
        return target.__reduce_ex__(protocol)  # a copy is a module of its own, which nobody serves

    own = {"__call__": __call__, "forward": functools.wraps(cls.forward)(forward), "__reduce_ex__": __reduce_ex__,
           "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if hasattr(cls, "__del__"):
        own["__del__"] = lambda _self: None  # that is the module's own to do
    try:
        view: nn.Module = object.__new__(meta(cls.__name__, (cls,), own))
        view.__dict__ = target.__dict__
    except Exception as e:  # a class may forbid being derived from, in any words
        return f"{type(e).__name__}: {e}"
    return view
