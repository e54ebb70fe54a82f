"""`torch.tensor([a, 1, b])` of tensors with one number each, while a model is traced.

torch reads the numbers, which a trace does not have. What the call gives is those tensors in one, so that is traced:

    torch.tensor([[a, 1], [2, b]])   ->   stack([stack([a, full(1)]), stack([full(2), b])])

in the type that torch finds for all of them together, and apart from their gradients, as a tensor of numbers is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_TYPES: dict[type[Any], torch.dtype | None] = {bool: torch.bool, int: torch.int64, torch.SymInt: torch.int64, float: None}
"""Numbers beside tensors, by their types; None is the default type of floats."""


def of_tensors(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What such a call gives; None for every other call."""
    if function is not torch.tensor or len(args) != 1 or not kwargs.keys() <= {"dtype", "device"}:
        return None
    leaves = list(_leaves(args[0]))
    tensors = [v for v in leaves if isinstance(v, Tensor)]
    if isinstance(args[0], Tensor) or not tensors or any(t.dim() or t.is_complex() for t in tensors):
        return None
    if any(not isinstance(v, Tensor) and type(v) not in _TYPES for v in leaves):
        return None
    kinds = (v.dtype if isinstance(v, Tensor) else _TYPES[type(v)] or torch.get_default_dtype() for v in leaves)
    common = functools.reduce(torch.promote_types, kinds)
    dtype = kwargs.get("dtype") or common
    if torch.promote_types(common, dtype) != dtype:  # torch raises where a number does not fit
        return None
    return _stacked(args[0], dtype, kwargs.get("device") or torch.get_default_device())


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, list | tuple):
        for part in data:  # pyright: ignore[reportUnknownVariableType] - a model's own
            yield from _leaves(part)
    else:
        yield data


def _stacked(data: Any, dtype: torch.dtype, device: Any) -> Tensor:
    if isinstance(data, list | tuple):
        return torch.stack([_stacked(part, dtype, device) for part in data])  # pyright: ignore[reportUnknownVariableType]
    if isinstance(data, Tensor):
        return data.detach().to(device=device, dtype=dtype)
    return torch.full((), data, dtype=dtype, device=device)
