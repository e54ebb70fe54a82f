"""Captured graphs on their way to serving: captured by a worker, compiled for the library, compared with the model's own answer.

Only then do calls run in the plan. A plan that an earlier process kept is made ready meanwhile. Every outcome is a decision.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hotfuse.analysis.call_facts import Dense, fact_text, facts_of, outer_facts
from hotfuse.analysis.ties import all_tied, quanta_of
from hotfuse.backends import registry
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Action, Why
from hotfuse.base.faults import is_passing, reason_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import NUMBER, TENSOR, Spec, builder, counts_in, describe
from hotfuse.compile.device.late_checks import unsafe_behind_reads
from hotfuse.frontends.captured import CallSpec
from hotfuse.frontends.paths.reads import Path
from hotfuse.frontends.questions.as_traced import as_traced, asks_identity
from hotfuse.ir.graph import Graph
from hotfuse.machine.device_stream import in_own_stream
from hotfuse.native.call_context import usual
from hotfuse.ops.own.assume import OtherPath
from hotfuse.runtime.call_group import MAX_OPEN, CallGroup, specs_of
from hotfuse.runtime.observe.repeats import InputRepeats
from hotfuse.runtime.plan import Plan, not_made
from hotfuse.runtime.plans import Capture, Plans
from hotfuse.runtime.samples import CallSamples, made_up, snapshot
from hotfuse.runtime.serve.effects import effects_of
from hotfuse.runtime.serve.fact_checks import failed, holds
from hotfuse.runtime.serve.guards import compile_signature
from hotfuse.runtime.serve.other_paths import PathBalance
from hotfuse.runtime.site import Entry, Site
from hotfuse.runtime.tierup.agreement import disagreement
from hotfuse.runtime.tierup.attempt import Compile, Weights, versions_of
from hotfuse.runtime.tierup.audit import why_not
from hotfuse.runtime.tierup.lull import Lull
from hotfuse.runtime.tierup.objective import SLOWER
from hotfuse.runtime.tierup.proof import in_float64, rounds_otherwise
from hotfuse.runtime.warm_start import RecalledStart, Recalls
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange
from hotfuse.simplify.result_order import ordered_otherwise, row_by_row
from hotfuse.specialize.table import TIER1

MAX_TRIES = 3
"""Captures of one kind of call that may fail for a passing reason before it is given up."""
PASSING = (Why.WORKER_DIED, Why.MODEL_CHANGED, Why.TOO_MUCH_MEMORY)
"""Reasons that say nothing of the graph that was asked for."""
MAX_PATHS, MAX_FOLLOWED = 6, 12
"""Paths through code that reads its data which one graph has at most, and captures of one kind of call for further ones."""
MAX_IDLE_GRAPHS = 3
"""Graphs in a row that answer hardly any call, behind which no further path is followed."""


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
    in_rows: frozenset[int] = frozenset()
    """Results that lay row by row in memory; copies of others may, too."""
    same: tuple[int, ...] = ()
    """Which tensors of the call were one object (`questions.as_traced.same_objects`)."""
    waited_s: float = 0.0
    """How long its capture waited for a first plan (`runtime.capture_turn`)."""


class GraphAdmission:
    """Admits the graphs of one engine; runs in the background."""

    def __init__(self, plans: Plans, compile: Compile) -> None:
        self._plans, self._compile = plans, compile
        self._model, self._settings, self._log = plans.model, plans.settings, plans.log
        self.admitted: Callable[[Site, Entry, int, RecalledStart | None], None] | None = None
        """Told of every captured graph that serves, how many threads its calls have, and what was made ready for it."""
        self.remembered: Callable[[Graph, Weights, Sequence[torch.Tensor]], Plan | None] = lambda *_: None
        """The plan of a graph that an earlier process made, linked and packed."""
        self.take_up: Callable[[Entry, RecalledStart, tuple[float, float]], bool] | None = None
        """Has that plan serve where it won there, or race; whether it races. With the seconds of the model's own code and of the
        plan on one call."""
        self.ahead: Callable[..., None] = lambda *_, **__: None
        """Told of every graph that was captured anew, before it serves: what its first plan of kernels takes may begin."""
        self._keys = itertools.count()

    def asks(self, site: Site, because: str, captured: CallGroup | None = None, *, grad_mode: bool = False) -> None:
        """The model's code does something else where gradients are enabled: both get plans of their own.

        `captured` is the group whose capture showed it, in that grad mode.
        """
        with self._plans.lock:
            for entry in site.entries:
                self._plans.call_sampler.forget(entry.key)
            if not site.mask:
                self._log.decide(Action.DROP if site.entries else Action.NOTICE, Why.GRAD_MODE, self._model.name, because=because)
            site.split(captured, grad_mode=grad_mode)

    def recalled(
        self, site: Site, group: CallGroup, inputs: Sequence[torch.Tensor], *, grad_mode: bool
    ) -> list[RecalledStart]:  # fmt: skip
        """While the model's own code answers: what an earlier process knew of it, made ready; nothing where that fails."""
        model = self._model
        assert isinstance(model, Recalls)
        try:
            with self._plans.lock:
                generation, call = self._plans.generation, self._call_of(group, inputs, grad_mode=grad_mode)[0]
            done = model.recall(site.spec, call)
            if done is None and call.open_dims:  # no graph leaves open what varies; one for these very sizes serves them meanwhile
                call = _own_sizes(inputs, grad_mode=grad_mode)
                done = model.recall(site.spec, call)
            if done is None:
                return []
            graph, versions = done.captured.graph, versions_of(done.weights)
            taken = self._plans.originals.take(done.watch.owned(done.weights).values())
            better = self.remembered(graph, done.weights, inputs)
            won = better is not None and better.recipe is not None and better.recipe.verdict is not None
            plan = None if won else self._compile(graph, done.weights)
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

    def learn(
        self, site: Site, group: CallGroup, why: Why, sample: CallSample, recalled: RecalledStart | None, *, grad_mode: bool
    ) -> None:
        """Capture, compile, verify, deploy: in the background, reporting every outcome as a decision.

        Which sizes vary is asked when the worker is ready: calls that came meanwhile have shown it, and one capture does
        where the first call alone would have led to one for its very sizes and then to another. A graph that an earlier process
        kept for fewer sizes costs no capture: it serves those, and the next call of others is captured with what varies.
        """
        own = call = _own_sizes(sample.inputs, grad_mode=grad_mode)
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
                if recalled is not None and recalled.is_narrower(call, own, self._plans.generation):
                    call, varied = recalled.calls, [set(t.dynamic) for t in recalled.calls.inputs]
                behind = {"behind_a_first_plan_s": round(sample.waited_s, 2)} if sample.waited_s else {}
                self._log.decide(Action.CAPTURE, why, self._model.name, call=describe(site.spec)[:120],
                                 dynamic=str([sorted(v) for v in varied]), **behind)
            if recalled is not None and not recalled.holds(call, self._plans.generation):
                recalled = None
                self._log.count("not_recalled")
            self._capture_and_deploy(site, group, call, sample, recalled)
        except CaptureError as e:
            dynamic = any(s.dynamic for s in call.inputs)
            evidence = {"what": e.what, "where": e.where, "because": e.because}
            kept = {"made": "in an earlier process; it is captured anew"} if recalled is not None and e.why is Why.MISMATCH else {}
            self._log.decide(Action.REFUSE, e.why, self._model.name, dynamic=dynamic, **evidence, **kept)
            if kept:
                assert isinstance(self._model, Recalls)
                self._model.disbelieve()
                group.tried.discard(own.shapes)
            elif call.paths is not None and len(call.paths) > 1:  # a further path cannot be had; what serves goes on
                group.followed = MAX_FOLLOWED
            elif e.why in (Why.READS_DATA, Why.OTHER_PATH) and not group.follows:  # the next such call shows which path to follow
                group.follows = True
                group.tried.discard(tuple(s.shape for s in call.inputs))
            elif dynamic:  # dims that cannot vary together may still be captured one shape at a time
                for varied in group.varied:
                    varied.clear()
                group.first = call.shapes
                group.not_open += e.why not in PASSING
                if group.not_open >= MAX_OPEN:  # those of this call, then
                    group.tried.discard(call.shapes)
                if group.across:  # calls here may have shown the same dims meanwhile
                    self._sizes_stay(site, group, call, e.why)
            elif (e.why in PASSING or e.why is Why.MISMATCH) and group.captures < MAX_TRIES:
                group.tried.discard(tuple(s.shape for s in call.inputs))  # it may have been the moment, not the model
            else:
                group.refuse(str(e), passing=e.why in PASSING)
        except Exception as e:
            self._log.decide(Action.REFUSE, Why.NOT_CAPTURABLE, self._model.name, what=reason_text(e))
            group.refuse(reason_text(e), passing=is_passing(e))

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
        if recalled is not None and sample.same and asks_identity(recalled.done.captured.asked):
            recalled = None  # that graph is for calls whose arguments are other objects each
        if recalled is None:
            done = self._captured(site, call, sample)
            waited = max(0, group.noted - site.resting - sample.number)
            self.ahead(done.captured.graph, done.weights, sample.inputs, heat=waited, seconds=waited * sample.seconds)
            plan = self._compile(done.captured.graph, done.weights)
        else:
            done = recalled.done
            plan = recalled.baseline or not_made(done.captured.graph, done.weights)
            self._watching(done.watch)
        graph = done.captured.graph
        lies = outer_facts(graph, [(t.shape, t.stride()) for t in sample.inputs])
        facts = facts_of(graph, tuple(t.is_contiguous() for t in sample.inputs), lies)
        # of sizes left open it may not be known that they are dense: what a graph assumed is what its call was
        facts = tuple(f for f in facts if not isinstance(f, Dense) or f.yes or f.order is None or holds(f, sample.inputs))
        if any(t.is_cuda for t in sample.inputs) and (op := unsafe_behind_reads(graph)):
            because = f"{op} behind a value that is read may be out of bounds on another path, which stops a device"
            raise CaptureError("calls on a device stay with the model's own code", because=because, why=Why.NOT_CAPTURABLE)
        if (wrong := failed(facts, sample.inputs)) is not None:
            raise CaptureError("the captured graph excludes the very call it was captured for", because=fact_text(wrong))
        expected = [*sample.outputs, *(sample.written.get(i, sample.inputs[i]) for i in done.captured.written)]
        try:
            shown = None if recalled is None else self._gives(recalled.proven, sample, expected)
            if shown is None:
                plan = self._made(plan, done)
                otherwise = self._compare(plan, done, sample, expected, lull)
                if otherwise and (ordered := row_by_row(graph, otherwise)) is not graph:
                    done, graph = replace(done, captured=replace(done.captured, graph=ordered)), ordered
                    plan = self._compile(graph, done.weights)
                    self._compare(plan, done, sample, expected, lull)
        except OtherPath as e:  # an earlier process followed another one
            raise CaptureError("the captured graph is for calls that take another path", because=e.what, why=Why.OTHER_PATH) from e
        effects = effects_of(sample.out_spec, done.captured, done.watch.memory)
        result_spec = sample.out_spec.children[0]
        bare = effects is None and (result_spec is TENSOR or result_spec is NUMBER)
        symbols, signature = compile_signature(graph)
        samples = CallSamples(self._settings.sample_bytes, snapshot if self._settings.keep_inputs else made_up)
        samples.note(signature(*sample.inputs), sample.inputs, fits=not done.captured.paths or self._settings.keep_inputs)
        if done.captured.asks_grad_mode and not site.mask:
            self.asks(site, "it asks whether they are", group, grad_mode=call.grad_mode)
        key = next(self._keys)
        entry = Entry(
            key, facts, plan, plan, done.weights, builder(result_spec), bare, call.grad_mode,
            (usual(gradients=call.grad_mode),), symbols, signature, samples, self._plans.call_sampler.watch(key),
            done.captured.notes,
        )
        entry.effects, entry.counted = effects, counts_in(site.spec)
        entry.asked = as_traced(done.captured.asked, done.watch.tensors)
        followed = recalled.calls.paths if recalled is not None else call.paths
        entry.balance = PathBalance(done.captured.paths, followed or ()) if done.captured.paths else None
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
                made = self._made(plan, done)
                self._compare(made, done, sample, expected, lull)
            except Exception:
                self._plans.drop_all()
                raise
            with self._plans.lock:
                entry.plan = made if entry.plan is plan else entry.plan
                entry.baseline = plan = made
            if not races:
                entry.own, entry.improving, entry.trying = False, False, None
        self._log.decide(Action.DEPLOY, Why.VERIFIED, self._model.name, tier=0, nodes=len(graph.nodes),
                        partitions=len(plan.artifacts))
        if self.admitted is not None:
            self.admitted(site, entry, sample.threads, recalled)

    def _captured(self, site: Site, call: CallSpec, sample: CallSample) -> Capture:
        """The graph of such calls; where the model's code asks which arguments are one object, of those that answer as this one."""
        done = self._model.capture(site.spec, call, self._watching)
        if not (sample.same and asks_identity(done.captured.asked)):
            return done
        return self._model.capture(site.spec, replace(call, same=sample.same), self._watching)

    def _followed(self, site: Site, entry: Entry) -> None:
        """A graph takes the place of one that had fewer paths."""
        same = [e for e in site.entries if e.balance is not None and (e.facts, e.grad_mode) == (entry.facts, entry.grad_mode)]
        for older in same:
            older.replaced = True
            site.remove(older)
            self._plans.call_sampler.forget(older.key)

    def _made(self, plan: Plan, done: Capture) -> Plan:
        """Tier 0, where a plan that won in an earlier process was made ready before it."""
        return plan if plan.artifacts else self._compile(done.captured.graph, done.weights)

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

    def _compare(self, plan: Plan, done: Capture, sample: CallSample, expected: Sequence[Any], lull: Lull) -> frozenset[int]:
        """Hold tier 0's answer against the model's own; raises CaptureError. Gives results that lie otherwise in memory."""
        rtol, graph = self._settings.rtol, done.captured.graph
        if because := registry.short_of_memory({t.device for t in sample.inputs}):
            raise CaptureError("nothing is proven beside calls", because=because, why=Why.TOO_MUCH_MEMORY)
        with torch.no_grad(), in_own_stream(sample.inputs), self.computing(lull):
            outs = plan.run(*sample.inputs)
            difference = disagreement(outs, expected, rtol)
            if any(isinstance(o, float) and o != e and o == o for o, e in zip(graph.outputs, expected, strict=False)):
                raise CaptureError("the captured graph disagrees with the model", because="it gives another number in every call",
                                   why=Why.MISMATCH)  # fmt: skip
            steps = quanta_of(graph, done.weights) if difference else ()
            differs = difference and not all_tied(outs, expected, steps, lambda g, w: not disagreement([g], [w], rtol))
            if differs and not done.watch.same_now():
                raise CaptureError("the model changed while it was captured", why=Why.MODEL_CHANGED)
            if differs and not rounds_otherwise(expected, outs, sample.inputs, rtol, in_float64(graph, done.weights), steps):
                raise CaptureError("the captured graph disagrees with the model", because=difference, why=Why.MISMATCH)
            return ordered_otherwise(outs, sample.in_rows)

    def computing(self, lull: Lull) -> AbstractContextManager[None]:
        """Around what is computed beside calls; captured inline, nobody is served beside."""
        return nullcontext() if self._settings.capture == "inline" else lull.computing()

    def _watching(self, watch: ModelGuard) -> None:
        """Before anything is deployed, the newest watch is the one that counts."""
        with self._plans.lock:
            if not any(site.entries for site in self._plans.sites.values()):
                self._plans.watch_with(watch)


def _own_sizes(inputs: Sequence[torch.Tensor], *, grad_mode: bool) -> CallSpec:
    """A call with its very sizes, whatever others have."""
    return CallSpec(tuple(specs_of(inputs, [set() for _ in inputs])), grad_mode)


def _paths(others: tuple[Path, ...], taken: Path | None) -> tuple[Path, ...] | None:
    """The paths that a capture is to follow: the one that this call took, and those that others did before."""
    if taken is None:
        return None
    return (taken, *[p for p in others if p != taken][: MAX_PATHS - 1])
