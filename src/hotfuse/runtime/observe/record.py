"""What serving learned, written to the profile store: beside inference, and never in the way of it.

    races       both times of every plan that was tried, as decisions with their evidence; what lost for certain in two processes
                in a row is not tried again by the next ones for a while, unless something it rested on has changed
    partitions  what each took per kind of call, with flops, bytes and the binding resource, from the sampled calls
    speed       the machine's own, probed now and then
    idle        time that nobody needs goes to the performance model (`runtime.observe.idle`)

One store, one watch over the machine's speed and one idle worker per process and place. Trouble with the file is the store's to
report; serving does not notice.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hotfuse.base.clock import is_recent
from hotfuse.base.errors import InputError
from hotfuse.base.events import Action, EventLog, EvidenceValue, Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.cache.address import program
from hotfuse.compile.request_context import context_of
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.ir.graph import Graph
from hotfuse.ir.hash import structural_hash
from hotfuse.ir.text import parse
from hotfuse.machine import team_size
from hotfuse.machine.cores import usable_cores
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.profile.glimpse import may_know
from hotfuse.profile.names import Names
from hotfuse.profile.snapshot import GraphSeen, PartitionSeen
from hotfuse.profile.store_place import central
from hotfuse.runtime.observe.findings import Finding, PartitionQuestion
from hotfuse.runtime.observe.idle import Idle

if TYPE_CHECKING:
    from hotfuse.machine.speed_drift import DriftWatch
    from hotfuse.profile.rows import PartitionProfile, StoredDecision, SubgraphProfile
    from hotfuse.profile.store import Store
    from hotfuse.profile.sync import CentralSync

BELIEVED = 2
"""Losses in a row, each certain and on the same basis, before a memory of them refuses anything: one may have been noise."""
BELIEVED_S, FORGOTTEN_S = 3600.0, 7 * 86_400.0
"""For how long they do: longer with each further loss; what lost so long ago may be tried again in any case."""
Rests = tuple[Sequence[torch.Tensor], int]
"""The call that a race was run on, and the tier of what served."""
MAX_OPS = 200
"""Characters of the operators of a piece, for readers."""
MAX_ASKED = 1024
"""Attempts whose past is not looked up again: sizes of calls make new ones for as long as a model serves."""
PRUNE_EVERY = 256
"""Writes between two looks at how large the file is."""
LOOKED_BACK = 500
"""Decisions of a graph that are looked through for what was tried before."""


@dataclass(frozen=True, slots=True)
class _SharedPlace:
    """What all models of a process share for one place."""

    store: Store
    machine: int
    version: int
    """Of the performance model that there was to begin with; 0 where there was none."""
    watch: DriftWatch
    idle: Idle
    sync: CentralSync | None
    """Exchanges rows with the fleet's database, where there is one."""


_stores: dict[str, _SharedPlace] = {}
_lock = threading.Lock()


def _shared(settings: Settings, log: EventLog) -> _SharedPlace:
    from hotfuse.hpm.model import named
    from hotfuse.profile.store import Store  # the database library is loaded when there is something to keep
    from hotfuse.runtime.observe.speed import speed_watch

    place = context_of(settings)
    with _lock:
        if place.path not in _stores:
            store = Store.open(place.path, log)
            watch = speed_watch(store, log)
            watch.start()
            idle = Idle(place, settings.compile_memory_mb << 20)
            machine = store.machine(fingerprint())
            store.prune(settings.profiles_rows)
            sync = _sync(settings, store, log)
            version = max(store.model_dates(named(settings.threads or team_size.threads()), machine), default=0)
            _stores[place.path] = _SharedPlace(store, machine, version, watch, idle, sync)
        return _stores[place.path]


def _sync(settings: Settings, store: Store, log: EventLog) -> CentralSync | None:
    """The exchange with the fleet's database; without one, or the packages for it, rows stay in the file."""
    if (url := central(settings)) is None or store.path is None:
        return None
    from hotfuse.profile.sync import CentralSync

    try:
        return CentralSync(url, store, log, settings.profiles_s, settings.profiles_rows, background_priority)
    except InputError as e:
        log.decide(Action.FALLBACK, Why.DATABASE_AWAY, "profiles", error=f"{e.what}: {e.because}"[:200])
        return None


class Recorder:
    """Writes for one model; every method is for the background and takes its time."""

    def __init__(self, settings: Settings, log: EventLog) -> None:
        self._settings, self._log = settings, log
        self.on = settings.capture == "background" and settings.record
        self.written = 0
        self.failed = 0
        """Writes that raised: the store reports its own troubles, so these are ours."""
        self._shared: _SharedPlace | None = None
        self._asked: dict[tuple[str, str], None] = {}
        """Attempts whose past was looked up: what this process finds out itself counts more."""

    def _here(self) -> _SharedPlace:
        if self._shared is None:
            self._shared = _shared(self._settings, self._log)
            if self._settings.idle and self._shared.store.path is not None:
                self._shared.idle.join(self._log)
        return self._shared

    @property
    def trained(self) -> int:
        """The version of the performance model that idle time trained last; 0 where none was."""
        shared = self._shared
        return 0 if shared is None else shared.idle.told.version or 0

    @property
    def speed_changes(self) -> int:
        """How often the machine was seen to run at another speed than before."""
        return 0 if self._shared is None else self._shared.watch.changes

    def idle(self) -> dict[str, Any]:
        """What idle time was used for, for `explain()`."""
        if not self.on or not self._settings.idle:
            return {"state": "switched off by the settings"}
        shared = self._shared
        return shared.idle.told.to_dict() if shared is not None else {"state": "nothing has been tried so far"}

    def _basis(self, rests: Rests) -> str:
        """What the outcome of a race rests on: program, machine, performance model, torch's threads, cores, what is asked for, the
        sizes, the other's tier.
        """
        call, against = rests
        shapes = " ".join("x".join(map(str, t.shape)) or "scalar" for t in call)
        version = self.trained or self._here().version
        who = fingerprint()
        own = (who.key, who.tuning_key, torch.__version__, version, team_size.threads(), usable_cores(),
               self._settings.code_key(), shapes, against)  # fmt: skip
        return hashlib.sha256(f"{program()} {own}".encode()).hexdigest()[:24]

    def lost(self, graph: Graph, attempt: str, rests: Rests) -> dict[str, EvidenceValue] | None:
        """The evidence of the last of several races that earlier processes lost for certain, all on the same basis and without one
        that was won or not decided in between, and how many they were; None where it is to be tried. Asked once per attempt.
        """
        if not self.on:
            return None
        try:
            key = structural_hash(graph)
            if (key, attempt) in self._asked:
                return None
            self._asked[key, attempt] = None
            for oldest in list(self._asked)[:-MAX_ASKED]:
                self._asked.pop(oldest, None)
            if self._shared is None and not may_know(context_of(self._settings).path, key):
                return None
            store, basis = self._here().store, self._basis(rests)
            past = [d for d in store.decisions(key, LOOKED_BACK) if d.evidence.get("attempt") == attempt]
            here = [d for d in past if d.evidence.get("basis") == basis and is_recent(d.at, FORGOTTEN_S)]
            lost = list(itertools.takewhile(_certainly_lost, here))  # the newest first
            believed_s = min(BELIEVED_S * 2 ** (len(lost) - BELIEVED), FORGOTTEN_S)
            if len(lost) < BELIEVED or not is_recent(lost[0].at, believed_s):
                return None
            return {**lost[0].evidence, "times": len(lost)}
        except Exception as e:  # then it is tried
            self._count(e)
        return None

    def tried(
        self, name: str, graph: Graph, action: Action, why: Why, evidence: Mapping[str, EvidenceValue], rests: Rests
    ) -> None:
        """A plan was compiled, proven and raced; whether it won is in the action."""
        if not self.on:
            return
        from hotfuse.profile.rows import StoredDecision

        try:
            store = self._here().store
            key = structural_hash(graph)
            store.record_graph(key, name)
            kept = {**evidence, "basis": self._basis(rests)}
            said = (evidence.get(us) for us in ("us_predicted", "us_after"))
            predicted, measured = (float(us) * 1e3 if isinstance(us, int | float) else None for us in said)
            decided = StoredDecision(key, action.value, why.value, name, kept, predicted, measured)
            store.record_decisions([decided], self._here().machine)
            self._wrote(store)
        except Exception as e:  # whatever it is, the plan serves all the same
            self._count(e)

    def seen(self, graph: Graph, number: int, found: GraphSeen, names: Names) -> None:
        """What the analyzer knows of a captured graph's partitions."""
        if not self.on:
            return
        try:
            store = self._here().store
            key = structural_hash(graph)
            rows = [_row(key, names, number, s.signature, p) for s in found.signatures for p in s.partitions]
            if rows:
                store.record_partitions(rows, self._here().machine)
                self._wrote(store)
        except Exception as e:
            self._count(e)

    def note_findings(self, graph: Graph, found: Sequence[Finding], asked: Sequence[PartitionQuestion] = ()) -> None:
        """What limits partitions: put beside their times, and under the names of what they compute."""
        if not self.on:
            return
        try:
            shared, key = self._here(), structural_hash(graph)
            about = {(f.name, f.shapes): f for f in found}
            rows = [
                replace(row, bottleneck=f.bottleneck.value, evidence={**f.evidence, "because": f.because,
                        "predicted_us": f.predicted_us, "model": f.version})
                for row in shared.store.partitions(key, shared.machine)
                if (f := about.get((row.partition, row.signature))) is not None
            ]  # fmt: skip
            shared.store.record_partitions(rows, shared.machine)
            shared.store.record_subgraphs([_profile(q, f) for q, f in zip(asked, found, strict=False)], shared.machine)
            if rows:
                self._wrote(shared.store)
        except Exception as e:  # whatever it is, the finding is shown all the same
            self._count(e)

    def _wrote(self, store: Store) -> None:
        """Count a write. A process that serves for months keeps its file within the limit, also while no database takes rows."""
        self.written += 1
        if self.written % PRUNE_EVERY == 0:
            store.prune(self._settings.profiles_rows)

    def _count(self, error: Exception) -> None:
        self.failed += 1
        self.on = self.on and not isinstance(error, InputError)  # a place that nobody can write to stays one
        self._log.count("record_failed")
        if self.failed == 1:
            self._log.decide(
                Action.NOTICE, Why.STORE_UNUSABLE, "profile store", error=f"{type(error).__name__}: {error}"[:200]
            )

    def close(self) -> None:
        """The model is closed."""
        if self._shared is not None:
            self._shared.idle.leave(self._log)

    def central(self) -> dict[str, Any]:
        """What was exchanged with the fleet's database, for `explain()`; empty where there is none."""
        shared = self._shared
        return {} if shared is None or shared.sync is None else shared.sync.stats()

    def stats(self) -> dict[str, int]:
        """Counters."""
        return {"written": self.written, "failed": self.failed}


def _certainly_lost(d: StoredDecision) -> bool:
    return d.why in (Why.NOT_FASTER.value, Why.NOT_BETTER.value) and bool(d.evidence.get("certain"))


def _row(graph: str, names: Names, number: int, signature: int, p: PartitionSeen) -> PartitionProfile:
    from hotfuse.profile.rows import PartitionProfile

    shapes = names.shapes(number, signature)
    text = " ".join("x".join(map(str, s)) or "scalar" for s in shapes) if shapes is not None else "other"
    return PartitionProfile(
        graph, names.item_name(number, p.item), text, p.n, p.mean, p.p10, p.p50, p.p90, float(p.bytes), float(p.flops)
    )


def _profile(q: PartitionQuestion, f: Finding) -> SubgraphProfile:
    """A partition by what it computes, with everything that is known of it."""
    from hotfuse.profile.rows import SubgraphProfile

    graph, seen = parse(q.times.graph), q.seen
    ops = " ".join(n.op for n in graph.nodes)[:MAX_OPS]
    evidence = {**f.evidence, "because": f.because, "predicted_us": f.predicted_us, "model": f.version}
    return SubgraphProfile(
        structural_hash(graph), ops, q.shapes, q.threads, q.tier, seen.n, seen.mean, seen.p10, seen.p50, seen.p90,
        float(max(seen.bytes, 0)), float(max(seen.flops, 0)), q.share, f.bottleneck.value, evidence,
    )  # fmt: skip


def end() -> None:
    """Let go of every store, and end what is done for it beside serving; a model that goes on keeps its own, others open anew."""
    with _lock:
        for shared in _stores.values():
            shared.idle.end()
            shared.watch.stop()
            if shared.sync is not None:
                shared.sync.stop()
            if shared.store.path is not None:  # what is kept in memory is there until the last model is gone
                shared.store.close()
        _stores.clear()


def _after_fork() -> None:
    """The threads are the parent's; a child that learns something opens the store anew."""
    global _lock
    _lock = threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(end)
