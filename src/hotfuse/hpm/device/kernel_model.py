"""The model of a device: what kernels took there, learned from trials and calibration, for kernels that nobody has compiled yet.

    time = first guess * exp(forest(features))

It is judged on problems that it has not seen: how far off it is, and what choosing by it would cost. It ranks tilings so that
few are compiled and tried; the device decides among those. One that ranks badly is left aside.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm import forest as trees
from hotfuse.hpm.device.features import DeviceShape, Vector, features, shape_from, table_of
from hotfuse.hpm.device.work import NAMES, Row
from hotfuse.hpm.forest import Forest
from hotfuse.machine.fingerprint import Fingerprint
from hotfuse.profile.rows import Measurement, Source
from hotfuse.profile.store import Store

NAME = "device kernels"
"""What its models and rows are called in a store."""
MIN_ROWS = 300
"""Kernels that a model is made of: fewer tell tilings apart no better than a count of what each program has to do."""
GROWN = 0.25
"""The part of a model's rows that must be new before another is made."""
FOLDS = 4
MAX_REGRET = 0.1
"""What the kernel that it ranks first may lose against the best, on the average, or the model is left aside. A handful of each
problem's kernels are measured, about as many as there are times more tilings than the few that are compiled by its choice."""
NOISY = 0.2
MAX_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class TimedWork:
    """One measured kernel."""

    problem: str
    """Kernels of one problem are compared with each other, and are left out together when a model is judged."""
    work: Row
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceKernelModel:
    """A trained forest, and the device it is about."""

    forest: Forest
    shape: DeviceShape
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    version: int = 0

    def seconds(self, rows: Sequence[Row]) -> Vector:
        """What kernels would take."""
        x, guess = features(table_of(rows), self.shape)
        return guess * np.exp(self.forest.predict(x))

    @property
    def chooses(self) -> bool:
        """Whether it ranks well enough to say what is compiled."""
        return float(self.facts.get("held_out", {}).get("regret", 1.0)) <= MAX_REGRET


def fit(rows: Sequence[TimedWork], shape: DeviceShape) -> DeviceKernelModel:
    """A model of all rows, judged by models of parts of them."""
    x, guess = features(table_of([r.work for r in rows]), shape)
    took = np.array([r.seconds for r in rows])
    off = np.log(took / guess)
    held = _judged(rows, x, guess, took, off)
    return DeviceKernelModel(trees.grow(x, off), shape, {"samples": len(rows), "held_out": held, "shape": shape.to_dict()})


def _judged(
    rows: Sequence[TimedWork], x: npt.NDArray[np.float64], guess: Vector, took: Vector, off: Vector
) -> dict[str, float]:
    """Errors and regret on problems that a model has not seen; each has been left out once."""
    fold = np.array([zlib.crc32(r.problem.encode()) % FOLDS for r in rows])
    predicted = np.zeros(len(rows))
    for k in range(FOLDS):
        seen, left = fold != k, fold == k
        if left.any() and seen.any():
            predicted[left] = guess[left] * np.exp(trees.grow(x[seen], off[seen]).predict(x[left]))
    error = np.abs(predicted / took - 1)
    return {
        "mape": round(float(error.mean()), 4), "median": round(float(np.median(error)), 4),
        "regret": round(_regret(rows, predicted, took), 4),
    }  # fmt: skip


def _regret(rows: Sequence[TimedWork], predicted: Vector, took: Vector) -> float:
    """What the kernel of a problem that is predicted to be the fastest takes more than the fastest, on the average."""
    of: dict[str, list[int]] = defaultdict(list)
    for i, r in enumerate(rows):
        of[r.problem].append(i)
    lost = [float(took[min(k, key=lambda i: predicted[i])] / took[k].min()) - 1 for k in of.values() if len(k) > 1]
    return float(np.mean(lost)) if lost else 1.0


# --- in a store


def device_fingerprint(name: str, arch: str) -> Fingerprint:
    """A device among a store's machines."""
    return Fingerprint((("arch", arch), ("device", name)), ())


def record(store: Store, machine: int, rows: Sequence[TimedWork], source: Source) -> int:
    """Keep what kernels took; how many rows were added."""
    made = [
        Measurement(f"{r.problem}:{zlib.crc32(repr(sorted(r.work.items())).encode()):08x}", NAME, dict(r.work), _dtype(r.work), 1,
                    r.seconds * 1e9, 0.0, source)
        for r in rows if r.seconds > 0
    ]  # fmt: skip
    return store.record_measurements(made, machine)


def _dtype(work: Row) -> str:
    return "f32" if work["width"] >= 4 else "f16"


def recorded(store: Store, machine: int) -> list[TimedWork]:
    """Everything that models of today can read; of a kernel that was measured twice, the newest row."""
    seen: dict[str, TimedWork] = {}
    for m in store.measurements(machine=machine, limit=MAX_ROWS):
        fits = m.family == NAME and m.time_ns > 0 and m.noise <= NOISY and all(n in m.features for n in NAMES)
        if fits and m.kernel not in seen:
            seen[m.kernel] = TimedWork(m.kernel.partition(":")[0], m.features, m.time_ns * 1e-9)
    return [seen[k] for k in sorted(seen)]


def save(store: Store, made: DeviceKernelModel, machine: int) -> int:
    """Keep a model; its version."""
    return store.save_model(NAME, made.forest.arrays(), made.facts, machine)


def load(store: Store, machine: int) -> DeviceKernelModel | None:
    """The newest of a device; None where there is none that this program can read."""
    found = store.load_model(NAME, None, machine)
    if found is None:
        return None
    try:
        shape = shape_from(found.facts["shape"])
        columns = features(table_of([dict.fromkeys(NAMES, 1.0)]), shape)[0].shape[1]
        return DeviceKernelModel(trees.from_arrays(found.arrays, columns), shape, dict(found.facts), found.version)
    except (KeyError, ValueError) as e:
        store.notes.append(f"the model of a device was left aside: {e}")
        return None


def due(store: Store, machine: int, rows: int) -> bool:
    """Whether so many rows are enough for a first model, or enough more than the newest has."""
    dates = store.model_dates(NAME, machine)
    have = int(dates[max(dates)][1].get("samples", 0)) if dates else 0
    return rows >= max(MIN_ROWS, (1 + GROWN) * have)
