"""Calls that are looked at: timed, answered by either of two plans that are compared, and learned from.

The engine's call path counts calls and sends one in so many here. Blocks of whole calls (`whole_calls`) lie between two looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hotfuse.base.events import Action, Why
from hotfuse.base.faults import error_text
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.machine.device_clock import being_recorded, clock_of
from hotfuse.runtime.call_learner import CallLearner
from hotfuse.runtime.capturing import Capturer
from hotfuse.runtime.crowded_teams import CrowdedTeams
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import Plans
from hotfuse.runtime.serve.answering import turn_of
from hotfuse.runtime.serve.gradients import PLAIN, GradientLink, joined
from hotfuse.runtime.site import Entry, Site
from hotfuse.runtime.tally import Everyone, ThreadCounts
from hotfuse.runtime.tierup.improve import Improver
from hotfuse.runtime.tierup.own_code import later_than_own
from hotfuse.runtime.whole_calls import BLOCK, WHOLE_BELOW_S

SHORT_S, LEARNED_ONCE_IN = 2e-4, 8
"""Of short calls that are compared, and of those of which learning takes more than such a part, one in so many is learned from:
that takes several times as long as a short call, and finds its way out of every cache. Python code suffers more from that than a
native plan, so a plan would win that is slower in use."""
MAX_LOOK_S = 1e-3
"""What a look counts for at most: what takes longer was interrupted, or did something that is not done again."""


class AnsweredInstead(Protocol):
    """Answers a call whose plan raised."""

    def __call__(
        self, failed: tuple[Site, Entry, Plan, Exception], leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        counts: ThreadCounts, /,
    ) -> Any:
        """The model's own code's result, or what it raises."""
        ...  # fmt: skip


class CallLooks:
    """Answers those calls of one engine that are looked at."""

    def __init__(
        self, plans: Plans, own_code: Callable[..., Any], teams: CrowdedTeams, capturer: Capturer, improver: Improver | None,
        learner: CallLearner, everyone: Everyone, answered_instead: AnsweredInstead, context_decided: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._plans, self._log, self._own_code = plans, plans.log, own_code
        self._teams, self._capturer, self._improver, self._learner = teams, capturer, improver, learner
        self._everyone, self._answered_instead = everyone, answered_instead
        self.rare = False
        """Whether calls are far apart: then it is timed from when they come."""
        self._context_decided = context_decided
        """Whether it is decided if native code or Python asks what is around a call."""

    def answer(
        self, found: tuple[Site, Entry, Plan, GradientLink], leaves: Sequence[torch.Tensor], holders: Sequence[Any],
        args: tuple[Any, ...], kwargs: dict[str, Any], counts: ThreadCounts, came: float,
    ) -> Any:
        """Serve a call and learn from it: its time, its sizes, which of two plans is faster, and whether anything should change."""
        site, entry, plan, link = found
        number, entered, began = entry.calls, time.perf_counter(), self._log.now()
        since, entry.looked = max(1, number - entry.looked), number
        found_s = entered - came if came else 0.0
        since_s = entered - entry.left if entry.left else None
        own = entry.own and plan is entry.baseline
        answer, turn, result, computed = None if own else plan, None, None, None
        in_whole_calls = (whole := entry.whole) is not None and whole.under_way
        if whole is not None:
            slower = whole.arrived(number, threading.get_ident(), counts.module_calls + self._everyone.rest.passed, entered)
            if slower is not None:
                self._plans.withdraw_slower_in_use(site, entry, plan, slower)
        if being_recorded(leaves):  # by the caller: nothing is timed, kept or compared
            entry.next_look = number + 1
            counts.answered(-1)
            return self._own_code(*args, **kwargs)
        signature = entry.signature(*leaves)
        effects = entry.effects
        seen = leaves if effects is None else effects.unwritten(leaves)
        try:
            awaited = self._improver is not None and self._improver.first_plan_awaited(entry)
            replayed = own and any(t.is_cuda for t in leaves)  # the baseline's kernels, one by one, take ten times as long
            if number >= entry.sampler.at and (awaited or replayed):
                entry.sampler.later(number)  # what samples are for comes behind it, and looking takes a worker's time
            if number >= entry.sampler.at:
                answer, seconds = plan, list[float]()

                def sampled(*leaves: torch.Tensor) -> tuple[Any, ...]:
                    outs, spent = self._plans.call_sampler.run(entry.key, number, plan, entry.baseline, entry.weights, leaves)
                    seconds.append(spent)
                    return outs

                outs = sampled(*leaves) if link is PLAIN else joined(link, sampled, leaves)
                spent = seconds[0]
                if own and not entry.sampler.sampled_ns:
                    later_than_own(entry, number)
            else:
                if (turn := turn_of(entry, plan, signature, leaves, grad=bool(link.places))) is not None:
                    answer = turn.answers
                clock = clock_of(leaves)
                cpu = time.thread_time() if turn is not None else 0.0
                begin = clock()
                if answer is None and turn is None and (balance := entry.balance) is not None and balance.unmet > 0:
                    return self._capturer.look_for_path(site, entry, balance, leaves, args, kwargs, counts)
                if answer is None:
                    outs = (self._teams.own_code if self._teams.concerned else self._own_code)(*args, **kwargs)
                elif not answer.tier and link is PLAIN and self._teams.concerned:
                    outs = self._teams.library_plan(entry.key, answer.run, leaves)
                else:
                    outs = answer.run(*leaves) if link is PLAIN else joined(link, answer.run, leaves)
                spent = clock() - begin
                if turn is not None and clock is time.perf_counter:
                    computed = time.thread_time() - cpu
                self._teams.seen(spent)
        except Exception as e:
            if answer is None:
                counts.module_calls += 1
                raise
            return self._answered_instead((site, entry, answer, e), leaves, args, kwargs, counts)
        counts.answered(-1 if answer is None else answer.tier)
        finishing = time.perf_counter()
        if effects is not None and answer is not None:
            result = effects.finish(outs, leaves, holders)
        else:
            result = outs if answer is None else outs[0] if entry.bare else entry.rebuild(outs)
        finish_s = time.perf_counter() - finishing
        self._log.span("calls", "own code" if answer is None else f"tier {answer.tier}", began, call=number)
        counts.looked_at += 1
        try:
            short = spent < max(SHORT_S, entry.look_s * LEARNED_ONCE_IN)
            if (turn is not None or in_whole_calls) and short and number % LEARNED_ONCE_IN:
                self._learner.pass_by(entry, spent, since)
            else:
                self._learner.learn(site, entry, plan, seen, signature, spent, since, answered=answer is not None)
            if turn is not None:
                look_s = time.perf_counter() - entered - spent - finish_s
                self._learner.compared(site, entry, turn, leaves, spent, computed, finish_s, look_s, found_s)
            elif answer is plan and (audit := entry.audit_of(plan, signature)) is not None:
                audit.note(number, signature, spent, since)
            if since_s is not None:
                entry.gaps.note(since_s, since, spent)
                self.rare = bool(entry.gaps.rare)
            entry.left = time.perf_counter()
            entry.look_s += (min(entry.left - entered - spent - finish_s, MAX_LOOK_S) - entry.look_s) / 8
            if entry.key in self._teams.crowded and not (plan.tier or own):  # who looks decides on how many threads
                entry.next_look = min(entry.next_look, number + 1)
            elif turn is None and spent < WHOLE_BELOW_S and answer is plan:
                self._begin_whole_calls(site, entry, plan, counts)
        except Exception as e:  # what is learned from a call is no part of its answer, nor of its plan
            self._log.count("learning_faults")
            self._log.decide(Action.KEEP, Why.LEARNING_FAILED, self._plans.model.name, because=error_text(e))
        return result

    def _begin_whole_calls(self, site: Site, entry: Entry, plan: Plan, counts: ThreadCounts) -> None:
        """Behind a look: the next calls are compared as a whole with those in the model's own code, or are those."""
        if background_priority.jobs or (whole := entry.in_whole_calls(plan)) is None or whole.ended:
            return
        if not self._path_is_native(site, entry):
            return
        if whole.by_own_code:
            site.resting, entry.next_look = BLOCK, entry.calls + 1
        else:
            entry.next_look = entry.calls + BLOCK + 1
        answered = counts.module_calls + self._everyone.rest.passed
        whole.begins(entry.calls, threading.get_ident(), answered, time.perf_counter())

    def _path_is_native(self, site: Site, entry: Entry) -> bool:
        """Whether native code finds plans, checks the model and asks for the context of calls, or is known not to.

        Python takes three times as long for that as a small plan takes, but only until native code is compiled.
        """
        cache, watch = site.cache(grad_mode=entry.grad_mode), self._plans.watch
        found = cache is not None and (cache.table.native or cache.fallbacks > 0)
        return found and (watch is None or watch.native is not False) and self._context_decided()
