"""Noticing that the user's model is no longer the one that was captured.

Checked on every call, so it is made of a few C-level sweeps: identities of module attributes, parameters, buffers and
hooks; addresses and versions of tensors. Snapshots hold references, so an address or identity cannot be reused.

| what happened | how it shows | what follows |
| --- | --- | --- |
| weights written (`load_state_dict`, an optimizer) | version | tier 0 reads live tensors; copies are stale |
| memory exchanged (`.to()`, `p.data = ...`) | address | the same; a new capture if the type changed |
| parts replaced, `train()`, attributes, hooks | identity, count | a new capture |

Writing through `p.data` in place leaves no trace that torch would show; tier 0 reads the live numbers all the same.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import nn

_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
_DICTS = ("__dict__", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_version = operator.attrgetter("_version")


class Change(StrEnum):
    """What a check found."""

    NONE = "none"
    VALUES = "values"
    """Weights hold other numbers in the same place, or lie elsewhere with the same type."""
    MODEL = "model"
    """The captured graph may no longer describe the model."""


class _Cell:
    """A closure's variable, readable like a mapping."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, _key: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not assigned yet
            return None


def names_read(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """The global and closure variables a function names: what it means when they are rebound."""
    if not isinstance(function, types.FunctionType):
        return []
    places: list[tuple[Any, str]] = [
        (function.__globals__, n) for n in function.__code__.co_names if n in function.__globals__
    ]
    return places + [(_Cell(c), n) for c, n in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True)]


class Watch:
    """A snapshot of modules and tensors that can be compared with the present at little cost.

    Global and closure variables count where `functions` and the modules' own `forward` name them.
    """

    def __init__(
        self, modules: Sequence[nn.Module], tensors: Sequence[torch.Tensor],
        functions: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self._modules = tuple(modules)
        self._dicts: list[dict[str, Any]] = [getattr(m, d) for m in modules for d in _DICTS]
        places: list[tuple[Any, str]] = [(d, key) for d in self._dicts for key in d if key not in _INTERNAL]
        for forward in (*functions, *dict.fromkeys(type(m).forward for m in modules)):
            places += names_read(forward)
        self._owners = [d for d, _ in places]
        self._keys = [k for _, k in places]
        self._held: list[Any] = list(map(operator.getitem, self._owners, self._keys))
        self._ids = list(map(id, self._held))
        self._sizes = list(map(len, self._dicts))
        self._classes = [type(m) for m in modules]
        self._tensors = tuple(t for t in tensors if t.layout is torch.strided)
        self._versioned = tuple(t for t in self._tensors if not t.is_inference())
        self.any_grad = any(t.requires_grad for t in tensors)
        self.accept(self.observe())

    def observe(self) -> tuple[list[Any], list[int], list[int]]:
        """What the tensors are like now: kinds, versions and addresses."""
        return (
            [(t.dtype, t.shape, t.device, t.stride()) for t in self._tensors],
            list(map(_version, self._versioned)),
            list(map(torch.Tensor.data_ptr, self._tensors)),
        )

    def accept(self, observed: tuple[list[Any], list[int], list[int]]) -> None:
        """From here on, what was observed is no change.

        To be called when everything that held copies of older values is out of the way of calls: until then every thread must
        go on hearing of the change, and what is written after the observation must be heard of too.
        """
        self._kinds, self._versions, self._addresses = observed

    def check(self) -> Change:
        """Compare with the present; a change of values is reported until it is accepted."""
        if list(map(len, self._dicts)) != self._sizes:
            return Change.MODEL
        try:
            if list(map(id, map(operator.getitem, self._owners, self._keys))) != self._ids:
                return Change.MODEL
        except KeyError:  # one attribute deleted and another set
            return Change.MODEL
        if (
            list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
            and list(map(_version, self._versioned)) == self._versions
        ):
            return Change.NONE
        return Change.VALUES if self.observe()[0] == self._kinds else Change.MODEL

    def same_now(self) -> bool:
        """Whether nothing at all changed since the snapshot (for captures that take a while)."""
        return self.check() is Change.NONE and [type(m) for m in self._modules] == self._classes
