"""The machine as rates and knots, and the least time of work on it: vectorized over rows of `hpm.work`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.work import NAMES, Matrix
from hotfuse.machine.assumed import assumed_core
from hotfuse.machine.peaks import LEVELS, MachinePeaks
from hotfuse.machine.topology import Topology, stated_hz

Vector = npt.NDArray[np.float64]
_GUESS = {"L1": 100e9, "L2": 50e9, "L3": 25e9, "memory": 10e9}
FORK_S = 2e-6
SLACK = 0.95
"""Peaks are measured as well: what comes a little nearer than their noise to them is no mistake."""


Column = Any
"""A column of rows, or the symbol of one (`hpm.compiled.columns`)."""


class Speeds:
    """Bandwidth by working set, of arrays or of symbols."""

    __slots__ = ()
    log_knots: Sequence[Any]
    log_speeds: Sequence[Any]
    ends: Sequence[Any]

    def between(self, held: Column, values: Sequence[Any]) -> Column:
        """What holds at the knots, and a straight line between them, over the logarithm of working sets."""
        at, found = np.log(np.maximum(held, 1.0)), values[0]
        for i in range(len(values) - 1):
            low, high = self.log_knots[i], self.log_knots[i + 1]
            found = found + np.minimum(np.maximum((at - low) / (high - low), 0.0), 1.0) * (values[i + 1] - values[i])
        return found

    def bandwidth(self, held: Column) -> Column:
        """Bytes a second for working sets, smooth between the levels."""
        return np.exp(self.between(held, self.log_speeds))

    def level(self, held: Column) -> Column:
        """Which level working sets lie in: 0 is the first."""
        return sum(1.0 * (held > end) for end in self.ends)


@dataclass(frozen=True, slots=True)
class Roofline(Speeds):
    """Rates of one number of threads; `knots` are working sets with the bandwidth that holds up to them."""

    threads: int
    flops: float
    knots: tuple[float, ...]
    speeds: tuple[float, ...]
    call_s: float
    fork_s: float
    measured: bool
    hz: float
    """Cycles a second of a core: measured, or as the system states it (`machine.topology.stated_hz`)."""
    log_knots: Sequence[float] = field(init=False, compare=False, repr=False)
    log_speeds: Sequence[float] = field(init=False, compare=False, repr=False)
    ends: Sequence[float] = field(init=False, compare=False, repr=False)
    """Working sets up to which each level but the last reaches."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_knots", tuple(math.log(k) for k in self.knots))
        object.__setattr__(self, "log_speeds", tuple(math.log(s) for s in self.speeds))
        object.__setattr__(self, "ends", tuple(k * 1.25 for k in self.knots[:-1]))


def machine_roofline(peaks: MachinePeaks | None, top: Topology, lanes: int, threads: int = 1) -> Roofline:
    """A machine's roofline: measured where there are measured peaks, else the same guesses everywhere."""
    caches = {f"L{c.level}": c.bytes for c in top.caches if c.kind != "instruction"}
    return _roofline(peaks, caches, lanes * 4 * stated_hz(), top.max_mhz * 1e6 if top.max_mhz else stated_hz(), threads)


def measured_roofline(peaks: MachinePeaks, caches: Mapping[str, int], hz: float | None, threads: int) -> Roofline | None:
    """The roofline of a machine that others measured, by its peaks, the sizes of its caches and its highest clock, where known;
    None where its peaks are not those of arithmetic."""
    return None if peaks.rate("f32", threads) is None else _roofline(peaks, caches, 0.0, hz or assumed_core().hz, threads)


def _roofline(peaks: MachinePeaks | None, caches: Mapping[str, int], flops_a_thread: float, hz: float, threads: int) -> Roofline:
    sizes = [caches.get("L1", 32 << 10), caches.get("L2", 1 << 20), caches.get("L3", 8 << 20)]
    flops = peaks.rate("f32", threads) if peaks is not None else None
    speeds: list[float] = []
    for level in LEVELS:
        read = peaks.bandwidth(level, "read", threads) if peaks is not None else None
        speeds.append(read or (min(speeds[-1], _GUESS[level] * threads) if speeds else _GUESS[level] * threads))
    knots = _increasing([sizes[0] * 0.8, sizes[1] * 0.8, sizes[2] * 0.5, sizes[2] * 2.0])
    fork = peaks.fork(threads) if peaks is not None else None
    return Roofline(
        threads, flops or flops_a_thread * threads, tuple(knots), tuple(speeds),
        (peaks.call_ns if peaks is not None else 100.0) * 1e-9,
        (fork * 1e-9 if fork is not None else FORK_S) if threads > 1 else 0.0, flops is not None,
        (peaks.hz if peaks is not None else None) or hz,
    )  # fmt: skip


def _increasing(numbers: Sequence[float]) -> list[float]:
    made: list[float] = []
    for n in numbers:
        made.append(max(n, made[-1] * 1.5) if made else n)
    return made


@dataclass(frozen=True, slots=True)
class Least:
    """Least times, in seconds, and what they come from."""

    seconds: Vector
    """What a kernel on the roofline takes, with a call."""
    compute: Vector
    memory: Vector
    bound: Vector
    """What nothing can beat: products at the peak, compulsory traffic at the level's bandwidth."""
    level: npt.NDArray[np.int64]
    """Of the working set."""
    products: Vector
    """Operations of products that cannot be done without."""

    def pick(self, where: npt.NDArray[Any]) -> Least:
        """Some rows."""
        return Least(self.seconds[where], self.compute[where], self.memory[where], self.bound[where], self.level[where],
                     self.products[where])  # fmt: skip


def least(table: Matrix, at: Roofline) -> Least:
    """The roofline of rows."""
    found = least_of(dict(zip(NAMES, np.ascontiguousarray(table.T), strict=True)), at)
    return replace(found, level=found.level.astype(np.int64))


def least_of(c: Mapping[str, Column], at: Any) -> Least:
    """Like `least`, from the rows' columns."""
    library = c["library"] > 0
    traffic = c["bytes_in"] + c["bytes_const"] + c["bytes_out"]
    moved = np.where(library, np.maximum(c["moved"], traffic), traffic)
    held = np.maximum(np.where(library, c["most_moved"], traffic), 1.0)
    memory = moved / at.bandwidth(held)
    mma = c["mma"] * c["kept_products"]
    # an instruction that is no multiply-add does half as many operations
    compute = (mma + 2 * (c["light"] + c["divide"] + c["function"])) / at.flops
    calls = np.where(library, c["calls"] * (20 * at.call_s), 2 * at.call_s) + at.fork_s
    seconds = np.maximum(compute, memory) + calls
    bound = np.maximum(mma / at.flops, traffic / at.speeds[0]) * SLACK
    return Least(seconds, compute, memory, bound, at.level(held), mma)
