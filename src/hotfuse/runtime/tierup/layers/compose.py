"""One plan of many layers: `runtime.tierup.layers` put together for an entry, with what serves already used again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

import torch

from hotfuse.analysis.call_facts import Facts
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.request_context import EVERY
from hotfuse.compile.value import GENERATE, Demand
from hotfuse.ir.graph import Graph
from hotfuse.runtime.observe.traffic import as_planned
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup.attempt import AttemptContext, demand_of
from hotfuse.runtime.tierup.bets import BranchBet
from hotfuse.runtime.tierup.layers.layer import Call, Layer


@dataclass(frozen=True, slots=True)
class PlanComposer:
    """Makes the pieces of an entry's plan; the plan that serves is a piece where it has just the layers that are asked for."""

    context: AttemptContext
    entry: Entry
    serving: Plan
    layers: tuple[Layer, ...]
    """Those of the plan that serves."""
    demand: Demand
    placed: dict[str, BranchBet]
    reused: list[Plan] = field(default_factory=list[Plan])
    """The plan that serves, where it is a piece."""
    quiet: Callable[[], None] = lambda: None
    """Waits until what was begun alongside is over."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The entry's."""
        return self.entry.weights

    @property
    def facts(self) -> Facts:
        """The entry's."""
        return self.entry.facts

    @property
    def submit(self) -> Callable[[Callable[[], None]], None]:
        """The engine's background."""
        return self.context.plans.in_background

    def owns(self, graph: Graph) -> bool:
        """Whether it is the entry's own graph."""
        return graph is self.entry.baseline.graph

    def plan(self, graph: Graph, calls: Sequence[Call], layers: tuple[Layer, ...]) -> Plan:
        """What serves, a layer around others, or kernels."""
        plain = not self.demand.strategies
        if plain and layers == self.layers and self.owns(graph) and self.serving is not self.entry.baseline:
            self.reused.append(self.serving)
            return self.serving
        if layers:
            return layers[0].build(graph, calls, layers[1:], self)
        same = len(graph.inputs) == len(self.entry.baseline.graph.inputs)
        demand = self.demand if same else replace(self.demand, of_late=None)  # whose shapes are of the entry's inputs
        return self.context.improve(graph, self.entry.weights, calls[0], demand=demand)

    def plain(self, graph: Graph) -> Plan:
        """On library kernels: the entry's own graph has such a plan."""
        return self.entry.baseline if self.owns(graph) else self.context.compile(graph, self.entry.weights)

    @property
    def generates(self) -> bool:
        """Whether kernels are generated for an accelerator."""
        return GENERATE in self.demand.strategies

    def recording(self) -> PlanComposer:
        """On the library's kernels."""
        return replace(self, demand=replace(self.demand, strategies=()))

    def skipping(self, focus: str, what: str) -> PlanComposer:
        """With kernels that leave zeros out."""
        seen = self.demand.seen if focus == EVERY else as_planned(self.entry)  # its products were looked at in the plan that serves
        return replace(self, demand=replace(self.demand, strategies=(what,), focus=focus, seen=seen))


def composer_of(context: AttemptContext, entry: Entry) -> PlanComposer:
    """For an entry as it is now."""
    return PlanComposer(context, entry, entry.plan, entry.layers, demand_of(context, entry), dict(entry.bets))
