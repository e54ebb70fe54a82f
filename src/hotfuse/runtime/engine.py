# pyright: reportPrivateUsage=false
# Torch has no public question for its dispatch modes.
"""The engine: serves a model, captures it beside, proves the graph, and takes it over.

A call never waits: it runs in a captured plan whose guard holds, or in the model's own code. The engine knows no
compiler and no front end: both come in as functions, so tests drive it with fakes.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hotfuse.base.errors import CaptureError, HotfuseError, InputError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.settings import Settings
from hotfuse.base.structure import NUMBER, TENSOR, Spec, describe, flatten, unflatten
from hotfuse.frontends.captured import CallSpec, Captured
from hotfuse.ir.graph import Graph
from hotfuse.runtime.guards import compile_guard
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.race import race
from hotfuse.runtime.site import Entry, Group, Site, specs_of
from hotfuse.runtime.tally import Counts, Tally, total
from hotfuse.runtime.verify import disagreement
from hotfuse.runtime.watch import Change, Watch

MAX_SITES = 64
MAX_TRIES = 3
"""Captures of one kind of call that may fail for a passing reason before it is given up."""
_TENSORS = {torch.Tensor, nn.Parameter}
_C = torch._C


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured graph with the live tensors it runs on, and the watch over them."""

    captured: Captured
    weights: Mapping[str, torch.Tensor]
    watch: Watch


class Model(Protocol):
    """What an engine serves."""

    name: str

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own code."""
        ...

    def capture(self, spec: Spec, call: CallSpec, watching: Callable[[Watch], None]) -> Capture:
        """A graph for calls like these; may take seconds; raises CaptureError.

        `watching` is told what to watch before anything can fail, so that a refused model that changes is tried again.
        """
        ...


Compile = Callable[[Graph, Mapping[str, torch.Tensor]], Plan]
"""A graph as a tier-0 plan, at once."""
Improve = Callable[[Graph, Mapping[str, torch.Tensor], Sequence[torch.Tensor]], Plan]
"""The same as a plan of a higher tier; may take seconds; raises a HotfuseError where there is none."""
Submit = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class Sample:
    """A real call: copies of what went in and what came out."""

    inputs: list[torch.Tensor]
    outputs: list[Any]
    out_spec: Spec


def _snapshot(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: the graph is captured for this layout, so it is guarded and verified on it."""
    t = t.detach()
    if t.layout is not torch.strided or t.is_contiguous():
        return t.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((span,), (1,)).clone().as_strided(t.shape, t.stride())


class Engine:
    """Serves one model."""

    def __init__(
        self, model: Model, compile: Compile, submit: Submit, settings: Settings, log: EventLog,
        improve: Improve | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.log = log
        self._compile = compile
        self._improve = improve
        self._submit = submit
        self.sites: dict[Spec, Site] = {}
        self._plain: dict[tuple[Any, ...], Spec] = {}
        self._watch: Watch | None = None
        self._generation = 0
        self._captures = 0
        self._exhausted = False
        self._unsupported = ""
        self._clock = itertools.count(1)
        self._everyone: list[Counts] = []
        self._tally = Tally(self._everyone)
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._pending = 0
        self.closed = False
        if settings.capture == "off":
            log.decide(Action.KEEP, Why.TURNED_OFF, model.name)
        _ENGINES.add(self)

    # --- the call path ---------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve one call."""
        if torch.compiler.is_compiling():
            return self.model.call(*args, **kwargs)
        threads = self.settings.threads
        if threads is None or torch.get_num_threads() == threads:
            return self._serve(args, kwargs)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return self._serve(args, kwargs)
        finally:
            torch.set_num_threads(before)

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts = self._tally.mine
        counts.calls += 1
        leaves = (*args, *kwargs.values()) if kwargs else args
        for leaf in leaves:
            if type(leaf) not in _TENSORS:
                return self._serve_nested(args, kwargs, counts)
        key = (len(args), *kwargs)
        spec = self._plain.get(key)
        if spec is None:
            spec = self._plain[key] = flatten((args, kwargs))[1]
        return self._serve_flat(spec, leaves, args, kwargs, counts)

    def _serve_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any], counts: Counts) -> Any:
        try:
            leaves, spec = flatten((args, kwargs))
            hash(spec)
        except (InputError, TypeError) as e:
            self.log.count("unsupported_calls")
            if not self._unsupported:
                self._unsupported = str(e)
                self.log.decide(Action.KEEP, Why.UNSUPPORTED_CALL, self.model.name, because=str(e).splitlines()[0])
            counts.module_calls += 1
            return self.model.call(*args, **kwargs)
        for leaf in leaves:
            if type(leaf) not in _TENSORS:
                counts.module_calls += 1
                return self.model.call(*args, **kwargs)
        return self._serve_flat(spec, leaves, args, kwargs, counts)

    def _serve_flat(
        self, spec: Spec, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], counts: Counts
    ) -> Any:
        if _C._is_any_autocast_enabled() or _C._len_torch_function_stack() or _C._len_torch_dispatch_stack():
            counts.module_calls += 1  # the caller changed what torch ops mean
            return self.model.call(*args, **kwargs)
        site = self.sites.get(spec)
        if site is not None:
            for entry in site.entries:
                if entry.grad_mode is torch.is_grad_enabled() and entry.guard(*leaves):
                    watch = self._watch
                    if watch is not None and (change := watch.check()) is not Change.NONE:
                        self._changed(change)
                        if change is Change.MODEL:
                            break
                    if entry.default_dtype is not torch.get_default_dtype() or (
                        entry.grad_regions and torch.is_grad_enabled() and self._wants_grad(leaves)
                    ):
                        break
                    plan = entry.plan
                    try:
                        outs = plan.run(*leaves)
                    except Exception as e:
                        self._withdraw(site, entry, e)
                        break
                    counts.graph_calls += 1
                    entry.calls += 1
                    entry.heat += 1
                    if plan.tier:
                        counts.native_calls += 1
                    elif entry.heat == self.settings.hot_calls and self._improve is not None:
                        self._promote(entry)
                    entry.last_used = next(self._clock)
                    return outs[0] if entry.bare else unflatten(entry.out_spec, outs)
            else:
                counts.guard_misses += 1
        return self._own_code(spec, leaves, args, kwargs, counts)

    def _wants_grad(self, leaves: Sequence[torch.Tensor]) -> bool:
        return any(t.requires_grad for t in leaves) or (self._watch is not None and self._watch.any_grad)

    # --- the model's own code, and learning from it ----------------------------------------------

    def _own_code(
        self, spec: Spec, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], counts: Counts
    ) -> Any:
        counts.module_calls += 1
        wanted = self._wanted(spec, leaves)
        if wanted is None:
            return self.model.call(*args, **kwargs)
        site, group, call = wanted
        inputs = [_snapshot(t) for t in leaves]
        try:
            result = self.model.call(*args, **kwargs)
        except BaseException:
            self._done(group)
            raise
        try:
            outputs, out_spec = flatten(result, numbers=True)
            hash(out_spec)
        except (InputError, TypeError) as e:
            group.refused = str(e)
            self.log.decide(Action.REFUSE, Why.NOT_CAPTURABLE, self.model.name, because=str(e).splitlines()[0])
            self._done(group)
            return result
        copies = [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in outputs]
        sample = Sample(inputs, copies, out_spec)

        def job() -> None:
            try:
                self._learn(site, group, call, sample)
            finally:
                self._done(group)

        if self.settings.capture == "inline":
            job()
        else:
            self._submit(job)
        return result

    def _wanted(self, spec: Spec, leaves: Sequence[torch.Tensor]) -> tuple[Site, Group, CallSpec] | None:
        """Whether this call should be captured; marks its group as pending if so."""
        if self.settings.capture == "off" or self.closed or self._exhausted:
            return None
        if (watch := self._watch) is not None and (change := watch.check()) is not Change.NONE:
            self._changed(change)  # what was refused may be possible now
        with self._lock:
            site = self.sites.get(spec)
            if site is None:
                if len(self.sites) >= MAX_SITES:
                    self.log.count("structures_over_limit")
                    return None
                site = self.sites[spec] = Site(spec)
            group = site.group(leaves, self.settings.max_entries)
            if group is None:
                self.log.count("groups_over_limit")
                return None
            shapes = tuple(tuple(t.shape) for t in leaves)
            group.note(shapes)
            if group.pending or group.refused or shapes in group.tried:
                return None
            if self._captures >= self.settings.max_captures:
                self._exhausted = True
                self.log.decide(Action.REFUSE, Why.TOO_MANY, self.model.name, captures=self._captures)
                return None
            why = Why.NEW_SHAPE if group.tried else Why.FIRST_CALL
            group.tried.add(shapes)
            group.pending = True
            group.captures += 1
            self._captures += 1
            self.log.decide(Action.CAPTURE, why, self.model.name, call=describe(spec)[:120],
                            dynamic=str([sorted(v) for v in group.varied]))
            call = CallSpec(tuple(specs_of(leaves, group.varied)), torch.is_grad_enabled())
        with self._idle:
            self._pending += 1
        return site, group, call

    def _learn(self, site: Site, group: Group, call: CallSpec, sample: Sample) -> None:
        """Capture, compile, verify, deploy: in the background, reporting every outcome as a decision."""
        try:
            self._capture_and_deploy(site, call, sample)
        except CaptureError as e:
            dynamic = any(s.dynamic for s in call.inputs)
            evidence = {"what": e.what, "where": e.where, "because": e.because}
            self.log.decide(Action.REFUSE, e.why, self.model.name, dynamic=dynamic, **evidence)
            if dynamic:  # dims that cannot vary together may still be captured one shape at a time
                for varied in group.varied:
                    varied.clear()
                group.first = tuple(s.shape for s in call.inputs)
            elif e.why in (Why.WORKER_DIED, Why.MODEL_CHANGED, Why.MISMATCH) and group.captures < MAX_TRIES:
                group.tried.discard(tuple(s.shape for s in call.inputs))  # it may have been the moment, not the model
            else:
                group.refused = str(e)
        except Exception as e:
            text = e.what if isinstance(e, HotfuseError) else f"{type(e).__name__}: {e}"
            self.log.decide(Action.REFUSE, Why.NOT_CAPTURABLE, self.model.name, what=text.splitlines()[0][:300])
            group.refused = str(e)

    def _capture_and_deploy(self, site: Site, call: CallSpec, sample: Sample) -> None:
        generation = self._generation
        done = self.model.capture(site.spec, call, self._watching)
        graph = done.captured.graph
        plan = self._compile(graph, done.weights)
        guard, text = compile_guard(graph, tuple(t.is_contiguous() for t in sample.inputs))
        if not guard(*sample.inputs):
            raise CaptureError("the captured graph excludes the very call it was captured for", because=text)
        bare = sample.out_spec is TENSOR or sample.out_spec is NUMBER
        entry = Entry(
            guard, text, plan, plan, done.weights, sample.inputs, sample.out_spec, bare, call.grad_mode,
            done.captured.grad_regions, torch.get_default_dtype(), done.captured.notes,
        )
        with torch.no_grad():
            difference = disagreement(plan.run(*sample.inputs), sample.outputs, self.settings.rtol)
        if difference:
            raise CaptureError("the captured graph disagrees with the model", because=difference, why=Why.MISMATCH)
        with self._lock:
            if self.closed:
                return
            if generation != self._generation or not done.watch.same_now():
                raise CaptureError("the model changed while it was captured", why=Why.MODEL_CHANGED)
            if self._watch is not None and self._watch.check() is Change.MODEL:
                self._drop_all()  # plans of an older model, which no call has met since
            kept = site.entries
            if len(kept) >= self.settings.max_entries:
                coldest = min(kept, key=lambda e: e.last_used)
                kept = tuple(e for e in kept if e is not coldest)
                self.log.decide(Action.DROP, Why.TOO_MANY, self.model.name, calls=coldest.calls)
            self._watch = done.watch
            site.entries = (entry, *kept)
        self.log.decide(Action.DEPLOY, Why.VERIFIED, self.model.name, tier=0, nodes=len(graph.nodes),
                        partitions=len(plan.artifacts))

    # --- higher tiers ----------------------------------------------------------------------------

    def _promote(self, entry: Entry) -> None:
        """A hot plan gets a try at the next tier, beside inference."""
        if entry.improving or self.closed or self.settings.tiers < 1:
            return
        if entry.grad_mode:
            self.log.decide(Action.KEEP, Why.GRAD_NEEDED, self.model.name, tier=0, hint="call it under torch.no_grad()")
            return
        entry.improving = True
        with self._idle:
            self._pending += 1

        def job() -> None:
            try:
                self._try_better(entry)
            finally:
                entry.improving = False
                self._finished()

        if self.settings.capture == "inline":
            job()
        else:
            self._submit(job)

    def _try_better(self, entry: Entry) -> None:
        """Compile, prove, measure; swap only what won. Whatever happens is a decision."""
        assert self._improve is not None
        generation, name = self._generation, self.model.name
        versions = [t._version for t in entry.weights.values() if not t.is_inference()]
        try:
            better = self._improve(entry.baseline.graph, entry.weights, entry.sample)
            with torch.no_grad():
                want = entry.baseline.run(*entry.sample)
                difference = disagreement(better.run(*entry.sample), want, self.settings.rtol)
        except Exception as e:
            text = f"{e.what}: {e.because}" if isinstance(e, HotfuseError) else f"{type(e).__name__}: {e}"
            self.log.decide(Action.REFUSE, Why.NOT_COMPILED, name, tier=1, what=text.strip(": ").splitlines()[0][:500])
            return
        if difference:
            self.log.decide(Action.REFUSE, Why.MISMATCH, name, tier=better.tier, because=difference)
            return
        trial = race(entry.baseline.run, better.run, entry.sample, self.settings.race_s)
        evidence = {"tier": better.tier, "us_before": round(trial.old_us, 1), "us_after": round(trial.new_us, 1),
                    "rounds": trial.rounds}
        if not trial.won:
            self.log.decide(Action.REFUSE, Why.NOT_FASTER, name, **evidence)
            return
        with self._lock:
            same = versions == [t._version for t in entry.weights.values() if not t.is_inference()]
            if self.closed or generation != self._generation or not same:
                self.log.decide(Action.REFUSE, Why.WEIGHTS_CHANGED, name, tier=better.tier)
                return
            entry.heat = 0
            entry.plan = better
        self.log.decide(Action.DEPLOY, Why.FASTER, name, **evidence)

    def _watching(self, watch: Watch) -> None:
        """Before anything is deployed, the newest watch is the one that counts."""
        with self._lock:
            if not any(site.entries for site in self.sites.values()):
                self._watch = watch

    # --- changes ---------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        self.log.decide(
            Action.NOTICE if change is Change.VALUES else Action.DROP,
            Why.WEIGHTS_CHANGED if change is Change.VALUES else Why.MODEL_CHANGED, self.model.name,
        )
        if change is not Change.MODEL:
            for site in self.sites.values():
                for entry in site.entries:  # copies of weights are stale; the baseline reads them live
                    if entry.plan is not entry.baseline:
                        self._tally.mine.deopts += 1
                        entry.plan, entry.heat = entry.baseline, 0
            return
        with self._lock:
            self._generation += 1
            self._watch = None
            if any(site.entries for site in self.sites.values()):
                self._captures = 0  # the budget bounds fruitless captures, not a model that is updated for years
            self._drop_all()
            for site in self.sites.values():
                site.groups = {k: g for k, g in site.groups.items() if g.pending}
                for group in site.groups.values():
                    group.tried.clear()

    def _drop_all(self) -> None:
        for site in self.sites.values():
            self._tally.mine.deopts += len(site.entries)
            site.entries = ()

    def _withdraw(self, site: Site, entry: Entry, error: Exception) -> None:
        """A plan that raised is dropped; the call goes on in the model's own code, which may raise the same."""
        first = str(error).strip().splitlines()
        self.log.decide(Action.DROP, Why.RUN_FAILED, self.model.name, error=f"{type(error).__name__}: "
                        f"{first[0][:200] if first else ''}")
        self._tally.mine.deopts += 1
        if entry.plan is not entry.baseline:
            entry.plan = entry.baseline
            return
        with self._lock:
            site.entries = tuple(e for e in site.entries if e is not entry)

    # --- control ---------------------------------------------------------------------------------

    def _done(self, group: Group) -> None:
        group.pending = False
        self._finished()

    def _finished(self) -> None:
        with self._idle:
            self._pending -= 1
            self._idle.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Until no background work is pending; True if drained in time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending <= 0, timeout)

    def counts(self) -> dict[str, int]:
        """Call counters over all threads."""
        return total(self._everyone)

    def close(self) -> None:
        """Drop every plan; later calls run the model's own code."""
        with self._lock:
            self.closed = True
            self._watch = None
            for site in self.sites.values():
                site.entries = ()

    def after_fork(self) -> None:
        """In a forked child: what was pending belongs to the parent."""
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._pending = 0
        for site in self.sites.values():
            for group in site.groups.values():
                group.pending = False


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_ENGINES):
        engine.after_fork()


os.register_at_fork(after_in_child=_after_fork)
