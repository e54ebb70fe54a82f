"""Watching as the engine holds it: which calls are sampled, in which variant of the plan, and what was seen.

    watching = CallSampler(model name, settings, in_background, log)
    sampler = watching.watch(key)                                  # once per captured graph
    if number >= sampler.at:                                       # on the call path
        outs, seconds = watching.run(key, number, plan, baseline, weights, leaves)

Everything that takes longer than a look (linking probes, building a variant, counting costs) happens in background jobs; until
then calls run as they are. Analyzer and probes are shared by all models of the process.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.faults import reason_text
from hotfuse.base.living import Living
from hotfuse.base.settings import Settings
from hotfuse.profile.agent import BUDGET, Agent, Sampler
from hotfuse.profile.analyzer import Analyzer
from hotfuse.profile.names import Names
from hotfuse.profile.shown import watched_text
from hotfuse.profile.snapshot import ControlSeen, GraphSeen, NoticedDrift, Snapshot
from hotfuse.runtime.plan import Plan

if TYPE_CHECKING:
    from hotfuse.runtime.observe.call_notes import RecordValue
    from hotfuse.runtime.observe.instrument import InstrumentedPlan
    from hotfuse.tile.program import Kernel

MAX_VARIANTS = 6
"""Instrumented plans kept per captured graph."""
DEEP = 4
"""Of a plan that hides its branches, at most one sample in so many runs in the baseline."""
TRIES = 2
"""Times that probes are asked for: what stood in the way of the first, a worker that was killed, need not stay there."""
InBackground = Callable[[Callable[[], None]], None]


class Shared:
    """What all models of a process watch with."""

    def __init__(self, analyzer: Analyzer | None = None) -> None:
        self.analyzer = analyzer or Analyzer()
        self.look: RecordValue | None = None
        self.counters: Callable[[], dict[str, int]] = dict
        self.failed = ""
        """Why there are no probes, and will be none."""
        self._asked = False
        self._tries = 0
        self._lock = threading.Lock()

    def want(self, settings: Settings, in_background: InBackground) -> None:
        """Have the probes fetched, once; once more where that failed."""
        with self._lock:
            if self._asked:
                return
            self._asked = True
            self._tries += 1

        def job() -> None:
            from hotfuse.compile.instruments import fetch_probes  # LLVM is loaded when it is first needed

            try:
                probes = fetch_probes(settings)
            except Exception as e:  # whatever it was: models go on unwatched, and `explain` says why
                with self._lock:
                    if self._tries < TRIES:
                        self._asked = False
                    else:
                        self.failed = reason_text(e)
                return
            self.analyzer.use(probes.publish)
            self.analyzer.start()  # not in a call
            self.counters = lambda: {"values_copied": probes.copies, "values_refused": probes.refused}
            self.look = probes.look

        in_background(job)


class _WatchedGraph:
    """One captured graph."""

    def __init__(self, graph: int, sampler: Sampler) -> None:
        self.graph = graph
        self.sampler = sampler
        self.variants: OrderedDict[int, InstrumentedPlan] = OrderedDict()
        self.building: set[int] = set()
        self.number = 0
        self.deep = 0
        """Samples taken in the baseline."""
        self.deep_at = 0
        """The call from which on another one is affordable."""
        self.drifts = 0


class CallSampler:
    """Watches one model."""

    def __init__(
        self, name: str, settings: Settings, in_background: InBackground, log: EventLog, shared: Shared | None = None,
    ) -> None:
        self._name, self._settings, self._in_background, self._log = name, settings, in_background, log
        self._shared = shared or shared_here()
        self.agent = Agent(settings.watch_rate, on=settings.watch)
        self._watched: dict[int, _WatchedGraph] = {}
        self._lock = threading.Lock()
        self._unready = 0
        self._failed = 0
        self._counting = 0
        self.closed = not settings.watch
        self._numbers: set[int] = set()
        """Graphs that the analyzer knows of us."""
        self._told = _listening(weakref.ref(self))
        if settings.watch:
            self._shared.analyzer.on_drift(self._told)
            weakref.finalize(self, _gone, self._shared.analyzer, self._told, self._numbers).atexit = False
        _SAMPLERS.add(self)

    # --- the call path ---------------------------------------------------------------------------

    def watch(self, key: int) -> Sampler:
        """Begin to watch a captured graph; a call compares its number with `at` of what comes back."""
        sampler = self.agent.sampler(key)
        with self._lock:
            if key not in self._watched and not self.closed:
                self._watched[key] = _WatchedGraph(number := self._shared.analyzer.graph(self._name), sampler)
                self._numbers.add(number)
        return sampler

    def run(
        self, key: int, number: int, plan: Plan, baseline: Plan, weights: Mapping[str, Any], leaves: Sequence[Any]
    ) -> tuple[tuple[Any, ...], float]:
        """Serve a call that is due: its outputs, and the seconds such a call takes without watching, as last measured."""
        watched = self._watched.get(key)
        look = self._shared.look
        variant = watched.variants.get(id(plan)) if watched is not None else None
        if watched is None or look is None or variant is None:
            return self._plain(watched, number, plan, baseline, weights, leaves)
        watched.number = number
        sampler = watched.sampler
        if sampler.sampled_ns:
            start = time.perf_counter_ns()
            outs = plan.run(*leaves)
            ns = time.perf_counter_ns() - start
            sampler.compared(number, ns)
            return outs, ns * 1e-9
        sampler.at = number + sampler.interval  # nobody else takes this sample
        publish = self._shared.analyzer.publish
        deep = watched.variants.get(id(baseline)) if variant.hidden and number >= watched.deep_at else None
        if deep is not None and sampler.taken:  # a call in the baseline costs the difference, and has a budget of its own
            done = deep(number, leaves, publish)
            cost = max(0.0, done.ns + done.cost_ns - sampler.call_ns)
            watched.deep_at = number + max(DEEP * sampler.interval, int(cost / (BUDGET / 2 * sampler.call_ns)))
            sampler.total_cost_ns += cost
            watched.deep += 1
            return done.outs, sampler.call_ns * 1e-9
        done = variant(number, leaves, publish)
        sampler.took(number, done.ns + done.cost_ns, done.cost_ns)
        if variant.needs_costs(signature := done.signature):
            shapes = [tuple(t.shape) for t in leaves]
            self._in_background(lambda: variant.work_out(signature, shapes))  # which may wait for long: no results are held by it
        elif kernels := variant.wants():
            self._count(variant, kernels)
        return done.outs, sampler.call_ns * 1e-9

    def _plain(
        self, watched: _WatchedGraph | None, number: int, plan: Plan, baseline: Plan, weights: Mapping[str, Any],
        leaves: Sequence[Any],
    ) -> tuple[tuple[Any, ...], float]:
        """A call without a variant to run in; has one made."""
        if watched is not None:
            self._unready += 1
            if self._shared.failed:
                watched.sampler.off()
            else:
                watched.sampler.later(number)
            self._prepare(watched, plan, weights)
            if plan is not baseline:
                self._prepare(watched, baseline, weights)
        start = time.perf_counter()
        outs = plan.run(*leaves)
        return outs, time.perf_counter() - start

    # --- beside ----------------------------------------------------------------------------------

    def _prepare(self, watched: _WatchedGraph, plan: Plan, weights: Mapping[str, Any]) -> None:
        if self._shared.look is None:
            self._shared.want(self._settings, self._in_background)
            return
        with self._lock:
            if id(plan) in watched.building or id(plan) in watched.variants or self.closed:
                return
            watched.building.add(id(plan))

        def job() -> None:
            look = self._shared.look
            if look is None:
                return
            from hotfuse.runtime.observe.instrument import InstrumentedPlan  # not before a call is to be looked into

            try:
                made = InstrumentedPlan(plan, weights, watched.graph, self._shared.analyzer.names, look)
            except Exception as e:  # the plan serves all the same; it stays among those being built, so it is not tried again
                self._failed += 1
                text = reason_text(e)
                self._log.decide(Action.REFUSE, Why.NOT_COMPILED, self._name, what=f"no instrumented variant: {text}"[:300])
                return
            with self._lock:
                if id(plan) not in watched.building:  # it was withdrawn meanwhile
                    return
                watched.variants[id(plan)] = made
                watched.building.discard(id(plan))
                while len(watched.variants) > MAX_VARIANTS:
                    watched.variants.popitem(last=False)

        self._in_background(job)

    def _count(self, variant: InstrumentedPlan, kernels: Mapping[int, Kernel]) -> None:
        """Have kernels made that count, once per variant; not where background work holds up the call."""
        with self._lock:
            if variant.asked or self._settings.capture == "inline":
                return
            variant.asked = True

        def job() -> None:
            from hotfuse.compile.instruments import fetch_counting  # LLVM is loaded when it is first needed

            try:
                made = fetch_counting(kernels, self._settings)
            except Exception as e:  # the plan is watched as before
                self._failed += 1
                text = reason_text(e)
                self._log.decide(Action.REFUSE, Why.NOT_COMPILED, self._name, what=f"no counting kernels: {text}"[:300])
                return
            self._counting += len(made)
            variant.count_with(made)

        self._in_background(job)

    def drifted(self, drift: NoticedDrift) -> None:
        """The analyzer noticed a change; in its listening thread."""
        with self._lock:
            found = next((w for w in self._watched.values() if w.graph == drift.graph), None)
        if found is None:
            return
        found.drifts += 1
        found.sampler.changed(found.number)
        self._log.decide(
            Action.NOTICE, Why.DRIFT, self._name, value=self._shared.analyzer.names.item_name(drift.graph, drift.item),
            of=drift.metric, distance=round(drift.distance, 3), chance=round(drift.threshold, 3), samples=drift.sample,
        )

    def keep_only(self, key: int, plans: Sequence[Plan]) -> None:
        """Plans that no call of a graph runs in any more let go of their code."""
        watched = self._watched.get(key)
        if watched is not None:
            wanted = {id(p) for p in plans}
            with self._lock:
                for gone in [i for i in watched.variants if i not in wanted]:
                    del watched.variants[gone]
                watched.building &= wanted

    # --- what was seen ---------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """A snapshot of the whole process; `seen` is one graph's part of it."""
        return self._shared.analyzer.snapshot

    def seen(self, key: int) -> GraphSeen | None:
        """What was seen of a captured graph."""
        watched = self._watched.get(key)
        return None if watched is None else self.snapshot.graphs.get(watched.graph)

    def known(self, key: int) -> tuple[int, GraphSeen, Names] | None:
        """A captured graph's number in the records, what was seen of it, and the names of things; None before the first sample."""
        watched, found = self._watched.get(key), self.seen(key)
        return None if watched is None or found is None else (watched.graph, found, self._shared.analyzer.names)

    def outcomes(self, key: int) -> dict[str, ControlSeen]:
        """Which way calls of a captured graph went at its control nodes, by their names; nothing before the first sample."""
        found = self.seen(key)
        return {} if found is None else found.by_name(self._shared.analyzer.names)

    def predictable(self, key: int, kind: str, name: str = "") -> tuple[int, float, int] | None:
        """What is expected of a named value or control node (`shape` needs no name): (value, accuracy, predictions)."""
        watched = self._watched.get(key)
        if watched is None:
            return None
        item = self._shared.analyzer.names.item(watched.graph, name) if kind != "shape" else 0
        return self.snapshot.predictable(kind, (watched.graph, item))

    def drifts(self, key: int) -> int:
        """How often the traffic of a captured graph was seen to change."""
        watched = self._watched.get(key)
        return 0 if watched is None else watched.drifts

    def stats(self) -> dict[str, Any]:
        """Counters: this model's samples, and the process's records."""
        variants = [v for w in list(self._watched.values()) for v in list(w.variants.values())]
        failed = self._failed + sum(v.failed for v in variants)
        return {
            **self.agent.stats(), "samples_not_ready": self._unready, "looks_failed": failed,
            "counting_kernels": self._counting, "looks_uncounted": sum(v.uncounted for v in variants),
            **self._shared.counters(), **self._shared.analyzer.stats(),
        }

    def text(self) -> str:
        """A section of `explain()`."""
        if not self._settings.watch:
            return "watching is switched off by the settings"
        trouble = self._shared.analyzer.given_up or self._shared.failed
        graphs = [w.graph for w in list(self._watched.values())]
        stopped = f"watching stopped: {trouble}\n" if trouble else ""
        return stopped + watched_text(self.snapshot, self._shared.analyzer.names, self.stats(), graphs)

    # --- the end ---------------------------------------------------------------------------------

    def forget(self, key: int) -> None:
        """A captured graph is gone."""
        with self._lock:
            if (gone := self._watched.pop(key, None)) is not None:
                self._numbers.discard(gone.graph)
                self._shared.analyzer.leave([gone.graph])
        self.agent.forget(key)

    def close(self) -> None:
        """Take no more samples; what was seen stays."""
        self.closed = True
        self.agent.off()
        self._shared.analyzer.forget(self._told)
        with self._lock:
            for w in self._watched.values():
                w.variants.clear()

    def after_fork(self) -> None:
        """In a forked child: it watches nothing."""
        self._lock = threading.Lock()
        self.closed = True
        self.agent.after_fork()


def _listening(call_sampler: weakref.ref[CallSampler]) -> Callable[[NoticedDrift], None]:
    """For the analyzer, which outlives every model and must not hold one that nobody closed."""

    def told(drift: NoticedDrift) -> None:
        if (here := call_sampler()) is not None:
            here.drifted(drift)

    return told


def _gone(analyzer: Analyzer, told: Callable[[NoticedDrift], None], graphs: set[int]) -> None:
    """A call sampler is gone, closed or not; may run in the middle of anything, so it takes no lock."""
    analyzer.forget(told)
    analyzer.leave(graphs)


_SAMPLERS: Living[CallSampler] = Living()
_shared: Shared | None = None
_making = threading.Lock()


def shared_here() -> Shared:
    """The process's one analyzer and its probes."""
    global _shared
    with _making:
        if _shared is None:
            _shared = Shared()
        return _shared


def _after_fork() -> None:
    """The analyzer is the parent's; models made in the child from now on may have one of their own."""
    global _shared, _making
    _making = threading.Lock()
    old, _shared = _shared, None
    if old is not None:
        old.analyzer.after_fork()
    for call_sampler in _SAMPLERS:
        call_sampler.after_fork()


def _at_exit() -> None:
    if _shared is not None:
        _shared.analyzer.stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
