"""What serving learned, written to the profile store: beside inference, and never in the way of it.

    races       both times of every plan that was tried, as decisions with their evidence
    partitions  what each took per kind of call, with flops, bytes and the binding resource, from the sampled calls
    speed       the machine's own, probed now and then

One store and one watch over the machine's speed per process and place. Trouble with the file is the store's to report; serving
does not notice.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hotfuse.base.events import Action, EventLog, EvidenceValue, Why
from hotfuse.base.settings import Settings
from hotfuse.ir.graph import Graph
from hotfuse.ir.hash import structural_hash
from hotfuse.profile.names import Names
from hotfuse.profile.snapshot import GraphSeen, PartitionSeen

if TYPE_CHECKING:
    from hotfuse.machine.drift import DriftWatch
    from hotfuse.profile.rows import PartitionProfile
    from hotfuse.profile.store import Store

_stores: dict[str, tuple[Store, DriftWatch]] = {}
_lock = threading.Lock()


def _shared(settings: Settings, log: EventLog) -> tuple[Store, DriftWatch]:
    from hotfuse.profile.place import location
    from hotfuse.profile.store import Store  # the database library is loaded when there is something to keep
    from hotfuse.runtime.speed import speed_watch

    place = location(settings)
    with _lock:
        if place not in _stores:
            store = Store.open(place, log)
            watch = speed_watch(store, log)
            watch.start()
            _stores[place] = (store, watch)
        return _stores[place]


class Recorder:
    """Writes for one model; every method is for the background and takes its time."""

    def __init__(self, settings: Settings, log: EventLog) -> None:
        self._settings, self._log = settings, log
        self.on = settings.capture == "background" and settings.record
        self.written = 0
        self.failed = 0
        """Writes that raised: the store reports its own troubles, so these are ours."""

    def tried(self, name: str, graph: Graph, action: Action, why: Why, evidence: Mapping[str, EvidenceValue]) -> None:
        """A plan was compiled, proven and raced; whether it won is in the action."""
        if not self.on:
            return
        from hotfuse.profile.rows import StoredDecision

        try:
            store, _ = _shared(self._settings, self._log)
            key = structural_hash(graph)
            store.record_graph(key, name)
            after = evidence.get("us_after")
            measured = float(after) * 1e3 if isinstance(after, int | float) else None
            store.record_decisions([StoredDecision(key, action.value, why.value, name, dict(evidence), None, measured)])
            self.written += 1
        except Exception as e:  # whatever it is, the plan serves all the same
            self._count(e)

    def seen(self, graph: Graph, number: int, found: GraphSeen, names: Names) -> None:
        """What the analyzer knows of a captured graph's partitions."""
        if not self.on:
            return
        try:
            store, _ = _shared(self._settings, self._log)
            key = structural_hash(graph)
            rows = [_row(key, names, number, s.signature, p) for s in found.signatures for p in s.partitions]
            if rows:
                store.record_partitions(rows)
                self.written += 1
        except Exception as e:
            self._count(e)

    def _count(self, error: Exception) -> None:
        self.failed += 1
        self._log.count("record_failed")
        if self.failed == 1:
            self._log.decide(Action.NOTICE, Why.STORE_UNUSABLE, "profile store", error=f"{type(error).__name__}: {error}"[:200])

    def stats(self) -> dict[str, int]:
        """Counters."""
        return {"written": self.written, "failed": self.failed}


def _row(graph: str, names: Names, number: int, signature: int, p: PartitionSeen) -> PartitionProfile:
    from hotfuse.profile.rows import PartitionProfile

    shapes = names.shapes(number, signature)
    text = " ".join("x".join(map(str, s)) or "scalar" for s in shapes) if shapes is not None else "other"
    return PartitionProfile(graph, names.item_name(number, p.item), text, p.n, p.mean, p.p10, p.p50, p.p90,
                            float(p.bytes), float(p.flops))


def _at_exit() -> None:
    with _lock:
        for store, watch in _stores.values():
            watch.stop()
            store.close()
        _stores.clear()


def _after_fork() -> None:
    """The watch's thread is the parent's; a child that learns something opens the store anew."""
    global _lock
    _lock = threading.Lock()
    _stores.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
