"""The fusion engine: from groups to better groups, by prediction, until nothing pays.

    start    the groups that access classes suggest, or single nodes
    round    candidates around new groups are predicted, equal ones once; the best of those that pay are applied
    explore  candidates that predictions cannot decide are measured while the budget lasts (`fusion.exploration`)
    end      no candidate is worth more than nothing

Every round lowers the plan's predicted score and no candidate is examined twice, so the engine terminates. It records each
decision, taken or not, with its reasons. The result is a prediction: kernels are measured when they are built, before they serve.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Objective
from hotfuse.fusion import exploration
from hotfuse.fusion.bandit import Bandit, Budget, Option
from hotfuse.fusion.candidates import FusionCandidate, Generator, kind_of
from hotfuse.fusion.closed import Key, UseIndex
from hotfuse.fusion.criteria import Criterion, Reason, fails, holds
from hotfuse.fusion.forecast import Predictor
from hotfuse.fusion.group_costs import UNKNOWN, GroupCosts
from hotfuse.fusion.group_steps import Side, conversions, differing, ops, regrouped, rewritten
from hotfuse.fusion.groups import Group
from hotfuse.fusion.kinds import WHOLE_GROUPS, CandidateKind, GroupKind
from hotfuse.fusion.order import GroupOrder
from hotfuse.fusion.seen_costs import SeenCosts
from hotfuse.fusion.worth import NOTHING, Gain, PredictedCost, gain, score, value
from hotfuse.hpm.work import CoreShape
from hotfuse.ir.graph import Graph

WORTH_MEASURING = 0.002
"""Of what a graph costs: while a plan waits, no contest is held about less."""
MAX_ROUNDS = 24
MIN_GAIN = 0.002
"""Gains below this part of what there is drown in noise."""
NO_GAIN = Gain(0.0, 0.0)
SAMPLES = "samples"
"""Evidence that calls gave: reasons that have it are shown also where others decided."""


Contest = Callable[[Sequence[Side], Sequence[Side]], tuple[str, float]]
"""Measures what a candidate would build against what there is: why it may not be taken, and seconds saved."""
Grouped = tuple[Graph, Sequence[Group]]
MAX_CONVERTING = 0.5
"""The part of a graph's time that conversions may take where nobody measures what they are for."""


def no_objection(_piece: Graph) -> str:
    """Everything can be built."""
    return ""


@dataclass(frozen=True, slots=True)
class FusionChoice:
    """A decision about a candidate, and the trade it is."""

    kind: CandidateKind
    subject: str
    accepted: bool
    uses: int
    before: PredictedCost = UNKNOWN
    after: PredictedCost = UNKNOWN
    gain: Gain = NO_GAIN
    value: float = 0.0
    reasons: tuple[Reason, ...] = ()
    looked: bool = False
    """Whether a measurement decided what predictions could not."""

    @property
    def because(self) -> str:
        """What decided it."""
        deciding = [r for r in self.reasons if r.holds is self.accepted]
        seen = [r for r in deciding[:-1] if SAMPLES in r.evidence]
        return "; ".join(map(str, [*seen, *deciding[-1:]] if self.accepted else deciding))


@dataclass(frozen=True, slots=True)
class Planned:
    """Groups in an order in which they can run, of a graph that may have been rewritten."""

    graph: Graph
    groups: tuple[Group, ...]
    choices: tuple[FusionChoice, ...]
    before: PredictedCost
    after: PredictedCost
    seconds: float
    """What planning took."""
    predictions: int
    costs: Mapping[Group, PredictedCost] = field(default_factory=dict[Group, PredictedCost])


def apart(graph: Graph, groups: Sequence[Group]) -> tuple[Group, ...]:
    """No fusion: every node by itself, but for those that only make sense together (attention, recurrent layers)."""
    index = UseIndex(graph, {})
    found: list[Group] = []
    for g in groups:
        if g.kind in WHOLE_GROUPS or g.kind == GroupKind.LIBRARY:
            found.append(g)
        else:
            found += [Group((i,), kind_of(index, (i,), g.kind)) for i in g.nodes]
    return GroupOrder(index, found).groups


@dataclass(slots=True)
class FusionPlanner:
    """What planning needs to know, and the memory of one planning."""

    predict: Predictor
    core: CoreShape
    threads: int = 1
    objective: Objective = "latency"
    bandit: Bandit = field(default_factory=Bandit)
    lowers: Callable[[Graph], str] = no_objection
    """Why a piece has no kernel; empty if it has one."""
    contest: Contest | None = None
    """None: believe what is predicted."""
    compile_s: Callable[[Group], float] = lambda g: 0.01 + 0.004 * len(g.nodes)
    kinds: frozenset[CandidateKind] = frozenset(CandidateKind)
    seen: SeenCosts = field(default_factory=SeenCosts)
    """What calls showed of the graph."""
    _costs: GroupCosts = field(init=False)
    _lowered: dict[Key, str] = field(default_factory=dict[Key, str])
    _whole: float = 0.0
    """What all groups together cost before anything was changed, in what is optimized."""
    _open: dict[Key, FusionChoice] = field(default_factory=dict[Key, FusionChoice])
    """What predictions left undecided."""
    _exploration: Budget = field(default_factory=exploration.budget)

    def __post_init__(self) -> None:
        self._costs = GroupCosts(lambda asks: self.predict(asks), self.core, self.threads, self.seen)

    def plan(self, graph: Graph, groups: Sequence[Group], sizes: Mapping[str, int]) -> Planned:
        """Better groups for a graph at the sizes of a call."""
        start = time.perf_counter()
        self._costs.begin()
        index = UseIndex(graph, sizes)
        order = GroupOrder(index, groups)
        self._costs.foresee(index, order.groups)
        before = self._costs.total(index, order.groups)
        self._whole = score(before, self.objective, self.threads)
        choices: list[FusionChoice] = []
        decided: set[Key] = set()
        self._open.clear()
        self._exploration = exploration.budget()
        new = set(order.groups)
        while new:
            order = self._decided(order, new, decided, choices)
            order, new = self._explored(order, choices)
        late = fails(Criterion.VALUE, "predictions cannot tell, and no time is left for a look")
        choices += [_with(c, accepted=False, reasons=(*c.reasons, late)) for c in self._open.values()]
        index = order.index
        costs = {g: self._costs.cost(index, g) for g in order.groups}
        return Planned(index.graph, order.groups, tuple(choices), before, self._costs.total(index, order.groups),
                       time.perf_counter() - start, self._costs.predictions, costs)

    def best(self, graph: Graph, groups: Sequence[Group], sizes: Mapping[str, int]) -> Planned:
        """The better of two plans: one that begins with these groups, one that begins with no fusion at all.

        The second counts only if everything in it can be built: nobody asked that of the single nodes it began with.
        """
        start = time.perf_counter()
        plans = [self.plan(graph, g, sizes) for g in (groups, apart(graph, groups))]
        tried = sum(p.predictions for p in plans)
        best = min(plans, key=lambda p: score(p.after, self.objective, self.threads))
        if best is plans[1] and any(self._unbuilt(UseIndex(best.graph, sizes), g) for g in best.groups if g not in groups):
            best = plans[0]
        return replace(best, before=plans[0].before, seconds=time.perf_counter() - start, predictions=tried)

    def layout(
        self, plain: Grouped, other: Grouped, sizes: Mapping[str, int], subject: str, contest: Contest | None
    ) -> FusionChoice:
        """Whether a graph in another layout, with conversions where the order has to change, is worth them.

        What is predicted knows work and conversions; what walking in another order costs shows only where both sides are built. So
        a contest decides about the groups that differ. Without one the other layout is taken unless conversions are most of it.
        """
        sides, won = self._compared(plain, other, sizes)
        added, moved = conversions(plain[0], other[0], sizes)
        seconds = self._total_of(other, sizes, added)
        text = f"{len(added)} conversions move {moved} bytes, {seconds * 1e6:.1f} us"
        evidence: dict[str, int | float | str] = {"conversions": len(added), "bytes": moved, "us": round(seconds * 1e6, 2)}
        accepted = seconds < MAX_CONVERTING * sides[1].seconds if added else True
        if contest is not None and added:
            objection, saved = self._contested(other, plain, sizes, contest)
            accepted = bool(objection)
            text += f"; row-major {objection or f'saves {saved * 1e6:.1f} us, measured'}"
            self.bandit.learn(CandidateKind.LAYOUT.value, won.mean, -saved)
        reason = Reason(Criterion.VALUE, accepted, text, evidence)
        return FusionChoice(CandidateKind.LAYOUT, subject, accepted, 1, sides[0], sides[1], won, won.mean, (reason,))

    def converting(self, plain: Grouped, other: Grouped, sizes: Mapping[str, int], subject: str, contest: Contest) -> FusionChoice:
        """Whether what is read in an order that does not suit its readers is worth a copy: only kernels that are built can tell."""
        sides, won = self._compared(plain, other, sizes)
        added, moved = conversions(plain[0], other[0], sizes)
        objection, saved = self._contested(plain, other, sizes, contest)
        self.bandit.learn(CandidateKind.LAYOUT.value, won.mean, saved)
        found = objection or f"saves {saved * 1e6:.1f} us, measured"
        text = f"{len(added)} conversions of what is read move {moved} bytes; {found}"
        reason = Reason(Criterion.VALUE, not objection, text, {"conversions": len(added), "bytes": moved})
        return FusionChoice(CandidateKind.LAYOUT, subject, not objection, 1, sides[0], sides[1], won, won.mean, (reason,))

    def _compared(self, one: Grouped, two: Grouped, sizes: Mapping[str, int]) -> tuple[list[PredictedCost], Gain]:
        """What two graphs are predicted to take, and what the second one gains."""
        sides: list[PredictedCost] = []
        for graph, groups in (one, two):
            index = UseIndex(graph, sizes)
            self._costs.foresee(index, groups)
            sides.append(self._costs.total(index, groups))
        return sides, gain(sides[0], sides[1], self.objective, self.threads)

    def _contested(self, old: Grouped, new: Grouped, sizes: Mapping[str, int], contest: Contest) -> tuple[str, float]:
        """A contest between the groups that differ."""
        kept, made = differing(*(self._sides(graph, groups, sizes) for graph, groups in (old, new)))
        return contest([s for _, s in kept], [s for _, s in made])

    def _sides(self, graph: Graph, groups: Sequence[Group], sizes: Mapping[str, int]) -> list[tuple[Key, Side]]:
        index = UseIndex(graph, sizes)
        return [
            (index.key(g.nodes), (index.closed(g.nodes), g.kind == GroupKind.LIBRARY or bool(self._unbuilt(index, g))))
            for g in groups
        ]

    def _total_of(self, where: Grouped, sizes: Mapping[str, int], nodes: Sequence[int]) -> float:
        """What nodes would take by themselves."""
        index = UseIndex(where[0], sizes)
        alone = [Group((i,), GroupKind.ROWS) for i in nodes]
        self._costs.foresee(index, alone)
        return self._costs.total(index, alone).seconds

    def _decided(self, order: GroupOrder, dirty: set[Group], decided: set[Key], choices: list[FusionChoice]) -> GroupOrder:
        """Rounds around new groups, until predictions find nothing more."""
        for _ in range(MAX_ROUNDS):
            order, taken, dirty = self._round(order, dirty, decided, choices)
            if not taken:
                break
        return order

    # --- one round ---------------------------------------------------------------------------------------------------

    def _round(
        self, order: GroupOrder, dirty: set[Group], decided: set[Key], choices: list[FusionChoice]
    ) -> tuple[GroupOrder, bool, set[Group]]:
        """Take what pays among candidates around new groups: (groups then, whether anything changed, what is new)."""
        index = order.index
        make = Generator(index, order, self.core, self.threads, self.seen)
        alike: dict[Key, list[FusionCandidate]] = {}
        for c in (*make.pairs(dirty), *make.singles(dirty)):
            if c.kind in self.kinds and c.key not in decided:
                alike.setdefault(c.key, []).append(c)
        for key in [k for k, found in alike.items() if not found[0].viable]:
            decided.add(key)
            found = alike.pop(key)
            choices.append(self._refused(index, found))
        viable = {k: found[0] for k, found in alike.items()}
        self._costs.foresee_all(index, viable.values())
        ranked: list[tuple[float, int, list[FusionCandidate], FusionChoice]] = []
        for n, (key, c) in enumerate(viable.items()):
            choice = self._weighed(index, c, len(alike[key]))
            if choice.accepted:
                ranked.append((-choice.value, n, alike[key], choice))
                continue
            decided.add(key)
            if self._undecided(index, c, choice):
                self._open[key] = choice
            else:
                choices.append(choice)
        ranked.sort(key=lambda r: r[:2])
        return self._take(order, ranked, decided, choices)

    def _take(
        self,
        order: GroupOrder,
        ranked: Sequence[tuple[float, int, list[FusionCandidate], FusionChoice]],
        decided: set[Key],
        choices: list[FusionChoice],
    ) -> tuple[GroupOrder, bool, set[Group]]:
        """The best candidates that do not touch the same groups; one that rewrites the graph is taken alone."""
        made: set[Group] = set()
        taken: Counter[Key] = Counter()
        now = order
        for _, _, found, choice in ranked:
            unbuilt = self._objection(order.index, found[0])
            if objection := unbuilt or self._lost(order.index, found[0], choice):
                decided.add(found[0].key)
                reasons = (*choice.reasons, fails(Criterion.LOWERING if unbuilt else Criterion.VALUE, objection))
                choices.append(_with(choice, accepted=False, reasons=reasons))
                continue
            if found[0].rewritten is not None:
                if made:
                    continue
                now, made = rewritten(now, found[0], now.index.sizes)
                choices.append(_with(choice, accepted=True, reasons=choice.reasons, uses=1))
                return now, True, made
            now, count, made = regrouped(now, found, made)
            if count:
                taken[found[0].key] += count
                choices.append(_with(choice, accepted=True, reasons=choice.reasons, uses=count))
        return now, bool(taken), made

    def _objection(self, index: UseIndex, c: FusionCandidate) -> str:
        """Why what a candidate would build cannot be built; asked last, since it takes longest."""
        where = UseIndex(c.rewritten.graph, index.sizes) if c.rewritten is not None else index
        return next((why for g in c.new if (why := self._unbuilt(where, g))), "")

    def _lost(self, index: UseIndex, c: FusionCandidate, choice: FusionChoice) -> str:
        """Why a candidate that was measured is not taken; what it really saved is learned either way."""
        if self.contest is None:
            return ""
        if (all_uses := choice.gain.mean * choice.uses) < WORTH_MEASURING * self._whole:
            return f"it would save {all_uses / self._whole:.2%} of the whole, which is not worth measuring"
        objection, saved = self._held(index, c, self.contest)
        self.bandit.learn(c.kind.value, choice.gain.mean, saved)
        return objection

    @staticmethod
    def _held(index: UseIndex, c: FusionCandidate, contest: Contest) -> tuple[str, float]:
        """What a contest says of a candidate."""
        where = UseIndex(c.rewritten.graph, index.sizes) if c.rewritten is not None else index
        old = [(index.closed(g.nodes), g.kind == GroupKind.LIBRARY) for g in c.old]
        return contest(old, [(where.closed(g.nodes), g.kind == GroupKind.LIBRARY) for g in c.new])

    # --- what predictions leave undecided ----------------------------------------------------------------------------

    def _undecided(self, index: UseIndex, c: FusionCandidate, choice: FusionChoice) -> bool:
        """Whether a candidate that is not taken by prediction is worth a measurement."""
        if self.contest is None or not (choice.before.known and choice.after.known):
            return False
        best = exploration.hope(choice.before, choice.after, choice.gain)
        before = score(choice.before, self.objective, self.threads)
        return (best * choice.uses > WORTH_MEASURING * self._whole
                and exploration.undecided(best, choice.uses, before, self._exploration_s(index, c)))  # fmt: skip

    def _exploration_s(self, index: UseIndex, c: FusionCandidate) -> float:
        """What building and measuring a candidate takes; what looks alike is built once."""
        where = UseIndex(c.rewritten.graph, index.sizes) if c.rewritten is not None else index
        built = {where.key(g.nodes): self.compile_s(g) for g in c.new if g.kind != GroupKind.LIBRARY}
        return exploration.CONTEST_S + sum(built.values())

    def _explored(self, order: GroupOrder, choices: list[FusionChoice]) -> tuple[GroupOrder, set[Group]]:
        """Measure what is undecided, as long as there is time, until one is taken: (groups then, what is new)."""
        if self.contest is None or not self._open:
            return order, set()
        index, alike = order.index, dict[Key, list[FusionCandidate]]()
        make = Generator(index, order, self.core, self.threads, self.seen)
        for c in (*make.pairs(set(order.groups)), *make.singles(set(order.groups))):
            if c.key in self._open and c.viable:
                alike.setdefault(c.key, []).append(c)
        options: list[Option[Key]] = []
        for key, found in alike.items():
            choice = self._open[key]
            best = exploration.hope(choice.before, choice.after, choice.gain) * len(found)
            options.append(Option(key, exploration.arm(choice.kind.value), best, self._exploration_s(index, found[0])))
        for option in self.bandit.choose(options, self._exploration):
            found, choice = alike[option.what], self._open.pop(option.what)
            if unbuilt := self._objection(index, found[0]):
                choices.append(_with(choice, accepted=False, reasons=(*choice.reasons, fails(Criterion.LOWERING, unbuilt))))
                continue
            self._exploration.spend(option.cost_s)
            objection, saved = self._held(index, found[0], self.contest)
            self.bandit.learn(option.arm, option.value / len(found), saved)
            text = f"predictions cannot tell, a look can: {objection or f'saves {saved * 1e6:.1f} us, measured'}"
            if objection:
                refused = _with(choice, accepted=False, reasons=(*choice.reasons, fails(Criterion.VALUE, text)))
                choices.append(replace(refused, looked=True))
                continue
            if found[0].rewritten is not None:
                now, made = rewritten(order, found[0], index.sizes)
                count = 1
            else:
                now, count, made = regrouped(order, found, set())
            taken = _with(choice, accepted=True, reasons=(*choice.reasons, holds(Criterion.VALUE, text)), uses=count)
            choices.append(replace(taken, looked=True))
            return now, made
        return order, set()

    def _unbuilt(self, index: UseIndex, g: Group) -> str:
        """Why a group has no kernel; empty if it has one or needs none."""
        if g.kind == GroupKind.LIBRARY:
            return ""
        key = index.key(g.nodes)
        if key not in self._lowered:
            self._lowered[key] = self.lowers(index.closed(g.nodes))
        return self._lowered[key]

    # --- decisions ---------------------------------------------------------------------------------------------------

    def _weighed(self, index: UseIndex, c: FusionCandidate, uses: int) -> FusionChoice:
        where = UseIndex(c.rewritten.graph, index.sizes) if c.rewritten is not None else index
        before, after = NOTHING, NOTHING
        for g in c.old:
            before = before + self._costs.cost(index, g)
        local = self._costs.off(c.old, index) / self._costs.off() if self._costs.measured else 1.0
        for g in c.new:
            plain = g.kind == GroupKind.LIBRARY or self._costs.is_measured(where, g)
            after = after + self._costs.cost(where, g).times(1.0 if plain else local)
        subject = ops(index, c.old)
        if not before.known or not after.known:
            reason = fails(Criterion.PREDICTABLE, "its time cannot be predicted")
            refused = FusionChoice(c.kind, subject, accepted=False, uses=uses, before=before, after=after)
            return replace(refused, reasons=(*c.reasons, reason))
        predicted = gain(before, after, self.objective, self.threads)
        won, spread = self._at_all_sizes(index, where, c, predicted)
        trust = self.bandit.trust(c.kind.value)
        worth = value(won, trust, uses)
        least = MIN_GAIN * score(before, self.objective, self.threads)
        accepted = worth > 0 and won.discounted(trust) > least
        known = sum(self._costs.is_measured(index, g) for g in c.old)
        as_served = f", {known} of {len(c.old)} as measured while serving" if known else ""
        text = f"{before.seconds * 1e6:.1f} -> {after.seconds * 1e6:.1f} us{as_served}, worth {worth:.2g} s"
        make = holds if accepted else fails
        reason = make(Criterion.VALUE, text, gain_us=round(won.mean * 1e6, 2), deviation_us=round(won.deviation * 1e6, 2))
        return FusionChoice(c.kind, subject, accepted, uses, before, after, predicted, worth, (*c.reasons, *spread, reason))

    def _at_all_sizes(self, index: UseIndex, where: UseIndex, c: FusionCandidate, won: Gain) -> tuple[Gain, tuple[Reason, ...]]:
        """A gain that differs from size to size is as uncertain as the sizes of calls are: with how far it lies apart."""
        old, new = self._costs.at_each_size(index, c.old), self._costs.at_each_size(where, c.new)
        if old is None or new is None:
            return won, ()
        shares = [share for _, share in self._costs.mix(index.sizes)]
        each = [a - b for a, b in zip(old, new, strict=True)]
        mean = sum(g * share for g, share in zip(each, shares, strict=True))
        deviation = math.sqrt(sum(share * (g - mean) ** 2 for g, share in zip(each, shares, strict=True)))
        text = f"saves {min(each) * 1e6:.1f} to {max(each) * 1e6:.1f} us at the {len(each)} sizes that calls have"
        make = holds if mean > deviation else fails
        reason = make(Criterion.PREDICTABLE, text, **{SAMPLES: len(each), "least_us": round(min(each) * 1e6, 2)})
        return Gain(won.mean, math.hypot(won.deviation, deviation)), (reason,)

    def _refused(self, index: UseIndex, found: Sequence[FusionCandidate]) -> FusionChoice:
        c = found[0]
        reasons = tuple(r for r in c.reasons if not r.holds)
        return FusionChoice(c.kind, ops(index, c.old), accepted=False, uses=len(found), reasons=reasons)


def _with(choice: FusionChoice, *, accepted: bool, reasons: tuple[Reason, ...], uses: int | None = None) -> FusionChoice:
    return replace(choice, accepted=accepted, reasons=reasons, uses=choice.uses if uses is None else uses)
