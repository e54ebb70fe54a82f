"""A call site: one call structure, the plans captured for it, and what its calls looked like.

`entries` is one immutable tuple, exchanged by a single reference store: a call reads it once and runs wholly in the plan
it found there, whatever is swapped in meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hotfuse.base.structure import Spec
from hotfuse.frontends.captured import TensorSpec
from hotfuse.runtime.guards import Guard
from hotfuse.runtime.plan import Plan


@dataclass(slots=True, eq=False)
class Entry:
    """A guard and the plan behind it: they travel together.

    `plan` is the slot that a higher tier swaps by one reference store; `baseline` is the proven tier-0 plan behind it.
    """

    guard: Guard
    guard_text: str
    plan: Plan
    baseline: Plan
    weights: Mapping[str, torch.Tensor]
    sample: Sequence[torch.Tensor]
    """Inputs of a real call, to prove and measure a better plan with."""
    out_spec: Spec
    bare: bool
    """The model returns one tensor and nothing around it."""
    grad_mode: bool
    """Whether gradients were enabled around the captured call; user code may ask."""
    grad_regions: bool
    default_dtype: torch.dtype
    notes: tuple[str, ...] = ()
    calls: int = 0
    heat: int = 0
    """Calls since the plan was last exchanged."""
    last_used: int = 0
    improving: bool = False


@dataclass(slots=True)
class Group:
    """Calls of one structure whose tensors have the same dtypes, ranks, devices and contiguity."""

    first: tuple[tuple[int, ...], ...]
    varied: list[set[int]]
    captures: int = 0
    pending: bool = False
    refused: str = ""
    tried: set[tuple[tuple[int, ...], ...]] = field(default_factory=set[tuple[tuple[int, ...], ...]])

    def note(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Learn which dims vary."""
        for seen, before, now in zip(self.varied, self.first, shapes, strict=True):
            seen.update(d for d, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)


@dataclass(slots=True, eq=False)
class Site:
    """Everything about one call structure."""

    spec: Spec
    entries: tuple[Entry, ...] = ()
    groups: dict[Any, Group] = field(default_factory=dict[Any, Group])

    def group(self, leaves: Sequence[torch.Tensor], limit: int) -> Group | None:
        """The group of a call; None when there are too many already."""
        key = (torch.is_grad_enabled(), *((t.dtype, t.dim(), str(t.device), t.is_contiguous()) for t in leaves))
        found = self.groups.get(key)
        if found is None and len(self.groups) < limit:
            shapes = tuple(tuple(t.shape) for t in leaves)
            found = self.groups[key] = Group(shapes, [set() for _ in leaves])
        return found


def specs_of(leaves: Sequence[torch.Tensor], varied: Sequence[set[int]]) -> list[TensorSpec]:
    """The leaves as capture needs to know them.

    A dim of size 0 or 1 broadcasts or is empty, so a graph that is generic in it excludes the very call it is for: there
    it stays static, and the dims beside it vary.
    """
    return [
        TensorSpec(tuple(t.shape), tuple(t.stride()), t.dtype, str(t.device), frozenset(d for d in v if t.shape[d] > 1))
        for t, v in zip(leaves, varied, strict=True)
    ]
