"""Layers of a plan: one specialization each, put together into one plan that any of them may be part of.

    branch %c is true                 the condition, then straight-line code                     (the outermost)
      open mask: all of mask is 1       behind a guard the graph without its mask, else with it
        zero rows                         kernels that leave rows of zeros out                    (the innermost)

A layer takes a graph and gives a plan of it, and asks a composer for the plans of the pieces that it cuts: those have the layers
that come after it. So each strategy knows itself alone, and bets on a branch, a mask and rows hold in one plan. Layers are plain
data, so that the plan for other sizes, or with one more layer, is built from those of the plan that serves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from hotfuse.analysis.call_facts import Facts
from hotfuse.backends.protocol import Artifact, Run
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph
from hotfuse.partition.cut import CutReason, Partition, Partitioning, device_of
from hotfuse.runtime.plan import BetCount, Condition, Plan, PlanMemory
from hotfuse.runtime.zero_rows import Sides
from hotfuse.specialize.table import ROWS, AttemptKey

Call = Sequence[torch.Tensor]
_ORDER = {r.name: i for i, r in enumerate(ROWS)}


class Composer(Protocol):
    """Who makes plans of the pieces that layers cut."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """What the graph runs on."""
        ...

    @property
    def facts(self) -> Facts:
        """What every call that comes so far brings, by the graph's inputs."""
        ...

    @property
    def submit(self) -> Callable[[Callable[[], None]], None]:
        """Runs a job in the background."""
        ...

    def plan(self, graph: Graph, calls: Sequence[Call], layers: tuple[Layer, ...]) -> Plan:
        """A graph as a plan with these layers; `calls` are kept ones that it is for."""
        ...

    def plain(self, graph: Graph) -> Plan:
        """A graph on library kernels, at once."""
        ...

    @property
    def quiet(self) -> Callable[[], None]:
        """To be called before something is measured: waits until what was begun alongside is over."""
        ...

    def skipping(self, focus: str, what: str) -> Composer:
        """The same, which makes kernels that leave zeros out of the products named: rows of them, or some within rows."""
        ...

    @property
    def generates(self) -> bool:
        """Whether it makes kernels that are generated for an accelerator, which are for sizes that are numbers."""
        ...

    def recording(self) -> Composer:
        """The same, which makes plans of the library's kernels on an accelerator."""
        ...

    def owns(self, graph: Graph) -> bool:
        """Whether it is the entry's own graph: not a piece of it, nor one for sizes."""
        ...

    @property
    def placed(self) -> dict[str, Any]:
        """Bets on conditions of the entry's own graph, by condition: those that serve, and those that are being made."""
        ...


@dataclass(frozen=True, slots=True)
class Layer(ABC):
    """One specialization of a plan."""

    @property
    @abstractmethod
    def key(self) -> AttemptKey:
        """What it is known by."""

    @abstractmethod
    def build(self, graph: Graph, calls: Sequence[Call], inner: tuple[Layer, ...], composer: Composer) -> Plan:
        """A plan of the graph with this layer around `inner`; the inner ones alone where the graph has nothing for this one."""

    @property
    def values(self) -> tuple[str, ...]:
        """The graph's values that it is about, where what its plans count does not name them."""
        return ()

    @property
    def on_library(self) -> bool:
        """Whether it serves on library kernels, because generated ones are not there."""
        return False

    @property
    def keys(self) -> tuple[AttemptKey, ...]:
        """What is not to be tried again if a plan with this layer fails."""
        return (self.key,)


def with_layer(layers: tuple[Layer, ...], new: Layer) -> tuple[Layer, ...]:
    """Layers and a further one in its place, or instead of the one it goes on from: of the same row and about the same."""
    kept = [x for x in layers if x.key.row != new.key.row or x.key.about != new.key.about]
    return tuple(sorted((*kept, new), key=lambda x: _ORDER[x.key.row]))


def composed(
    graph: Graph, run: Run, kind: str, about: str, pieces: Sequence[Plan], *, notes: Sequence[str] = (),
    counters: Callable[[], dict[str, int]] = dict[str, int], bet: Condition | None = None,
    counts: tuple[AttemptKey, Callable[[], BetCount]] | None = None, begin: Callable[[], None] | None = None,
) -> Plan:  # fmt: skip
    """A plan of tier 2 that is one partition around plans of pieces: what these hold and count is its own."""
    part = Partition(0, 0, len(graph.nodes), CutReason.START, device_of(graph.nodes[0]) if graph.nodes else "cpu")
    inside = list(dict.fromkeys(pieces))
    sides = [p.sides for p in inside if p.sides is not None]
    states = {d.address: d for s in sides for d in s.states}

    def counted() -> dict[str, int]:
        found = Counter[str]()
        for p in inside:
            found.update(p.counters())
        return {**found, **counters()}

    def begun() -> None:
        for p in inside:
            p.begin()
        if begin is not None:
            begin()

    memory = PlanMemory(sum(p.memory.arena for p in inside), sum(p.memory.constants for p in inside),
                        inside[-1].memory.eager_peak if inside else None)  # fmt: skip
    said = tuple(dict.fromkeys((about, *notes, *(n for p in inside for n in p.notes))))
    return Plan(
        Partitioning(graph, (part,)), (Artifact(graph, run, kind, about),), run, 2, said, memory=memory,
        runs=tuple(r for p in inside for r in p.runs), counters=counted, begin=begun, bet=bet,
        bets=(*((counts,) if counts is not None else ()), *(b for p in inside for b in p.bets)),
        sides=Sides(list(states.values()), {k: n for s in sides for k, n in s.products.items()}) if states else None,
    )  # fmt: skip


def specialized(plan: Plan, layers: tuple[Layer, ...]) -> Plan:
    """A plan as one of tier 2, with the layers it has."""
    return replace(plan, tier=2, layers=tuple(x.key for x in layers))


def filtered(calls: Sequence[Call], holds: Callable[[Call], bool]) -> list[Call]:
    """The calls that a piece is for; all of them where no kept one is, so that there is something to try it on."""
    return [c for c in calls if holds(c)] or list(calls)

