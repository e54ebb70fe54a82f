"""Capturing: the model's own code answers a call that no plan takes, and what it did becomes one.

The graph is captured in a worker process, compiled for the library, and compared with what the model itself gave for that very
call. Only then do calls like it run in the plan. Every outcome is a decision.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hotfuse.analysis.call_facts import fact_text, facts_of
from hotfuse.analysis.ties import all_tied, quanta_of
from hotfuse.base.errors import CaptureError, HotfuseError, InputError
from hotfuse.base.events import Action, Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import NUMBER, TENSOR, Spec, builder, describe
from hotfuse.frontends.captured import CallSpec
from hotfuse.frontends.paths.reads import Path, RecordedReads, TooManyReads
from hotfuse.ir.graph import Graph
from hotfuse.machine import team
from hotfuse.machine.device_stream import in_own_stream
from hotfuse.native.call_context import usual
from hotfuse.ops.own.assume import OtherPath
from hotfuse.runtime.background import Background
from hotfuse.runtime.observe.repeats import InputRepeats
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.plans import Capture, Plans
from hotfuse.runtime.recalling import RecalledStart, Recalls
from hotfuse.runtime.samples import CallSamples, made_up, snapshot
from hotfuse.runtime.serve.check import failed
from hotfuse.runtime.serve.effects import Before, effects_of
from hotfuse.runtime.serve.gradients import Gradients, opens_graph, requires
from hotfuse.runtime.serve.guards import compile_signature
from hotfuse.runtime.serve.other_paths import PathBalance
from hotfuse.runtime.site import CallGroup, Entry, Site, specs_of
from hotfuse.runtime.tally import ThreadCounts
from hotfuse.runtime.tierup.attempt import Compile, Weights, versions_of
from hotfuse.runtime.tierup.audit import why_not
from hotfuse.runtime.tierup.lull import Lull
from hotfuse.runtime.tierup.objective import SLOWER
from hotfuse.runtime.tierup.own_code import LONG_S
from hotfuse.runtime.tierup.proof import in_float64, rounds_otherwise
from hotfuse.runtime.tierup.verify import disagreement
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange
from hotfuse.specialize.table import TIER1

MAX_SITES = 64
MAX_TRIES = 3
"""Captures of one kind of call that may fail for a passing reason before it is given up."""
PASSING = (Why.WORKER_DIED, Why.MODEL_CHANGED)
"""Reasons that say nothing of the graph that was asked for."""
MAX_RAISED = 16
"""Calls of one kind that raised when they were to be captured, after which sizes that did so are not looked at again."""

MAX_PATHS, MAX_FOLLOWED = 6, 12
"""Ways through code that reads its data which one graph has at most, and captures of one kind of call for further ones."""

RESTING_CALLS = 15
"""Calls between two looks at a site of which nothing can be captured, or nothing new is seen while that is done: a look costs some
15 us, a call without one less than 2."""

OPENS_GRAPH = "it enables gradients by itself where they are not"


@dataclass(slots=True)
class CallSample:
    """A real call: copies of what went in and what came out."""

    inputs: list[torch.Tensor]
    outputs: list[Any]
    out_spec: Spec
    """Of the result and of what the call changed in its arguments."""
    written: dict[int, torch.Tensor]
    """What tensors of the call held behind it that were written in place."""
    seconds: float = 0.0
    """What the call took."""
    number: int = 0
    """Which of its group's calls it was."""
    threads: int = 0
    """Threads of torch's that it was served with."""
    path: Path | None = None
    """What the model's Python read of its tensors, where that was recorded."""


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
        self._compile = compile
        self._background = background
        self._under_way = 0
        """Captures that are pending."""
        self._exhausted = 0
        """Captures that had been made when a call had to go without one."""
        self._told = 0
        """How many those were when it was last told."""
        self.own_answers: Callable[[], None] = lambda: None
        """Told of every call that the model's own code answers."""
        self.admitted: Callable[[Site, Entry, int, RecalledStart | None], None] | None = None
        """Told of every captured graph that serves, how many threads its calls have, and what was made ready for it."""
        self.remembered: Callable[[Graph, Weights, Sequence[torch.Tensor]], Plan | None] = lambda *_: None
        """The plan of a graph that an earlier process made, linked and packed."""
        self.take_up: Callable[[Entry, RecalledStart, tuple[float, float]], bool] | None = None
        """Has that plan serve where it won there, or race; whether it races. With the seconds of the model's own code and of the
        plan on one call."""
        self._keys = itertools.count()

    def after_fork(self) -> None:
        """In a forked child: what was pending belongs to the parent."""
        self._under_way = 0

    def limits(self) -> list[str]:
        """The limits that keep kinds of calls in the model's own code: none of them is told by a site."""
        counts, spent = self._log.counts, self._exhausted and not self._plans.may_capture()
        found = [f"{Why.TOO_MANY.value}, and calls in their plans pay for no more yet"] * bool(spent)
        for name, most, what in (("structures_over_limit", MAX_SITES, "kinds of arguments"),
                                 ("groups_over_limit", self._settings.max_entries, "ranks and dtypes of one kind of arguments")):
            found += [f"there are more than {most} {what}, and only so many are captured"] * (name in counts)
        return found

    def own_code(
        self, spec: Spec, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], counts: ThreadCounts
    ) -> Any:
        """Answer a call with the model's own code; what it did is captured beside where that is wanted."""
        counts.module_calls += 1
        self.own_answers()
        wanted = self._wanted(spec, leaves)
        if wanted is None:
            begin = time.perf_counter()
            result = self._own_code(*args, **kwargs)
            if time.perf_counter() - begin < LONG_S:
                self._rest(spec)
            return result
        site, group, why = wanted
        grad_mode = torch.is_grad_enabled()
        inputs, number = [snapshot(t) for t in leaves], group.noted
        recalled: list[RecalledStart] = []
        if self._settings.capture == "background" and isinstance(self._model, Recalls):
            self._background.begin()
            self._background.go_on(lambda: recalled.extend(self._recalled(site, group, inputs, grad_mode=grad_mode)), capture=True)
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
        copies = [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in after.leaves]
        try:
            read = reads.taken() if reads is not None else None
        except TooManyReads as e:
            return self._left_alone(group, Why.READS_DATA, str(e), result)
        sample = CallSample(inputs, copies, after.spec, watched.written(inputs), seconds, number, team.threads(), read)

        def job() -> None:
            try:
                self._learn(site, group, why, sample, next(iter(recalled), None), grad_mode=grad_mode)
            finally:
                self._ended(group)
                with self._plans.lock:
                    site.resting = 0

        self._background.go_on(job, capture=True)
        return result

    def other_path(
        self, site: Site, entry: Entry, balance: PathBalance, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        counts: ThreadCounts,
    ) -> Any:  # fmt: skip
        """Answer a call that takes a way which its graph does not have. Where such calls are many, the way is followed, too; where
        they cost more than the others save, the graph rests."""
        self._log.count("other_paths")
        group = site.group(leaves, self._settings.max_entries)
        if group is not None and not group.pending and group.followed < MAX_FOLLOWED and balance.wants_another(entry.calls):
            with self._plans.lock:
                group.followed += 1
                group.follows, group.paths = True, balance.paths
                group.tried.discard(tuple(tuple(t.shape) for t in leaves))
        begin = time.perf_counter()
        result = self.own_code(site.spec, leaves, args, kwargs, counts)
        own_s = time.perf_counter() - begin
        rest = balance.miss(entry.calls, own_s, entry.seconds / entry.heat if entry.heat else own_s / 2)
        if rest:
            if balance.rested == rest:
                self._log.decide(Action.KEEP, Why.OTHER_PATH, self._model.name, missed=balance.missed, calls=entry.calls)
            site.resting = rest
        return result

    def _rest(self, spec: Spec) -> None:
        """Where nothing of a site can be captured, its next calls go straight to the model's own code: to find that out again takes
        longer than a small model. What made it so, and kinds of calls that are new, are looked at a few calls later. So do calls
        whose capture is under way, once their sizes have shown for a while what they will be; they are counted all the same.
        """
        site = self._plans.sites.get(spec)
        if site is None or site.entries:
            return
        groups = list(site.groups.values())
        if all(g.refused and not g.pending for g in groups):
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
                with torch.no_grad(), in_own_stream(inputs), self._computing(Lull()):
                    difference = disagreement(entry.baseline.run(*inputs), copies, self._settings.rtol)
                if watch is not None and (watch.accepted != before or watch.check() is not WeightChange.NONE):
                    return  # it was compared with other weights
                if difference or opens:
                    self._asks(site, difference or OPENS_GRAPH)
                    return
                if around & 1:
                    self._gradients.learn(entry.links, pattern, link)
                if around not in entry.around:
                    entry.around = (*entry.around, around)
                entry.met = 0
            except Exception as e:
                self._log.decide(Action.KEEP, Why.LEARNING_FAILED, self._model.name, because=f"{type(e).__name__}: {e}")
            finally:
                entry.meeting = False

        self._background.go_on(job)
        return result

    def _asks(self, site: Site, because: str, captured: CallGroup | None = None, grad_mode: bool = False) -> None:
        """The model's code does something else where gradients are enabled: both get plans of their own.

        `captured` is the group whose capture showed it, in that grad mode.
        """
        with self._plans.lock:
            for entry in site.entries:
                self._plans.call_sampler.forget(entry.key)
            if not site.mask:
                self._log.decide(Action.DROP if site.entries else Action.NOTICE, Why.GRAD_MODE, self._model.name, because=because)
            site.split(captured, grad_mode)

    def _given_up(self, group: CallGroup) -> None:
        self._ended(group)
        self._background.finished()

    def _ended(self, group: CallGroup) -> None:
        with self._plans.lock:
            group.pending = False
            self._under_way = max(0, self._under_way - 1)

    def _wanted(self, spec: Spec, leaves: Sequence[torch.Tensor]) -> tuple[Site, CallGroup, Why] | None:
        """Whether this call should be captured, and why; marks its group as pending if so."""
        if self._settings.capture == "off" or self._plans.closed or (self._exhausted and not self._plans.may_capture()):
            return None
        if any(t.is_neg() or t.is_conj() for t in leaves):  # their memory holds other numbers than they do: no guard takes them
            self._log.count("lazy_inputs")
            return None
        if odd := [t for t in leaves if t.layout is not torch.strided or t.is_nested]:
            if "inputs_of_other_layouts" not in self._log.counts:
                said = "nested" if odd[0].is_nested else str(odd[0].layout)
                self._log.decide(Action.KEEP, Why.UNSUPPORTED_CALL, self._model.name, because=f"an argument is a {said} tensor")
            self._log.count("inputs_of_other_layouts")
            return None
        watch = self._plans.watch if not self._under_way else None  # a capture makes sure by itself, and calls need not meanwhile
        if watch is not None and (change := watch.check()) is not WeightChange.NONE:
            self._plans.changed(change, watch)  # what was refused may be possible now
        with self._plans.lock:
            site = self._plans.sites.get(spec)
            if site is None:
                if len(self._plans.sites) >= MAX_SITES:
                    self._log.count("structures_over_limit")
                    return None
                site = self._plans.sites[spec] = Site(spec, self._settings.max_entries)
            group = site.group(leaves, self._settings.max_entries)
            if group is None:
                self._log.count("groups_over_limit")
                return None
            shapes = tuple(tuple(t.shape) for t in leaves)
            group.note(shapes)
            if group.pending or group.refused or shapes in group.tried or _just_deployed(site, leaves):
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

    def _recalled(
        self, site: Site, group: CallGroup, inputs: Sequence[torch.Tensor], *, grad_mode: bool
    ) -> list[RecalledStart]:  # fmt: skip
        """While the model's own code answers: what an earlier process knew of it, made ready; nothing where that fails."""
        model = self._model
        assert isinstance(model, Recalls)
        try:
            with self._plans.lock:
                generation, call = self._plans.generation, self._call_of(group, inputs, grad_mode=grad_mode)[0]
            done = model.recall(site.spec, call)
            if done is None:
                return []
            graph, versions = done.captured.graph, versions_of(done.weights)
            plan, taken = self._compile(graph, done.weights), self._plans.originals.take(done.watch.owned(done.weights).values())
            better = self.remembered(graph, done.weights, inputs)
            return [RecalledStart(done.calls or call, done, plan, better, generation, taken, versions)]
        except Exception:  # the capture that follows does the same, and tells what is wrong
            self._log.count("not_recalled")
            return []

    def _call_of(
        self, group: CallGroup, inputs: Sequence[torch.Tensor], *, grad_mode: bool
    ) -> tuple[CallSpec, list[set[int]]]:  # fmt: skip
        """A call as captures see it, and which of its dims vary."""
        varied = group.dynamic()
        specs = tuple(specs_of(inputs, varied))
        return CallSpec(specs, grad_mode, group.equal(specs), group.across_processes()), varied

    def _learn(
        self, site: Site, group: CallGroup, why: Why, sample: CallSample, recalled: RecalledStart | None, *, grad_mode: bool
    ) -> None:
        """Capture, compile, verify, deploy: in the background, reporting every outcome as a decision.

        Which sizes vary is asked when whoever captures is ready: calls that came meanwhile have shown it, and one capture does
        where the first call alone would have led to one for its very sizes and then to another.
        """
        call = CallSpec(tuple(specs_of(sample.inputs, [set() for _ in sample.inputs])), grad_mode)
        try:
            if recalled is None:
                self._model.prepare()
                if isinstance(self._model, Recalls):
                    others = self._model.other_sizes(site.spec, call)
                    with self._plans.lock:
                        group.note_other_processes(call, others)
            with self._plans.lock:
                call, varied = self._call_of(group, sample.inputs, grad_mode=grad_mode)
                further, group.paths = group.paths, ()
                call = replace(call, paths=_paths(further, sample.path))
                self._log.decide(Action.CAPTURE, why, self._model.name, call=describe(site.spec)[:120],
                                 dynamic=str([sorted(v) for v in varied]))
            if recalled is not None and not recalled.holds(call, self._plans.generation):
                recalled = None
                self._log.count("not_recalled")
            self._capture_and_deploy(site, group, call, sample, recalled)
        except CaptureError as e:
            dynamic = any(s.dynamic for s in call.inputs)
            evidence = {"what": e.what, "where": e.where, "because": e.because}
            self._log.decide(Action.REFUSE, e.why, self._model.name, dynamic=dynamic, **evidence)
            if call.paths is not None and len(call.paths) > 1:  # a further way cannot be had; what serves goes on
                group.followed = MAX_FOLLOWED
            elif e.why in (Why.READS_DATA, Why.OTHER_PATH) and not group.follows:  # the next such call shows which way to follow
                group.follows = True
                group.tried.discard(tuple(s.shape for s in call.inputs))
            elif dynamic:  # dims that cannot vary together may still be captured one shape at a time
                for varied in group.varied:
                    varied.clear()
                group.first = call.shapes
                if call.across:
                    self._sizes_stay(site, group, call, e.why)
            elif (e.why in PASSING or e.why is Why.MISMATCH) and group.captures < MAX_TRIES:
                group.tried.discard(tuple(s.shape for s in call.inputs))  # it may have been the moment, not the model
            else:
                group.refused = str(e)
        except Exception as e:
            text = e.what if isinstance(e, HotfuseError) else f"{type(e).__name__}: {e}"
            self._log.decide(Action.REFUSE, Why.NOT_CAPTURABLE, self._model.name, what=text.splitlines()[0][:300])
            group.refused = str(e)

    def _sizes_stay(self, site: Site, group: CallGroup, call: CallSpec, why: Why) -> None:
        """What differs from process to process could not be left open: the next call of these sizes is captured as it is."""
        group.across = ()
        group.tried.discard(call.shapes)
        if isinstance(self._model, Recalls) and why not in PASSING:
            self._model.fix_sizes(site.spec)

    def _capture_and_deploy(
        self, site: Site, group: CallGroup, call: CallSpec, sample: CallSample, recalled: RecalledStart | None
    ) -> None:  # fmt: skip
        generation, lull = self._plans.generation, Lull()
        if recalled is None:
            done = self._model.capture(site.spec, call, self._watching)
            plan = self._compile(done.captured.graph, done.weights)
        else:
            done, plan = recalled.done, recalled.baseline
            self._watching(done.watch)
        graph = done.captured.graph
        facts = facts_of(graph, tuple(t.is_contiguous() for t in sample.inputs))
        if (wrong := failed(facts, sample.inputs)) is not None:
            raise CaptureError("the captured graph excludes the very call it was captured for", because=fact_text(wrong))
        expected = [*sample.outputs, *(sample.written.get(i, sample.inputs[i]) for i in done.captured.written)]
        try:
            shown = None if recalled is None else self._gives(recalled.proven, sample, expected)
            if shown is None:
                self._compare(plan, done, sample, expected, lull)
        except OtherPath as e:  # an earlier process followed another one
            raise CaptureError("the captured graph is for calls that take another way", because=e.what, why=Why.OTHER_PATH) from e
        effects = effects_of(sample.out_spec, done.captured)
        result_spec = sample.out_spec.children[0]
        bare = effects is None and (result_spec is TENSOR or result_spec is NUMBER)
        symbols, signature = compile_signature(graph)
        samples = CallSamples(self._settings.sample_bytes, snapshot if self._settings.keep_inputs else made_up)
        samples.note(signature(*sample.inputs), sample.inputs)
        if done.captured.asks_grad_mode and not site.mask:
            self._asks(site, "it asks whether they are", group, call.grad_mode)
        key = next(self._keys)
        entry = Entry(
            key, facts, plan, plan, done.weights, builder(result_spec), bare, call.grad_mode,
            (usual(call.grad_mode),), symbols, signature, samples, self._plans.call_sampler.watch(key), done.captured.notes,
        )
        entry.effects = effects
        entry.balance = PathBalance(done.captured.paths, call.paths or ()) if done.captured.paths else None
        entry.repeats = InputRepeats(len(graph.inputs) if self._settings.watch else 0)
        entry.not_audited, entry.allowed = why_not(self._settings), SLOWER if self._settings.objective == "memory" else 1.0
        waited = group.noted - site.resting - sample.number
        entry.heat = max(0, waited)  # calls that waited for this plan have shown how hot it will be
        entry.seconds = entry.heat * sample.seconds
        if shown is not None:  # tier 0 was not compared yet: nobody gets an answer of it, and nothing else is begun
            entry.own, entry.improving, entry.trying = True, True, TIER1
        with self._plans.lock:
            if self._plans.closed:
                return
            if generation != self._plans.generation or not done.watch.same_now():
                self._plans.call_sampler.forget(key)
                raise CaptureError("the model changed while it was captured", why=Why.MODEL_CHANGED)
            if self._plans.watch is not None and (change := self._plans.watch.check()) is not WeightChange.NONE:
                if change is WeightChange.MODEL:
                    self._plans.drop_all()  # plans of an older model, which no call has met since
                else:
                    self._plans.demote_all()  # their copies of weights are older than what the new watch takes as given
            self._plans.watch_with(done.watch)
            if call.paths is not None:
                self._followed(site, entry)
            site.admit(entry)
            group.noted, site.resting = group.noted - site.resting, 0
            self._plans.let_go()
        if shown is not None and recalled is not None and self.take_up is not None:
            races = self.take_up(entry, recalled, shown)
            try:
                self._compare(plan, done, sample, expected, lull)
            except Exception:
                self._plans.drop_all()
                raise
            if not races:
                entry.own, entry.improving, entry.trying = False, False, None
        self._log.decide(Action.DEPLOY, Why.VERIFIED, self._model.name, tier=0, nodes=len(graph.nodes),
                        partitions=len(plan.artifacts))
        if self.admitted is not None:
            self.admitted(site, entry, sample.threads, recalled)

    def _followed(self, site: Site, entry: Entry) -> None:
        """A graph takes the place of one that had fewer ways."""
        same = [e for e in site.entries if e.balance is not None and (e.facts, e.grad_mode) == (entry.facts, entry.grad_mode)]
        for older in same:
            site.remove(older)
            self._plans.call_sampler.forget(older.key)

    def _gives(self, better: Plan | None, sample: CallSample, expected: Sequence[Any]) -> tuple[float, float] | None:
        """Seconds of the model's own code and of a plan of an earlier process that gives the same answer; None where it does not:
        then tier 0 comes first, and the plan's proof.
        """
        if better is None or self.take_up is None:
            return None
        with torch.no_grad():
            begin = time.perf_counter()
            outs = better.run(*sample.inputs)
            seconds = time.perf_counter() - begin
            return None if disagreement(outs, expected, self._settings.tolerance) else (sample.seconds, seconds)

    def _compare(self, plan: Plan, done: Capture, sample: CallSample, expected: Sequence[Any], lull: Lull) -> None:
        """Hold tier 0's answer against the model's own; raises CaptureError."""
        rtol, graph = self._settings.rtol, done.captured.graph
        with torch.no_grad(), in_own_stream(sample.inputs), self._computing(lull):
            outs = plan.run(*sample.inputs)
            difference = disagreement(outs, expected, rtol)
            if any(isinstance(o, float) and o != e and o == o for o, e in zip(graph.outputs, expected, strict=False)):
                raise CaptureError("the captured graph disagrees with the model", because="it gives another number in every call",
                                   why=Why.MISMATCH)  # fmt: skip
            steps = quanta_of(graph, done.weights) if difference else ()
            differs = difference and not all_tied(outs, expected, steps, lambda g, w: not disagreement([g], [w], rtol))
            if differs and not rounds_otherwise(expected, outs, sample.inputs, rtol, in_float64(graph, done.weights), steps):
                raise CaptureError("the captured graph disagrees with the model", because=difference, why=Why.MISMATCH)

    def _computing(self, lull: Lull) -> AbstractContextManager[None]:
        """Around what is computed beside calls; captured inline, nobody is served beside."""
        return nullcontext() if self._settings.capture == "inline" else lull.computing()

    def _watching(self, watch: ModelGuard) -> None:
        """Before anything is deployed, the newest watch is the one that counts."""
        with self._plans.lock:
            if not any(site.entries for site in self._plans.sites.values()):
                self._plans.watch_with(watch)


def _paths(others: tuple[Path, ...], taken: Path | None) -> tuple[Path, ...] | None:
    """The ways that a capture is to follow: the one that this call took, and those that others did before."""
    if taken is None:
        return None
    return (taken, *[p for p in others if p != taken][: MAX_PATHS - 1])


def _just_deployed(site: Site, leaves: Sequence[torch.Tensor]) -> bool:
    """Whether a plan takes such a call that none has run in yet: it was deployed after this one had looked for it."""
    cache = site.cache(torch.is_grad_enabled())
    found = cache.table.select(*leaves) if cache is not None else -1
    route = cache.table.routes[found] if cache is not None and found >= 0 else None
    return route is not None and not route.entry.calls
