# pyright: reportPrivateUsage=false
# Torch keeps what a front end needs private.
"""Weights that hooks of torch compute before every call (`torch.nn.utils.weight_norm`, `spectral_norm`).

Such a hook sets an attribute of its module, from parameters that are watched. It is the same after a call as the next one will
make it, so it is neither an effect of the model's code nor a change of the model. While a model is traced, the attribute is there
only as long as its layer runs: torch.export refuses modules that differ behind a call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_HOOKS = (WeightNorm, SpectralNorm)


def _hooks(module: nn.Module) -> list[Any]:
    """Those of a layer; spectral norms move on by themselves in training."""
    return [] if module.training else [h for h in module._forward_pre_hooks.values() if type(h) in _HOOKS]


def derived_names(module: nn.Module) -> frozenset[str]:
    """Attributes of a module that such hooks set."""
    return frozenset(h.name for h in _hooks(module)) if module._forward_pre_hooks else frozenset()


def computed_in_the_layer(modules: Iterable[nn.Module]) -> None:
    """Have the layers of a model that is about to be traced compute such weights themselves; the model is nobody else's."""
    for module in modules:
        hooks = _hooks(module)
        if hooks and len(module._forward_pre_hooks) == len(hooks) and "forward" not in module.__dict__:
            for hook in hooks:
                module.__dict__.pop(hook.name, None)
            module.__dict__["_forward_pre_hooks"] = type(module._forward_pre_hooks)()
            module.__dict__["forward"] = functools.partial(_computing, module, hooks)


def _computing(module: nn.Module, hooks: list[Any], *args: Any, **kwargs: Any) -> Any:
    try:
        for hook in hooks:
            hook(module, args)
        return type(module).forward(module, *args, **kwargs)
    finally:
        for hook in hooks:
            module.__dict__.pop(hook.name, None)
