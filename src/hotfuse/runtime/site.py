"""A call site: one call structure, the plans captured for it, and what its calls looked like.

`entries` is one immutable tuple, exchanged by a single reference store: a call reads it once and runs wholly in the plan
it found there, whatever is swapped in meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from hotfuse.base.structure import Spec
from hotfuse.frontends.captured import TensorSpec
from hotfuse.runtime.guards import Guard
from hotfuse.runtime.pace import Pace
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.samples import Samples, Signature

NO_VERSIONS: Mapping[Signature, Plan] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Entry:
    """A guard and the plans behind it: they travel together.

    `plan` is the slot that a higher tier swaps by one reference store; `baseline` is the proven tier-0 plan behind it.
    `versions` is the inline cache before it: plans for sizes that recur, one immutable mapping, exchanged as a whole.
    """

    guard: Guard
    guard_text: str
    plan: Plan
    baseline: Plan
    weights: Mapping[str, torch.Tensor]
    out_spec: Spec
    bare: bool
    """The model returns one tensor and nothing around it."""
    grad_mode: bool
    """Whether gradients were enabled around the captured call; user code may ask."""
    grad_regions: bool
    default_dtype: torch.dtype
    symbols: tuple[str, ...]
    """The graph's symbols that inputs show."""
    signature: Callable[..., Signature]
    """Their values in a call."""
    samples: Samples
    """Inputs of real calls, to prove and measure better plans with."""
    notes: tuple[str, ...] = ()
    versions: Mapping[Signature, Plan] = field(default_factory=lambda: NO_VERSIONS)
    calls: int = 0
    next_look: int = 1
    """The call that is looked at next: timed, noted, and asked whether it should change anything."""
    looked: int = 0
    """The call that was looked at last."""
    heat: int = 0
    """Calls since the plan was last exchanged."""
    seconds: float = 0.0
    """Time spent in them, as far as it was looked at."""
    last_used: int = 0
    improving: bool = False
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """What was tried and lost, with the reason; not tried again until something changed."""
    stamp: tuple[int, ...] = ()
    """What the refusals rest on."""
    pace: Pace = field(default_factory=Pace)

    def cool(self) -> None:
        """The plan was exchanged: its calls count from here, and the first of them are looked at."""
        self.heat, self.seconds = 0, 0.0
        self.looked, self.next_look = self.calls, self.calls + 1
        self.pace.forget()


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
