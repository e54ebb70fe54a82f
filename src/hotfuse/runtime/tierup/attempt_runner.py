"""Carrying an attempt out: compile, prove on real calls, race, and swap in only what won. Every outcome is a decision."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from hotfuse.analysis.ties import quanta_of
from hotfuse.base.errors import CaptureError, HotfuseError
from hotfuse.base.events import Action, EvidenceValue, Why
from hotfuse.base.faults import is_passing
from hotfuse.compile.learn.strategy_history import StrategyHistory, send
from hotfuse.compile.request_context import context_of, settings_of
from hotfuse.compile.workers.service import sized
from hotfuse.ir.types import TensorType
from hotfuse.machine.huge_pages import huge_pages
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.site import MAX_REFUSED, Entry, WonRace
from hotfuse.runtime.tierup.attempt import (
    Attempt,
    AttemptContext,
    bet_context,
    versions_of,
)
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.judge import Judge
from hotfuse.runtime.tierup.lull import Lull
from hotfuse.runtime.tierup.objective import Trade, decide
from hotfuse.runtime.tierup.proof import Proof, in_float64, prove
from hotfuse.runtime.tierup.race import LIVE, MARGIN, Trial, race
from hotfuse.runtime.warm_start import MadeOf
from hotfuse.specialize.table import (
    NAMES,
    PLACED,
    REPLANNED,
)

DEVICE_WARM_UPS = 4
"""Rounds of a race on a device that are not judged: a plan's first calls record what later ones replay, a packed plan's for
more than one number of rows."""
OWN_CODE = -1
"""The tier of the model's own code, where a race against it is remembered."""


class AttemptRunner:
    """Carries out the attempts of one model (`runtime.tierup.improve` decides which)."""

    def __init__(self, plans: Plans, context: AttemptContext, history: StrategyHistory) -> None:
        self._plans, self._context, self._history = plans, context, history
        self._log = plans.log
        self._judge = Judge(plans)
        self._inline = plans.settings.capture == "inline"
        """Nobody is served beside."""

    def attempt(self, entry: Entry, attempt: Attempt | None, *, meanwhile: bool = False) -> None:
        """Compile, prove, measure; swap only what won. Whatever happens is a decision. `meanwhile`: while another one is made."""
        if attempt is None:
            return
        key, what, calls, tier, about = attempt.key, str(attempt.key), attempt.calls, attempt.tier, attempt.about
        if meanwhile:
            entry.meanwhile = key
        else:
            entry.trying = key
        made_of = attempt.made_of or self.made_of(entry)
        begin, lull = self._log.now(), Lull()
        rival = attempt.rival()
        rests = (calls[0], OWN_CODE if entry.own and rival is entry.baseline else rival.tier)
        lost = None if attempt.remembered else self._plans.recorder.lost(entry.baseline.graph, what, rests)
        if lost is not None:
            before, after = lost.get("us_before"), lost.get("us_after")
            said = f"{after} us instead of {before} in earlier processes"
            self._context.postpone(entry, key, Why.LOST_BEFORE, said, tier=tier, us_before=before, us_after=after,
                                   times=lost.get("times"), **about)
            return
        try:
            better = attempt.make()
            if self._plans.closed or entry.replaced:
                return
            self._log.span("compile", what, begin, nodes=len(better.graph.nodes))
            begin = self._log.now()
            wide = in_float64(entry.baseline.graph, entry.weights)
            proof = prove(attempt.compared(better.run), attempt.compared(entry.baseline.run), calls,
                          self._plans.settings.tolerance, lambda noise=0: attempt.compared(wide(noise)),
                          quanta_of(entry.baseline.graph, entry.weights), nullcontext if self._inline else lull.computing)
            self._log.span("proof", what, begin, inputs=proof.inputs, judge=proof.judge)
        except Exception as e:
            text = f"{e.what}: {e.because}" if isinstance(e, HotfuseError) else f"{type(e).__name__}: {e}"
            reason = text.strip(": ").splitlines()[0][:500]
            why = Why.SAME_PLAN if isinstance(e, CaptureError) and e.why is Why.SAME_PLAN else Why.NOT_COMPILED
            refuse = self._context.postpone if is_passing(e) else self._context.refuse
            refuse(entry, key, why, reason, tier=tier, what=reason, **about)
            return
        if proof.difference:
            self._context.refuse(entry, key, Why.MISMATCH, proof.difference, tier=tier, because=proof.difference, judge=proof.judge,
                                 **about)
            return
        better.begin()
        recipe = better.recipe
        if attempt.remembered and recipe is not None and recipe.verdict is not None:
            took = {k: recipe.verdict.get(k) for k in ("us_before", "us_after")}
            self.deploy(entry, attempt, better, made_of, Why.WON_BEFORE,
                         {"tier": tier, **took, "proven_on": proof.inputs, "judge": proof.judge, **about})
            return
        if recipe is not None and recipe.verdict is None and not recipe.lost:
            recipe.judged(won=None, evidence={"proven_on": proof.inputs, "judge": proof.judge})
        self.decide_by_race(entry, attempt, better, made_of, proof, lull)

    def decide_by_race(
        self, entry: Entry, attempt: Attempt, better: Plan, made_of: MadeOf, proof: Proof, lull: Lull
    ) -> None:  # fmt: skip
        """Measure a plan that was proven; swap it in if it won."""
        key, what, calls, tier, about = attempt.key, str(attempt.key), attempt.calls, attempt.tier, attempt.about
        (generation, taken, versions), recipe = made_of, better.recipe
        shown = (*proof.first, *proof.rounds)
        self._judge.baseline(entry, shown)
        old = attempt.rival()
        own = entry.own and old is entry.baseline

        def begin_contest(contest: PlanContest) -> bool:
            if not self._plans.still_as_copied(entry, taken):
                return False
            with self._plans.exchanging(generation) as same:
                opened = same and taken == self._plans.originals.generation and versions == versions_of(entry.weights)
                if opened:
                    entry.open(contest)
            if opened:
                self._plans.compare_copies()
            return opened

        # A proof is against the baseline, on calls as they come: rounds for tier 1, not for what is meant for some of them only.
        before = proof.rounds if tier == 1 and old is entry.baseline else ()
        warm_ups = DEVICE_WARM_UPS if on_device(entry) or key == PLACED else 0
        contest = PlanContest(old, better, own=own, signature=attempt.signature, meant=attempt.meant, warm_ups=warm_ups)
        seen = shown if old is entry.baseline else as_served(shown, entry.trade)
        trial, trade = self._race(entry, contest, begin_contest, calls[0], before, seen, lull)
        took = {"us_before": round(trial.old_us, 1), "us_after": round(trial.new_us, 1)} if trial.rounds else {}
        evidence: dict[str, EvidenceValue] = {
            "tier": tier, **took, "rounds": trial.rounds, "race": trial.by, "proven_on": proof.inputs, "judge": proof.judge,
            **(trade.evidence() if trial.rounds else {}), **about,
        }
        if own:
            evidence["against"] = "the model's own code"
        if better.account is not None and better.account.predicted_us is not None:
            evidence["us_predicted"] = better.account.predicted_us
        by_time = self._plans.settings.objective == "latency"
        won, lost_why = (Why.FASTER, Why.NOT_FASTER) if by_time else (Why.BETTER, Why.NOT_BETTER)
        if not trial.rounds:  # nothing was measured: nothing is learned of it either, and it is tried again
            epochs.retire(better)
            self._context.postpone(entry, key, Why.NOT_MEASURED, "calls came into every round of its race", **evidence)
            return
        if (addresses := attempt.addresses) is not None:
            helped = self._history.ledger.learn(*addresses, trial.old_us, trial.new_us)
            evidence |= {"bottleneck": addresses[0].value, "strategy": addresses[1].value, "helped": helped}
            self._remember()
        if key.row in NAMES:
            self._history.outcomes.learn(key.row, bet_context(entry, attempt.share), trial.old_us, trial.new_us, won=trial.won)
            self._remember()
        kept: dict[str, EvidenceValue] = {**evidence, "attempt": what, "certain": trial.decided}
        rests = (calls[0], OWN_CODE if own else old.tier)
        graph, name = entry.baseline.graph, self._plans.model.name
        if recipe is not None:
            first = entry.trade.us[0] if entry.trade is not None and old is not entry.baseline else None
            if (worth := recipe_verdict(trial, first)) is not None:
                us = trial.old_us if first is None else first
                begun_with = old.recipe if not worth and old.recipe is not None and old.recipe.verdict is not None else None
                if trial.won and key == REPLANNED and old.recipe is not None:  # the next process begins with it
                    recipe.beat(old.recipe, {**evidence, "us_before": round(us, 1)})
                if begun_with is None or not begun_with.beat(recipe, {**evidence, **dict(begun_with.verdict or {})}):
                    recipe.judged(won=worth, evidence={**evidence, "us_before": round(us, 1)})
        if not trial.won:
            epochs.retire(better)  # a live call may be in it
            said = f"{trial.new_us:.1f} us instead of {trial.old_us:.1f}" + ("" if trial.decided else ", not decided")
            refuse = self._context.refuse if trial.decided else self._context.postpone
            refuse(entry, key, lost_why, said, **evidence)
            self._plans.recorder.tried(name, graph, Action.REFUSE, lost_why, kept, rests)
            return
        if trial.by != LIVE:
            better.begin()  # rounds repeat one call: what they showed says nothing of traffic
        if not self.deploy(entry, attempt, better, made_of, won, evidence, trade):
            return
        if self._inline or lull.lasts():  # beside calls it would hold them up, and take longer than it does: sampled calls show it
            self._plans.examiner.raced(entry, better, calls[0])
        self._plans.recorder.tried(name, graph, Action.DEPLOY, won, kept, rests)

    def made_of(self, entry: Entry) -> MadeOf:
        """What a plan that is made from now on has copies of."""
        generation, versions = self._plans.generation, versions_of(entry.weights)
        return generation, self._plans.before_copying(entry), versions

    def deploy(
        self, entry: Entry, attempt: Attempt, better: Plan, made_of: MadeOf, why: Why,
        evidence: dict[str, EvidenceValue], trade: Trade | None = None,
    ) -> bool:  # fmt: skip
        """Swap a plan in, unless the model or its weights are no longer those that it was made of."""
        generation, taken, versions = made_of
        same_memory = self._plans.still_as_copied(entry, taken)
        with self._plans.exchanging(generation) as same:
            if not same or not same_memory or taken != self._plans.originals.generation or versions != versions_of(entry.weights):
                self._context.decide(Action.REFUSE, Why.WEIGHTS_CHANGED, tier=attempt.tier, **attempt.about)
                return False
            attempt.deploy(better)
            self._plans.evict_to_budget(better)
            entry.trade = trade
        before, after = (evidence.get(us) for us in ("us_before", "us_after"))
        if isinstance(before, int | float) and isinstance(after, int | float):
            entry.won[attempt.key] = WonRace(float(before), float(after), time.time())
            for oldest in list(entry.won)[:-MAX_REFUSED]:
                entry.won.pop(oldest, None)
        self._context.decide(Action.DEPLOY, why, **evidence)
        self._plans.release(entry)
        self._plans.compare_copies()
        if huge_pages.waiting:
            self._plans.in_background(huge_pages.gather)
        return True

    def _remember(self) -> None:
        """Have what was learned added to the store; nobody waits for it."""
        settings = self._plans.settings
        send(sized(settings).pool.submit, settings_of(settings), context_of(settings), self._history)

    def _race(
        self, entry: Entry, contest: PlanContest, begin_contest: Callable[[PlanContest], bool], inputs: Sequence[torch.Tensor],
        before: Sequence[tuple[float, float]], seen: Sequence[tuple[float, float]], lull: Lull,
    ) -> tuple[Trial, Trade]:  # fmt: skip
        """Race two proven plans. Where captures are inline no call is served meanwhile, and the rounds run here at once."""
        begin, settings = self._log.now(), self._plans.settings
        if self._inline:
            known = () if settings.objective == "energy" else before  # which runs on another clock
            trial, trade = decide(settings, race, contest.serving, contest.new, inputs, before=known)
        else:
            judge = partial(self._judge.between, entry, contest, begin_contest, race)
            trial, trade = decide(settings, judge, contest.serving, contest.new, inputs, lull=lull, seen=seen)
        self._log.span("race", "race", begin, rounds=trial.rounds, won=trial.won, by=trial.by)
        return trial, trade


def on_device(entry: Entry) -> bool:
    """Whether calls run on an accelerator: what is specialized so far is for CPUs."""
    return any(isinstance(v.type, TensorType) and v.type.device != "cpu" for v in entry.baseline.graph.inputs)


def as_served(shown: Sequence[tuple[float, float]], trade: Trade | None) -> list[tuple[float, float]]:
    """Seconds of what serves and of a new plan, by a proof, which ran the baseline: by as much as the race of what serves showed it
    to be faster. Empty where nothing is known of that.
    """
    if trade is None or not trade.us[0]:
        return []
    return [(old * trade.us[1] / trade.us[0], new) for old, new in shown]


def recipe_verdict(trial: Trial, first_us: float | None) -> bool | None:
    """Whether the next process may begin with what was raced; None where the race decided nothing, which is no verdict.

    `first_us` is what the baseline took where a part of the plan serves already: that part won, and the whole, though not faster
    than the part, may have won against the baseline as well.
    """
    if trial.won:
        return True
    if not trial.decided:
        return None
    return first_us is not None and trial.new_us < MARGIN * first_us
