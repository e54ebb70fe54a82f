"""A call site: one call structure, the plans captured for it, and what its calls looked like.

A call looks up its plan in the site's inline cache (`dispatch`) and runs wholly in that plan, even if another one is deployed
meanwhile: cache tables, plans and versions are immutable and exchanged by a single reference store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from math import inf
from types import MappingProxyType
from typing import Any

import torch

from hotfuse.analysis.call_facts import Facts, fact_text, sized, stride_order
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import Spec
from hotfuse.frontends.questions.as_traced import AsTraced
from hotfuse.ir.types import ROW_MAJOR
from hotfuse.ops.dense_order import layout_by
from hotfuse.profile.agent import Sampler
from hotfuse.profile.traffic import MeasuredPiece
from hotfuse.runtime.call_gaps import CallGaps
from hotfuse.runtime.call_group import CallGroup
from hotfuse.runtime.concurrency import Callers
from hotfuse.runtime.observe.findings import Finding
from hotfuse.runtime.observe.graph_weights import GraphWeights
from hotfuse.runtime.observe.repeats import InputRepeats
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.samples import CallSamples, Signature
from hotfuse.runtime.serve.dispatch import Case, InlineCache, Job
from hotfuse.runtime.serve.effects import Effects
from hotfuse.runtime.serve.gradients import GradientLink, Pattern
from hotfuse.runtime.serve.other_paths import PathBalance
from hotfuse.runtime.tally import Rest
from hotfuse.runtime.tierup.audit import Audit
from hotfuse.runtime.tierup.bets import BranchBet
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.layers.layer import Layer
from hotfuse.runtime.tierup.objective import Trade
from hotfuse.runtime.whole_calls import FIRST_ROUNDS, IN_DOUBT, WholeCalls
from hotfuse.specialize.table import FUSED, AttemptKey, sizes_key

MISSES_PER_HIT = 4
"""A call that finds no plan takes so many times as long to find that out as a call gains that finds one."""
MISSED_CALLS = 15
"""Calls of a site that found no plan, less those that hits make up for, from which on most go straight to the model's own code."""
LOOKS_IN_VAIN = 64
"""Calls that found no plan and were not to be captured either, one looked at after the other, behind which looks become rarer."""
MAX_REFUSED = 256
"""Attempts of one entry that are remembered as refused: kinds of sizes come and go for as long as a model serves."""
THREADS = 1
"""Where the number of torch's threads is in an entry's stamp."""
RETRY_S, MAX_RETRY_S = 60.0, 3600.0
"""What was refused without certainty, or withdrawn, is tried again after so long, each further time twice as late."""
NOT_KEPT_RETRY_S = 2.0
"""The same of what only lacked a kept call to be proven on: others are kept every few seconds."""
NO_VERSIONS: Mapping[Signature, Plan] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Retry:
    """When an attempt may be made again."""

    at: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class WonRace:
    """A specialization that was deployed."""

    us_before: float
    us_after: float
    at: float
    """Seconds since the epoch."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Entry:
    """What calls must bring and the plans behind it: they travel together.

    `plan` is the slot that a higher tier swaps by one reference store; `baseline` is the proven tier-0 plan behind it.
    `versions` are plans for sizes that recur; each has a route of its own in the inline cache, before the entry's.
    """

    key: int
    facts: Facts
    plan: Plan
    baseline: Plan
    weights: Mapping[str, torch.Tensor]
    rebuild: Callable[[tuple[Any, ...]], Any]
    """What the model returns, of the plan's results."""
    bare: bool
    """The model returns one tensor and nothing around it."""
    grad_mode: bool
    """Whether gradients were enabled around the captured call; user code may ask."""
    around: tuple[int, ...]
    """What may be around a call: gradients and the default dtype as in calls it was compared with (`native.call_context`)."""
    symbols: tuple[str, ...]
    """The graph's symbols that inputs show."""
    signature: Callable[..., Signature]
    """Their values in a call."""
    samples: CallSamples
    """Inputs of real calls, to prove and measure better plans with."""
    sampler: Sampler
    """Which calls run in an instrumented variant."""
    notes: tuple[str, ...] = ()
    effects: Effects | None = None
    """What its calls change of what they are given, where they do."""
    asked: AsTraced | None = None
    """Whether a call's arguments answer what the model's code asks of them; None where it asks nothing."""
    versions: Mapping[Signature, Plan] = field(default_factory=lambda: NO_VERSIONS)
    bets: Mapping[str, BranchBet] = field(default_factory=dict[str, BranchBet])
    """Conditions that the plan bets on, by name, with the code there is for each outcome."""
    layers: tuple[Layer, ...] = ()
    """The specializations that the plan is composed of, the outermost first."""
    calls: int = 0
    next_look: int = 1
    """The call that is looked at next: timed, noted, and asked whether it should change anything."""
    looked: int = 0
    """The call that was looked at last."""
    left: float = 0.0
    """When that look ended."""
    gaps: CallGaps = field(default_factory=CallGaps)
    look_s: float = 0.0
    """What looking at a call takes besides, of late."""
    heat: int = 0
    """Calls since the plan was last exchanged."""
    seconds: float = 0.0
    """Time spent in them, as far as it was looked at."""
    last_used: int = 0
    improving: bool = False
    trying: AttemptKey | None = None
    """At what."""
    meanwhile: AttemptKey | None = None
    """What is tried while that is made."""
    examining: bool = False
    """A question about its partitions waits for an answer."""
    refused: dict[AttemptKey, str] = field(default_factory=dict[AttemptKey, str])
    """What was tried and lost, with the reason; not tried again until something changed."""
    findings: tuple[Finding, ...] = ()
    """What limits the partitions of its plan, the slowest first, as the calls that were looked at showed it."""
    weighed: GraphWeights = GraphWeights()
    """What partitions of its graph took while they served: what planning reads."""
    planned_by: tuple[MeasuredPiece, ...] | None = None
    """The weights that it was last planned again by, whatever came of it; None: what its plan was made by."""
    replans: int = 0
    """How often that was, since decisions were opened last."""
    trade: Trade | None = None
    """What the plan that was deployed last costs and what the one before it cost."""
    stamp: tuple[int, ...] = ()
    """What decisions rest on; another one re-opens them (`runtime.tierup.improve`)."""
    links: dict[Pattern, GradientLink] = field(default_factory=dict[Pattern, GradientLink])
    """How results are joined to autograd's graph, by which of the inputs require gradients."""
    meeting: bool = False
    """A call that it may not serve yet is being compared with it."""
    met: int = 0
    """Such calls since the last that agreed."""
    retries: dict[AttemptKey, Retry] = field(default_factory=dict[AttemptKey, Retry])
    """When what was refused without certainty may be tried again."""
    own: bool = False
    """The model's own code answers where the baseline would: it was not slower on live calls."""
    own_ratio: float | None = None
    """What the model's own code takes over what the baseline takes; None before live calls have decided between them."""
    own_doubted: bool = False
    """That alone spoke against a plan, and calls were asked once more."""
    dispatch_s: tuple[float, bool, bool] = (0.0, False, False)
    """What finding a plan for a call takes, which calls that go straight to the own code do not pay; whether native code was
    asked; and whether all of the way to the plan was measured, the look through the model with it."""
    lost_by_dispatch: bool = False
    """The own code won by what Python takes to find a plan: that is decided again when native code does."""
    contest: PlanContest | None = None
    """A race on live calls: while it is open every call is looked at."""
    audits: dict[Signature | None, Audit] = field(default_factory=dict[Signature | None, Audit])
    """Deployed plans on trial: by the sizes of a version, None is the plan itself."""
    whole: WholeCalls | None = None
    """What compares its plan with the model's own code in whole calls."""
    not_audited: str = ""
    """Why not, where that is so."""
    allowed: float = 1.0
    """How many times as long as what it replaced a plan may take: more than once where memory is what counts."""
    balance: PathBalance | None = None
    """Of a graph that has some paths through code which reads its data: what calls that took others cost."""
    replaced: bool = False
    """A graph with further paths has taken its place: nothing better is made of it any more."""
    callers: Callers = field(default_factory=Callers)
    won: dict[AttemptKey, WonRace] = field(default_factory=dict[AttemptKey, "WonRace"])
    """What specializations saved in the race before they were deployed."""
    counted: bool = False
    """Some of its sizes are counts that objects hold, which may be others in every call."""
    repeats: InputRepeats = field(default_factory=lambda: InputRepeats(0))
    """Which inputs calls bring again."""

    def guards(self) -> list[str]:
        """What calls must bring, in words."""
        names = [v.name for v in self.baseline.graph.inputs]
        return [fact_text(f, names) for f in self.facts]

    def refuse(self, plan: Plan, why: str, *, later: bool = False) -> None:
        """Whatever led to a plan is not tried again until something changed, or `later`."""
        if plan is not self.plan:
            attempts = [sizes_key(s) for s, p in self.versions.items() if p is plan]
        else:
            attempts = [k for layer in self.layers for k in layer.keys] or [*plan.layers] or [AttemptKey(FUSED, tier=plan.tier)]
        for attempt in attempts:
            self.mark_refused(attempt, why, later=later)

    def mark_refused(self, attempt: AttemptKey, why: str, *, later: bool = False) -> None:
        """An attempt is not made again until something changed, or `later`; of very many the oldest is forgotten."""
        self.refused[attempt] = why
        if later:
            self._retry_after(attempt, RETRY_S)
        for oldest in list(self.refused)[:-MAX_REFUSED]:
            self.refused.pop(oldest, None)
            self.retries.pop(oldest, None)

    def mark_not_kept(self, attempt: AttemptKey) -> None:
        """An attempt waits for a kept call that it is for."""
        self.mark_refused(attempt, "no inputs of this kind are kept")
        self._retry_after(attempt, NOT_KEPT_RETRY_S)

    def _retry_after(self, attempt: AttemptKey, first_s: float) -> None:
        before = self.retries.get(attempt)
        wait = first_s if before is None else min(max(2 * before.wait_s, first_s), MAX_RETRY_S)
        self.retries[attempt] = Retry(time.monotonic() + wait, wait)

    def retry(self, now: float) -> None:
        """What was refused without certainty may be tried again when its time has come."""
        for attempt in [a for a, r in list(self.retries.items()) if r.at <= now]:
            self.refused.pop(attempt, None)
            self.retries[attempt] = Retry(inf, self.retries[attempt].wait_s)

    def reset_hotness(self) -> None:
        """The plan was exchanged: its calls count from here, and the first of them are looked at."""
        self.heat, self.seconds = 0, 0.0
        self.looked, self.next_look = self.calls, self.calls + 1
        self.contest = None  # what was to be measured is no longer what serves
        self.audits.clear()

    def open(self, contest: PlanContest) -> None:
        """Answer calls in turns from here on."""
        self.contest = contest
        self.next_look = 0

    def close(self, contest: PlanContest) -> None:
        """Answer calls by what serves again; another contest that was opened meanwhile stays."""
        if self.contest is contest:
            self.contest = None

    def reference(self, signature: Signature | None) -> Plan | None:
        """What a deployed plan took the place of: a version that of the entry's plan, any other the better of the baseline and the
        model's own code, which is None here; where nobody knows which that is, the model's own code.
        """
        if signature is not None and self.plan is not self.baseline:
            return self.plan
        return None if self.plan is self.baseline or self.own or self.own_ratio is None else self.baseline

    def audit_of(self, plan: Plan, signature: Signature) -> Audit | None:
        """The trial that a deployed plan is on; None where it cannot be or there is nothing to compare it with."""
        if self.not_audited or (plan is self.baseline and (self.own or self.own_ratio is None)):
            return None
        version = None if plan is self.plan else signature
        if version is not None and self.versions.get(version) is not plan:  # it was exchanged while a call was in it
            return None
        found = self.audits.get(version)
        if found is None or not found.is_of(plan):
            found = self.audits[version] = Audit(plan, version, self.calls, self.allowed)
        return found

    def in_whole_calls(self, plan: Plan) -> WholeCalls | None:
        """What compares a plan with the own code in use; None where that answers anyway, where several plans take turns, and before
        an audit has shown whether there is any doubt."""
        if plan is not self.plan or self.versions or self.contest is not None or self.reference(None) is not None:
            return None
        if self.whole is not None and self.whole.is_of(plan):
            return self.whole
        audit = self.audits.get(None)
        if audit is None or audit.rounds < FIRST_ROUNDS or not audit.is_of(plan) or (state := audit.state()) is None:
            return None
        self.whole = WholeCalls(plan, ended=state.ratio < IN_DOUBT)
        return self.whole


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where a call goes: a version of an entry, or the entry's plan."""

    entry: Entry
    signature: Signature | None = None
    version: Plan | None = None


class Site:
    """Everything about one call structure.

    A version has a route if and only if its entry has it, even while others take versions away: the entry's table is exchanged
    under a lock, held for no longer than that; routes follow, and a route is dropped only where its entry has no such version.
    """

    def __init__(self, spec: Spec, limit: int) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self.entries: tuple[Entry, ...] = ()
        self.groups: dict[Any, CallGroup] = {}
        self._limit = limit
        self._hardening: list[Job] = []
        self._evicted: list[Entry] = []
        self.rest = Rest()
        """Of calls for which nothing here is faster; while there is no other site, the model's own (`RestOfAll`)."""
        self.unlooked = self.in_vain = 0
        """Calls that find no plan and go to the model's own code without a look at whether they are to be captured; and how many
        such looks in a row led to nothing."""
        self._missed = self._hits = 0
        """Calls that found no plan, as far as hits have not made up for them; and what hits were at the last of them."""
        self.caches: dict[int, InlineCache[Route]] = {}
        """One, or one for each grad mode (`split`)."""
        self.mask = 0
        """What of the grad mode tells caches apart: 1 where the model's code asks whether gradients are enabled."""

    @property
    def resting(self) -> int:
        """Calls that the model's own code answers before anything is looked up again."""
        return self.rest.left

    @resting.setter
    def resting(self, calls: int) -> None:
        self.rest.left = calls

    def looked_in_vain(self, *, pending: bool) -> None:
        """A call that found no plan was not to be captured either. Where one in two calls is such a one (a model that raises, or
        sizes that no graph is for), the others are worth their plan, and the look takes 8 us."""
        self.in_vain = 0 if pending else self.in_vain + 1
        if self.in_vain > LOOKS_IN_VAIN:
            self.unlooked = min(self.in_vain // 8, MISSED_CALLS)

    def missed_again(self) -> bool:
        """A call found no plan among those there are; whether so many did that finding none costs more than plans gain."""
        hits = sum(e.calls for e in self.entries)
        self._missed = max(0, self._missed - MISSES_PER_HIT * max(0, hits - self._hits)) + 1
        self._hits = hits
        if self._missed <= MISSED_CALLS:
            return False
        self._missed = 2 * MISSED_CALLS  # one hit in a rest of misses is not enough to go on missing all the others
        return True

    def split(self, captured: CallGroup | None, *, grad_mode: bool) -> None:
        """Plans for calls with gradients enabled and without are different ones from now on; what there is goes.

        A group that is being captured stays, for the grad mode of that capture: its calls, some of which are past the look for
        a plan already, must not ask for another one.
        """
        with self._lock:
            kept = {(grad_mode, *key[1:]): g for key, g in self.groups.items() if g is captured}
            self.entries, self.mask, self.groups, self.caches = (), 1, kept, {}

    def cache(self, *, grad_mode: bool) -> InlineCache[Route] | None:
        """Where calls of a grad mode look for their route."""
        return self.caches.get(grad_mode & self.mask)

    def _cache(self, entry: Entry) -> InlineCache[Route]:
        mode = entry.grad_mode & self.mask
        if mode not in self.caches:
            inputs = len(entry.baseline.graph.inputs)
            self.caches[mode] = InlineCache(inputs, self._limit, self._when_hot)
        return self.caches[mode]

    def _when_hot(self, job: Job) -> None:
        """Each job once, however often it is asked for before the site is hot."""
        if job not in self._hardening:
            self._hardening.append(job)

    def admit(self, entry: Entry) -> None:
        """Route calls to a new entry; others may have to go (`evicted`)."""
        with self._lock:
            self.entries = (entry, *self.entries)
        self._gone(self._cache(entry).add(Case(entry.facts, Route(entry))))

    def admit_version(self, entry: Entry, signature: Signature, plan: Plan) -> bool:
        """Route calls of these sizes to a version; False where the site takes no more special cases, or the entry is gone."""
        if not self._has(entry):  # it went while the version was compiled
            return False
        facts = (*entry.facts, *sized(entry.baseline.graph, dict(zip(entry.symbols, signature, strict=True))))
        self.remove_version(entry, signature)
        route = Route(entry, signature, plan)
        with self._lock:
            entry.versions = {**entry.versions, signature: plan}
        self._gone(self._cache(entry).add(Case(facts, route)))
        if self._has(entry) and entry.versions.get(signature) is plan:
            return True
        self._drop(entry, lambda r: r is route)  # a call that failed may have taken all versions away meanwhile
        return False

    def reopen(self) -> None:
        """Take special cases again, of which there were too many before: the traffic has changed."""
        for cache in list(self.caches.values()):
            cache.reopen()

    def _has(self, entry: Entry) -> bool:
        return any(e is entry for e in self.entries)

    def _gone(self, routes: Sequence[Route]) -> None:
        for route in routes:
            if route.signature is None:
                self.remove(route.entry)
                self._evicted.append(route.entry)
            else:
                self._without(route.entry, route.signature, route.version)

    def evicted(self) -> list[Entry]:
        """Entries that had to go for others since this was last asked: somebody may know them by their key."""
        gone, self._evicted = self._evicted, []
        return gone

    def remove(self, entry: Entry) -> None:
        """Route nothing to an entry any more."""
        with self._lock:
            self.entries = tuple(e for e in self.entries if e is not entry)
        self._drop(entry, lambda _route: True)

    def remove_version(self, entry: Entry, signature: Signature) -> None:
        """Calls of these sizes take the entry's plan again."""
        self._without(entry, signature, entry.versions.get(signature))
        self._drop_unknown(entry)

    def remove_versions(self, entry: Entry) -> None:
        """All calls of an entry take its plan again."""
        with self._lock:
            entry.versions = NO_VERSIONS
        self._drop_unknown(entry)

    def _without(self, entry: Entry, signature: Signature, plan: Plan | None) -> None:
        """A version is the entry's no more; another one of the same sizes, which came meanwhile, stays."""
        with self._lock:
            kept = {s: p for s, p in entry.versions.items() if s != signature or p is not plan}
            entry.versions = kept or NO_VERSIONS
            entry.audits.pop(signature, None)

    def _drop_unknown(self, entry: Entry) -> None:
        self._drop(entry, lambda r: r.signature is not None and entry.versions.get(r.signature) is not r.version)

    def _drop(self, entry: Entry, which: Callable[[Route], bool]) -> None:
        cache = self.cache(grad_mode=entry.grad_mode)
        if cache is not None:
            cache.remove(*[t for t in cache.table.targets if t.entry is entry and which(t)])

    def clear(self) -> None:
        """Route nothing anywhere."""
        with self._lock:
            self.entries = ()
        for cache in self.caches.values():
            cache.clear()

    def after_fork(self) -> None:
        """In a forked child: the thread that held a lock is in the parent."""
        self._lock = threading.Lock()
        for cache in self.caches.values():
            cache.after_fork()

    def hardening_jobs(self) -> list[Job]:
        """Jobs that make the dispatch native, for a site that turned out to be hot; each is given out once."""
        jobs, self._hardening[:] = list(self._hardening), []
        return jobs

    def group(self, leaves: Sequence[torch.Tensor], limit: int) -> CallGroup | None:
        """The group of a call; None when there are too many already."""
        key = (torch.is_grad_enabled() & self.mask, *((t.dtype, t.dim(), str(t.device), _order(t)) for t in leaves))
        found = self.groups.get(key)
        if found is None and len(self.groups) < limit:
            shapes = tuple(tuple(t.shape) for t in leaves)
            found = self.groups[key] = CallGroup(shapes, [set() for _ in leaves])
        return found


def _order(t: torch.Tensor) -> object:
    """How a tensor lies, as plans are told apart by it: its order where it is dense, or else that of its strides."""
    if t.is_contiguous():
        return ROW_MAJOR
    dense = layout_by(t.shape, t.stride())
    return stride_order(t.stride()) if dense.strided else dense
