"""Capturing: the model's own code answers a call that no plan takes, and what it did becomes a plan (`runtime.admission`).

Which calls are captured is decided here, on the threads that call: new structures and sizes, other paths through code that reads
its data, another grad mode.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hotfuse.base.errors import CallFault, HotfuseError, InputError
from hotfuse.base.events import Action, Why
from hotfuse.base.faults import error_text, is_passing
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import Spec
from hotfuse.compile.workers.service import service
from hotfuse.frontends.paths.reads import RecordedReads, TooManyReads
from hotfuse.frontends.questions.as_traced import same_objects
from hotfuse.machine import team_size
from hotfuse.machine.device_stream import in_own_stream
from hotfuse.ops.own.assume import OtherPath
from hotfuse.runtime.admission import MAX_FOLLOWED, MAX_IDLE_GRAPHS, CallSample, GraphAdmission
from hotfuse.runtime.background import Background
from hotfuse.runtime.call_group import CallGroup
from hotfuse.runtime.capture_turn import CaptureTurn
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import HasState, Plans
from hotfuse.runtime.returning_values import SAID, ReturningValues
from hotfuse.runtime.samples import snapshot
from hotfuse.runtime.serve.effects import Before, shares_memory
from hotfuse.runtime.serve.gradients import Gradients, opens_graph, requires
from hotfuse.runtime.serve.other_paths import PathBalance, fits
from hotfuse.runtime.serve.own_effects import transformed
from hotfuse.runtime.site import Entry, Site
from hotfuse.runtime.tally import ThreadCounts
from hotfuse.runtime.tierup.agreement import disagreement
from hotfuse.runtime.tierup.attempt import Compile
from hotfuse.runtime.tierup.lull import Lull
from hotfuse.runtime.tierup.own_code import LONG_S
from hotfuse.runtime.warm_start import RecalledStart, Recalls
from hotfuse.runtime.weights.model_guard import WeightChange
from hotfuse.simplify.result_order import in_rows

MAX_SITES = 64
MAX_RAISED = 16
"""Calls of one kind that raised when they were to be captured, after which sizes that did so are not looked at again."""
MAX_REST_S = 0.02
"""Time in which calls of a site where nothing can be captured are not looked at, at most."""
RESTING_CALLS = 15
"""Calls between two looks at a site of which nothing can be captured, or nothing new is seen while that is done: a look costs some
15 us, a call without one less than 2."""
SHORT_LOOK_S, LOOKS_SHARE = 1e-4, 1 / 200
"""Looks at whether a model has changed that take longer have this part of the time at most, where no plan rests on them."""
OPENS_GRAPH = "it enables gradients by itself where they are not"


@dataclass(frozen=True, slots=True, eq=False)
class QueuedCapture:
    """A call that is to be captured."""

    group: CallGroup
    sample: CallSample
    recalled: Sequence[RecalledStart]
    """What an earlier process knew of it, once that is made ready."""
    capture: Callable[[], None]


class Capturer:
    """Captures the calls of one engine."""

    def __init__(
        self, plans: Plans, compile: Compile, background: Background, gradients: Gradients, own_code: Callable[..., Any]
    ) -> None:
        self._plans = plans
        self._own_code = own_code
        self._gradients = gradients
        self._model = plans.model
        self._settings = plans.settings
        self._log = plans.log
        self._background = background
        self._under_way = 0
        """Captures that are pending."""
        self._queued: list[QueuedCapture] = []
        """Those that have not begun."""
        self._exhausted = 0
        """Captures that had been made when a call had to go without one."""
        self._look_again_at = 0.0
        """When it is asked next whether the model has changed."""
        self._told = 0
        """How many those were when it was last told."""
        self._values = ReturningValues()
        self._beyond: dict[str, str] = {}
        """Why calls are never captured whatever the model is, by what counts them."""
        self.own_answers: Callable[[], None] = lambda: None
        """Told of every call that the model's own code answers."""
        self.turn: CaptureTurn | None = None
        """Has captures wait for the first plan of a graph that is there, where they have a queue of their own."""
        self.graphs = GraphAdmission(plans, compile)

    def after_fork(self) -> None:
        """In a forked child: what was pending belongs to the parent."""
        self._under_way = 0
        self._queued.clear()

    def limits(self) -> list[str]:
        """The limits that keep kinds of calls in the model's own code: none of them is told by a site."""
        counts = self._log.counts
        found = [f"{Why.TOO_MANY.value}, and calls in their plans pay for no more yet"] * self._spent()
        for name, most, what in (("structures_over_limit", MAX_SITES, "kinds of arguments"),
                                 ("groups_over_limit", self._settings.max_entries, "ranks, dtypes or orders in memory")):
            found += [f"there are more than {most} {what}, and only so many are captured"] * (name in counts)
        return found + [SAID] * bool(self._values.passed) + list(self._beyond.values())

    def _spent(self) -> bool:
        """Whether a call had to go without a capture, and none is paid for since."""
        return self._exhausted > 0 and not self._plans.may_capture()

    def own_code(
        self, spec: Spec, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], counts: ThreadCounts,
        strays_from: Plan | None = None,
    ) -> Any:  # fmt: skip
        """Answer a call with the model's own code; what it did is captured beside where that is wanted, and where it takes a path
        that a graph does not have."""
        counts.module_calls += 1
        self.own_answers()
        wanted = self._wanted(spec, leaves)
        if wanted is None:
            begin = time.perf_counter()
            try:
                return self._own_code(*args, **kwargs)
            finally:  # calls that raise, too: some programs try what a model takes
                if (seconds := time.perf_counter() - begin) < LONG_S:
                    self._rest(spec, leaves, seconds)
        site, group, why = wanted
        site.in_vain = 0
        grad_mode = torch.is_grad_enabled()
        inputs, number = [snapshot(t) for t in leaves], group.noted
        recalled: list[RecalledStart] = []
        if self._settings.capture == "background" and isinstance(self._model, Recalls):
            self._background.begin()
            ready = partial(self.graphs.recalled, site, group, inputs, grad_mode=grad_mode)
            self._background.go_on(lambda: recalled.extend(ready()), capture=True)
        watched = Before(args, kwargs, leaves)
        reads = RecordedReads() if group.follows else None
        begin = time.perf_counter()
        try:
            if reads is None:
                result = self._own_code(*args, **kwargs)
            else:
                with reads:
                    result = self._model.call(*args, **kwargs)
        except BaseException:
            with self._plans.lock:  # that call was not one to capture; the next of its sizes may be
                group.raised += 1
                group.captures -= 1
                self._plans.captures -= 1
                if group.raised < MAX_RAISED:
                    group.tried.discard(tuple(tuple(t.shape) for t in leaves))
            self._given_up(group)
            raise
        seconds = time.perf_counter() - begin
        try:
            after = watched.after(result)
            hash(after.spec)
        except (InputError, TypeError) as e:
            return self._left_alone(group, Why.NOT_CAPTURABLE, str(e), result)
        if not grad_mode and opens_graph(after.leaves, leaves):
            return self._left_alone(group, Why.GRAD_MODE, OPENS_GRAPH, result)
        state = self._model.state_count if isinstance(self._model, HasState) else 0
        if shares_memory(after.leaves, leaves[:state]):
            return self._left_alone(group, Why.STATEFUL, "a result shares memory with a buffer that later calls write", result)
        written = watched.written(inputs)
        if shares_memory(after.leaves, [leaves[i] for i in written]):
            return self._left_alone(group, Why.STATEFUL, "a result is a view of an argument that the call writes", result)
        copies = [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in after.leaves]
        try:
            read = reads.taken() if reads is not None else None
        except TooManyReads as e:
            return self._left_alone(group, Why.READS_DATA, str(e), result)
        rows, same = in_rows(after.leaves), same_objects(leaves)
        sample = CallSample(inputs, copies, after.spec, written, seconds, number, team_size.threads(), read, rows, same)

        def capture() -> None:
            try:
                if strays_from is not None and fits(strays_from.run, inputs, self.graphs.computing(Lull())):
                    self._nothing_new(group)
                else:
                    self.graphs.learn(site, group, why, sample, next(iter(recalled), None), grad_mode=grad_mode)
            finally:
                self._ended(group)
                with self._plans.lock:
                    site.resting = 0

        with self._plans.lock:
            self._queued.append(QueuedCapture(group, sample, recalled, capture))
        self._background.go_on(self._next_capture, capture=True)
        return result

    def _not_begun(self, queued: QueuedCapture, error: Exception) -> None:
        """What comes before a capture raised: its calls stay with the model's own code, for a while where the error may pass."""
        self._log.decide(Action.REFUSE, Why.NOT_CAPTURABLE, self._model.name, what=error_text(error))
        queued.group.refuse(error_text(error), passing=is_passing(error))
        self._ended(queued.group)

    def _next_capture(self) -> None:
        """Begin the waiting capture whose calls took the most time since they were met: a worker that is to be started
        takes seconds, and by then the steps of a text have been called a hundred times, its prompt once. One that an earlier
        process made asks no worker, and so waits for nothing."""
        waited = 0.0
        try:
            if self.turn is not None and not any(q.recalled for q in list(self._queued)):
                waited = self.turn.wait(lambda: sum(q.group.noted for q in list(self._queued)))
            if len(self._queued) > 1 or not all(q.recalled for q in list(self._queued)):
                with contextlib.suppress(HotfuseError):  # which the capture tells of
                    self._model.prepare()
        except Exception as e:  # one job, one capture: without it that one would wait for ever
            with self._plans.lock:
                last = self._queued.pop()
            self._not_begun(last, e)
            return
        with self._plans.lock:
            kept = [q for q in self._queued if q.recalled] if self.turn is not None else []
            hottest = max(kept or self._queued, key=lambda q: (q.group.noted - q.sample.number) * q.sample.seconds)
            self._queued.remove(hottest)
            hottest.sample.waited_s = waited
        hottest.capture()

    def other_path(
        self, failed: tuple[Site, Entry, Plan, Exception], balance: PathBalance, leaves: Sequence[Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], counts: ThreadCounts,
    ) -> tuple[Any, bool]:  # fmt: skip
        """Answer a call that a plan with some paths raised for; whether the call takes another one, and not the plan is to blame.

        Sizes that data decide may be other ones as well, on which operators raise what they will. So anything but the check's own
        fault is the plan's where tier 0 has an answer, or where the call read just what one of its paths was traced with. Where
        such calls are many, the path is followed, too; where they cost more than the others save, the graph rests.
        """
        site, entry, plan, error = failed
        failed_at = error.at if isinstance(error, OtherPath) else time.perf_counter()
        checked = isinstance(error, CallFault)
        if not checked and plan is not entry.baseline and fits(entry.baseline.run, leaves):
            return self.own_code(site.spec, leaves, args, kwargs, counts), False
        further = balance.wants_another(entry.calls)
        if further:
            self._weigh_graph(site, balance, entry.calls - 1, leaves)  # this one is not counted as missed so far
            further = self._follow_further(site, balance, leaves)
            if further or not any(g.pending for g in list(site.groups.values())):  # otherwise there is soon another graph to ask of
                balance.asked()
        begin, lost_s = time.perf_counter(), 0.0
        if further or not checked:
            with nullcontext() if checked else RecordedReads() as reads:
                result = self.own_code(site.spec, leaves, args, kwargs, counts)
            own_s = time.perf_counter() - begin
            if reads is not None and balance.has(tuple(reads.reads)):
                return result, False
        else:  # its sizes have a plan: there is nothing to be learned of them, and to find that out takes as long as small models
            counts.module_calls += 1
            self.own_answers()
            result = self._own_code(*args, **kwargs)
            own_s = time.perf_counter() - begin
            lost_s = begin - failed_at
        self._log.count("other_paths")
        rest = balance.miss(entry.calls, own_s, entry.seconds / entry.heat if entry.heat else own_s / 2, lost_s)
        if rest:
            if balance.rested == rest:
                self._log.decide(Action.KEEP, Why.OTHER_PATH, self._model.name, missed=balance.missed, calls=entry.calls)
            site.resting = rest
        return result, True

    def look_for_path(
        self, site: Site, entry: Entry, balance: PathBalance, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        counts: ThreadCounts,
    ) -> Any:  # fmt: skip
        """Answer a call with the model's own code, as others are, and follow its path if the graph does not have it."""
        balance.unmet -= 1
        strays_from = entry.baseline if self._follow_further(site, balance, leaves) else None
        return self.own_code(site.spec, leaves, args, kwargs, counts, strays_from)

    def _follow_further(self, site: Site, balance: PathBalance, leaves: Sequence[Any]) -> bool:
        """Have the next call of these sizes captured with the paths that its graph has; whether there may be more of them."""
        group = site.group(leaves, self._settings.max_entries)
        if group is None or group.pending or group.followed >= MAX_FOLLOWED or group.idle_graphs >= MAX_IDLE_GRAPHS:
            return False
        with self._plans.lock:
            group.followed += 1
            group.follows, group.paths = True, balance.paths
            group.tried.discard(tuple(tuple(t.shape) for t in leaves))
        return True

    def _weigh_graph(self, site: Site, balance: PathBalance, calls: int, leaves: Sequence[Any]) -> None:
        """A graph has missed its first calls. Where several in a row answered hardly any, there are too many paths to follow: each
        further capture takes processor time from the calls for nothing."""
        group = site.group(leaves, self._settings.max_entries)
        if group is None or balance.weighed:
            return
        balance.weighed = True
        group.idle_graphs = group.idle_graphs + 1 if balance.answered_hardly_any(calls) else 0
        if group.idle_graphs == MAX_IDLE_GRAPHS:
            self._log.decide(Action.REFUSE, Why.OTHER_PATH, self._model.name, graphs=group.idle_graphs,
                             because="nearly every call takes a path of its own")  # fmt: skip

    def _nothing_new(self, group: CallGroup) -> None:
        """A call that was recorded takes a path that its graph has: nothing is captured."""
        with self._plans.lock:
            group.followed, group.captures, self._plans.captures = group.followed - 1, group.captures - 1, self._plans.captures - 1
            group.paths = ()

    def _rest(self, spec: Spec, leaves: Sequence[Any], seconds: float) -> None:
        """Where nothing of a site can be captured, its next calls go straight to the model's own code: to find that out again takes
        longer than a small model. What made it so, and kinds of calls that are new, are looked at a few calls later, and the
        longer it has been so, the more calls, up to `MAX_REST_S`. So do calls of a model that changes all the time, calls
        whose capture is under way, once their sizes have shown for a while what they will be, and calls that the plans of their
        site do not take, one after the other; they are counted all the same.
        """
        site = self._plans.sites.get(spec)
        if site is None:
            return
        groups = list(site.groups.values())
        if pending := any(g.pending for g in groups):
            service().look_again()
        site.looked_in_vain(pending=pending)
        if site.entries:
            if site.missed_again():
                with self._plans.lock:
                    group = site.group(leaves, self._settings.max_entries) if _beyond_capture(leaves) is None else None
                    if group is not None:
                        group.noted += RESTING_CALLS
                    site.resting = RESTING_CALLS
            return
        if self._plans.awaits_change():
            site.resting = 4 * RESTING_CALLS
        elif all((g.refused or g.raised >= MAX_RAISED) and not g.pending for g in groups):
            longest = int(MAX_REST_S / max(seconds, 1e-7))
            site.resting = max(RESTING_CALLS, min(groups[0].noted // 8, longest)) if groups else RESTING_CALLS
        elif self._spent():
            site.resting = RESTING_CALLS
        elif len(groups) == 1 and groups[0].pending and groups[0].nothing_new > RESTING_CALLS:
            with self._plans.lock:
                if groups[0].pending and not site.entries:  # what has just been captured would be passed by
                    groups[0].noted += RESTING_CALLS
                    site.resting = RESTING_CALLS

    def _left_alone(self, group: CallGroup, why: Why, because: str, result: Any) -> Any:
        """Calls of a group stay with the model's own code; the result of this one."""
        group.refused = because
        self._log.decide(Action.REFUSE, why, self._model.name, because=because.splitlines()[0])
        self._given_up(group)
        return result

    def meet(
        self, met: tuple[Site, Entry, int], leaves: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any],
        counts: ThreadCounts,
    ) -> Any:
        """Answer a call with the model's own code that a plan would take, but that it was not compared with in this grad mode.

        It is compared beside, at the first such call and then ever more rarely, as long as the model changes meanwhile.
        """
        site, entry, around = met
        counts.module_calls += 1
        entry.met += 1
        if (
            entry.meeting or entry.met & (entry.met - 1) or self._plans.closed or self._settings.capture == "off"
            or (around | 1) != (entry.around[0] | 1)
        ):  # fmt: skip
            return self._own_code(*args, **kwargs)
        entry.meeting = True
        self._background.begin()
        watch, pattern = self._plans.watch, tuple(map(requires, leaves))
        now, before = self._gradients.wanted(watch), watch.accepted if watch is not None else 0
        inputs = [snapshot(t) for t in leaves]
        watched, effects = Before(args, kwargs, leaves), entry.effects
        try:
            result = self._own_code(*args, **kwargs)
            outputs = watched.after(result).leaves
            link, opens = self._gradients.seen(site.spec, outputs, leaves, now), not around & 1 and opens_graph(outputs, leaves)
            if link.places and effects is not None and effects.changes_arguments:  # its backward pass would have to see them
                link = replace(link, kept="the call changes its arguments")
            if effects is not None:
                written = watched.written(inputs)
                outputs += [written.get(i, inputs[i]) for i in effects.written]
            copies = [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in outputs]
        except BaseException:
            entry.meeting = False
            self._background.finished()
            raise

        def job() -> None:
            try:
                with torch.no_grad(), in_own_stream(inputs), self.graphs.computing(Lull()):
                    difference = disagreement(entry.baseline.run(*inputs), copies, self._settings.rtol)
                if watch is not None and (watch.accepted != before or watch.check() is not WeightChange.NONE):
                    return  # it was compared with other weights
                if difference or opens:
                    self.graphs.asks(site, difference or OPENS_GRAPH)
                    return
                if around & 1:
                    self._gradients.learn(entry.links, pattern, link)
                if around not in entry.around:
                    entry.around = (*entry.around, around)
                entry.met = 0
            except Exception as e:
                self._log.decide(Action.KEEP, Why.LEARNING_FAILED, self._model.name, because=error_text(e))
            finally:
                entry.meeting = False

        self._background.go_on(job)
        return result

    def _given_up(self, group: CallGroup) -> None:
        self._ended(group)
        self._background.finished()

    def _ended(self, group: CallGroup) -> None:
        with self._plans.lock:
            group.pending = False
            self._under_way = max(0, self._under_way - 1)

    def _wanted(self, spec: Spec, leaves: Sequence[torch.Tensor]) -> tuple[Site, CallGroup, Why] | None:
        """Whether this call should be captured, and why; marks its group as pending if so."""
        if self._settings.capture == "off" or self._plans.closed or self._spent() or self._plans.awaits_change():
            return None
        if beyond := _beyond_capture(leaves):
            name, because = beyond
            if name not in self._beyond:
                self._beyond[name] = because
                self._log.decide(Action.KEEP, Why.UNSUPPORTED_CALL, self._model.name, because=because)
            self._log.count(name)
            return None
        if not self._under_way:  # a capture makes sure by itself, and calls need not meanwhile
            self._look_at_model()
        with self._plans.lock:
            site = self._plans.sites.get(spec)
            if site is None:
                if not self._values.worth_a_graph(spec, self._plans.sites.values()):
                    return None
                if len(self._plans.sites) >= MAX_SITES:
                    self._log.count("structures_over_limit")
                    return None
                site = self._plans.sites[spec] = Site(spec, self._settings.max_entries)
                self._plans.site_came()
            group = site.group(leaves, self._settings.max_entries)
            if group is None:
                self._log.count("groups_over_limit")
                return None
            shapes = tuple(tuple(t.shape) for t in leaves)
            group.note(shapes)
            if group.pending or group.is_refused() or shapes in group.tried or _just_deployed(site, leaves):
                return None
            if not self._plans.may_capture():
                self._exhausted = self._plans.captures
                if not self._told < self._exhausted < 2 * self._told:  # busy programs earn captures one by one
                    self._told = self._exhausted
                    self._log.decide(Action.REFUSE, Why.TOO_MANY, self._model.name, captures=self._exhausted)
                return None
            self._exhausted = 0
            why = Why.NEW_SHAPE if group.tried else Why.FIRST_CALL
            group.tried.add(shapes)
            group.pending = True
            self._under_way += 1
            group.captures += 1
            self._plans.captures += 1
        self._background.begin()
        return site, group, why

    def _look_at_model(self) -> None:
        """Whether the model has changed: what was refused may be possible now. Long calls do not rest, and of a model with hundreds
        of tensors that is in no plan the look is Python that takes a tenth of such a call: it has a bounded share of the time."""
        watch, now = self._plans.watch, time.perf_counter()
        if watch is None or now < self._look_again_at:
            return
        change = watch.check()
        took = time.perf_counter() - now
        self._look_again_at = now + took / LOOKS_SHARE if took > SHORT_LOOK_S else 0.0
        if change is not WeightChange.NONE:
            self._plans.changed(change, watch)


def _beyond_capture(leaves: Sequence[torch.Tensor]) -> tuple[str, str] | None:
    """What counts calls that cannot be captured whatever the model is, and why; None for others."""
    if any(t.is_neg() or t.is_conj() for t in leaves):  # their memory holds other numbers than they do: no guard takes them
        return "lazy_inputs", "an argument is a lazy conjugate or negative: its memory holds other numbers than it does"
    if transformed():  # its tensors are more than they show, and what they hold cannot be read
        return "calls_in_transforms", "calls inside of a function transform (torch.func) run the model's own code"
    if odd := [t for t in leaves if t.layout is not torch.strided or t.is_nested]:
        said = "nested" if odd[0].is_nested else str(odd[0].layout)
        return "inputs_of_other_layouts", f"an argument is a {said} tensor"
    return None


def _just_deployed(site: Site, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether a plan takes such a call that none has run in yet: it was deployed after this one had looked for it."""
    cache = site.cache(grad_mode=torch.is_grad_enabled())
    found = cache.table.select(*leaves) if cache is not None else -1
    route = cache.table.routes[found] if cache is not None and found >= 0 else None
    return route is not None and not route.entry.calls
