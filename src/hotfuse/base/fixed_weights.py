"""Weights that nobody can change, and what was made of them: one copy for all plans of a process.

A model has a plan for every kind of call, and its interpreter beside them. Each reads weights in an order of its own: folded into
convolutions, packed into panels. Where two want the same, the second gets what the first has. That is right only for tensors that
stay as they are: of a torch module somebody may write to a weight, and a plan made afterwards must not find the copy from before.
So a tensor takes part once `fix` was told of it, and a session tells it of the weights it read from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

from hotfuse.base.lazy_dataclass import dataclass

T = TypeVar("T")


@dataclass(frozen=True, eq=False)  # no slots: before 3.13 a generic class with them has no place for weak references
class MadeOf(Generic[T]):
    """What was made of weights. Who uses it keeps this object, and with it the weights, so that their ids stay theirs."""

    value: T
    sources: tuple[torch.Tensor, ...]


_fixed: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
_made: WeakValueDictionary[Hashable, MadeOf[Any]] = WeakValueDictionary()


def fix(weights: Iterable[Any]) -> None:
    """Nobody will write to these tensors for as long as they live; what is no tensor is passed over."""
    for weight in weights:
        if isinstance(weight, torch.Tensor):
            _fixed[id(weight)] = weight


def is_fixed(weight: torch.Tensor) -> bool:
    """Whether it was said that nobody writes to it."""
    return _fixed.get(id(weight)) is weight


def made_of(sources: Sequence[torch.Tensor], what: Hashable, make: Callable[[], T]) -> MadeOf[T]:
    """What `make` gives; of fixed weights that which another one got for the same `what`, while anybody has it.

    Two threads that ask at once may both make it: then one copy more lives as long as its plan.
    """
    if not all(map(is_fixed, sources)):
        return MadeOf(make(), tuple(sources))
    at = (what, tuple(map(id, sources)))
    found = _made.get(at)
    if found is None:
        found = _made[at] = MadeOf(make(), tuple(sources))
    return found
