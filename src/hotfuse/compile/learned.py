"""The performance model where units are compiled: what a kernel and the library would take, before there is a kernel.

A worker reads the model once, if the profile store holds one for this machine; without one everything is as it was, by roofs.
Every trial is a measurement next to a prediction: it corrects the model in this worker, and goes to the store for the next
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import from_env
from hotfuse.compile import measure
from hotfuse.compile.host import Host, this_host
from hotfuse.hpm import calibrate as rows
from hotfuse.hpm import model
from hotfuse.hpm.model import Predictor
from hotfuse.hpm.online import Online
from hotfuse.hpm.work import Book, Candidate
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import show
from hotfuse.profile.place import location
from hotfuse.profile.rows import Measurement
from hotfuse.profile.store import Store

LEAST_US = 20.0
"""Trials of shorter kernels say more about calling them than about them."""
TRIAL_NOISE = 0.1
"""A trial is a handful of runs beside others."""
FLUSH = 16
"""Measurements kept back before they go to the store together."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Seconds, predicted."""

    kernel_s: float
    high_s: float
    """What the kernel hardly exceeds."""
    library_s: float


@dataclass(slots=True)
class Foresight:
    """The model of this process."""

    store: Store
    host: Host
    predictor: Predictor
    online: Online
    pending: list[Measurement] = field(default_factory=list[Measurement])
    problems: dict[str, tuple[str, dict[str, int]]] = field(default_factory=dict[str, "tuple[str, dict[str, int]]"])
    """Groups that were tried, for the next calibration."""
    unknown: int = 0
    """Groups whose work depends on data."""

    @classmethod
    def of(cls, store: Store) -> Foresight | None:
        """What a store holds for this machine; None where that is nothing."""
        host = this_host(store, measure_peaks=False)
        found = model.load(store, host.machine)
        if found is None:
            return None
        online = Online()
        return cls(store, host, Predictor(found, host.at, Book(measure.tile_of), online), online)

    def of_group(self, graph: Graph, sizes: Mapping[str, int]) -> Foreseen | None:
        """What a group would take as a kernel and by the library; None where that depends on data."""
        try:
            found = self.predictor.predict([Candidate(graph, sizes, self.host.core), Candidate(graph, sizes, None)])
        except (HotfuseError, KeyError, IndexError):  # a size that nobody knows
            self.unknown += 1
            return None
        return Foreseen(float(found.seconds[0]), float(found.high_s[0]), float(found.seconds[1]))

    def tried(self, key: str, graph: Graph, sizes: Mapping[str, int], kernel_us: float, library_us: float) -> None:
        """A trial's outcome, next to what was predicted."""
        candidates = [Candidate(graph, sizes, self.host.core), Candidate(graph, sizes, None)]
        try:
            table = self.predictor.book.rows(candidates)
        except (HotfuseError, KeyError, IndexError):
            self.unknown += 1
            return
        plain = Predictor(self.predictor.model, self.host.at, self.predictor.book).of_rows(table)
        taken = np.array([kernel_us, library_us])
        for i in np.flatnonzero(taken > LEAST_US):
            self.online.observe(int(plain.family[i]), int(plain.level[i]), float(plain.seconds[i]), taken[i] * 1e-6)
            core = self.host.core if i == 0 else None
            name = rows.kernel_name(key, {}, core, self.host.at.threads)
            one, threads = table[i : i + 1], self.host.at.threads
            self.pending += rows.measurements([name], one, [taken[i] * 1e-6], [TRIAL_NOISE], threads, "race")
        self.problems[key] = (show(graph), dict(sizes))
        if len(self.pending) >= FLUSH:
            self.flush()

    def flush(self) -> None:
        """Put what was measured into the store."""
        if self.pending:
            self.store.record_measurements(self.pending, self.host.machine)
            self.pending = []
        for key, (text, sizes) in self.problems.items():
            self.store.record_problem(key, text, sizes)
        self.problems = {}


_found: list[Foresight | None] = []


def foresight() -> Foresight | None:
    """This process's, looked for once; a store is never begun for it."""
    if not _found:
        place = location(from_env())
        path = Path(place.removeprefix("sqlite:///")).expanduser()
        _found.append(Foresight.of(Store.open(place)) if place != ":memory:" and path.exists() else None)
    return _found[0]
