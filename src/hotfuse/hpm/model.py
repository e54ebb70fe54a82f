"""The model: times by fitted rates, and what a forest learned about how far from them kernels stay, with an interval that holds.

    utilization = roofline / time
    time        = sum of rates * amounts * exp(forest(features))      never below the roofline
    interval    = residuals of kernels the forest had not seen, by family and length

It is stored as plain arrays under one name, each training a new version.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm import fitted, forest, phases, tiling_residuals
from hotfuse.hpm.compiled import tree_walk
from hotfuse.hpm.features import MACHINE, NAMES, Features, derive, joined
from hotfuse.hpm.forest import Forest
from hotfuse.hpm.roofline import Roofline
from hotfuse.hpm.row_cache import RowCache
from hotfuse.hpm.work import FAMILIES, Candidate, Matrix
from hotfuse.hpm.work import NAMES as ROW_NAMES
from hotfuse.machine.energy import watts_per_core
from hotfuse.profile.rows import StoredModel
from hotfuse.profile.store import Store

Vector = npt.NDArray[np.float64]
NAME = "kernels"


def named(threads: int) -> str:
    """What models for calls of so many threads are called in a store: what one says of another number is nothing."""
    return NAME if threads == 1 else f"{NAME} on {threads} threads"


INPUTS = (*NAMES, "fitted")
"""What a forest reads."""
MANY_MACHINES = (*INPUTS, *MACHINE)
"""What a forest of several machines may read besides: which machine it is."""
KEPT = 0.8
"""The part of all measurements that stated intervals hold."""
LENGTHS = (5e-6, 100e-6)
"""Kernels shorter than the first, between, longer than the second are judged apart."""
MIN_RESIDUALS = 25
"""Residuals that a family and length need for an interval of their own."""
FOLDS = 3
_CUT = np.array(
    [n in ("pointwise", "broadcast", "reduction", "contraction", "convolution") for n in FAMILIES], np.float64
)
"""Families that have several tilings."""
MIN_SAMPLES = 40
"""A model of fewer rows would know less than the roofline."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Per candidate; energy is an estimate from a core's watts, cycles are those of one core, at the rate that was measured."""

    seconds: Vector
    low_s: Vector
    high_s: Vector
    cycles: Vector
    joules: Vector
    memory: Vector
    """Bytes that the candidate reads and writes."""
    level: npt.NDArray[np.int64]
    """Which memory level binds; -1 where arithmetic does."""
    family: npt.NDArray[np.int64]
    energy_source: str = "estimated"


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Rows with their measured times; those of one `group` are the same problem in several tilings."""

    table: Matrix
    seconds: Vector
    noise: Vector
    group: npt.NDArray[np.int64]
    at: Vector | None = None
    """When they were measured, where that is known."""

    def __len__(self) -> int:
        return len(self.seconds)

    def pick(self, where: npt.NDArray[Any]) -> TrainingRows:
        """Some of them."""
        at = None if self.at is None else self.at[where]
        return TrainingRows(self.table[where], self.seconds[where], self.noise[where], self.group[where], at)


@dataclass(frozen=True, slots=True)
class PerformanceModel:
    """A trained forest and how far to trust it."""

    forest: Forest
    width: Matrix
    """Half-widths of intervals in log time, by family and length."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    version: int = 0
    rates: fitted.Rates = field(default_factory=lambda: fitted.NONE)
    tilings: Forest | None = None
    """What tells the tilings of one problem apart, where it was seen to help."""
    knows_machines: bool = False
    """Whether the forest reads which machine a row is about (`hpm.fleet`)."""

    def ratio(self, found: Features) -> Vector:
        """log(time / roofline)."""
        x, base = _inputs(found, self.rates, machines=self.knows_machines)
        keys = tree_walk.ordered(x)
        value = base + self.forest.predict(keys)
        if self.tilings is not None:
            value += self.tilings.predict(keys) * _CUT[found.family]
        return np.maximum(value, np.log(np.maximum(found.roofline.bound, 1e-12) / found.roofline.seconds))

    def seconds(self, found: Features) -> Vector:
        """Predicted times."""
        return found.roofline.seconds * np.exp(self.ratio(found))

    def widths(self, found: Features, seconds: Vector) -> Vector:
        """Half-widths of their intervals, in log time."""
        return self.width[found.family, np.searchsorted(LENGTHS, seconds)]


FAMILY_ROWS = 10.0
"""Own rows of a family that say as much about it on this machine as all others together."""


@dataclass(frozen=True, slots=True)
class Support:
    """Rows of other machines that are learned from beside a machine's own (`hpm.fleet`)."""

    features: Features
    """Each against the roofline of the machine it was measured on."""
    seconds: Vector
    weight: Vector
    """In ordinary rows of the machine itself."""
    model: PerformanceModel
    """What these rows alone say."""

    def behind(self, found: Features, seconds: Vector, weight: Vector) -> tuple[Features, Vector, Vector]:
        """A machine's own rows, and these as they would have been there: by how much its own are off from what these alone say."""
        off = np.log(seconds / self.model.seconds(found))
        overall = float(np.median(off)) * len(off) / (len(off) + FAMILY_ROWS) if len(off) else 0.0
        shift = np.full(len(FAMILIES), overall)
        for f in np.unique(found.family):
            own = off[found.family == f]
            shift[f] += (float(np.median(own)) - overall) * len(own) / (len(own) + FAMILY_ROWS)
        there = self.seconds * np.exp(shift[self.features.family])
        more = self.weight * float(weight.mean())
        return joined([found, self.features]), np.concatenate([seconds, there]), np.concatenate([weight, more])


def _inputs(found: Features, rates: fitted.Rates, *, machines: bool) -> tuple[npt.NDArray[np.float32], Vector]:
    """What a forest reads, and log(time by rates / roofline), which is the last column of `INPUTS`."""
    base = np.log(fitted.base(found.amounts, found.family, rates, found.roofline.seconds) / found.roofline.seconds)
    own = len(INPUTS)
    x = np.empty((len(base), len(MANY_MACHINES) if machines else own), np.float32)
    x[:, : own - 1], x[:, own - 1] = found.x, base
    if machines:
        x[:, own:] = found.machine
    return x, base


def grown(
    found: Features,
    seconds: Vector,
    weight: Vector,
    cell: tiling_residuals.Cells | None = None,
    *,
    seed: int = 0,
    few: int = forest.BOOST_FROM_ROWS,
    machines: bool = False,
    support: Support | None = None,
) -> PerformanceModel:
    """Rates, a forest for what they leave, and one for tilings if cells are told; it knows nothing of its errors yet. `machines`:
    the forest reads which machine each row is about."""
    own = len(seconds)
    if support is not None:
        found, seconds, weight = support.behind(found, seconds, weight)
    rates = fitted.fit(found.amounts, found.family, seconds, weight)
    x, base = _inputs(found, rates, machines=machines)
    left = np.log(seconds / found.roofline.seconds) - base
    trees = forest.grow(x, left, weight, seed=seed, few=few)
    rest = (left - trees.predict(x))[:own]
    apart = tiling_residuals.grow(x[:own], rest, weight[:own], cell, seed) if cell is not None else None
    none = np.zeros((len(FAMILIES), len(LENGTHS) + 1))
    return PerformanceModel(trees, none, rates=rates, tilings=apart, knows_machines=machines)


@dataclass(frozen=True, slots=True)
class Unseen:
    """Samples as the machine is when nothing slows it (`hpm.phases`), predicted by models that saw none of their problems."""

    samples: TrainingRows
    predicted: Vector
    slow: Vector
    """Log factors by which they were slowed when they were measured."""
    helps: bool
    """Whether a forest of tilings makes predictions better."""

    @property
    def off(self) -> Vector:
        """log(measured / predicted)."""
        return np.log(self.samples.seconds / self.predicted)


def unseen(
    samples: TrainingRows, at: Roofline, *, few: int = forest.BOOST_FROM_ROWS, seed: int = 0, support: Support | None = None
) -> Unseen:
    """Every sample predicted by a model that saw none of its problem, once phases in which the machine was slow are taken out."""
    predicted, helps = _folded(samples, at, few, FOLDS, seed, support)
    off = np.log(samples.seconds / predicted)
    slow = np.zeros(len(off)) if samples.at is None else phases.slowed(samples.at, off, samples.group)
    samples = replace(samples, seconds=samples.seconds / np.exp(slow))
    mean = slow.mean() if len(slow) else 0.0  # these models learned from slowed rows too
    return Unseen(samples, predicted / np.exp(mean), slow, helps)


def _folded(
    samples: TrainingRows, at: Roofline, few: int, folds: int, seed: int, support: Support | None
) -> tuple[Vector, bool]:
    """Predictions by models that saw no sample of the group, and whether a forest of tilings makes them better."""
    found, weight, cell = derive(samples.table, at), weights(samples), tiling_residuals.cells(samples.table)
    fold = _folds(samples.group, folds, seed)
    plain = samples.seconds.copy()
    told = plain.copy()
    for k in range(folds):
        test = fold == k
        if test.any() and not test.all():
            made = grown(
                found.pick(~test), samples.seconds[~test], weight[~test], cell[~test], seed=seed, few=few, support=support
            )
            part = found.pick(test)
            told[test] = made.seconds(part)
            plain[test] = replace(made, tilings=None).seconds(part) if made.tilings is not None else told[test]
    one, other = (tiling_residuals.error(samples.seconds, p, cell, weight) for p in (plain, told))
    helps = other < tiling_residuals.BETTER * one
    return (told, True) if helps else (plain, False)


def _folds(group: npt.NDArray[np.int64], folds: int, seed: int) -> npt.NDArray[np.int64]:
    names, number = np.unique(group, return_inverse=True)
    return np.random.default_rng(seed).permutation(len(names))[number] % folds


def weights(samples: TrainingRows) -> Vector:
    """Rows that were measured quietly count more."""
    return 1.0 / (0.05**2 + samples.noise**2)


def fit(
    samples: TrainingRows, at: Roofline, *, seed: int = 0, few: int = forest.BOOST_FROM_ROWS, support: Support | None = None
) -> PerformanceModel:
    """Train on everything, as fast as it is when nothing slows the machine (`hpm.phases`); intervals come from forests that did not
    see what they are judged on. `support`: rows of other machines, which count besides and are not judged.
    """
    started = time.perf_counter()
    told = unseen(samples, at, few=few, seed=seed, support=support)
    samples, predicted, off = told.samples, told.predicted, told.off
    found = derive(samples.table, at)
    cell = tiling_residuals.cells(samples.table) if told.helps else None
    made = grown(found, samples.seconds, weights(samples), cell, seed=seed, few=few, support=support)
    width = intervals(found.family, predicted, off)
    scores = accuracy(samples.seconds, predicted)
    facts = {
        "samples": len(samples), "groups": len(np.unique(samples.group)), "kind": "boosted" if len(samples) >= few else "extra",
        "trees": len(made.forest.roots), "tells_tilings_apart": told.helps,
        "seconds": round(time.perf_counter() - started, 3), "held_out": scores,
        "rooflines": accuracy(samples.seconds, found.roofline.seconds),
        "slowed": phases.summary(told.slow),
        "features": list(INPUTS), "rows": list(ROW_NAMES), "kept": KEPT, "threads": at.threads,
        "supported_by": 0 if support is None else len(support.seconds),
    }  # fmt: skip
    return replace(made, width=width, facts=facts)


def best_fit(samples: TrainingRows, at: Roofline, support: Support | None) -> PerformanceModel:
    """The same; rows of other machines stay where they made errors on problems that it had not seen smaller."""
    made = fit(samples, at, support=support)
    if support is None or len(samples) < MIN_SAMPLES:
        return made
    alone = fit(samples, at)
    return made if made.facts["held_out"]["mape"] < alone.facts["held_out"]["mape"] else alone


def intervals(family: npt.NDArray[np.int64], predicted: Vector, off: Vector) -> Matrix:
    """Half-widths by family and length that hold `KEPT` of residuals; all of them speak where a family and length has few."""
    length = np.searchsorted(LENGTHS, predicted)
    width = np.full((len(FAMILIES), len(LENGTHS) + 1), float(np.quantile(np.abs(off), KEPT)))
    for f in range(len(FAMILIES)):
        for b in range(len(LENGTHS) + 1):
            near = np.abs(off[(family == f) & (length == b)])
            if len(near) >= MIN_RESIDUALS:
                width[f, b] = float(np.quantile(near, min(1.0, KEPT * (1 + 1 / len(near)))))
    return width


def accuracy(measured: Vector, predicted: Vector, least_s: float = 5e-6) -> dict[str, float]:
    """MAPE and shares within 10% and 20%, of kernels that take longer than `least_s`."""
    long = measured > least_s
    if not long.any():
        return {"n": 0.0, "mape": float("nan"), "within10": float("nan"), "within20": float("nan")}
    error = np.abs(predicted[long] / measured[long] - 1)
    return {"n": float(long.sum()), "mape": float(error.mean()), "within10": float((error <= 0.1).mean()),
            "within20": float((error <= 0.2).mean())}  # fmt: skip


def save(store: Store, model: PerformanceModel, machine: int | None, name: str | None = None) -> int:
    """Keep a model; its version. It is named by its threads unless told."""
    arrays = {**model.forest.arrays(), "width": model.width, "rates": model.rates}
    if model.tilings is not None:
        arrays |= model.tilings.arrays("tilings_")
    return store.save_model(name or named(int(model.facts.get("threads", 1))), arrays, model.facts, machine)


def load(store: Store, machine: int | None = None, version: int | None = None, threads: int = 1) -> PerformanceModel | None:
    """The newest model for calls of so many threads, or a given version; None where there is none that this program and machine
    can use."""
    found = store.load_model(named(threads), version, machine)
    if found is None:
        return None
    if int(found.facts.get("threads", 1)) != threads:
        store.notes.append(f"a stored model was left aside: it was not trained for {threads} threads")
        return None
    return restored(store, found)


def restored(store: Store, found: StoredModel) -> PerformanceModel | None:
    """A model out of stored arrays; None, with a note, where they are not one that this program reads."""
    reads, rows = (list(found.facts.get(n, ())) for n in ("features", "rows"))
    if reads not in (list(INPUTS), list(MANY_MACHINES)) or rows != list(ROW_NAMES):
        store.notes.append("a stored model was left aside: it reads other features")
        return None
    try:
        trees = forest.from_arrays(found.arrays, len(reads))
        apart = forest.from_arrays(found.arrays, len(reads), "tilings_") if "tilings_roots" in found.arrays else None
        width, rates = found.arrays["width"], found.arrays["rates"]
    except (KeyError, ValueError) as e:
        store.notes.append(f"a stored model was left aside: {e}")
        return None
    if width.shape != (len(FAMILIES), len(LENGTHS) + 1) or not np.isfinite(width).all():
        store.notes.append("a stored model was left aside: its intervals do not fit")
        return None
    if rates.shape != fitted.NONE.shape or not np.isfinite(rates).all() or (rates < 0).any():
        store.notes.append("a stored model was left aside: its rates do not fit")
        return None
    return PerformanceModel(trees, width.astype(np.float64), dict(found.facts), found.version, rates.astype(np.float64), apart,
                            len(reads) > len(INPUTS))  # fmt: skip


class Correction:
    """What serving measured beside a model's predictions; the neutral one changes nothing."""

    def shift(self, family: npt.NDArray[np.int64], level: npt.NDArray[np.int64]) -> Vector:
        """Log factors to multiply predictions with."""
        return np.zeros(len(family))

    def of(self, found: Features, level: npt.NDArray[np.int64]) -> Vector:
        """The same, of rows whose features may count."""
        return self.shift(found.family, level)


@dataclass(slots=True)
class CostPredictor:
    """A model on a machine: candidates in, predictions out."""

    model: PerformanceModel
    at: Roofline
    row_cache: RowCache
    correction: Correction = field(default_factory=Correction)

    def predict(self, candidates: Sequence[Candidate]) -> Predictions:
        """Predict a batch before anything of it is built; raises Unknown where work depends on data."""
        return self.of_rows(self.row_cache.rows(candidates))

    def of_rows(self, table: Matrix) -> Predictions:
        """Like `predict`, for rows that are counted already."""
        found = derive(table, self.at)
        raw = self.model.seconds(found)
        level = binding(found)
        seconds = raw * np.exp(self.correction.of(found, level))
        width = np.exp(self.model.widths(found, raw))
        memory = table[:, _BYTES].sum(1)
        cycles = seconds * self.at.hz
        joules = seconds * watts_per_core() * self.at.threads
        return Predictions(seconds, seconds / width, seconds * width, cycles, joules, memory, level, found.family)


_BYTES = np.array([ROW_NAMES.index(n) for n in ("bytes_in", "bytes_const", "bytes_out")])


def binding(found: Features) -> npt.NDArray[np.int64]:
    """The memory level whose speed decides, -1 where arithmetic does."""
    return np.where(found.roofline.memory >= found.roofline.compute, found.roofline.level, -1)
