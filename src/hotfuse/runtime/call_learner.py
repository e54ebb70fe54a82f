"""What sampled calls teach: their times and sizes, which of two plans is faster, and what is due in the background.

The engine answers such a call (`call_looks`); nothing here is part of the answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from hotfuse.base.debug import CALLS, say
from hotfuse.native.call_context import ContextReader
from hotfuse.runtime.background import Job
from hotfuse.runtime.concurrency import Concurrency, calls_in_flight
from hotfuse.runtime.observe.obstacle_log import ObstacleLog
from hotfuse.runtime.path_cost import Serve, path_seconds
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.samples import Signature
from hotfuse.runtime.serve.answering import Turn
from hotfuse.runtime.serve.dispatch import DispatchTable
from hotfuse.runtime.serve.gradients import Gradients
from hotfuse.runtime.site import Entry, Route, Site
from hotfuse.runtime.tally import Tally
from hotfuse.runtime.tierup.audit import Audit
from hotfuse.runtime.tierup.improve import Improver
from hotfuse.runtime.tierup.own_code import compare, decided, rest
from hotfuse.runtime.tierup.tiers import interval

MAX_RARE_ROUNDS = 48
"""Of calls that are far apart, between tier 0 and the own code: a look takes longer than most of them, and little is to be had."""
DISPATCHES = 9
"""Times that finding a plan is measured."""


class CallLearner:
    """Learns from the calls of one engine."""

    def __init__(
        self, plans: Plans, gradients: Gradients, improver: Improver | None, obstacles: ObstacleLog,
        context: Callable[[], ContextReader],
        harden: Callable[[Sequence[Job]], None], serve: Serve, tally: Tally,
    ) -> None:  # fmt: skip
        self._plans, self._gradients, self._improver, self._obstacles = plans, gradients, improver, obstacles
        self._settings, self._log = plans.settings, plans.log
        self._context = context
        """Gives the function that reads the context of a call, which changes once native code is there."""
        self._harden = harden
        """Has that compiled, and what else every call asks, beside other jobs; the first hot call asks for it."""
        self._serve, self._tally = serve, tally
        self.outside_s: Callable[[], float] = lambda: 0.0
        """Seconds that a caller of the engine adds to calls in plans, and not to calls that go straight to the own code."""
        self.concurrency = Concurrency()

    def _dispatch_s(self, site: Site, entry: Entry, leaves: Sequence[torch.Tensor]) -> float:
        """What a call in a plan takes besides the plan: measured on a real call, once, and again when it is asked natively.

        Finding the plan is all that counts before it is known whether native code looks through the model: Python takes as long
        for that as many models take. With gradients results hang on a node of autograd, which is part of what a plan takes; on a
        device the look is beside a replay that was launched before it.
        """
        seconds, native, whole = entry.dispatch_s
        cache, watch = site.cache(grad_mode=entry.grad_mode), self._plans.watch
        if cache is None:
            return seconds
        natively_checked = (watch is None or watch.native is not False) and all(t.is_cpu for t in leaves)
        if not seconds or (native, whole) != (cache.table.native, natively_checked):
            if natively_checked and not torch.is_grad_enabled():
                around = self._context()()
                seconds = path_seconds(self._serve, self._tally.mine, site, entry, leaves, around) or 0.0
            else:
                seconds = self._looked_up_s(cache.table, entry, leaves)
            seconds += self.outside_s()
            entry.dispatch_s = (seconds, cache.table.native, natively_checked)
        return seconds

    def _looked_up_s(self, table: DispatchTable[Route], entry: Entry, leaves: Sequence[torch.Tensor]) -> float:
        """What finding the plan of a call takes."""
        watch, around, gradients = self._plans.watch, self._context(), torch.is_grad_enabled()
        times: list[float] = []
        for _ in range(DISPATCHES):
            begin = time.perf_counter()
            around()
            table.select(*leaves)
            if watch is not None:
                watch.unchanged()
            if gradients:
                self._gradients.link(entry.links, watch, leaves)
            times.append(time.perf_counter() - begin)
        return median(times)

    def compared(
        self, site: Site, entry: Entry, turn: Turn, leaves: Sequence[torch.Tensor], spent: float, computed: float | None,
        finish_s: float, look_s: float, found_s: float = 0.0,
    ) -> None:  # fmt: skip
        """A call was half of a round and took so long, of which the calling thread computed so long, where that is known. Making
        its result took `finish_s`, looking at it `look_s` besides, and finding its plan `found_s`, where calls are far apart: what
        was measured in a loop is too little then.
        """
        judge = turn.of
        if turn.answers is not None and (entry.reference(judge.version) is None if isinstance(judge, Audit) else judge.own):
            spent += max(self._dispatch_s(site, entry, leaves), found_s) + finish_s  # the own code's results are made
        if isinstance(judge, Audit):
            if judge.took(entry.calls, turn.key, turn.side, spent, look_s):
                self._plans.withdraw_slower(site, entry, judge)
            entry.next_look = min(entry.next_look, max(judge.at, entry.calls + 1))
            return
        judge.took(turn.key, turn.side, spent, computed)
        if found_s and judge.own and judge.new is entry.baseline and judge.rounds >= MAX_RARE_ROUNDS:
            judge.give_up()
        if judge.trial is not None and judge is entry.contest and judge.new is entry.baseline:
            decided(entry, judge, judge.trial, self._log, self._plans.model.name)

    def pass_by(self, entry: Entry, spent: float, since: int) -> None:
        """A short call that is half of a round: it counts, and nothing that takes longer than itself is done behind it."""
        entry.heat += since
        entry.seconds += spent * since
        entry.next_look = 0 if entry.contest is not None else entry.calls + 1

    def learn(
        self, site: Site, entry: Entry, plan: Plan, leaves: Sequence[torch.Tensor], signature: Signature, spent: float, since: int,
        *, answered: bool,
    ) -> None:  # fmt: skip
        """From a call that took so long, the first to be looked at of so many; `answered` by a plan."""
        number = entry.calls
        self.concurrency.note(calls_in_flight())
        if not plan.tier:
            self._obstacles.below()
        entry.heat += since
        entry.seconds += spent * since
        after = interval(entry.heat, self._settings.watch_rate, spent, entry.look_s)
        entry.next_look = min(number + after, max(number + 1, entry.sampler.at))
        if self._settings.debug >= CALLS:
            entry.next_look = number + 1
            say(CALLS, CALLS, lambda: f"call {number} of {self._plans.model.name}: tier {plan.tier}, {spent * 1e6:.1f} us")
        if entry.repeats.note(number, leaves):
            entry.next_look = number + 1
        entry.samples.note(signature, leaves, fits=entry.balance is None or (answered and entry.samples.real))
        entry.callers.note(threading.get_ident())
        if self._improver is not None:
            self._improver.consider(site, entry, plan)
        compare(site, entry, self._settings)
        if entry.heat >= self._settings.hot_calls:
            watch = self._plans.watch
            watching = watch.hardening_jobs(lambda job: self._harden((job,))) if watch is not None else ()
            self._harden((*site.hardening_jobs(), *watching, *self._gradients.hardening_jobs()))
        if self._plans.examiner.due(entry):
            entry.examining = True
            self._plans.in_background(lambda: self._plans.examiner.look(entry))
        if (audit := entry.audit_of(plan, signature)) is not None:
            entry.next_look = min(entry.next_look, max(audit.at, number + 1))
        if entry.contest is not None:  # behind all that set it: every call is looked at
            entry.next_look = 0
        elif entry.own and plan is entry.baseline:
            rest(site, entry, spent)
