# pyright: reportPrivateUsage=false
# Torch keeps what a front end needs private.
"""What a model is made of: the tensors and modules that it, or a function, leads to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import Spec

MAX_OBJECTS = 200_000
"""Objects that are looked through for tensors and modules."""
PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, slots=True)
class PresentModel:
    """A model that stays where it is, and what it is made of."""

    target: Any
    spec: Spec
    tensors: tuple[torch.Tensor, ...]
    modules: tuple[nn.Module, ...]


def hold(target: Any, spec: Spec) -> PresentModel:
    """What a model is made of; raises CaptureError where that has no end."""
    tensors: dict[int, torch.Tensor] = {}
    modules: dict[int, nn.Module] = {}
    seen: set[int] = set()
    left: list[Any] = [target]
    while left:
        obj = left.pop()
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        if len(seen) > MAX_OBJECTS:
            raise CaptureError("the model cannot be looked through", because=f"it holds more than {MAX_OBJECTS} objects",
                               why=Why.NOT_SENDABLE)  # fmt: skip
        if isinstance(obj, torch.Tensor):
            if type(obj) in PLAIN_TENSORS:
                tensors[id(obj)] = obj
            continue
        if isinstance(obj, torch.jit.ScriptModule):
            raise CaptureError(f"a {type(obj).__name__} is TorchScript, whose code and weights are not Python's",
                               because="nothing would notice that they change",
                               hint="jit the Python module that it was made of; it takes the same state_dict")  # fmt: skip
        if isinstance(obj, nn.Module):
            modules[id(obj)] = obj
        left.extend(_parts(obj))
    return PresentModel(target, spec, tuple(tensors.values()), tuple(modules.values()))


def _parts(obj: Any) -> Iterator[Any]:
    """The objects that one refers to and that may lead to tensors or modules."""
    if isinstance(obj, dict):
        yield from obj.values()
    elif isinstance(obj, list | tuple | set | frozenset):
        yield from obj
    elif isinstance(obj, types.FunctionType):
        for cell in obj.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield from (obj.__globals__[n] for n in obj.__code__.co_names if isinstance(obj.__globals__.get(n), _LEADING))
        yield from obj.__defaults__ or ()
    elif isinstance(obj, types.MethodType):
        yield from (obj.__self__, obj.__func__)
    elif isinstance(obj, functools.partial):
        yield from (obj.func, obj.args, obj.keywords)
    elif isinstance(obj, nn.Module) or not (
        isinstance(obj, type | types.ModuleType) or type(obj).__module__.partition(".")[0] in ("torch", "builtins")
    ):
        yield from getattr(obj, "__dict__", {}).values()


_LEADING = (nn.Module, torch.Tensor, types.FunctionType)
