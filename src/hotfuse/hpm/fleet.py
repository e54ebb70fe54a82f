"""One model of many machines: rows of each are held against its own roofline, so what they say holds for a machine nobody measured.

    never seen        the fleet's model, judged on machines that were left out whole when it was trained
    first samples     the same, corrected by what is measured here, most where it was measured (`hpm.nearby`)
    some rows         a model of its own that the fleet's rows support: moved by how far the machine's own are off from them, and
                      counting together as much as some of its own

Features are ratios against measured peaks. Which machine a row is about (`features.MACHINE`) is told to the forest only where
that helped on machines left out: with two or three it can but tell them apart by name.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm import calibrate, forest, model
from hotfuse.hpm.features import Features, derive, joined
from hotfuse.hpm.model import PerformanceModel, TrainingRows, Vector
from hotfuse.hpm.roofline import Roofline, measured_roofline
from hotfuse.hpm.work import NAMES as ROW_NAMES
from hotfuse.machine import peaks as machine_peaks
from hotfuse.machine.fingerprint import caches_of, hz_of
from hotfuse.profile.rows import StoredMachine
from hotfuse.profile.store import Store

NAME = "kernels of all machines"
MAX_ROWS = 6000
"""Of all machines together, evenly, the newest: training takes seconds then."""
MAX_MACHINES = 12
"""The most recently seen."""
MAX_TRIALS = 4
"""Times that machines are left out; where there are more of them, several at once."""
MIN_ROWS = 40
"""A machine with fewer says nothing of its own."""
TELLING = 3
"""Machines from which on it is tried whether a forest should know which one a row is about."""
HELPED = 0.97
"""How much smaller errors have to be for that, as a factor."""
HALF_VOICE = 300.0
"""Rows with which a machine counts half as much as one with very many: a few rows, taken on a busy machine perhaps, would each
count as dozens of others', and where nobody else has such vectors they alone decide."""
SUPPORT = 100.0
"""So many of a machine's own rows weigh as much as all rows of the others."""


@dataclass(frozen=True, slots=True)
class MachineRows:
    """What was measured on one machine with one number of threads."""

    machine: int
    name: str
    at: Roofline
    rows: TrainingRows


def machines(store: Store, *, without: int | None = None) -> list[MachineRows]:
    """All that a store has enough rows and measured peaks of; `without` leaves one out."""
    known = [m for m in store.machines() if m.id != without and not m.is_device][:MAX_MACHINES]
    asked = [(m, t, at) for m in known for t in sorted(store.measured_threads(m.id)) if (at := roofline_of(m, t)) is not None]
    found = [MachineRows(m.id, m.name, at, calibrate.samples(store, m.id, t, MAX_ROWS // len(asked))) for m, t, at in asked]
    return [f for f in found if len(f.rows) >= MIN_ROWS]


def roofline_of(known: StoredMachine, threads: int) -> Roofline | None:
    """A stored machine's; None where nobody measured its peaks."""
    if known.peaks is None:
        return None
    try:
        peaks = machine_peaks.from_dict(known.peaks)
    except ValueError:
        return None
    return measured_roofline(peaks, caches_of(known.tuning), hz_of(known.tuning), threads)


@dataclass(frozen=True, slots=True)
class Pooled:
    """Rows of several machines together."""

    features: Features
    seconds: Vector
    weight: Vector
    """Machines with many rows count the same in all, however many those are; one with few counts less."""
    machine: Vector

    @classmethod
    def of(cls, parts: Sequence[MachineRows]) -> Pooled:
        """Those of some machines."""
        weights = [model.weights(p.rows) for p in parts]
        total, rows = dict[int, float](), Counter[int]()
        for p, w in zip(parts, weights, strict=True):
            total[p.machine] = total.get(p.machine, 0.0) + float(w.sum())
            rows[p.machine] += len(p.rows)
        voice = {m: n / (n + HALF_VOICE) for m, n in rows.items()}
        return cls(
            joined([derive(p.rows.table, p.at) for p in parts]), np.concatenate([p.rows.seconds for p in parts]),
            np.concatenate([w / total[p.machine] * 1e3 * voice[p.machine] for w, p in zip(weights, parts, strict=True)]),
            np.concatenate([np.full(len(p.rows), float(p.machine)) for p in parts]),
        )  # fmt: skip

    def grown(self, where: Vector | None = None, *, knows: bool, few: int, seed: int) -> PerformanceModel:
        """A model of them, or of some rows; `knows`: it reads which machine each is about."""
        chosen = np.ones(len(self.seconds), bool) if where is None else where.astype(bool)
        rows, seconds, weight = self.features.pick(chosen), self.seconds[chosen], self.weight[chosen]
        return model.grown(rows, seconds, weight, seed=seed, few=few, machines=knows)

    def left_out(self, *, knows: bool, few: int, seed: int) -> Vector:
        """Each machine predicted by a model that saw no row of it."""
        predicted = self.seconds.copy()
        names, number = np.unique(self.machine, return_inverse=True)
        trial = number % MAX_TRIALS if len(names) > MAX_TRIALS else number
        for one in np.unique(trial):
            test = trial == one
            predicted[test] = self.grown(~test, knows=knows, few=few, seed=seed).seconds(self.features.pick(test))
        return predicted


def fit(parts: Sequence[MachineRows], *, few: int = forest.BOOST_FROM_ROWS, seed: int = 0) -> PerformanceModel:
    """One model of them all. Its score and intervals are those on machines that were left out; of a single machine there is none,
    so that what it proposes elsewhere is measured first (`hpm.trust`)."""
    started, pooled = time.perf_counter(), Pooled.of(parts)
    count, knows = len(np.unique(pooled.machine)), False
    predicted = pooled.seconds
    if count > 1:
        predicted = pooled.left_out(knows=False, few=few, seed=seed)
        if count >= TELLING:
            told = pooled.left_out(knows=True, few=few, seed=seed)
            errors = [float(np.abs(np.log(pooled.seconds / p)).mean()) for p in (predicted, told)]
            knows, predicted = (True, told) if errors[1] < HELPED * errors[0] else (False, predicted)
    made = pooled.grown(knows=knows, few=few, seed=seed)
    judged = predicted if count > 1 else pooled.features.roofline.seconds
    off = np.log(pooled.seconds / judged)
    each = {
        name: model.accuracy(pooled.seconds[pooled.machine == m], predicted[pooled.machine == m])
        for m, name in {p.machine: p.name for p in parts}.items()
    }
    facts = {
        "samples": len(pooled.seconds), "machines": count, "kind": "boosted" if len(pooled.seconds) >= few else "extra",
        "trees": len(made.forest.roots), "knows_machines": knows, "seconds": round(time.perf_counter() - started, 3),
        "held_out": model.accuracy(pooled.seconds, predicted) if count > 1 else {},
        "left_out": each if count > 1 else {},
        "rooflines": model.accuracy(pooled.seconds, pooled.features.roofline.seconds) if count > 1 else {},
        "features": list(model.MANY_MACHINES if knows else model.INPUTS), "rows": list(ROW_NAMES), "kept": model.KEPT,
    }  # fmt: skip
    return replace(made, width=model.intervals(pooled.features.family, judged, off), facts=facts)


def train(store: Store) -> PerformanceModel | None:
    """A new version of the fleet's model from everything in a store; None where that is too little."""
    parts = machines(store)
    if sum(len(p.rows) for p in parts) < model.MIN_SAMPLES:
        return None
    made = fit(parts)
    return replace(made, version=model.save(store, made, None, NAME))


def load(store: Store) -> PerformanceModel | None:
    """The newest one that a store holds, trained on any machine."""
    found = store.load_model(NAME)
    return None if found is None else model.restored(store, found)


def support(parts: Sequence[MachineRows]) -> model.Support | None:
    """What a machine's own training takes from others; None where there are none."""
    if not parts:
        return None
    pooled = Pooled.of(parts)
    alone = pooled.grown(knows=False, few=forest.BOOST_FROM_ROWS, seed=0)
    return model.Support(pooled.features, pooled.seconds, pooled.weight / pooled.weight.sum() * SUPPORT, alone)
