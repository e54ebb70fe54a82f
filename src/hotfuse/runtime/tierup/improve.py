# pyright: reportPrivateUsage=false
# A tensor's version has no public name.
"""Better plans for hot ones: which attempts are made for an entry, and when (`runtime.tierup.attempt_runner` carries them out).

Every attempt ends in a decision. What lost is remembered with both times and not tried again until something it rested on
changed: the weights, the number of threads, or the traffic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

import torch

from hotfuse.analysis.attention import attends, pools
from hotfuse.backends import registry
from hotfuse.base.errors import HotfuseError
from hotfuse.base.events import Action, Why
from hotfuse.base.faults import error_text, is_passing
from hotfuse.compile.learn.strategy_history import history_of, recall
from hotfuse.compile.request_context import context_of, settings_of
from hotfuse.compile.workers.service import sized
from hotfuse.hpm.bottleneck import Strategy
from hotfuse.ir.graph import Graph
from hotfuse.machine import team_size
from hotfuse.machine.cores import usable_cores
from hotfuse.runtime.observe.graph_weights import GraphWeights
from hotfuse.runtime.plan import UNTRIED, Plan
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.serve.device_caches import StaticCacheRun
from hotfuse.runtime.site import THREADS, Entry, Site
from hotfuse.runtime.tierup.alongside import JobAlongside
from hotfuse.runtime.tierup.attempt import (
    Attempt,
    AttemptContext,
    CalledOff,
    Compile,
    Improve,
    Remembers,
    Weights,
    WorksAhead,
    versions_of,
)
from hotfuse.runtime.tierup.attempt_runner import AttemptRunner, on_device
from hotfuse.runtime.tierup.lull import Lull
from hotfuse.runtime.tierup.own_code import compare
from hotfuse.runtime.tierup.proof import Proof
from hotfuse.runtime.tierup.skipping import suspected
from hotfuse.runtime.tierup.strategies import against, attempts, failed_before, replanned, weights_moved
from hotfuse.runtime.tierup.tier1 import fused, known
from hotfuse.runtime.tierup.tiers import is_hot, weighs
from hotfuse.runtime.warm_start import RecalledStart
from hotfuse.runtime.zero_rows import MAX_DENSE_CALLS
from hotfuse.specialize.table import (
    DEVICE_KERNELS,
    LAYERED,
    PADDING,
    PLACED,
    REPLANNED,
    SIZES,
    TIER1,
    TUNED_KERNELS,
    ZERO_ROWS,
    AttemptKey,
)

STAMP = ("model", "threads", "traffic", "performance model", "cores", "speed", "callers", "gaps")
MACHINE = frozenset({"threads", "cores", "speed", "callers", "gaps"})
"""What decides how fast a plan is, whatever it computes."""


SPECIALIZING = "hotfuse.runtime.tierup.proposals"
"""What calls need once tier 1 serves: imported by a background job behind the one that makes it."""


class Improver:
    """Decides what to try for the plans of one model, and tries it."""

    def __init__(self, plans: Plans, compile: Compile, improve: Improve) -> None:
        self._plans = plans
        self._context = AttemptContext(plans, compile, improve)
        self._log = plans.log
        self._inline = plans.settings.capture == "inline"
        """Nobody is served beside."""
        self._history = history_of(context_of(plans.settings).path)
        self._runner = AttemptRunner(plans, self._context, self._history)
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
            compare(site, entry, self._plans.settings)  # what tier 1 has to beat is decided by calls while it is made
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

    def ahead(self, graph: Graph, weights: Weights, inputs: Sequence[torch.Tensor], *, heat: int, seconds: float) -> None:
        """A graph was captured, and nothing serves it yet: where calls that waited for it have shown that it is hot, workers begin
        what its first plan of kernels takes.
        """
        hot = is_hot(heat, seconds, self._plans.settings.hot_calls, len(graph.nodes))
        if hot and isinstance(self._context.improve, WorksAhead):
            self._context.improve.ahead(graph, weights, inputs)

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
            self._start(entry, attempt.key, partial(self._runner.decide_by_race, entry, attempt, better, made_of, proof, Lull()))
            return True
        took = {k: verdict.get(k) for k in ("us_before", "us_after")}
        self._runner.deploy(entry, attempt, better, recalled.made_of, Why.WON_BEFORE,
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
        inputs, made_of = entry.samples.inputs(), self._runner.made_of(entry)
        try:
            plan = None if inputs is None else self.remembered(entry.baseline.graph, entry.weights, inputs)
        except HotfuseError:  # compiling comes to the same code, and tells what is wrong
            self._log.count("not_recalled")
            return None
        return None if plan is None else known(entry, plan, made_of)

    def first_plan_awaited(self, entry: Entry) -> bool:
        """Whether a first plan of kernels is still to come, or was not asked for yet: everything else waits for it."""
        return entry.trying == TIER1 or (entry.plan is entry.baseline and TIER1 not in entry.refused)

    def calls_before_first_plans(self) -> int | None:
        """Calls so far of the graphs whose first plan of kernels is being made, or is about to be as they have shown that they are
        hot; None where there is no such graph."""
        hot_calls = self._plans.settings.hot_calls
        low = [
            e for site in list(self._plans.sites.values()) for e in site.entries
            if e.plan is e.baseline and not e.replaced and TIER1 not in e.refused
        ]  # fmt: skip
        low = [e for e in low if e.trying == TIER1 or is_hot(e.heat, e.seconds, hot_calls, len(e.baseline.graph.nodes))]
        return sum(e.calls for e in low) if low and not self._plans.closed else None

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
        begins = plan is entry.baseline and TIER1 not in entry.refused and not entry.improving
        if not begins and not weighs(entry.heat, entry.samples.taken):  # a first plan waits for no further look
            self._notice_sides(entry)
            return
        settings = self._plans.settings
        stamp = (self._plans.generation, threads or team_size.threads(), self._plans.call_sampler.drifts(entry.key),
                 self._plans.recorder.trained, usable_cores(), self._plans.recorder.speed_changes, entry.callers.changes,
                 entry.gaps.changes)
        if not entry.stamp:
            entry.stamp = stamp  # the plan of an earlier process may have lost already, under these
        elif entry.stamp != stamp:  # what lost under other circumstances may win now
            self._reopen(site, entry, stamp)
        if entry.retries:
            entry.retry(time.monotonic())
        if entry.improving or self._plans.closed:
            return
        if entry.balance is not None and any(g.pending for g in list(site.groups.values())):
            return  # a graph with further paths is about to take its place
        if plan is entry.baseline:
            nodes = len(plan.graph.nodes)
            if TIER1 not in entry.refused and is_hot(entry.heat, entry.seconds, settings.hot_calls, nodes):
                self._first_plan(site, entry)
                return
        elif plan.recipe is not None and plan.recipe.stale and TIER1 not in entry.refused and plan is entry.plan:
            self._attempt(entry, TIER1, partial(fused, self._context, entry, partial(self._part, entry)))
            return
        if settings.tiers < 2 or (entry.plan is entry.baseline and TIER1 not in entry.refused):
            return
        if on_device(entry):
            self._consider_device(site, entry)
            return
        if PLACED in entry.plan.layers:
            return  # what follows is for the host's cores
        if settings.devices == "auto" and PLACED not in entry.refused:
            from hotfuse.runtime.tierup.placement import placed_elsewhere

            self._attempt(entry, PLACED, partial(placed_elsewhere, self._context, entry))
            return
        self._notice_sides(entry)
        if self._consider_rows(site, entry, LAYERED) or self._consider_bottleneck(entry):
            return
        if not self._consider_rows(site, entry, (SIZES,)):
            self._consider_weights(entry)

    def _first_plan(self, site: Site, entry: Entry) -> None:
        """Begin what is to replace library kernels: tier 1, or live rows alone where most rows are padding. Whichever comes first,
        the other may follow: tier 1 where calls are seen that are not packed.
        """
        tier1 = partial(fused, self._context, entry, partial(self._part, entry))

        def propose() -> Attempt | None:
            graph = entry.baseline.graph
            if not attends(graph) and not pools(graph):  # what follows imports much, while nothing is compiled yet
                return tier1()
            from hotfuse.runtime.tierup.proposals import packs
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

        plain = self._plans.settings.tiers < 2 or on_device(entry)
        self._attempt(entry, TIER1, tier1 if plain else propose)

    def _consider_device(self, site: Site, entry: Entry) -> None:
        """On an accelerator library kernels serve as recordings; generated ones are for sizes that are numbers, or recur. Rows that
        padding fills are left out first, since kernels are then made for what is left."""
        if not self._specializes:
            return  # what asks for such rows is being imported, and kernels for all rows would take most of a minute
        if self._consider_rows(site, entry, (PADDING,)) or registry.device_kernels().unavailable():
            return
        static_caches = isinstance(entry.plan.run, StaticCacheRun)  # whose sizes are numbers
        if entry.symbols and not static_caches:
            self._consider_rows(site, entry, (SIZES,))
        elif (key := _device_kernels_due(entry)) is not None:
            from hotfuse.runtime.tierup.proposals import packs_later
            from hotfuse.runtime.tierup.tier2 import with_device_kernels

            if not static_caches and packs_later(self._context, entry):
                return  # kernels for all rows would take the time in which those for live rows are made
            self._attempt(entry, key, partial(with_device_kernels, self._context, entry, key))

    def _reopen(self, site: Site, entry: Entry, stamp: tuple[int, ...]) -> None:
        """What decisions rest on changed: the model, torch's threads, the traffic, the performance model, the process's cores,
        their speed, how many threads call, how far apart calls are. What was refused may be tried; what serves has to prove itself
        again.
        """
        before, entry.stamp = entry.stamp, stamp
        entry.refused.clear()
        entry.retries.clear()
        entry.replans = 0
        changed = [what for what, was, now in zip(STAMP, before, stamp, strict=False) if was != now]
        if "traffic" in changed:
            site.reopen()
        if changed and MACHINE.intersection(changed):
            entry.weighed, entry.planned_by = GraphWeights(), None  # measured as it was, and nothing of it holds
            entry.own_ratio = None if entry.plan is entry.baseline else entry.own_ratio
            entry.own_doubted = False
            for audit in list(entry.audits.values()):
                audit.reopen(entry.calls)
            self._context.decide(Action.NOTICE, Why.CIRCUMSTANCES, changed=", ".join(changed), threads=stamp[THREADS],
                                 cores=stamp[4])  # fmt: skip

    def _consider_rows(self, site: Site, entry: Entry, rows: Sequence[str]) -> bool:
        """Whether a specialization of these rows was begun: of those proposed, the one that is expected to save most."""
        if not self._specializes:
            return False
        from hotfuse.runtime.tierup.proposals import MIN_VALUE, proposals

        proposed = proposals(self._context, site, entry, self._history.outcomes, rows)
        if proposed and self._recalls_races():
            return True
        for found in proposed:
            if found.key.row == SIZES and not self._promising(entry, Strategy.SPECIALIZE, found.key):
                continue
            value = found.value(self._history.outcomes, entry)
            if value < MIN_VALUE:
                said = f"{value:.2%} of the calls' time may be saved"
                self._context.refuse(entry, found.key, Why.UNPROMISING, said, row=found.key.row,
                                     share=round(found.share, 3), value=round(value, 4))  # fmt: skip
                continue
            if found.evidence:
                self._context.decide(Action.SPECIALIZE, Why.RECURS, **found.evidence)
            self._attempt(entry, found.key, found.attempt)
            return True
        return False

    def _recalls_races(self) -> bool:
        """Whether what races of earlier processes taught is on its way: nothing is bet before it is there, or cannot come."""
        settings = self._plans.settings
        if self._history.begun or self._history.asked or not self._plans.recorder.on:
            return False
        return recall(sized(settings).pool.submit, settings_of(settings), context_of(settings), self._history)

    def _consider_bottleneck(self, entry: Entry) -> bool:
        """Whether a plan was begun that addresses what limits this one: kernels fused anew, by one strategy alone."""
        for finding, strategy, attempt in attempts(entry, self._history.ledger):
            if not self._promising(entry, strategy, attempt):
                continue
            self._context.decide(Action.SPECIALIZE, Why.BOTTLENECK, partition=finding.index, bottleneck=finding.bottleneck.value,
                         strategy=strategy.value, us=round(finding.us, 1), share=round(finding.share, 3), because=finding.because)
            self._attempt(entry, attempt, partial(against, self._context, entry, finding, strategy, attempt))
            return True
        return False

    def _consider_weights(self, entry: Entry) -> None:
        """Where partitions take other parts of the time than their plan was made by, its graph is planned again."""
        if (moved := weights_moved(entry)) > 0:
            us = sum(p.us for p in entry.weighed.serving)
            self._context.decide(Action.SPECIALIZE, Why.WEIGHTS_MOVED, moved=round(moved, 3), us=round(us, 1),
                                 partitions=len(entry.weighed.serving))  # fmt: skip
            self._attempt(entry, REPLANNED, partial(replanned, self._context, entry))

    def _promising(self, entry: Entry, strategy: Strategy, attempt: AttemptKey) -> bool:
        """Whether a strategy is worth a try against what limits the plan now: not where it has failed again and again."""
        past = failed_before(entry, strategy, self._history.ledger)
        if past is not None:
            bound, said = entry.findings[0].bottleneck.value, f"{strategy.value} helped {past.helped} of {past.count} times"
            self._context.refuse(entry, attempt, Why.UNPROMISING, said, bottleneck=bound, strategy=strategy.value,
                                 helped=past.helped, tried=past.count)  # fmt: skip
        return past is None

    def _notice_sides(self, entry: Entry) -> None:
        """Products that found no rows of zeros for long stop looking; they look again when sampled calls show such rows."""
        for plan in (entry.plan, *entry.versions.values()):
            if (sides := plan.sides) is None:
                continue
            if (gone := sides.one_sided()) > 0:
                self._context.decide(Action.DROP, Why.NO_ZERO_ROWS, tier=2, what=ZERO_ROWS, products=gone, calls=MAX_DENSE_CALLS)
            elif sides.may_look_again() and suspected(self._plans.call_sampler.seen(entry.key)):
                self._context.decide(Action.SPECIALIZE, Why.RECURS, what=ZERO_ROWS, products=sides.look_again())

    def _attempt(self, entry: Entry, key: AttemptKey, propose: Callable[[], Attempt | None]) -> None:
        self._start(entry, key, lambda: self._runner.attempt(entry, propose()))

    def _start(self, entry: Entry, key: AttemptKey, work: Callable[[], None]) -> None:
        entry.improving, entry.trying, what = True, key, str(key)

        def job() -> None:
            begin = self._log.now()
            try:
                if not self._plans.closed and not entry.replaced and self._vetted(entry, key):
                    work()
            except Exception as e:  # what raised once would do so at every look: it is refused like what lost
                refuse = self._context.postpone if is_passing(e) else self._context.refuse
                refuse(entry, key, Why.BACKGROUND_FAILED, error_text(e), what=what, error=error_text(e))
            finally:
                entry.improving, entry.trying = False, None
                self._log.span("in_background", what, begin)

        self._plans.in_background(job)

    def _vetted(self, entry: Entry, key: AttemptKey) -> bool:
        """Whether there are calls to prove plans on."""
        self._context.vet(entry)
        if entry.balance is not None and entry.samples.inputs() is None:
            self._context.postpone(entry, key, Why.OTHER_PATH, "no kept call takes a path that its graph has", what=str(key))
            return False
        return True

    def _part(self, entry: Entry, attempt: Attempt) -> Callable[[], None]:
        """Try an unfinished plan while workers go on with the rest; returns what waits for its end."""
        if self._inline:
            self._runner.attempt(entry, attempt, meanwhile=True)
            entry.meanwhile = None
        return self._alongside(entry, lambda: attempt)

    def _alongside(self, entry: Entry, propose: Callable[[], Attempt | None]) -> Callable[[], None]:
        """Try something while the job that calls this goes on; returns what waits for its end. Inline there is no other thread."""
        if self._inline:
            return lambda: None
        submit = sized(self._plans.settings).submit

        def job() -> None:
            try:
                self._runner.attempt(entry, propose(), meanwhile=True)
            finally:
                entry.meanwhile = None

        return JobAlongside(partial(submit, owner=(self, "alongside")), job).finish

    def after_fork(self) -> None:
        """In a forked child: the thread that considered is in the parent."""
        self._considering = threading.Lock()

    def close(self) -> None:
        """Call off what is being made for the plans that there were."""
        if isinstance(self._context.improve, CalledOff):
            self._context.improve.call_off()


def _device_kernels_due(entry: Entry) -> AttemptKey | None:
    """A first plan of generated kernels is there soon; one of all that are worth a trial takes its place. Where the first lost, or
    none of its kernels was faster than the library's, others may be."""
    generated = DEVICE_KERNELS in entry.plan.layers
    if not generated and DEVICE_KERNELS not in entry.refused:
        return DEVICE_KERNELS
    left = not generated or entry.plan.counters().get(UNTRIED, 0)
    return TUNED_KERNELS if left and TUNED_KERNELS not in entry.refused else None
