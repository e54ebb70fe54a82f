# pyright: reportPrivateUsage=false
# A tensor's version has no public name.
"""Better plans for hot ones: compiled beside inference, proven on real calls, raced, and swapped in only if they win.

Every attempt ends in a decision. What lost is remembered with both times and not tried again until something it rested on
changed: the weights, the number of threads, or the traffic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module

import torch

from hotfuse.analysis.attention import attends
from hotfuse.analysis.ties import quanta_of
from hotfuse.backends import registry
from hotfuse.base.errors import HotfuseError
from hotfuse.base.events import Action, EvidenceValue, Why
from hotfuse.base.faults import error_text
from hotfuse.compile.learn.strategy_history import history_of, send
from hotfuse.compile.request_context import context_of, settings_of
from hotfuse.compile.workers.service import sized
from hotfuse.hpm.bottleneck import Strategy
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import TensorType
from hotfuse.machine import team
from hotfuse.machine.cores import usable_cores
from hotfuse.machine.huge_pages import huge_pages
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.recalling import MadeOf, RecalledStart
from hotfuse.runtime.serve.device_rooms import RoomedRun
from hotfuse.runtime.site import MOST_REFUSED, THREADS, Entry, Site, WonRace
from hotfuse.runtime.tierup.alongside import JobAlongside
from hotfuse.runtime.tierup.attempt import (
    Attempt,
    AttemptContext,
    CalledOff,
    Compile,
    Improve,
    Remembers,
    Weights,
    versions_of,
)
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.judge import Judge
from hotfuse.runtime.tierup.lull import Lull
from hotfuse.runtime.tierup.objective import Trade, decide
from hotfuse.runtime.tierup.own_code import compare
from hotfuse.runtime.tierup.proof import Proof, in_float64, prove
from hotfuse.runtime.tierup.race import LIVE, MARGIN, Trial, race
from hotfuse.runtime.tierup.skipping import suspected
from hotfuse.runtime.tierup.strategies import against, attempts, failed_before
from hotfuse.runtime.tierup.tier1 import fused, known
from hotfuse.runtime.tierup.tiers import is_hot
from hotfuse.runtime.zero_rows import MAX_DENSE_CALLS
from hotfuse.specialize.table import (
    DEVICE_KERNELS,
    LAYERED,
    NAMES,
    PADDING,
    PLACED,
    SIZES,
    TIER1,
    ZERO_ROWS,
    AttemptKey,
)

STAMP = ("model", "threads", "traffic", "performance model", "cores", "speed", "callers")
DEVICE_WARM_UPS = 4
"""Rounds of a race on a device that are not judged: a plan's first calls record what later ones replay, a packed plan's for
more than one number of rows."""
OWN_CODE = -1
"""The tier of the model's own code, where a race against it is remembered."""
MACHINE = frozenset({"threads", "cores", "speed", "callers"})
"""What decides how fast a plan is, whatever it computes."""


SPECIALIZING = "hotfuse.runtime.tierup.rows"
"""What calls need once tier 1 serves: imported by a background job behind the one that makes it."""


class Improver:
    """Decides what to try for the plans of one model, and tries it."""

    def __init__(self, plans: Plans, compile: Compile, improve: Improve) -> None:
        self._plans = plans
        self._context = AttemptContext(plans, compile, improve)
        self._log = plans.log
        self._judge = Judge(plans)
        self._inline = plans.settings.capture == "inline"
        """Nobody is served beside."""
        self._history = history_of(context_of(plans.settings).path)
        self._considering = threading.Lock()
        self._specializes = False
        """Whether what specializing takes has been imported: no call does that."""

    def admitted(self, site: Site, entry: Entry, threads: int, recalled: RecalledStart | None = None) -> None:
        """A graph was captured. Where an earlier process made a plan of it, that one is tried now, however hot it is; else calls
        that waited for the capture may have shown that it is hot.
        """
        if not entry.improving and entry.plan is entry.baseline and isinstance(self._context.improve, Remembers):
            self._attempt(entry, TIER1, partial(self._known, entry, recalled))

        def hot() -> None:
            compare(entry, self._plans.settings)  # what tier 1 has to beat is decided by calls while it is made
            self.consider(site, entry, entry.plan, threads)
            self._plans.in_background(specializing)  # behind what has just begun

        def specializing() -> None:
            import_module(SPECIALIZING)
            self._specializes = True

        self._plans.in_background(hot)

    def remembered(self, graph: Graph, weights: Weights, inputs: Sequence[torch.Tensor]) -> Plan | None:
        """The plan of a graph that an earlier process made, linked and packed; None where there is none, or it lost there."""
        improve = self._context.improve
        return improve.remembered(graph, weights, inputs) if isinstance(improve, Remembers) else None

    def take_up(self, entry: Entry, recalled: RecalledStart, shown: tuple[float, float]) -> bool:
        """A plan that was proven in an earlier process gave the model's own answer to a first call: it serves where it won there.
        Where nothing was decided it takes turns with the model's own code, which nothing has been compared with yet; True then.
        """
        better, made_of = recalled.better, recalled.made_of
        assert better is not None and better.recipe is not None
        attempt, verdict = known(entry, better, made_of), better.recipe.verdict
        better.begin()
        if verdict is None:
            proof = Proof("", 1, "the model's own code", first=(shown,))
            self._start(entry, attempt.key, partial(self._decide_by_race, entry, attempt, better, made_of, proof, Lull()))
            return True
        took = {k: verdict.get(k) for k in ("us_before", "us_after")}
        self._deploy(entry, attempt, better, recalled.made_of, Why.WON_BEFORE,
                     {"tier": attempt.tier, **took, "proven_on": 1, "judge": "the model's own code"})  # fmt: skip
        return False

    def _known(self, entry: Entry, recalled: RecalledStart | None) -> Attempt | None:
        """An attempt with the plan of an earlier process: the one that was made ready, if the model and its weights are still what
        it was made of; None where there is none.
        """
        if recalled is not None and recalled.better is not None:
            same = recalled.generation == self._plans.generation and recalled.versions == versions_of(entry.weights)
            if same and self._plans.still_as_copied(entry, recalled.taken):
                return known(entry, recalled.better, recalled.made_of)
        inputs, made_of = entry.samples.inputs(), self._made_of(entry)
        try:
            plan = None if inputs is None else self.remembered(entry.baseline.graph, entry.weights, inputs)
        except HotfuseError:  # compiling comes to the same code, and tells what is wrong
            self._log.count("not_recalled")
            return None
        return None if plan is None else known(entry, plan, made_of)

    def first_plan_awaited(self, entry: Entry) -> bool:
        """Whether a first plan of kernels is still to come, or was not asked for yet: everything else waits for it."""
        return entry.trying == TIER1 or (entry.plan is entry.baseline and TIER1 not in entry.refused)

    def consider(self, site: Site, entry: Entry, plan: Plan, threads: int = 0) -> None:
        """After a call that was looked at, which has torch's threads as they are, or so many; at most starts something.

        One thread at a time: sixteen that look at once would all begin what each of them finds worth beginning.
        """
        if not self._considering.acquire(blocking=False):
            return
        try:
            self._consider(site, entry, plan, threads)
        finally:
            self._considering.release()

    def _consider(self, site: Site, entry: Entry, plan: Plan, threads: int) -> None:
        settings = self._plans.settings
        stamp = (self._plans.generation, threads or team.threads(), self._plans.call_sampler.drifts(entry.key),
                 self._plans.recorder.trained, usable_cores(), self._plans.recorder.speed_changes, entry.callers.changes)
        if not entry.stamp:
            entry.stamp = stamp  # the plan of an earlier process may have lost already, under these
        elif entry.stamp != stamp:  # what lost under other circumstances may win now
            self._reopen(site, entry, stamp)
        if entry.retries:
            entry.retry(time.monotonic())
        if entry.improving or self._plans.closed:
            return
        if plan is entry.baseline:
            nodes = len(plan.graph.nodes)
            if TIER1 not in entry.refused and is_hot(entry.heat, entry.seconds, settings.hot_calls, nodes):
                self._first_plan(site, entry)
                return
        elif plan.recipe is not None and plan.recipe.stale and TIER1 not in entry.refused and plan is entry.plan:
            self._attempt(entry, TIER1, partial(fused, self._context, entry, partial(self._try, entry)))
            return
        if settings.tiers < 2 or (entry.plan is entry.baseline and TIER1 not in entry.refused):
            return
        if _on_device(entry):
            self._consider_device(site, entry)
            return
        if PLACED in entry.plan.layers:
            return  # what follows is for the host's cores
        if settings.devices == "auto" and PLACED not in entry.refused:
            from hotfuse.runtime.tierup.placement import placed_elsewhere

            self._attempt(entry, PLACED, partial(placed_elsewhere, self._context, entry))
            return
        for serving in (entry.plan, *entry.versions.values()):
            self._notice_sides(entry, serving)
        if self._consider_rows(site, entry, LAYERED) or self._consider_bottleneck(entry):
            return
        self._consider_rows(site, entry, (SIZES,))

    def _first_plan(self, site: Site, entry: Entry) -> None:
        """Begin what is to replace library kernels: tier 1, or live rows alone where most rows are padding. Whichever comes first,
        the other may follow: tier 1 where calls are seen that are not packed.
        """
        tier1 = partial(fused, self._context, entry, partial(self._try, entry))

        def propose() -> Attempt | None:
            if not attends(entry.baseline.graph):  # what follows imports much, while nothing is compiled yet
                return tier1()
            from hotfuse.runtime.tierup.rows import packs
            from hotfuse.runtime.tierup.tier2 import packed_first

            if packs(self._context, entry):
                try:
                    found = packed_first(self._context, site, entry, self._history.outcomes, partial(self._alongside, entry))
                except Exception as e:  # it is no reason to go without tier 1
                    said = error_text(e)
                    self._context.refuse(entry, AttemptKey(PADDING), Why.BACKGROUND_FAILED, said, what=PADDING, error=said)
                    found = None
                if found is not None:
                    return found
            return tier1()

        plain = self._plans.settings.tiers < 2 or _on_device(entry)
        self._attempt(entry, TIER1, tier1 if plain else propose)

    def _consider_device(self, site: Site, entry: Entry) -> None:
        """On an accelerator library kernels serve as recordings; generated ones are for sizes that are numbers, or recur. Rows that
        padding fills are left out first, since kernels are then made for what is left."""
        if self._consider_rows(site, entry, (PADDING,)) or registry.device_kernels().unavailable():
            return
        in_rooms = isinstance(entry.plan.run, RoomedRun)  # whose sizes are numbers
        if entry.symbols and not in_rooms:
            self._consider_rows(site, entry, (SIZES,))
        elif DEVICE_KERNELS not in entry.plan.layers and DEVICE_KERNELS not in entry.refused:
            from hotfuse.runtime.tierup.rows import packs_later
            from hotfuse.runtime.tierup.tier2 import with_device_kernels

            if self._specializes and not in_rooms and packs_later(self._context, entry):
                return  # kernels for all rows would take the time in which those for live rows are made
            self._attempt(entry, DEVICE_KERNELS, partial(with_device_kernels, self._context, entry))

    def _reopen(self, site: Site, entry: Entry, stamp: tuple[int, ...]) -> None:
        """What decisions rest on changed: the model, torch's threads, the traffic, the performance model, the process's cores,
        their speed, how many threads call. What was refused may be tried; what serves has to prove itself again.
        """
        before, entry.stamp = entry.stamp, stamp
        entry.refused.clear()
        entry.retries.clear()
        changed = [what for what, was, now in zip(STAMP, before, stamp, strict=False) if was != now]
        if "traffic" in changed:
            site.reopen()
        if changed and MACHINE.intersection(changed):
            entry.own_ratio = None if entry.plan is entry.baseline else entry.own_ratio
            for audit in list(entry.audits.values()):
                audit.reopen(entry.calls)
            self._decide(Action.NOTICE, Why.CIRCUMSTANCES, changed=", ".join(changed), threads=stamp[THREADS], cores=stamp[4])

    def _consider_rows(self, site: Site, entry: Entry, rows: Sequence[str]) -> bool:
        """Whether a specialization of these rows was begun: of those proposed, the one that is expected to save most."""
        if not self._specializes:
            return False
        from hotfuse.runtime.tierup.rows import LEAST_VALUE, proposals

        for found in proposals(self._context, site, entry, self._history.outcomes, rows):
            if found.key.row == SIZES and not self._promising(entry, Strategy.SPECIALIZE, found.key):
                continue
            value = found.value(self._history.outcomes)
            if value < LEAST_VALUE:
                said = f"{value:.2%} of the calls' time may be saved"
                self._context.refuse(entry, found.key, Why.UNPROMISING, said, row=found.key.row,
                                     share=round(found.share, 3), value=round(value, 4))  # fmt: skip
                continue
            if found.evidence:
                self._decide(Action.SPECIALIZE, Why.RECURS, **found.evidence)
            self._attempt(entry, found.key, found.attempt)
            return True
        return False

    def _consider_bottleneck(self, entry: Entry) -> bool:
        """Whether a plan was begun that addresses what limits this one: kernels fused anew, by one strategy alone."""
        for finding, strategy, attempt in attempts(entry, self._history.ledger):
            if not self._promising(entry, strategy, attempt):
                continue
            self._decide(Action.SPECIALIZE, Why.BOTTLENECK, partition=finding.index, bottleneck=finding.bottleneck.value,
                         strategy=strategy.value, us=round(finding.us, 1), share=round(finding.share, 3), because=finding.because)
            self._attempt(entry, attempt, partial(against, self._context, entry, finding, strategy, attempt))
            return True
        return False

    def _promising(self, entry: Entry, strategy: Strategy, attempt: AttemptKey) -> bool:
        """Whether a strategy is worth a try against what limits the plan now: not where it has failed again and again."""
        past = failed_before(entry, strategy, self._history.ledger)
        if past is not None:
            bound, said = entry.findings[0].bottleneck.value, f"{strategy.value} helped {past.helped} of {past.count} times"
            self._context.refuse(entry, attempt, Why.UNPROMISING, said, bottleneck=bound, strategy=strategy.value,
                                 helped=past.helped, tried=past.count)  # fmt: skip
        return past is None

    def _notice_sides(self, entry: Entry, plan: Plan) -> None:
        """Products that found no rows of zeros for long stop looking; they look again when sampled calls show such rows."""
        sides = plan.sides
        if sides is None:
            return
        if (gone := sides.one_sided()) > 0:
            self._decide(Action.DROP, Why.NO_ZERO_ROWS, tier=2, what=ZERO_ROWS, products=gone, calls=MAX_DENSE_CALLS)
        elif sides.may_look_again() and suspected(self._plans.call_sampler.seen(entry.key)):
            self._decide(Action.SPECIALIZE, Why.RECURS, what=ZERO_ROWS, products=sides.look_again())

    def _attempt(self, entry: Entry, key: AttemptKey, propose: Callable[[], Attempt | None]) -> None:
        self._start(entry, key, lambda: self._try(entry, propose()))

    def _start(self, entry: Entry, key: AttemptKey, work: Callable[[], None]) -> None:
        entry.improving, entry.trying, what = True, key, str(key)

        def job() -> None:
            begin = self._log.now()
            try:
                if not self._plans.closed:
                    work()
            except Exception as e:  # what raised once would do so at every look: it is refused like what lost
                self._context.refuse(entry, key, Why.BACKGROUND_FAILED, error_text(e), what=what, error=error_text(e))
            finally:
                entry.improving, entry.trying = False, None
                self._log.span("in_background", what, begin)

        self._plans.in_background(job)

    def _alongside(self, entry: Entry, propose: Callable[[], Attempt | None]) -> Callable[[], None]:
        """Try something while the job that calls this goes on; returns what waits for its end. Inline there is no other thread."""
        if self._inline:
            return lambda: None
        submit = sized(self._plans.settings).submit

        def job() -> None:
            try:
                self._try(entry, propose(), meanwhile=True)
            finally:
                entry.meanwhile = None

        return JobAlongside(partial(submit, owner=(self, "alongside")), job).finish

    def after_fork(self) -> None:
        """In a forked child: whoever considered is in the parent."""
        self._considering = threading.Lock()

    def close(self) -> None:
        """Call off what is being made for the plans that there were."""
        if isinstance(self._context.improve, CalledOff):
            self._context.improve.call_off()

    def _try(self, entry: Entry, attempt: Attempt | None, *, meanwhile: bool = False) -> None:
        """Compile, prove, measure; swap only what won. Whatever happens is a decision. `meanwhile`: while another one is made."""
        if attempt is None:
            return
        key, what, calls, tier, about = attempt.key, str(attempt.key), attempt.calls, attempt.tier, attempt.about
        if meanwhile:
            entry.meanwhile = key
        else:
            entry.trying = key
        made_of = attempt.made_of or self._made_of(entry)
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
            if self._plans.closed:
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
            self._context.refuse(entry, key, Why.NOT_COMPILED, reason, tier=tier, what=reason, **about)
            return
        if proof.difference:
            self._context.refuse(entry, key, Why.MISMATCH, proof.difference, tier=tier, because=proof.difference, judge=proof.judge,
                                 **about)
            return
        better.begin()
        recipe = better.recipe
        if attempt.remembered and recipe is not None and recipe.verdict is not None:
            took = {k: recipe.verdict.get(k) for k in ("us_before", "us_after")}
            self._deploy(entry, attempt, better, made_of, Why.WON_BEFORE,
                         {"tier": tier, **took, "proven_on": proof.inputs, "judge": proof.judge, **about})
            return
        if recipe is not None and recipe.verdict is None and not recipe.lost:
            recipe.judged(won=None, evidence={"proven_on": proof.inputs, "judge": proof.judge})
        self._decide_by_race(entry, attempt, better, made_of, proof, lull)

    def _decide_by_race(
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
        warm_ups = DEVICE_WARM_UPS if _on_device(entry) or key == PLACED else 0
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
            self._history.outcomes.learn(key.row, attempt.share, trial.old_us, trial.new_us, trial.won)
            self._remember()
        kept: dict[str, EvidenceValue] = {**evidence, "attempt": what, "certain": trial.decided}
        rests = (calls[0], OWN_CODE if own else old.tier)
        graph, name = entry.baseline.graph, self._plans.model.name
        if recipe is not None:
            first = entry.trade.us[0] if entry.trade is not None and old is not entry.baseline else None
            if (worth := recipe_verdict(trial, first)) is not None:
                us = trial.old_us if first is None else first
                begun_with = old.recipe if not worth and old.recipe is not None and old.recipe.verdict is not None else None
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
        if not self._deploy(entry, attempt, better, made_of, won, evidence, trade):
            return
        if self._inline or lull.lasts():  # beside calls it would hold them up, and take longer than it does: sampled calls show it
            self._plans.examiner.raced(entry, better, calls[0])
        self._plans.recorder.tried(name, graph, Action.DEPLOY, won, kept, rests)

    def _made_of(self, entry: Entry) -> MadeOf:
        """What a plan that is made from now on has copies of."""
        generation, versions = self._plans.generation, versions_of(entry.weights)
        return generation, self._plans.before_copying(entry), versions

    def _deploy(
        self, entry: Entry, attempt: Attempt, better: Plan, made_of: MadeOf, why: Why,
        evidence: dict[str, EvidenceValue], trade: Trade | None = None,
    ) -> bool:  # fmt: skip
        """Swap a plan in, unless the model or its weights are no longer those that it was made of."""
        generation, taken, versions = made_of
        same_memory = self._plans.still_as_copied(entry, taken)
        with self._plans.exchanging(generation) as same:
            if not same or not same_memory or taken != self._plans.originals.generation or versions != versions_of(entry.weights):
                self._decide(Action.REFUSE, Why.WEIGHTS_CHANGED, tier=attempt.tier, **attempt.about)
                return False
            attempt.deploy(better)
            self._plans.evict_to_budget(better)
            entry.trade = trade
        before, after = (evidence.get(us) for us in ("us_before", "us_after"))
        if isinstance(before, int | float) and isinstance(after, int | float):
            entry.won[attempt.key] = WonRace(float(before), float(after), time.time())
            for oldest in list(entry.won)[:-MOST_REFUSED]:
                entry.won.pop(oldest, None)
        self._decide(Action.DEPLOY, why, **evidence)
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
        """Of two proven plans; where captures are inline nobody is served beside, and rounds follow each other here and now."""
        begin, settings = self._log.now(), self._plans.settings
        if self._inline:
            known = () if settings.objective == "energy" else before  # which runs on another clock
            trial, trade = decide(settings, race, contest.serving, contest.new, inputs, before=known)
        else:
            judge = partial(self._judge.between, entry, contest, begin_contest, race)
            trial, trade = decide(settings, judge, contest.serving, contest.new, inputs, lull=lull, seen=seen)
        self._log.span("race", "race", begin, rounds=trial.rounds, won=trial.won, by=trial.by)
        return trial, trade

    def _decide(self, action: Action, why: Why, **evidence: EvidenceValue) -> None:
        self._context.decide(action, why, **evidence)


def _on_device(entry: Entry) -> bool:
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
