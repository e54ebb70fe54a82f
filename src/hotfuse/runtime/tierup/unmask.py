"""Plans for calls whose mask lets everything through: the graph without it (`specialize.masks`), behind a guard on the mask itself.

The guard is asked on every call, of the very tensor that came: a mask that hides something is served by the plan there was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hotfuse.analysis.call_facts import AllEqual, Dense, Facts
from hotfuse.backends.protocol import Artifact
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import DType, TensorType
from hotfuse.partition.cut import CutReason, Partition, Partitioning, device_of
from hotfuse.profile.predict import ALL
from hotfuse.runtime.observe.points import masks
from hotfuse.runtime.plan import Plan, PlanMemory
from hotfuse.runtime.serve.partition_guard import guarded
from hotfuse.runtime.tierup.tiers import FEWEST, PREDICTABLE
from hotfuse.specialize.masks import all_alike

_MASKS = frozenset({DType.BOOL, DType.I64, DType.I32, DType.U8, DType.I8})
Predictable = Callable[[str], tuple[int, float, int] | None]
"""What is expected of the valid part of a named value: (class, accuracy, predictions)."""


@dataclass(frozen=True, slots=True)
class Open:
    """An input that was seen to be all one number, and the graph for that."""

    name: str
    fact: AllEqual
    graph: Graph
    accuracy: float
    samples: int

    @property
    def attempt(self) -> str:
        """What a try at it is called."""
        return f"all of {self.name} is {self.fact.value}"

    def holds(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a call is of that kind."""
        return bool((inputs[self.fact.input] == self.fact.value).all())


def open_mask(
    graph: Graph, facts: Facts, expected: Predictable, calls: Sequence[Sequence[torch.Tensor]], refused: Callable[[str], bool]
) -> Open | None:
    """A mask worth a plan without it; `calls` are kept ones, `refused` says what was tried before."""
    masking = masks(graph)
    for i, v in enumerate(graph.inputs):
        if v.name not in masking or not isinstance(v.type, TensorType) or v.type.dtype not in _MASKS:
            continue
        seen = expected(v.name)
        dense = any(isinstance(f, Dense) and f.input == i and f.order is None and f.yes for f in facts)
        if seen is None or seen[0] != ALL or seen[1] < PREDICTABLE or seen[2] < FEWEST or not dense:
            continue
        shown = next((c[i].flatten()[0].item() for c in calls if c[i].numel() and bool((c[i] == c[i].flatten()[0]).all())), None)
        if not shown:  # no kept call is of that kind, or what it shows is a mask that hides everything
            continue
        fact = AllEqual(i, v.type.dtype, shown)
        found = Open(v.name, fact, graph, seen[1], seen[2])
        if not refused(found.attempt) and (less := all_alike(graph, v.name, shown)) is not None:
            return replace(found, graph=less)
    return None


def opened(
    found: Open, fast: Plan, plan: Plan, graph: Graph, facts: Facts, submit: Callable[[Callable[[], None]], None]
) -> Plan:
    """A plan of tier 2: `fast` where the mask is open, else the plan there was."""
    guard = guarded(fast.run, (*facts, found.fact), plan.run, len(graph.inputs), submit)

    def counters() -> dict[str, int]:
        inner: dict[str, Any] = fast.counters()
        return {**plan.counters(), **{f"open_{k}": n for k, n in inner.items()},
                "mask_hits": guard.hits, "mask_misses": sum(guard.misses.values())}

    about = f"where {found.attempt}: {len(fast.graph.nodes)} nodes instead of {len(graph.nodes)}; else as before"
    part = Partition(0, 0, len(graph.nodes), CutReason.START, device_of(graph.nodes[0]))
    made = Artifact(graph, guard, "guarded", about)
    held = (fast.memory, plan.memory)
    memory = PlanMemory(sum(m.arena for m in held), sum(m.constants for m in held), plan.memory.eager_peak)
    return Plan(Partitioning(graph, (part,)), (made,), guard, 2, (about, *fast.notes), memory=memory,
                runs=(*fast.runs, *plan.runs), counters=counters, attempt=found.attempt)  # fmt: skip
