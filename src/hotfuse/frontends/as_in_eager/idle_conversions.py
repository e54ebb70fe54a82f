# pyright: reportPrivateUsage=false
# What all conversions of a module go through is private to torch.
"""Layers that a model's code converts to what they are (`self.router.to(self.dtype)`, `self.table.to(x.device)`).

From the second call on that changes nothing. While a model is traced its weights are fake tensors. torch replaces fake tensors by
converted ones even where both are the same, and fails because the tracer refers to them. So a conversion that changes no tensor of
a layer is left out while that layer is traced. One that changes something goes on as torch has it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Convert = Callable[[torch.Tensor], torch.Tensor]


def without_idle_conversions(modules: Iterable[nn.Module]) -> None:
    """Have modules that are about to be traced leave conversions out that give back what they are given."""
    for module in modules:
        if "_apply" not in vars(module):
            module.__dict__["_apply"] = functools.partial(_converted, module)


def _converted(module: nn.Module, convert: Convert, recurse: bool = True) -> Any:  # as torch calls it
    """As torch's own, of a layer that needs it."""
    tensors = itertools.chain(module.parameters(recurse), module.buffers(recurse))
    with torch.no_grad():
        idle = all(t.grad is None and convert(t) is t for t in tensors)
    return module if idle else type(module)._apply(module, convert, recurse)
