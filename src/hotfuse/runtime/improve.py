# pyright: reportPrivateUsage=false
# A tensor's version has no public name.
"""Better plans for hot ones: compiled beside inference, proven on real calls, raced, and swapped in only if they win.

Every attempt ends in a decision. What lost is remembered with both times and not tried again until something it rested on
changed: the weights, the number of threads, or the traffic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from hotfuse.analysis.ties import Quantum, quanta
from hotfuse.backends.protocol import Run
from hotfuse.base.errors import HotfuseError, InternalError
from hotfuse.base.events import Action, EvidenceValue, Why
from hotfuse.compile.recall import recalled, send
from hotfuse.compile.scheduler import usable_cores
from hotfuse.compile.service import sized
from hotfuse.compile.skips import SKIP
from hotfuse.compile.stored import EVERY, place_of
from hotfuse.compile.value import Demand
from hotfuse.hpm.bottleneck import Bottleneck, Strategy
from hotfuse.ir.branches import control_name
from hotfuse.ir.graph import Graph, Value
from hotfuse.profile.predict import ALL
from hotfuse.profile.snapshot import GraphSeen
from hotfuse.runtime.bets import Bet, place
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.findings import Finding
from hotfuse.runtime.objective import Trade, settle
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.proof import prove
from hotfuse.runtime.race import Trial, race
from hotfuse.runtime.samples import Signature
from hotfuse.runtime.site import Entry, Site, named, way
from hotfuse.runtime.skipping import ENOUGH, all_finite, products, suspected
from hotfuse.runtime.strategies import FOCUSED, attempts, failed_before, focus_of, kernels
from hotfuse.runtime.tiers import FEWEST, PREDICTABLE, is_hot, recurring
from hotfuse.runtime.unmask import Open, open_mask, opened
from hotfuse.specialize.branches import conditions
from hotfuse.specialize.shapes import at_sizes

PROVEN_ON = 4
"""Kinds of calls a plan is proven on."""
BET_ON = 16
"""Kept calls that a bet on a branch is made up and proven with."""
EARLY = 0.5
"""Part of the expected saving that must be there before an unfinished plan is tried."""
EARLY_S = 5.0
"""Seconds of compilation before that: making, proving and racing an unfinished plan takes as long as a whole one, and the rest
waits meanwhile."""

Weights = Mapping[str, torch.Tensor]
Compile = Callable[[Graph, Weights], Plan]
"""A graph as a tier-0 plan, at once."""
Progress = Callable[[Callable[[], Plan], float], None]
"""Told while kernels are made: a plan of those there are, made on demand, and which part of the expected saving is settled."""


class Improve(Protocol):
    """A graph as a plan of a higher tier; may take seconds; raises a HotfuseError where there is none."""

    def __call__(
        self, graph: Graph, weights: Weights, sample: Sequence[torch.Tensor], /, progress: Progress | None = None,
        demand: Demand | None = None,
    ) -> Plan:
        """`demand`: how much the graph is used; `progress` may deploy what there is before all of it is done."""
        ...


@runtime_checkable
class CalledOff(Protocol):
    """What makes plans in other processes can be told that nobody wants them any more."""

    def call_off(self) -> None:
        """End what runs, and whatever would begin from now on."""
        ...


class Improver:
    """Decides what to try for the plans of one model, and tries it."""

    def __init__(self, plans: Plans, compile: Compile, improve: Improve) -> None:
        self._plans = plans
        self._compile = compile
        self._improve = improve
        self._log = plans.log
        self._recall = recalled(place_of(plans.settings).path)

    def consider(self, site: Site, entry: Entry, plan: Plan, signature: Signature, seconds: float) -> None:
        """After a call that was looked at; at most starts something."""
        settings = self._plans.settings
        stamp = (self._plans.generation, torch.get_num_threads(), self._plans.watcher.drifts(entry.key),
                 self._plans.recorder.trained)
        if entry.stamp != stamp:  # what lost under other circumstances may win now
            entry.stamp = stamp
            entry.refused.clear()
        if entry.improving or self._plans.closed:
            return
        if entry.grad_mode:
            if "tier 1" not in entry.refused and is_hot(entry.heat, entry.seconds, settings.hot_calls, 0):
                entry.turn_down("tier 1", "gradients are enabled")
                self._decide(Action.KEEP, Why.GRAD_NEEDED, tier=0, hint="call it under torch.no_grad()")
            return
        if plan is entry.baseline:
            nodes = len(plan.graph.nodes)
            if "tier 1" not in entry.refused and is_hot(entry.heat, entry.seconds, settings.hot_calls, nodes):
                self._start(entry, "tier 1", lambda: self._fuse(entry))
                return
        elif (slower := entry.pace.note(signature, seconds)) is not None:
            self._start(entry, "check", lambda: self._recheck(site, entry, *slower))
            return
        if settings.tiers < 2 or (entry.plan is entry.baseline and "tier 1" not in entry.refused):
            return
        if self._consider_branches(entry) or self._consider_masks(entry) or self._consider_rows(site, entry):
            return
        if self._consider_bottleneck(entry):
            return
        if entry.symbols and entry.plan is not entry.baseline and not entry.bets:
            bets = recurring(entry.samples.shares(), entry.samples.taken, settings.max_versions)
            new = [b for b in bets if b.value not in entry.versions and named(b.value) not in entry.refused]
            if new and self._promising(entry, Strategy.SPECIALIZE, named(new[0].value)):
                sizes = new[0].value
                self._decide(Action.SPECIALIZE, Why.RECURS, sizes=_sizes(entry, sizes), share=round(new[0].share, 3),
                             samples=new[0].samples)
                self._start(entry, named(sizes), lambda: self._specialize(site, entry, sizes))

    def _consider_branches(self, entry: Entry) -> bool:
        """Whether a bet on a condition was begun: one that sampled calls showed to go one way, and that has no code for it."""
        graph = entry.baseline.graph
        for at in conditions(graph):
            name = control_name(graph.nodes[at])
            seen = self._plans.watcher.predictable(entry.key, "branch", name)
            if seen is None or seen[1] < PREDICTABLE or seen[2] < FEWEST:
                continue
            outcome = bool(seen[0])
            placed = entry.bets.get(name)
            if (placed is None and entry.bets) or (placed is not None and outcome in placed.hot):
                continue
            if way(name, outcome) not in entry.refused:
                self._decide(Action.SPECIALIZE, Why.RECURS, condition=name, outcome=outcome, accuracy=round(seen[1], 3),
                             samples=seen[2])
                self._start(entry, way(name, outcome), partial(self._bet, entry, at, outcome, name))
                return True
        return False

    def _consider_bottleneck(self, entry: Entry) -> bool:
        """Whether a plan was begun that addresses what limits this one: kernels fused anew, by one strategy alone."""
        for finding, strategy, attempt in attempts(entry, self._recall.ledger):
            if not self._promising(entry, strategy, attempt):
                continue
            self._decide(Action.SPECIALIZE, Why.BOTTLENECK, partition=finding.index, bottleneck=finding.bottleneck.value,
                         strategy=strategy.value, us=round(finding.us, 1), share=round(finding.share, 3), because=finding.because)
            self._start(entry, attempt, partial(self._address, entry, finding, strategy, attempt))
            return True
        return False

    def _promising(self, entry: Entry, strategy: Strategy, attempt: str) -> bool:
        """Whether a strategy is worth a try against what limits the plan now: not where it has failed again and again."""
        past = failed_before(entry, strategy, self._recall.ledger)
        if past is not None:
            bound, said = entry.findings[0].bottleneck.value, f"{strategy.value} helped {past.helped} of {past.count} times"
            self._refuse(entry, attempt, Why.UNPROMISING, said, bottleneck=bound, strategy=strategy.value, helped=past.helped,
                         tried=past.count)  # fmt: skip
        return past is None

    def _address(self, entry: Entry, finding: Finding, strategy: Strategy, attempt: str) -> None:
        """Tier 1 again, its kernels made by one strategy alone."""
        inputs, serving = entry.samples.inputs(), entry.plan
        if inputs is None:
            return

        def make() -> Plan:
            focus = focus_of(serving, finding.index) if strategy in FOCUSED else ""
            demand = replace(_demand(entry), strategies=(strategy.value,), focus=focus)
            better = self._improve(entry.baseline.graph, entry.weights, inputs, demand=demand)
            if kernels(better) == kernels(serving):
                raise InternalError("the plan is the one that serves", because=f"{strategy.value} changes nothing")
            return better

        self._try(entry, attempt, make, lambda: entry.plan, entry.samples.several(PROVEN_ON), partial(self._exchange, entry),
                  addresses=(finding.bottleneck, strategy))  # fmt: skip

    def _consider_masks(self, entry: Entry) -> bool:
        """Whether a plan without a mask was begun: one that sampled calls showed to let everything through."""
        if entry.bets or entry.plan.attempt:
            return False
        expected = partial(self._plans.watcher.predictable, entry.key, "valid")
        if all((seen := expected(v.name)) is None or seen[0] != ALL for v in entry.baseline.graph.inputs):
            return False
        calls = entry.samples.several(BET_ON)
        found = open_mask(entry.baseline.graph, entry.facts, expected, calls, entry.refused.__contains__)
        if found is None:
            return False
        self._decide(Action.SPECIALIZE, Why.RECURS, mask=found.name, all=found.fact.value, accuracy=round(found.accuracy, 3),
                     samples=found.samples)
        self._start(entry, found.attempt, partial(self._unmask, entry, found))
        return True

    def _unmask(self, entry: Entry, found: Open) -> None:
        """Tier 2: the graph without a mask, behind a guard on the mask."""
        calls = sorted(entry.samples.several(BET_ON), key=lambda c: not found.holds(c))  # raced on one that is meant, proven on all
        before = entry.plan
        if not calls or not found.holds(calls[0]):
            entry.turn_down(found.attempt, "no inputs of this kind are kept")
            return

        def make() -> Plan:
            fast = self._improve(found.graph, entry.weights, calls[0], demand=_demand(entry))
            return opened(found, fast, before, entry.baseline.graph, entry.facts, self._plans.beside)

        def deploy(better: Plan) -> None:
            if entry.plan is not before:
                entry.turn_down(found.attempt, "the plan behind it was exchanged meanwhile")
                return
            entry.plan = better  # what it replaces goes on serving behind it
            entry.cool()

        self._try(entry, found.attempt, make, lambda: before, calls, deploy, mask=found.name)

    def _consider_rows(self, site: Site, entry: Entry) -> bool:
        """Whether a plan that leaves rows of zeros out was begun; those that serve are told what calls showed."""
        seen = self._plans.watcher.seen(entry.key)
        if entry.plan.sides is not None:
            for plan in (entry.plan, *entry.versions.values()):
                self._notice_sides(plan, seen)
            return False
        if SKIP in entry.refused or entry.bets or entry.plan.attempt or entry.plan is entry.baseline or not suspected(seen):
            return False
        self._start(entry, SKIP, partial(self._skip, site, entry))
        return True

    def _notice_sides(self, plan: Plan, seen: GraphSeen | None) -> None:
        """Products that found no rows of zeros for long stop looking; they look again when sampled calls show such rows."""
        sides = plan.sides
        if sides is None:
            return
        if (gone := sides.one_sided()) > 0:
            self._decide(Action.DROP, Why.RARE, tier=2, what=SKIP, products=gone, calls=ENOUGH)
        elif sides.may_look_again() and suspected(seen):
            self._decide(Action.SPECIALIZE, Why.RECURS, what=SKIP, products=sides.look_again())

    def _skip(self, site: Site, entry: Entry) -> None:
        """Tier 2: products whose input has rows of zeros get a side that leaves them out."""
        calls = entry.samples.several(BET_ON)
        found = products(entry.plan, entry.weights, calls, self._compile)
        if isinstance(found, str):
            self._refuse(entry, SKIP, Why.RARE, found, tier=2, what=SKIP, because=found)
            return
        self._decide(Action.SPECIALIZE, Why.RECURS, what=SKIP, products=len(found.focus), share=round(found.share, 3),
                     samples=len(calls))

        def make() -> Plan:
            demand = replace(_demand(entry), strategies=(SKIP,), focus=",".join(found.focus))
            better = self._improve(entry.baseline.graph, entry.weights, found.calls[0], demand=demand)
            if better.sides is None:
                raise InternalError("the plan leaves no rows out", because="; ".join(better.notes)[:300])
            return replace(better, tier=2, attempt=SKIP)

        def deploy(better: Plan) -> None:
            if better.sides is not None:
                better.sides.begin()
            self._exchange(entry, better)
            for signature, version in list(entry.versions.items()):  # they multiply every row; such sizes get new ones
                site.remove_version(entry, signature)
                epochs.retire(version)

        self._try(entry, SKIP, make, lambda: entry.plan, found.calls, deploy, share=round(found.share, 3))

    def _start(self, entry: Entry, what: str, work: Callable[[], None]) -> None:
        entry.improving = True

        def job() -> None:
            begin = self._log.now()
            try:
                if not self._plans.closed:
                    work()
            finally:
                entry.improving = False
                self._log.span("beside", what, begin)

        self._plans.beside(job)

    def close(self) -> None:
        """Call off what is being made for the plans that there were."""
        if isinstance(self._improve, CalledOff):
            self._improve.call_off()

    def _fuse(self, entry: Entry) -> None:
        """Tier 1: generated kernels, generic in the graph's sizes."""
        inputs = entry.samples.inputs()
        if inputs is None:
            return

        def deploy(better: Plan) -> None:
            self._exchange(entry, better)

        begin, calls, tried = time.perf_counter(), entry.samples.several(PROVEN_ON), list[float]()

        def early(make: Callable[[], Plan], settled: float) -> None:
            if not tried and EARLY <= settled < 1 and time.perf_counter() - begin > EARLY_S:
                tried.append(settled)
                self._try(entry, "part of tier 1", make, lambda: entry.baseline, calls, deploy, settled=round(settled, 2))

        def make() -> Plan:
            better = self._improve(entry.baseline.graph, entry.weights, inputs, progress=early, demand=_demand(entry))
            later = [c for c in entry.samples.several(PROVEN_ON) if c is not calls[0]]
            calls[1:] = later[: PROVEN_ON - 1]  # kinds of calls that came meanwhile are proven on as well
            return better

        self._try(entry, "tier 1", make, lambda: entry.plan, calls, deploy)  # which part of it may serve already

    def _specialize(self, site: Site, entry: Entry, signature: Signature) -> None:
        """Tier 2: the same for sizes that recur."""
        inputs = entry.samples.inputs(signature)
        if inputs is None:
            entry.turn_down(named(signature), "no inputs of this kind are kept")
            return

        def make() -> Plan:
            fixed = at_sizes(entry.baseline.graph, dict(zip(entry.symbols, signature, strict=True)))
            demand = _demand(entry)
            if entry.plan.sides is not None and all_finite(entry.weights):
                demand = replace(demand, strategies=(SKIP,), focus=EVERY)
            return replace(self._improve(fixed, entry.weights, inputs, demand=demand), tier=2)

        def deploy(better: Plan) -> None:
            present = entry.versions  # a call that fails takes them all away meanwhile
            if len(present) >= self._plans.settings.max_versions:
                shares = entry.samples.shares()
                rarest = min(present, key=lambda s: shares.get(s, 0.0))
                site.remove_version(entry, rarest)
                epochs.retire(present[rarest])
                self._decide(Action.DROP, Why.RARE, tier=2, sizes=_sizes(entry, rarest), share=round(shares.get(rarest, 0), 3))
            if not site.admit_version(entry, signature, better):
                self._refuse(entry, named(signature), Why.TOO_MANY, "the site serves too many kinds of calls", tier=2,
                             sizes=_sizes(entry, signature))

        self._try(entry, named(signature), make, lambda: entry.plan, [inputs], deploy,
                  addresses=(entry.findings[0].bottleneck, Strategy.SPECIALIZE) if entry.findings else None,
                  sizes=_sizes(entry, signature))  # fmt: skip

    def _bet(self, entry: Entry, at: int, outcome: bool, name: str) -> None:
        """Tier 2: the branch that is taken, written out behind its condition."""
        graph, calls = entry.baseline.graph, entry.samples.several(BET_ON)
        before = entry.bets.get(name)
        made: list[Bet] = []

        def plain(piece: Graph, _call: Sequence[torch.Tensor]) -> Plan:
            return self._compile(piece, entry.weights)

        def make() -> Plan:
            made.append(place(
                graph, at, outcome, name, calls, lambda g, call: self._improve(g, entry.weights, call), plain, before
            ))
            return made[0].plan(graph)

        def deploy(better: Plan) -> None:
            entry.bets = {**entry.bets, name: made[0]}
            self._exchange(entry, better)

        self._try(entry, way(name, outcome), make, lambda: entry.plan, calls, deploy, condition=name, outcome=outcome)

    def _recheck(self, site: Site, entry: Entry, reference_us: float, now_us: float) -> None:
        """A plan that became slower is raced again: it is withdrawn if what it replaced is faster now."""
        inputs = entry.samples.inputs()
        plan = entry.plan
        if inputs is None or plan is entry.baseline:
            return
        trial, _ = self._race(entry.baseline, plan, inputs)
        entry.pace.forget()  # whatever follows, this is the pace now
        evidence: dict[str, EvidenceValue] = {
            "tier": plan.tier, "us_once": round(reference_us, 1), "us_now": round(now_us, 1),
            "us_plan": round(trial.new_us, 1), "us_baseline": round(trial.old_us, 1),
        }
        if trial.new_us <= trial.old_us:
            self._decide(Action.KEEP, Why.KEPT_PACE, **evidence)
            return
        self._decide(Action.DROP, Why.REGRESSED, **evidence)
        self._plans.demote(site, entry)
        entry.turn_down("tier 1", "it became slower than the library")

    def _try(
        self, entry: Entry, what: str, make: Callable[[], Plan], rival: Callable[[], Plan], calls: Sequence[Sequence[torch.Tensor]],
        deploy: Callable[[Plan], None], addresses: tuple[Bottleneck, Strategy] | None = None, **about: EvidenceValue,
    ) -> None:
        """Compile, prove, measure; swap only what won. Whatever happens is a decision."""
        generation = self._plans.generation
        versions = _versions(entry.weights)
        tier = 1 if what.endswith("tier 1") else 2
        begin = self._log.now()
        if (lost := self._plans.recorder.lost(entry.baseline.graph, what, (calls[0], rival().tier))) is not None:
            before, after = lost.get("us_before"), lost.get("us_after")
            self._refuse(entry, what, Why.LOST_BEFORE, f"{after} us instead of {before} in an earlier process", tier=tier,
                         us_before=before, us_after=after, **about)
            return
        try:
            better = make()
            if self._plans.closed:
                return
            self._log.span("compile", what, begin, nodes=len(better.graph.nodes))
            begin = self._log.now()
            proof = prove(better.run, entry.baseline.run, calls, self._plans.settings.tolerance, lambda: self._wide(entry),
                          _quanta(entry))
            self._log.span("proof", what, begin, inputs=proof.inputs, judge=proof.judge)
        except Exception as e:
            text = f"{e.what}: {e.because}" if isinstance(e, HotfuseError) else f"{type(e).__name__}: {e}"
            reason = text.strip(": ").splitlines()[0][:500]
            self._refuse(entry, what, Why.NOT_COMPILED, reason, tier=tier, what=reason, **about)
            return
        if proof.difference:
            self._refuse(entry, what, Why.MISMATCH, proof.difference, tier=tier, because=proof.difference, judge=proof.judge,
                         **about)
            return
        old = rival()
        # A proof is against the baseline, on calls as they come: rounds for tier 1, not for what is meant for some of them only.
        trial, trade = self._race(old, better, calls[0], proof.rounds if tier == 1 and old is entry.baseline else ())
        evidence: dict[str, EvidenceValue] = {
            "tier": tier, "us_before": round(trial.old_us, 1), "us_after": round(trial.new_us, 1), "rounds": trial.rounds,
            "proven_on": proof.inputs, "judge": proof.judge, **trade.evidence(), **about,
        }
        if better.account is not None and better.account.predicted_us is not None:
            evidence["us_predicted"] = better.account.predicted_us
        by_time = self._plans.settings.objective == "latency"
        won, lost_why = (Why.FASTER, Why.NOT_FASTER) if by_time else (Why.BETTER, Why.NOT_BETTER)
        if addresses is not None:
            helped = self._recall.ledger.learn(*addresses, trial.old_us, trial.new_us)
            evidence |= {"bottleneck": addresses[0].value, "strategy": addresses[1].value, "helped": helped}
            send(sized(self._plans.settings).pool.submit, place_of(self._plans.settings), self._recall)
        kept: dict[str, EvidenceValue] = {**evidence, "attempt": what, "certain": trial.settled}
        rests = (calls[0], old.tier)
        graph, name = entry.baseline.graph, self._plans.model.name
        if not trial.won:
            self._refuse(entry, what, lost_why, f"{trial.new_us:.1f} us instead of {trial.old_us:.1f}", **evidence)
            self._plans.recorder.tried(name, graph, Action.REFUSE, lost_why, kept, rests)
            return
        with self._plans.exchanging(generation) as same:
            if not same or versions != _versions(entry.weights):
                self._decide(Action.REFUSE, Why.WEIGHTS_CHANGED, tier=tier, **about)
                return
            deploy(better)
            self._plans.fit(better)
            entry.trade = trade
        self._decide(Action.DEPLOY, won, **evidence)
        self._plans.examiner.raced(entry, better, calls[0])
        self._plans.release(entry)
        self._plans.recorder.tried(name, graph, Action.DEPLOY, won, kept, rests)

    def _exchange(self, entry: Entry, better: Plan) -> None:
        """Swap the plan of an entry: one reference store."""
        old, entry.plan = entry.plan, better
        if old is not entry.baseline:
            epochs.retire(old)
        entry.cool()

    def _wide(self, entry: Entry) -> Run:
        """The baseline on weights in float64."""
        weights = {k: w.double() if w.is_floating_point() else w for k, w in entry.weights.items()}
        return self._compile(entry.baseline.graph, weights).run

    def _race(
        self, old: Plan, new: Plan, inputs: Sequence[torch.Tensor], before: Sequence[tuple[float, float]] = ()
    ) -> tuple[Trial, Trade]:
        begin, settings = self._log.now(), self._plans.settings
        known = () if settings.objective == "energy" else before  # which runs on another clock
        trial, trade = settle(settings, race, old, new, inputs, pause=self._pause, before=known)
        self._log.span("race", "race", begin, rounds=trial.rounds, won=trial.won)
        return trial, trade

    def _pause(self, spent: float) -> None:
        """Where calls use every core, leave it to them for as long as a round took, so that they are slowed half as often."""
        if self._plans.settings.capture != "inline" and torch.get_num_threads() >= usable_cores():
            time.sleep(min(spent, 0.05))

    def _refuse(self, entry: Entry, attempt: str, why: Why, reason: str, **evidence: EvidenceValue) -> None:
        entry.turn_down(attempt, reason)
        self._decide(Action.REFUSE, why, **evidence)

    def _decide(self, action: Action, why: Why, **evidence: EvidenceValue) -> None:
        self._log.decide(action, why, self._plans.model.name, **evidence)


def _quanta(entry: Entry) -> tuple[Quantum, ...]:
    """The steps of outputs that the model rounds."""
    graph = entry.baseline.graph
    keys = {p.value.name: p.key for p in graph.params}

    def number(v: Value) -> float | None:
        found = entry.weights.get(keys.get(v.name, ""))
        return float(found) if found is not None and found.numel() == 1 else None

    return quanta(graph, number)


def _demand(entry: Entry) -> Demand:
    """What a call takes, from the calls looked at since the plan was exchanged; it orders the units of a compilation.

    How often the graph is called is left open: a model that serves is expected to go on serving, so no unit is given up because
    its estimated saving is small. Trials decide that.
    """
    return Demand(library_us=entry.seconds / entry.heat * 1e6) if entry.heat and entry.seconds else Demand()


def _sizes(entry: Entry, signature: Signature) -> str:
    return ", ".join(f"{s}={n}" for s, n in zip(entry.symbols, signature, strict=True))


def _versions(weights: Weights) -> list[int]:
    return [t._version for t in weights.values() if not t.is_inference()]
