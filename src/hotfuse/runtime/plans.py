"""The plans of one model: where they are kept, who may exchange them, and what takes them away.

Serving reads them without a lock. Capturing and improving exchange them under a lock, and only while the model is the one they
were made of: every change of the model increments `generation`. A withdrawn plan is freed when no call can be in it (`epochs`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, Protocol, runtime_checkable

import torch

from hotfuse.base.events import Action, EventLog, Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.base.structure import Spec
from hotfuse.frontends.captured import CallSpec, Captured
from hotfuse.runtime.background import Job
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.observe.call_sampler import CallSampler
from hotfuse.runtime.observe.examine import Examiner
from hotfuse.runtime.observe.record import Recorder
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.serve.budget import MemoryHolder, victims
from hotfuse.runtime.site import Entry, Site
from hotfuse.runtime.tally import Tally
from hotfuse.runtime.tierup.audit import Audit
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange
from hotfuse.runtime.weights.originals import Late, Originals, copied
from hotfuse.runtime.weights.release import Released
from hotfuse.runtime.weights.scrubber import scrubber
from hotfuse.runtime.whole_calls import SlowerInUse


@dataclass(frozen=True, slots=True)
class Capture:
    """A captured graph with the live tensors it runs on, and the watch over them."""

    captured: Captured
    weights: Mapping[str, torch.Tensor]
    watch: ModelGuard
    calls: CallSpec | None = None
    """The calls that the graph is for, where an earlier process captured it."""

CALLS_A_CAPTURE, MAX_EARNED = 256, 8
"""Calls in plans that pay for one capture more, and how many times the limit there may be in all. The limit is for models whose
captures serve nobody; a program that generates in many ways (beams, batches, caches of several kinds) has more than sixteen kinds
of calls, and uses all of them."""
MAX_SHORT_LIVED = 4
"""Changes in a row that renew the limit although plans of the model before had answered fewer calls than that."""
AWAITED_AFTER, MAX_AWAITED_S = 2, 32.0
"""From so many such changes on, nothing is captured for twice as long as the model had lasted, and at most so long: a capture takes
half a second of Python beside calls, and one follows the other while a variable that the code reads changes in every call."""


class Servable(Protocol):
    """What an engine serves."""

    name: str

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own code."""
        ...

    def watched(self) -> ModelGuard:
        """What notices that the model changed; raises CaptureError where its code does what no recording of kernels would."""
        ...

    def prepare(self) -> None:
        """Have the worker that captures ready; may take seconds, in which more calls show what varies."""
        ...

    def capture(self, spec: Spec, call: CallSpec, watching: Callable[[ModelGuard], None]) -> Capture:
        """A graph for calls like these; may take seconds; raises CaptureError.

        `watching` is told what to watch before anything can fail, so that a refused model that changes is tried again.
        """
        ...


@runtime_checkable
class HasState(Protocol):
    """A model whose calls have tensors in front that are its own."""

    state_count: int
    """How many."""


class Plans:
    """All plans of one model, and what they share."""

    def __init__(
        self, model: Servable, settings: Settings, log: EventLog, tally: Tally, in_background: Callable[[Job], None]
    ) -> None:
        self.model = model
        self.settings = settings
        self.log = log
        self.in_background = in_background
        """Runs a job in the background."""
        self.released = Released(settings.folder, model.name, log) if settings.release_weights else None
        """Weights that plans have copies of, where their memory may be given back."""
        self.recorder = Recorder(settings, log)
        self.call_sampler = CallSampler(model.name, settings, in_background, log)
        self.examiner = Examiner(settings, log, self.recorder, self.call_sampler)
        self.sites: dict[Spec, Site] = {}
        self.site_came: Callable[[], None] = lambda: None
        """Told of every new site."""
        self.watch: ModelGuard | None = None
        self.originals = Originals(settings)
        """What compares the memory of weights that plans have copies of."""
        self.generation = 0
        """Grows whenever the model is no longer the one that was captured."""
        self.captures = 0
        """Captures since the model was last another one: the budget bounds fruitless ones."""
        self.closed = False
        self.short_lived = 0
        """Changes of the model in a row whose plans had answered few calls."""
        self.changes = ""
        """What changed last."""
        self._changed_at, self._awaited_until = monotonic(), 0.0
        """When that was, and from when on the model may be captured again."""
        self._in_vain = 0
        """Changes of the model in a row behind which no plan had served, since a capture was refused."""
        self.lock = threading.Lock()
        self._tally = tally

    def may_capture(self) -> bool:
        """Whether another capture is paid for: the first ones are given, later ones by calls that plans of earlier ones took."""
        most = self.settings.max_captures
        if self.captures < most:
            return True
        served = sum(e.calls for site in list(self.sites.values()) for e in site.entries)
        return self.captures < min(MAX_EARNED * most, most + served // CALLS_A_CAPTURE)

    def awaits_change(self) -> bool:
        """Whether the model has changed so often that the next change is waited for, and nothing is captured meanwhile."""
        return self.short_lived > AWAITED_AFTER and monotonic() < self._awaited_until

    def changes_itself(self, *, counted: bool = True) -> list[str]:
        """That the model is another one after a few calls, time and again; empty where it is not. A log that says everything once
        wants it without the count."""
        if self.short_lived < 2:
            return []
        times = f"{self.short_lived} times in a row" if counted else "time and again"
        return [f"the model changed {times} after a few calls ({self.changes}): what it keeps from call "
                "to call should be an argument and a result, or an object among them"]  # fmt: skip

    @contextmanager
    def exchanging(self, generation: int) -> Generator[bool]:
        """The right to exchange plans; False if the model has changed since."""
        with self.lock:
            yield not self.closed and generation == self.generation

    def changed(self, change: WeightChange, watch: ModelGuard) -> None:
        """A call found the model to be another one than its plans were made of."""
        if change is WeightChange.UNSEEN:
            self.written_unseen(watch.late or Late(0, 0.0))
            return
        if change is not WeightChange.MODEL:
            self.log.decide(Action.NOTICE, Why.WEIGHTS_CHANGED, self.model.name)
            with self.lock:  # nor may a plan be deployed meanwhile that was made of older weights
                observed = watch.observe()
                self.demote_all()
                watch.accept(observed)  # not before: calls beside must not take a stale plan for a good one
            return
        if self._tried_again_later():
            return
        self.changes = watch.difference()
        self.log.decide(Action.DROP, Why.MODEL_CHANGED, self.model.name, what=self.changes)
        with self.lock:
            self.generation += 1
            self.watch = None
            served = sum(e.calls for site in self.sites.values() for e in site.entries)
            self.short_lived = 0 if served >= CALLS_A_CAPTURE else self.short_lived + 1
            now = monotonic()
            lasted, self._changed_at = now - self._changed_at, now
            self._awaited_until = now + min(2 * lasted, MAX_AWAITED_S) if lasted < MAX_AWAITED_S else now
            if any(site.entries for site in self.sites.values()) and self.short_lived <= MAX_SHORT_LIVED:
                self.captures = 0  # the budget is not for a model that is updated for years, but for one that changes itself
            self.drop_all()
            for site in self.sites.values():
                site.groups = {k: g for k, g in site.groups.items() if g.pending}
                for group in site.groups.values():
                    group.tried.clear()

    def _tried_again_later(self) -> bool:
        """Whether a change of the model leaves refused captures alone. One may make them possible; those of a model that changes
        itself in every call, and is refused for that, do not, so each further one is tried after twice as many changes.
        """
        sites = list(self.sites.values())
        if any(s.entries for s in sites) or not any(g.refused for s in sites for g in list(s.groups.values())):
            self._in_vain = 0
            return False
        self._in_vain += 1
        return bool(self._in_vain & (self._in_vain - 1))

    def written_unseen(self, late: Late) -> None:
        """Weights are no longer what copies were made of, and nothing but their memory shows it."""
        with self.lock:
            if self.closed or not self.originals.bytes:
                return  # another call noticed it too
            self.demote_all()
        self.originals.noticed += 1
        self.log.decide(Action.NOTICE, Why.WEIGHTS_WRITTEN_UNSEEN, self.model.name, at_most_calls=late.calls, at_most_ms=late.ms)

    def watch_with(self, watch: ModelGuard) -> None:
        """Calls ask this watch from now on; called with the lock."""
        watch.originals = self.originals
        self.watch = watch

    def before_copying(self, entry: Entry) -> int:
        """Take checksums of weights that a plan will have copies of; what to ask `still_as_copied` with. For the background."""
        return self.originals.take(self._owned(entry).values())

    def still_as_copied(self, entry: Entry, taken: int) -> bool:
        """Whether the weights are what they were before a plan was made; if not, other plans with copies are gone too."""
        if self.originals.still(taken, self._owned(entry).values()):
            return True
        self.written_unseen(Late(0, 0.0))
        self.originals.forget()
        return False

    def compare_copies(self) -> None:
        """Plans were exchanged, or race on live calls: what they have copies of is compared with its checksums from now on."""
        with self.lock:
            if self.closed:
                return
            wanted: list[torch.Tensor] = []
            for entry in [e for site in list(self.sites.values()) for e in site.entries]:
                racing = () if (contest := entry.contest) is None else (contest.new,)
                plans = [p for p in dict.fromkeys((entry.plan, *entry.versions.values(), *racing)) if p.tier]
                wanted += copied(self._owned(entry), [p.live for p in plans]) if plans else []
            self.originals.compare(wanted, self.released.ranges if self.released is not None else ())
        if wanted:
            scrubber.join(self)

    def _owned(self, entry: Entry) -> dict[str, torch.Tensor]:
        return {} if self.watch is None else self.watch.owned(entry.weights)

    def demote_all(self) -> None:
        """Copies of weights are stale; the baselines read them live."""
        self.originals.forget()
        for site in list(self.sites.values()):
            for entry in site.entries:
                self.demote(site, entry)

    def release(self, entry: Entry) -> None:
        """A plan was deployed: weights that nobody reads any more may go. For the background."""
        if self.released is not None:
            serving = [p for s in list(self.sites.values()) for e in s.entries for p in (e.plan, *e.versions.values())]
            self.released.after(serving, entry.weights)

    def drop_all(self) -> None:
        """No plan is of use any more."""
        self.originals.forget()
        if self.released is not None:
            self.released.forget()
        for site in self.sites.values():
            self._tally.mine.deopts += len(site.entries)
            for entry in site.entries:
                self.call_sampler.forget(entry.key)
            site.clear()

    def demote(self, site: Site, entry: Entry) -> None:
        """Back to the baseline, and a fresh start for what was refused."""
        if self._to_baseline(site, entry):
            self._tally.mine.deopts += 1
        contest = entry.contest
        entry.reset_hotness()
        entry.refused.clear()
        if contest is not None and contest.new is entry.baseline:  # it reads weights live, as the own code does, which it is beside
            entry.open(contest)

    def _to_baseline(self, site: Site, entry: Entry) -> bool:
        """Whether there was anything above it."""
        old = [p for p in (entry.plan, *entry.versions.values()) if p is not entry.baseline]
        entry.plan, entry.bets, entry.layers = entry.baseline, {}, ()
        site.remove_versions(entry)
        for plan in old:
            epochs.retire(plan)
        self.call_sampler.keep_only(entry.key, [entry.baseline])
        return bool(old)

    def let_go(self) -> None:
        """What no call is routed to any more is forgotten: of every entry, since a new route may cost another's, or all of it."""
        for cold in [e for site in list(self.sites.values()) for e in site.evicted()]:
            self.call_sampler.forget(cold.key)
            self.log.decide(Action.DROP, Why.TOO_MANY, self.model.name, calls=cold.calls)
        for entry in [e for site in list(self.sites.values()) for e in site.entries]:
            self.call_sampler.keep_only(entry.key, [entry.baseline, entry.plan, *entry.versions.values()])

    def evict_to_budget(self, keep: Plan) -> None:
        """Let go of the least recently used compiled plans until the rest fits the memory allowed; never of `keep`."""
        held: list[MemoryHolder[tuple[Site, Entry, Plan]]] = []
        for site in list(self.sites.values()):
            for entry in site.entries:
                for plan in dict.fromkeys((entry.plan, *entry.versions.values())):
                    if plan.tier:
                        size = plan.memory.constants + plan.memory.arena
                        held.append(MemoryHolder((site, entry, plan), size, entry.last_used if plan is not keep else 1 << 62))
        for site, entry, plan in victims(held, self.settings.code_bytes):
            if plan is keep:
                continue
            self.log.decide(Action.DROP, Why.TOO_MUCH_MEMORY, self.model.name, tier=plan.tier, calls=entry.calls,
                            bytes=plan.memory.constants + plan.memory.arena)
            entry.refuse(plan, "the memory for compiled plans is full")
            if plan is entry.plan:
                entry.plan, entry.bets, entry.layers = entry.baseline, {}, ()
            for signature in [s for s, p in entry.versions.items() if p is plan]:
                site.remove_version(entry, signature)
            epochs.retire(plan)
        self.let_go()

    def withdraw(self, site: Site, entry: Entry, plan: Plan, error: Exception) -> None:
        """A plan that raised where the model's own code does not is dropped."""
        first = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {first[0][:200] if first else ''}"
        self.log.decide(Action.DROP, Why.RUN_FAILED, self.model.name, tier=plan.tier, error=text)
        self._tally.mine.deopts += 1
        if plan is not entry.baseline:
            entry.refuse(plan, text)
            self._to_baseline(site, entry)
            return
        with self.lock:
            site.remove(entry)
        self.call_sampler.forget(entry.key)

    def withdraw_slower(self, site: Site, entry: Entry, audit: Audit) -> None:
        """A plan that the audit found to be slower than what it replaced is dropped; it may be tried again later."""
        with self.lock:
            version, found = audit.version, audit.state()
            plan = entry.plan if version is None else entry.versions.get(version)
            if plan is None or not audit.is_of(plan) or found is None:  # it went meanwhile
                return
            reference = entry.reference(version)
            against = "the model's own code" if reference is None else f"tier {reference.tier}"
            self.log.decide(
                Action.DROP, Why.REGRESSED, self.model.name, tier=plan.tier, against=against, ratio=round(found.ratio, 3),
                low=round(found.low, 3), us_plan=round(found.plan_us, 1), us_reference=round(found.reference_us, 1),
                rounds=found.rounds, calls=entry.calls,
            )
            self._lost(plan, found.reference_us, found.plan_us)
            if plan is entry.baseline:
                self._own_is_faster(entry, 1 / found.ratio)
                return
            entry.refuse(plan, f"it took {found.ratio:.2f} times as long as {against}", later=True)
            if version is not None:
                site.remove_version(entry, version)
                epochs.retire(plan)
                self.call_sampler.keep_only(entry.key, [entry.baseline, entry.plan, *entry.versions.values()])
            else:
                self._to_baseline(site, entry)
                entry.reset_hotness()

    def withdraw_slower_in_use(self, site: Site, entry: Entry, plan: Plan, found: SlowerInUse) -> None:
        """A plan with which whole calls take longer than in the model's own code is dropped; it may be tried again later."""
        with self.lock:
            if plan is not entry.plan:  # it went meanwhile
                return
            own_us, plan_us = found.own_s * 1e6, found.plan_s * 1e6
            self.log.decide(
                Action.DROP, Why.REGRESSED, self.model.name, tier=plan.tier, against="the model's own code, in whole calls",
                us_plan=round(plan_us, 1), us_reference=round(own_us, 1), rounds=found.rounds, calls=entry.calls,
            )  # fmt: skip
            self._lost(plan, own_us, plan_us)
            if plan is not entry.baseline:
                entry.refuse(plan, f"calls as a whole took {plan_us:.1f} us instead of {own_us:.1f}", later=True)
                self._to_baseline(site, entry)
            self._own_is_faster(entry, own_us / plan_us)

    def _lost(self, plan: Plan, us_before: float, us_after: float) -> None:
        """A plan goes because it was slower: nor does the next process begin with it."""
        self._tally.mine.deopts += 1
        if (recipe := plan.recipe) is not None:
            took = {"us_before": round(us_before, 1), "us_after": round(us_after, 1)}
            self.in_background(lambda: recipe.judged(won=False, evidence=took))

    @staticmethod
    def _own_is_faster(entry: Entry, ratio: float) -> None:
        entry.own, entry.own_ratio = True, min(1.0, ratio)
        entry.reset_hotness()

    def close(self) -> None:
        """Drop every plan; what was seen is kept in the profile store."""
        if self.recorder.written:  # there is a store, and a model that lived long enough to be worth a row
            for entry in [e for site in self.sites.values() for e in site.entries]:
                self.examiner.write(entry)
        with self.lock:
            self.closed = True
            self.watch = None
            self.originals.forget()
            for site in self.sites.values():
                site.clear()
        self.call_sampler.close()
        self.recorder.close()

    def after_fork(self) -> None:
        """In a forked child: the threads that were at work are in the parent."""
        self.lock = threading.Lock()
        self.originals.after_fork()
        if self.originals.bytes:
            scrubber.join(self)
        for site in self.sites.values():
            site.after_fork()
            for group in site.groups.values():
                group.pending = False
            for entry in site.entries:
                entry.improving = entry.examining = False
                entry.samples.after_fork()
