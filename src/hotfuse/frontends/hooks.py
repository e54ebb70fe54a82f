# pyright: reportPrivateUsage=false
# Torch keeps a module's hooks private.
"""Forward hooks: a graph holds what they do to tensors, and nothing else that they do.

A hook that collects activations in a list, counts or prints would run while the model is captured and never again. So a model is
captured only while each of its hooks is seen to compute on tensors alone: its code stores nowhere but in its own variables, and
every name that it reads is torch's, a tensor's or a constant. Hooks of torch's own (weight norm) and of transformers' (which
collect into what a call returns) are known to be fine.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _every

from hotfuse.base.errors import CaptureError

TRUSTED = ("torch.", "transformers.")
_STORES = ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "DELETE_ATTR", "DELETE_SUBSCR",
           "DELETE_GLOBAL", "DELETE_DEREF", "IMPORT_NAME", "YIELD_VALUE")  # fmt: skip
_NAMES = frozenset((*dir(torch), *dir(torch.Tensor), *dir(nn.functional), "torch", "F", "nn", "functional"))


def refuse_hooks(modules: Iterable[nn.Module]) -> None:
    """Raise CaptureError where a hook of the model may do something that no graph does."""
    of_all = (*_every._global_forward_pre_hooks.values(), *_every._global_forward_hooks.values())
    for module in modules:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *of_all):
            if not _on_tensors_alone(hook):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise CaptureError(
                    f"a forward hook of {type(module).__name__} may do more than compute on tensors: {name}",
                    because="a captured graph would leave it out",
                    hint="remove the hook where the model serves; while it is there the model's own code answers",
                )


def _on_tensors_alone(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    if home == "torch" or home.startswith(TRUSTED):
        return True
    function = getattr(hook, "__func__", hook)
    if not isinstance(function, types.FunctionType):
        return False
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return all(map(_constant, (*held, *(function.__defaults__ or ())))) and _computes(function.__code__, function.__globals__)


def _computes(code: types.CodeType, names: dict[str, Any]) -> bool:
    """Whether code stores in its own variables only and reads nothing that could be changed through it."""
    for step in dis.get_instructions(code):
        if step.opname in _STORES:
            return False
        if step.opname == "LOAD_GLOBAL" and step.argval in names and not _known(names[step.argval]):
            return False
    if not _NAMES.issuperset(n for n in code.co_names if n not in names or not _constant(names[n])):
        return False
    return all(_computes(c, names) for c in code.co_consts if isinstance(c, types.CodeType))


def _constant(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.Tensor)


def _known(value: object) -> bool:
    """A constant, torch, or something of torch's."""
    home = getattr(value, "__name__", "") if isinstance(value, types.ModuleType) else getattr(value, "__module__", "") or ""
    return _constant(value) or home == "torch" or home.startswith("torch.")
