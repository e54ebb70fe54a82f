"""Plans that bet on branches: `specialize.branches` applied as often as the evidence allows, compiled, and put together.

The outermost condition is bet on because sampled calls showed which way it goes. Conditions that come to light inside the branch
are bet on where every kept call agrees: their values are computed from real inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hotfuse.backends.protocol import Artifact, Run
from hotfuse.ir.graph import Graph
from hotfuse.partition.cut import CutReason, Partition, Partitioning, device_of
from hotfuse.runtime.plan import Condition, Plan, PlanMemory
from hotfuse.runtime.serve.scalar_conditions import asked
from hotfuse.runtime.serve.speculate import BranchSide, OutcomeHits, betting
from hotfuse.specialize.branches import Speculation, conditions, speculate

DEEPEST = 8
"""Conditions bet on one inside the other."""

Weights = Mapping[str, torch.Tensor]
Call = Sequence[torch.Tensor]
Make = Callable[[Graph, Call], Plan]
"""A graph as a plan, with a call to try it on."""


@dataclass(frozen=True, slots=True)
class BranchBet:
    """A condition with code for some of its outcomes: what a later outcome is added to."""

    name: str
    prefix: Plan
    takes: tuple[int, ...]
    condition: int
    given: bool
    hot: Mapping[bool, Plan]
    cold: Run
    outcomes: OutcomeHits

    def plan(self, graph: Graph) -> Plan:
        """The whole as a plan of tier 2 for the graph it was made of: one partition, which hides what is behind the condition."""
        sides = {o: BranchSide(p.run, len(p.graph.inputs) > len(graph.inputs)) for o, p in self.hot.items()}
        ask = asked(self.prefix.graph, self.condition, tuple(v.name for v in graph.inputs), self.prefix.weights)
        cold = BranchSide(self.cold, self.given)
        telling = partial(betting, self.prefix.run, self.takes, self.condition, sides, cold, self.outcomes, ask)
        run = telling()
        ways = [f"bets that {self.name} is {str(o).lower()}: then {_told(p)}" for o, p in self.hot.items()]
        part = Partition(0, 0, len(graph.nodes), CutReason.START, device_of(graph.nodes[0]))
        made = Artifact(graph, run, "bets", "; ".join(ways))
        notes = tuple(dict.fromkeys(n for p in self.hot.values() for n in p.notes))
        held = [p.memory for p in self.hot.values()]
        memory = PlanMemory(sum(m.arena for m in held), sum(m.constants for m in held), held[0].eager_peak)
        bet = Condition(self.name, telling)
        return Plan(Partitioning(graph, (part,)), (made,), run, 2, (*ways, *notes), memory=memory, bet=bet)


def _told(plan: Plan) -> str:
    """What a plan is made of, in a few words."""
    kinds = Counter(a.backend for a in plan.artifacts)
    return f"{len(plan.graph.nodes)} nodes in " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())


def place(graph: Graph, at: int, outcome: bool, name: str, calls: Sequence[Call], make: Make, plain: Make,
          before: BranchBet | None = None) -> BranchBet:
    """A bet on one outcome, beside those of a bet made before on the same condition."""
    cut = speculate(graph, at, outcome)
    prefix = before.prefix if before is not None else plain(cut.prefix, calls[0])
    inside = _inside(graph, cut, prefix, calls, outcome)
    if not inside:
        raise LookupError("no kept call goes that way")
    hot = _straight(cut.hot, inside, make, plain, DEEPEST)
    if before is not None:
        return replace(before, hot={**before.hot, outcome: hot})
    given = bool(cut.prefix.nodes)
    return BranchBet(
        name,
        prefix,
        _takes(graph, cut),
        cut.condition,
        given,
        {outcome: hot},
        plain(cut.cold, inside[0]).run,
        OutcomeHits(),
    )


def _takes(graph: Graph, cut: Speculation) -> tuple[int, ...]:
    names = [v.name for v in graph.inputs]
    return tuple(names.index(v.name) for v in cut.prefix.inputs)


def _inside(graph: Graph, cut: Speculation, prefix: Plan, calls: Sequence[Call], outcome: bool) -> list[Call]:
    """The kept calls that go the way of the bet, as the code behind the condition takes them."""
    takes, found = _takes(graph, cut), list[Call]()
    with torch.no_grad():
        for inputs in calls:
            known = prefix.run(*[inputs[i] for i in takes])
            if bool(known[cut.condition]) is outcome:
                found.append([*inputs, *known] if len(cut.hot.inputs) > len(graph.inputs) else inputs)
    return found


def _straight(graph: Graph, calls: Sequence[Call], make: Make, plain: Make, depth: int) -> Plan:
    """The code behind a condition, with the conditions in it bet on where all calls agree."""
    for at in conditions(graph) if depth else ():
        guess = speculate(graph, at, True)
        prefix = plain(guess.prefix, calls[0])
        ways = {way for way in (True, False) if _inside(graph, guess, prefix, calls, way)}
        if len(ways) == 1:
            outcome = ways.pop()
            cut = guess if outcome else speculate(graph, at, False)
            inside = _inside(graph, cut, prefix, calls, outcome)
            hot = _straight(cut.hot, inside, make, plain, depth - 1)
            name = f"%{graph.nodes[at].outs[0].name}" if graph.nodes[at].outs else f"node {at}"
            bet = BranchBet(name, prefix, _takes(graph, cut), cut.condition, bool(cut.prefix.nodes), {outcome: hot},
                      plain(cut.cold, inside[0]).run, OutcomeHits())
            return bet.plan(graph)
    return make(graph, calls[0])
