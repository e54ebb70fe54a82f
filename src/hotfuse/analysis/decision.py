"""The least that must be checked to tell the plans of a site apart: a decision over facts, with as few of them as it takes.

    plan 0: A B size=5      common: A, B          size=5? -- yes --> 0
    plan 1: A B size=7      then                    no -> size=7? -- yes --> 1
    plan 2: A B                                             no --> 2

Facts that all plans need are checked once, in order. Then a tree over what differs: a fact that fails strikes out every plan that
needs it, one that holds strikes out every plan whose facts exclude it. The answer is always the first plan of the list whose facts
all hold. Equal questions share a node, so the tree stays small.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.analysis.call_facts import (
    Aligned,
    AllEqual,
    Dense,
    Fact,
    Facts,
    Holds,
    Outer,
    Plain,
    Ranked,
    Sized,
    Typed,
    fact_text,
    inputs_of,
    question,
)
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass

MAX_NODES = 2000
MAX_DIFFERENCES = 400
"""Beyond these a site is not worth a tree: its plans are then asked one after another."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The call fits a plan."""

    plan: int


@dataclass(frozen=True, slots=True)
class Miss:
    """The call fits none: the fact that struck out the last of them."""

    fact: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Check a fact, and go on; steps are numbers of nodes."""

    fact: int
    yes: int
    no: int


Step = Hit | Miss | Ask


@dataclass(frozen=True, slots=True)
class DecisionDag:
    """Numbered facts and numbered steps; the first step is number 0. Every step leads to one with a greater number."""

    inputs: int
    plans: int
    facts: Facts
    steps: tuple[Step, ...]
    common: int
    """How many facts all plans share: they are numbered and checked first."""


_COST: dict[type[Fact], int] = {Plain: 0, Typed: 1, Ranked: 1, Sized: 2, Dense: 3, Outer: 3, Holds: 4, Aligned: 5, AllEqual: 6}


_NEEDS: dict[type[Fact], tuple[type[Fact], ...]] = {
    Plain: (), Typed: (Plain,), Ranked: (Plain,), Aligned: (Plain,), Sized: (Plain, Ranked), Dense: (Plain, Ranked),
    Outer: (Plain, Ranked),
    Holds: (Plain, Ranked), AllEqual: (Plain, Typed, Dense),
}  # fmt: skip
"""What must have been checked of an input before a fact about it may be read at all."""


def _needed(facts: Facts, own: Sequence[int]) -> dict[int, list[int]]:
    """For each fact of a plan, by number, those of the same plan that come before it."""
    have: dict[tuple[type[Fact], int], int] = {}
    for n in own:
        f = facts[n]
        if not isinstance(f, Dense) or (f.yes and f.order is None) or (Dense, f.input) not in have:
            have[type(f), inputs_of(f)[0]] = n
    found: dict[int, list[int]] = {}
    for n in own:
        f = facts[n]
        keys = [(kind, i) for kind in _NEEDS[type(f)] for i in inputs_of(f)]
        if any(key not in have for key in keys):
            raise InternalError("a fact is asked of an input that is not checked to have it", because=repr(f))
        found[n] = [have[key] for key in keys]
        if isinstance(f, AllEqual):
            layout = facts[have[Dense, f.input]]
            if not (isinstance(layout, Dense) and layout.yes and layout.order is None):
                raise InternalError("elements are asked of an input that is not known to be row-major", because=repr(f))
    return found


_Open = tuple[tuple[int, int], ...]
"""Plans that are still possible, each with the facts it has still to be asked, as a set of bits."""


class _Builder:
    def __init__(self, plans: Sequence[Facts]) -> None:
        met: dict[Fact, int] = {}
        own = [list(dict.fromkeys(met.setdefault(f, len(met)) for f in p)) for p in plans]
        needed = [_needed(tuple(met), p) for p in own]
        costs = [_COST[type(f)] for f in met]
        common = self.shared(needed, sorted(own[0], key=costs.__getitem__))
        rest = [n for n in range(len(met)) if n not in common]
        if len(rest) > MAX_DIFFERENCES:
            raise InternalError("the plans of a site differ in too many ways", because=f"{len(rest)} facts are not shared")
        # Numbered anew, those that all share first.
        known, number = list(met), {old: new for new, old in enumerate((*common, *rest))}
        self.common = len(common)
        self.facts: Facts = tuple(known[old] for old in number)
        self.costs = [costs[old] for old in number]
        self.sets = [sum(1 << number[n] for n in p if n not in common) for p in own]
        self.needs = [{number[n]: sum(1 << number[m] for m in set(ms)) for n, ms in p.items()} for p in needed]
        answers: dict[tuple[object, ...] | None, int] = {None: 0}
        asked = [question(f) for f in self.facts]
        for n in range(self.common, len(self.facts)):
            if asked[n] is not None:
                answers[asked[n]] = answers.get(asked[n], 0) | 1 << n
        self.others = [answers.get(q, 0) & ~(1 << n) for n, q in enumerate(asked)]
        """Per fact, those that cannot hold beside it."""
        self.nodes: list[Hit | Miss | tuple[int, int, int]] = []
        self.seen: dict[object, int] = {}

    @staticmethod
    def shared(needed: Sequence[dict[int, list[int]]], candidates: Sequence[int]) -> dict[int, None]:
        """The facts that every plan needs and may ask before anything that only some need, cheapest first."""
        found: dict[int, None] = {}
        for n in candidates:
            if all(n in p and all(m in found for m in p[n]) for p in needed):
                found[n] = None
        return found

    def node(self, key: object, step: Hit | Miss | tuple[int, int, int]) -> int:
        if len(self.nodes) >= MAX_NODES:
            raise InternalError("the plans of a site differ in too many ways", because=f"{MAX_NODES} checks do not suffice")
        self.nodes.append(step)
        self.seen[key] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def leaf(self, step: Hit | Miss) -> int:
        found = self.seen.get(step)
        return self.node(step, step) if found is None else found

    def step(self, left: _Open) -> int:
        """The node that decides among plans that are still possible."""
        first, open_ = left[0]
        if not open_:
            return self.leaf(Hit(first))
        if left in self.seen:
            return self.seen[left]
        fact = self.choose(left)
        bit = 1 << fact
        yes = tuple((i, facts & ~bit) for i, facts in left if not facts & self.others[fact])
        no = tuple((i, facts) for i, facts in left if not facts & bit)
        return self.node(left, (fact, self.step(yes), self.step(no) if no else self.leaf(Miss(fact))))

    def choose(self, left: _Open) -> int:
        """Pick one of the first plan's open facts that may be read by now: cheap ones first, then those that strike out most."""
        first, open_ = left[0]
        needs = self.needs[first]
        ready = [f for f in range(len(self.facts)) if open_ >> f & 1 and not needs[f] & open_]

        def gain(f: int) -> int:
            telling = 1 << f | self.others[f]
            return sum(1 for _, facts in left[1:] if facts & telling)

        return min(ready, key=lambda f: (self.costs[f], -gain(f)))

    def build(self) -> tuple[Step, ...]:
        at = self.step(tuple(enumerate(self.sets)))
        for number in reversed(range(self.common)):
            at = self.node(("common", number), (number, at, self.leaf(Miss(number))))
        return self.ordered(at)

    def ordered(self, root: int) -> tuple[Step, ...]:
        """Nodes renumbered so that steps only lead forwards: reversed order of completion, from the root."""
        after: list[int] = []
        seen: set[int] = set()
        stack: list[tuple[int, bool]] = [(root, False)]
        while stack:
            at, done = stack.pop()
            if done:
                after.append(at)
                continue
            if at in seen:
                continue
            seen.add(at)
            stack.append((at, True))
            step = self.nodes[at]
            if isinstance(step, tuple):
                stack += [(step[2], False), (step[1], False)]
        order = {n: i for i, n in enumerate(reversed(after))}
        result: list[Step] = []
        for n in reversed(after):
            step = self.nodes[n]
            result.append(Ask(step[0], order[step[1]], order[step[2]]) if isinstance(step, tuple) else step)
        return tuple(result)


def decide(plans: Sequence[Facts], inputs: int | None = None) -> DecisionDag:
    """How to find the first of some plans whose facts hold; facts may leave out some of the inputs."""
    if not plans:
        raise InternalError("no plans to decide among")
    least = 1 + max((f.input for p in plans for f in p if not isinstance(f, Holds)), default=-1)
    if inputs is not None and inputs < least:
        raise InternalError(f"a fact speaks of input {least - 1} of {inputs}")
    builder = _Builder(plans)
    steps = builder.build()
    return DecisionDag(least if inputs is None else inputs, len(plans), builder.facts, steps, builder.common)


def describe(decision: DecisionDag) -> list[str]:
    """The steps as text, for a reader and for tests."""
    lines: list[str] = []
    for n, step in enumerate(decision.steps):
        match step:
            case Hit(plan):
                lines.append(f"{n}: plan {plan}")
            case Miss(fact):
                lines.append(f"{n}: miss, {fact_text(decision.facts[fact])} did not hold")
            case Ask(fact, yes, no):
                lines.append(f"{n}: {fact_text(decision.facts[fact])}? {yes} else {no}")
    return lines
