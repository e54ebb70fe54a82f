# pyright: reportPrivateUsage=false
# Torch has no public question for its dispatch modes.
"""The engine: serves a model, captures it beside, proves the graph, and takes it over.

A call never waits: it runs in a captured plan whose guard holds, or in the model's own code. Some calls are looked at: timed,
noted as samples, and asked whether their plan has earned a better one (`improve`). The engine knows no compiler and no front
end: both come in as functions, so tests drive it with fakes.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hotfuse.analysis.call_facts import fact_text, facts_of
from hotfuse.base.debug import CALLS, say
from hotfuse.base.errors import CallFault, CaptureError, HotfuseError, InputError
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.settings import Settings
from hotfuse.base.structure import NUMBER, TENSOR, Spec, builder, describe, flatten
from hotfuse.frontends.captured import CallSpec, Captured
from hotfuse.runtime.budget import Held, victims
from hotfuse.runtime.check import failed
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.guards import compile_signature
from hotfuse.runtime.improve import Compile, Improve, Improver
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.record import Recorder
from hotfuse.runtime.samples import Samples, made_up, snapshot
from hotfuse.runtime.site import Entry, Group, Site, specs_of
from hotfuse.runtime.tally import Counts, Everyone, Tally
from hotfuse.runtime.tiers import interval
from hotfuse.runtime.verify import disagreement
from hotfuse.runtime.watch import Change, Watch
from hotfuse.runtime.watcher import Watcher

MAX_SITES = 64
RECORDED = 256
"""Calls looked at between two writes of what was seen to the profile store."""
MAX_TRIES = 3
"""Captures of one kind of call that may fail for a passing reason before it is given up."""
_TENSORS = {torch.Tensor, nn.Parameter}
_C = torch._C


def _meaning_changed() -> bool:
    """Whether the caller changed what torch ops mean."""
    return bool(_C._is_any_autocast_enabled() or _C._len_torch_function_stack() or _C._len_torch_dispatch_stack())


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


Submit = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class Sample:
    """A real call: copies of what went in and what came out."""

    inputs: list[torch.Tensor]
    outputs: list[Any]
    out_spec: Spec


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
        self._submit = submit
        self.recorder = Recorder(settings, log)
        self.watcher = Watcher(model.name, settings, self.beside, log)
        self._improver = Improver(self, compile, improve) if improve is not None and settings.tiers >= 1 else None
        self.sites: dict[Spec, Site] = {}
        self._plain: dict[int | tuple[Any, ...], Site] = {}
        """Sites of calls whose arguments are tensors and nothing around them, by how many and by what names."""
        self._watch: Watch | None = None
        self.generation = 0
        """Grows whenever the model is no longer the one that was captured."""
        self._captures = 0
        self._exhausted = False
        self._unsupported = ""
        self._clock = itertools.count(1)
        self._keys = itertools.count()
        self._everyone = Everyone()
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
        return self.serve(args, kwargs)

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, for callers that have the arguments as they are kept."""
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
        """A call whose arguments are tensors and nothing around them is at its site with one look-up."""
        leaves = (*args, *kwargs.values()) if kwargs else args
        site = self._plain.get((len(args), *kwargs) if kwargs else len(args))
        if site is not None:
            return self._serve_at(site, leaves, args, kwargs, plain=False)
        if not _TENSORS.issuperset(map(type, leaves)):
            return self._serve_nested(args, kwargs)
        spec = flatten((args, kwargs))[1]
        if (site := self.sites.get(spec)) is None:
            return self._unmet(spec, leaves, args, kwargs)
        self._plain[(len(args), *kwargs) if kwargs else len(args)] = site
        return self._serve_at(site, leaves, args, kwargs, plain=True)

    def _serve_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counts = self._tally.mine
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
        if not _TENSORS.issuperset(map(type, leaves)):
            counts.module_calls += 1
            return self.model.call(*args, **kwargs)
        if (site := self.sites.get(spec)) is None:
            return self._unmet(spec, leaves, args, kwargs)
        return self._serve_at(site, leaves, args, kwargs, plain=True)

    def _unmet(self, spec: Spec, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A structure that no call has had so far."""
        counts = self._tally.mine
        if _meaning_changed():
            counts.module_calls += 1
            return self.model.call(*args, **kwargs)
        return self._own_code(spec, leaves, args, kwargs, counts)

    def _serve_at(
        self, site: Site, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, plain: bool
    ) -> Any:
        """`plain` says that all leaves are known to be tensors; a native decision finds out by itself."""
        tally = self._tally
        counts = tally.mine
        if _C._is_any_autocast_enabled() or _C._len_torch_function_stack() or _C._len_torch_dispatch_stack():
            if not plain and not _TENSORS.issuperset(map(type, leaves)):
                return self._serve_nested(args, kwargs)
            counts.module_calls += 1
            return self.model.call(*args, **kwargs)
        cache = site.caches.get(torch.is_grad_enabled())
        slot = tally.slot
        outer = slot.epoch
        slot.epoch = outer or epochs.now  # from here on nothing this call may find is freed
        try:
            table = cache.table if cache is not None else None
            if not plain and (table is None or not table.native) and not _TENSORS.issuperset(map(type, leaves)):
                return self._serve_nested(args, kwargs)
            if table is not None:
                found = table.select(*leaves)
                route = table.routes[found] if found >= 0 else None
                if route is None:
                    if not plain and not _TENSORS.issuperset(map(type, leaves)):
                        return self._serve_nested(args, kwargs)
                    counts.guard_misses += 1
                elif self._fits(entry := route.entry, leaves):
                    plan, sizes = route.version, route.signature
                    if plan is None or sizes is None or entry.versions.get(sizes) is not plan:  # it may just have been withdrawn
                        plan = entry.plan
                    number = entry.calls = entry.calls + 1
                    try:
                        outs = plan.run(*leaves) if number < entry.next_look else self._looked_at(site, entry, plan, leaves)
                    except Exception as e:
                        return self._answered_instead((site, entry, plan, e), leaves, args, kwargs, counts)
                    if plan.tier == 1:
                        counts.tier1_calls += 1
                    elif plan.tier:
                        counts.tier2_calls += 1
                    else:
                        counts.tier0_calls += 1
                    entry.last_used = next(self._clock)
                    return outs[0] if entry.bare else entry.rebuild(outs)
        finally:
            slot.epoch = outer
        return self._own_code(site.spec, leaves, args, kwargs, counts)

    def _answered_instead(
        self, failed: tuple[Site, Entry, Plan, Exception], leaves: Sequence[Any], args: tuple[Any, ...],
        kwargs: dict[str, Any], counts: Counts,
    ) -> Any:
        """A plan raised: the model's own code answers. Where that raises too, or an index pointed nowhere, the call is to blame."""
        site, entry, plan, error = failed
        try:
            result = self._own_code(site.spec, leaves, args, kwargs, counts)
        except Exception:
            self.log.count("call_faults")
            raise
        if isinstance(error, CallFault):
            self.log.count("call_faults")
        else:
            self._withdraw(site, entry, plan, error)
        return result

    def _fits(self, entry: Entry, leaves: Sequence[torch.Tensor]) -> bool:
        """What a call must find besides its tensors: the model unchanged, and nothing asked for that a plan does not do."""
        watch = self._watch
        if watch is not None and not watch.unchanged() and (change := watch.check()) is not Change.NONE:
            self._changed(change, watch)
            if change is Change.MODEL:
                return False
        return entry.default_dtype is torch.get_default_dtype() and not (
            entry.grad_regions and torch.is_grad_enabled() and self._wants_grad(leaves)
        )

    def _looked_at(self, site: Site, entry: Entry, plan: Plan, leaves: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Serve a call and learn from it: its time, its sizes, and whether anything should change."""
        number = entry.calls
        since, entry.looked = max(1, number - entry.looked), number
        began = self.log.now()
        if number >= entry.sampler.at:
            outs, spent = self.watcher.run(entry.key, number, plan, entry.baseline, entry.weights, leaves)
        else:
            begin = time.perf_counter()
            outs = plan.run(*leaves)
            spent = time.perf_counter() - begin
        self.log.span("calls", f"tier {plan.tier}", began, call=number)
        self._tally.mine.looked_at += 1
        entry.heat += since
        entry.seconds += spent * since
        entry.next_look = min(number + interval(entry.heat, self.settings.watch_rate, spent), max(number + 1, entry.sampler.at))
        if self.settings.debug >= CALLS:
            entry.next_look = number + 1
            say(CALLS, CALLS, lambda: f"call {number} of {self.model.name}: tier {plan.tier}, {spent * 1e6:.1f} us")
        signature = entry.signature(*leaves)
        entry.samples.note(signature, leaves)
        if self._improver is not None:
            self._improver.consider(site, entry, plan, signature, spent)
        if entry.heat >= self.settings.hot_calls:
            for job in (*site.soft(), *(self._watch.soft() if self._watch is not None else ())):
                self.beside(job)
        if self.recorder.on and entry.samples.taken % RECORDED == 0:
            self.beside(lambda: self.watcher.record(entry.key, entry.baseline.graph, self.recorder))
        return outs

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
        inputs = [snapshot(t) for t in leaves]
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
        if any(t.is_neg() or t.is_conj() for t in leaves):  # their memory holds other numbers than they do: no guard takes them
            self.log.count("lazy_inputs")
            return None
        if (watch := self._watch) is not None and (change := watch.check()) is not Change.NONE:
            self._changed(change, watch)  # what was refused may be possible now
        with self._lock:
            site = self.sites.get(spec)
            if site is None:
                if len(self.sites) >= MAX_SITES:
                    self.log.count("structures_over_limit")
                    return None
                site = self.sites[spec] = Site(spec, self.settings.max_entries)
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
        generation = self.generation
        done = self.model.capture(site.spec, call, self._watching)
        graph = done.captured.graph
        plan = self._compile(graph, done.weights)
        facts = facts_of(graph, tuple(t.is_contiguous() for t in sample.inputs))
        if (wrong := failed(facts, sample.inputs)) is not None:
            raise CaptureError("the captured graph excludes the very call it was captured for", because=fact_text(wrong))
        bare = sample.out_spec is TENSOR or sample.out_spec is NUMBER
        symbols, signature = compile_signature(graph)
        samples = Samples(self.settings.sample_bytes, snapshot if self.settings.keep_inputs else made_up)
        samples.note(signature(*sample.inputs), sample.inputs)
        key = next(self._keys)
        entry = Entry(
            key, facts, plan, plan, done.weights, builder(sample.out_spec), bare, call.grad_mode, done.captured.grad_regions,
            torch.get_default_dtype(), symbols, signature, samples, self.watcher.watch(key), done.captured.notes,
        )
        with torch.no_grad():
            difference = disagreement(plan.run(*sample.inputs), sample.outputs, self.settings.rtol)
        if difference:
            raise CaptureError("the captured graph disagrees with the model", because=difference, why=Why.MISMATCH)
        with self._lock:
            if self.closed:
                return
            if generation != self.generation or not done.watch.same_now():
                raise CaptureError("the model changed while it was captured", why=Why.MODEL_CHANGED)
            if self._watch is not None and (change := self._watch.check()) is not Change.NONE:
                if change is Change.MODEL:
                    self._drop_all()  # plans of an older model, which no call has met since
                else:
                    self._demote_all()  # their copies of weights are older than what the new watch takes as given
            self._watch = done.watch
            gone = site.admit(entry)
        for cold in gone:
            self.watcher.forget(cold.key)
            self.log.decide(Action.DROP, Why.TOO_MANY, self.model.name, calls=cold.calls)
        self.log.decide(Action.DEPLOY, Why.VERIFIED, self.model.name, tier=0, nodes=len(graph.nodes),
                        partitions=len(plan.artifacts))

    def _watching(self, watch: Watch) -> None:
        """Before anything is deployed, the newest watch is the one that counts."""
        with self._lock:
            if not any(site.entries for site in self.sites.values()):
                self._watch = watch

    # --- changes ---------------------------------------------------------------------------------

    def _changed(self, change: Change, watch: Watch) -> None:
        self.log.decide(
            Action.NOTICE if change is Change.VALUES else Action.DROP,
            Why.WEIGHTS_CHANGED if change is Change.VALUES else Why.MODEL_CHANGED, self.model.name,
        )
        if change is not Change.MODEL:
            with self._lock:  # nor may a plan be deployed meanwhile that was made of older weights
                observed = watch.observe()
                self._demote_all()
                watch.accept(observed)  # not before: calls beside must not take a stale plan for a good one
            return
        with self._lock:
            self.generation += 1
            self._watch = None
            if any(site.entries for site in self.sites.values()):
                self._captures = 0  # the budget bounds fruitless captures, not a model that is updated for years
            self._drop_all()
            for site in self.sites.values():
                site.groups = {k: g for k, g in site.groups.items() if g.pending}
                for group in site.groups.values():
                    group.tried.clear()

    def _demote_all(self) -> None:
        """Copies of weights are stale; the baselines read them live."""
        for site in list(self.sites.values()):
            for entry in site.entries:
                self.demote(site, entry)

    def _drop_all(self) -> None:
        for site in self.sites.values():
            self._tally.mine.deopts += len(site.entries)
            for entry in site.entries:
                self.watcher.forget(entry.key)
            site.clear()

    def demote(self, site: Site, entry: Entry) -> None:
        """Back to the baseline, and a fresh start for what was refused."""
        if self._to_baseline(site, entry):
            self._tally.mine.deopts += 1
        entry.cool()
        entry.refused.clear()

    def _to_baseline(self, site: Site, entry: Entry) -> bool:
        """Whether there was anything above it."""
        old = [p for p in (entry.plan, *entry.versions.values()) if p is not entry.baseline]
        entry.plan, entry.bets = entry.baseline, {}
        site.remove_versions(entry)
        for plan in old:
            epochs.retire(plan)
        self.watcher.keep_only(entry.key, [entry.baseline])
        return bool(old)

    def fit(self, keep: Plan) -> None:
        """Let go of the least recently used compiled plans until the rest fits the memory allowed; never of `keep`."""
        held: list[Held[tuple[Site, Entry, Plan]]] = []
        for site in list(self.sites.values()):
            for entry in site.entries:
                for plan in dict.fromkeys((entry.plan, *entry.versions.values())):
                    if plan.tier:
                        size = plan.memory.constants + plan.memory.arena
                        held.append(Held((site, entry, plan), size, entry.last_used if plan is not keep else 1 << 62))
        for site, entry, plan in victims(held, self.settings.code_bytes):
            if plan is keep:
                continue
            self.log.decide(Action.DROP, Why.TOO_MUCH_MEMORY, self.model.name, tier=plan.tier, calls=entry.calls,
                            bytes=plan.memory.constants + plan.memory.arena)
            entry.refuse(plan, "the memory for compiled plans is full")
            if plan is entry.plan:
                entry.plan, entry.bets = entry.baseline, {}
            for signature in [s for s, p in entry.versions.items() if p is plan]:
                site.remove_version(entry, signature)
            self.watcher.keep_only(entry.key, [entry.baseline, entry.plan, *entry.versions.values()])
            epochs.retire(plan)

    def _withdraw(self, site: Site, entry: Entry, plan: Plan, error: Exception) -> None:
        """A plan that raised where the model's own code does not is dropped."""
        first = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {first[0][:200] if first else ''}"
        self.log.decide(Action.DROP, Why.RUN_FAILED, self.model.name, tier=plan.tier, error=text)
        self._tally.mine.deopts += 1
        if plan is not entry.baseline:
            entry.refuse(plan, text)
            self._to_baseline(site, entry)
            return
        with self._lock:
            site.remove(entry)
        self.watcher.forget(entry.key)

    # --- control ---------------------------------------------------------------------------------

    def beside(self, job: Callable[[], None]) -> None:
        """Run a job in the background, or here and now where the settings say so; `wait` waits for it."""
        with self._idle:
            self._pending += 1

        def counted() -> None:
            try:
                job()
            finally:
                self._finished()

        if self.settings.capture == "inline":
            counted()
        else:
            self._submit(counted)

    @contextmanager
    def exchanging(self, generation: int) -> Generator[bool]:
        """The right to exchange plans; False if the model has changed since."""
        with self._lock:
            yield not self.closed and generation == self.generation

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
        return self._everyone.total()

    def watch_stats(self) -> dict[str, Any]:
        """How calls make sure that the model is the one that was captured."""
        watch = self._watch
        return watch.stats() if watch is not None else {}

    def close(self) -> None:
        """Drop every plan; later calls run the model's own code. What was seen is kept in the profile store."""
        if self.recorder.written:  # there is a store, and a model that lived long enough to be worth a row
            for entry in [e for site in self.sites.values() for e in site.entries]:
                self.watcher.record(entry.key, entry.baseline.graph, self.recorder)
        with self._lock:
            self.closed = True
            self._watch = None
            for site in self.sites.values():
                site.clear()
        self.watcher.close()

    def after_fork(self) -> None:
        """In a forked child: what was pending belongs to the parent."""
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._pending = 0
        for site in self.sites.values():
            for group in site.groups.values():
                group.pending = False
            for entry in site.entries:
                entry.improving = False  # whoever was at it is in the parent


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_ENGINES):
        engine.after_fork()


os.register_at_fork(after_in_child=_after_fork)
