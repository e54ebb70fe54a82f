"""From measurements in the store to a model in the store: rows out, samples in, a new version when there is more to learn from.

kernel name ::= problem:sizes:variant      problems are held out whole when a model is judged
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hotfuse.hpm import model
from hotfuse.hpm.model import PerformanceModel, Support, TrainingRows
from hotfuse.hpm.roofline import Roofline
from hotfuse.hpm.work import FAMILIES, NAMES, CoreShape, Matrix, families
from hotfuse.profile.rows import Measurement, Source
from hotfuse.profile.store import Store

NOISY = 0.25
"""Rows whose turns lie further apart are not learned from."""
LIBRARY = "library"


def kernel_name(problem: str, sizes: Mapping[str, int], core: CoreShape | None, threads: int) -> str:
    """What a row is called: the same for the same candidate, so that it is not measured twice."""
    variant = LIBRARY if core is None else f"{core.lanes}x{core.registers}x{core.l2}"
    shown = ",".join(f"{n}={v}" for n, v in sorted(sizes.items()))
    return f"{problem}:{shown}:{variant}:{threads}"[:128]


def problem_of(kernel: str) -> str:
    """What all tilings of one problem at the same sizes are called."""
    return ":".join(kernel.split(":")[:2])


def measurements(
    names: Sequence[str],
    table: Matrix,
    seconds: Sequence[float],
    noise: Sequence[float],
    threads: int,
    source: Source = "calibrate",
) -> list[Measurement]:
    """Rows for the store."""
    kinds = families(table)
    return [
        Measurement(
            name, FAMILIES[int(k)], dict(zip(NAMES, map(float, row), strict=True)), "f32", threads, s * 1e9, n, source
        )
        for name, row, s, n, k in zip(names, table, seconds, noise, kinds, strict=True)
    ]


def samples(store: Store, machine: int | None, threads: int = 1, limit: int = 20_000) -> TrainingRows:
    """Everything in the store that fits what models read today; of a kernel measured twice, the newest row."""
    seen: dict[str, Measurement] = {}
    for m in store.measurements(machine=machine, threads=threads, limit=limit):
        fits = m.time_ns > 0 and m.noise <= NOISY and all(n in m.features for n in NAMES)
        if fits and m.kernel not in seen:
            seen[m.kernel] = m
    rows = sorted(seen.values(), key=lambda m: m.kernel)
    table = np.array([[m.features[n] for n in NAMES] for m in rows]).reshape(len(rows), len(NAMES))
    group = np.array([zlib.crc32(m.kernel.split(":")[0].encode()) for m in rows], np.int64)
    seconds, noise, at = (np.array([getattr(m, n) for m in rows], np.float64) for n in ("time_ns", "noise", "at"))
    return TrainingRows(table, seconds * 1e-9, noise, group, at)


def measured_before(store: Store, machine: int | None) -> set[str]:
    """Names of what was measured before."""
    return {m.kernel for m in store.measurements(machine=machine, source="calibrate")}


def train(store: Store, machine: int | None, at: Roofline, support: Support | None = None) -> PerformanceModel | None:
    """A new version from everything measured so far; None where that is too little."""
    found = samples(store, machine, at.threads)
    if len(found) < model.MIN_SAMPLES:
        return None
    made = model.best_fit(found, at, support)
    version = model.save(store, made, machine)
    return replace(made, version=version)
