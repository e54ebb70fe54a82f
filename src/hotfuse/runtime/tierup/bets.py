"""Plans that bet on branches: `specialize.branches` applied as often as the evidence allows, compiled, and put together.

The outermost condition is bet on because sampled calls showed which way it goes. Conditions that come to light inside the branch
are bet on where every kept call agrees: their values are computed from real inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from hotfuse.backends.protocol import Run
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.control_bodies import control_name
from hotfuse.ir.graph import Graph
from hotfuse.runtime.plan import BetCount, Condition, Plan
from hotfuse.runtime.serve.scalar_conditions import scalar_condition
from hotfuse.runtime.serve.speculate import BranchSide, OutcomeHits, betting
from hotfuse.runtime.tierup.layers.layer import Call, Composer, Layer, composed
from hotfuse.specialize.branches import Speculation, conditions, speculate
from hotfuse.specialize.table import BRANCH, AttemptKey, branch_key

DEEPEST = 8
"""Conditions bet on one inside the other."""

Make = Callable[[Graph, Sequence[Call]], Plan]
"""A graph as a plan, with calls to try it on."""


class NoSuchCall(LookupError):
    """No kept call goes the way of a bet."""


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
    inner: tuple[Layer, ...] = ()
    """The layers that its code has."""

    def plan(self, graph: Graph) -> Plan:
        """The whole as a plan of tier 2 for the graph it was made of: one partition, which hides what is behind the condition."""
        sides = {o: BranchSide(p.run, len(p.graph.inputs) > len(graph.inputs)) for o, p in self.hot.items()}
        ask = scalar_condition(self.prefix.graph, self.condition, tuple(v.name for v in graph.inputs), self.prefix.weights)
        cold = BranchSide(self.cold, self.given)
        telling = partial(betting, self.prefix.run, self.takes, self.condition, sides, cold, self.outcomes, ask)
        run = telling()
        told = [f"bets that {self.name} is {str(o).lower()}: then {_described(p)}" for o, p in self.hot.items()]
        bet, outcomes = Condition(self.name, telling), self.outcomes
        return composed(graph, run, "bets", "; ".join(told), list(self.hot.values()), notes=told, bet=bet,
                        counts=(AttemptKey(BRANCH, self.name), lambda: BetCount(outcomes.hits, outcomes.misses)))  # fmt: skip


def _described(plan: Plan) -> str:
    """What a plan is made of, in a few words."""
    kinds = Counter(a.backend for a in plan.artifacts)
    return f"{len(plan.graph.nodes)} nodes in " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())


def place(graph: Graph, at: int, name: str, calls: Sequence[Call], make: Make, plain: Make, before: BranchBet | None = None, *,
          outcome: bool) -> BranchBet:
    """A bet on one outcome, beside those of a bet made before on the same condition."""
    cut = speculate(graph, at, outcome=outcome)
    prefix = before.prefix if before is not None else plain(cut.prefix, calls)
    inside = _inside(graph, cut, prefix, calls, outcome=outcome)
    if not inside:
        raise NoSuchCall("no kept call takes that path")
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
        plain(cut.cold, inside).run,
        OutcomeHits(),
    )


def _takes(graph: Graph, cut: Speculation) -> tuple[int, ...]:
    names = [v.name for v in graph.inputs]
    return tuple(names.index(v.name) for v in cut.prefix.inputs)


def _inside(graph: Graph, cut: Speculation, prefix: Plan, calls: Sequence[Call], *, outcome: bool) -> list[Call]:
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
        guess = speculate(graph, at, outcome=True)
        prefix = plain(guess.prefix, calls)
        outcomes = {o for o in (True, False) if _inside(graph, guess, prefix, calls, outcome=o)}
        if len(outcomes) == 1:
            outcome = outcomes.pop()
            cut = guess if outcome else speculate(graph, at, outcome=False)
            inside = _inside(graph, cut, prefix, calls, outcome=outcome)
            hot = _straight(cut.hot, inside, make, plain, depth - 1)
            name = f"%{graph.nodes[at].outs[0].name}" if graph.nodes[at].outs else f"node {at}"
            bet = BranchBet(name, prefix, _takes(graph, cut), cut.condition, bool(cut.prefix.nodes), {outcome: hot},
                      plain(cut.cold, inside).run, OutcomeHits())
            return bet.plan(graph)
    return make(graph, calls)


@dataclass(frozen=True, slots=True)
class BranchLayer(Layer):
    """A bet on one condition: code for each outcome that recurred."""

    name: str
    outcomes: tuple[bool, ...]

    @property
    def key(self) -> AttemptKey:
        """The condition: a further outcome takes the place of the layer without it."""
        return AttemptKey(BRANCH, self.name)

    @property
    def keys(self) -> tuple[AttemptKey, ...]:
        """Every outcome is an attempt of its own."""
        return tuple(branch_key(self.name, outcome=o) for o in self.outcomes)

    def build(self, graph: Graph, calls: Sequence[Call], inner: tuple[Layer, ...], composer: Composer) -> Plan:
        """The condition, and behind it plans with the other layers; code that serves already is used again."""
        at = next((i for i in conditions(graph) if control_name(graph.nodes[i]) == self.name), None)
        if at is None:
            return composer.plan(graph, calls, inner)

        def fast(piece: Graph, calls: Sequence[Call]) -> Plan:
            return composer.plan(piece, calls, inner)

        def plain(piece: Graph, _calls: Sequence[Call]) -> Plan:
            return composer.plain(piece)

        found: BranchBet | None = composer.placed.get(self.name) if composer.owns(graph) else None
        bet = found if found is not None and found.inner == inner else None
        for outcome in self.outcomes:
            if bet is not None and outcome in bet.hot:
                continue
            try:
                bet = replace(place(graph, at, self.name, calls, fast, plain, bet, outcome=outcome), inner=inner)
            except NoSuchCall:
                if outcome == self.outcomes[-1] and bet is None:
                    raise
        assert bet is not None
        if composer.owns(graph):
            composer.placed[self.name] = bet
        return bet.plan(graph)
