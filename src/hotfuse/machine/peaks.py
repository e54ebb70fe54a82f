"""What a machine reaches at best, as measured: the roofline that performance models and utilization are held against.

Plain data; measuring needs generated code and happens in `backends.llvm.peak_kernels`. A figure is the best of several passes that
were spread out in time, with the distance of the other good passes from it as its noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from hotfuse.base.lazy_dataclass import dataclass

Direction = Literal["read", "write"]
LEVELS = ("L1", "L2", "L3", "memory")


@dataclass(frozen=True, slots=True)
class Rate:
    """Operations a second: a multiply-add counts as two."""

    dtype: str
    threads: int
    per_s: float
    noise: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second to or from one level."""

    level: str
    direction: Direction
    threads: int
    per_s: float
    noise: float
    bytes: int
    """Working set of one thread."""


@dataclass(frozen=True, slots=True)
class ForkCost:
    """Nanoseconds to begin and end a parallel loop."""

    threads: int
    hot_ns: float
    """The loop before ended just now: threads still wait for work."""
    idle_ns: float
    """After some milliseconds without work: threads sleep."""


@dataclass(frozen=True, slots=True)
class MachinePeaks:
    """Everything that was measured."""

    target: str
    """Instructions that the measuring code used."""
    rates: tuple[Rate, ...]
    bandwidths: tuple[Bandwidth, ...]
    forks: tuple[ForkCost, ...]
    call_ns: float
    """From Python into native code and back."""
    at: float
    """Seconds since 1970."""
    seconds: float
    """What measuring took."""
    missing: tuple[tuple[str, str], ...] = ()
    """What could not be measured, and why."""
    hz: float | None = None
    """Cycles a second of one core at work; None where no instruction's latency is known for certain."""

    def measured(self, threads: int) -> bool:
        """Whether this number of threads was measured itself."""
        return any(r.dtype == "f32" and r.threads == threads for r in self.rates)

    def rate(self, dtype: str = "f32", threads: int = 1) -> float | None:
        """Operations a second; between two measured numbers of threads, in proportion."""
        return _between({r.threads: r.per_s for r in self.rates if r.dtype == dtype}, threads)

    def bandwidth(self, level: str, direction: Direction = "read", threads: int = 1) -> float | None:
        """Bytes a second."""
        found = {b.threads: b.per_s for b in self.bandwidths if (b.level, b.direction) == (level, direction)}
        return _between(found, threads)

    def fork(self, threads: int, *, idle: bool = False) -> float | None:
        """Nanoseconds of a fork and join; one thread needs none."""
        return (
            0.0 if threads <= 1 else _between({f.threads: f.idle_ns if idle else f.hot_ns for f in self.forks}, threads)
        )

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        return asdict(self)


def _between(known: Mapping[int, float], threads: int) -> float | None:
    """The figure for a number of threads; beyond the largest that was measured it grows no more."""
    if not known:
        return None
    if threads in known:
        return known[threads]
    below, above = [t for t in known if t < threads], [t for t in known if t > threads]
    if not below or not above:
        return known[max(below) if below else min(above)]
    lo, hi = max(below), min(above)
    return known[lo] + (known[hi] - known[lo]) * (threads - lo) / (hi - lo)


def from_dict(found: Mapping[str, Any]) -> MachinePeaks:
    """The reverse of `to_dict`; raises ValueError where the dict is something else."""
    try:
        peaks = MachinePeaks(
            target=str(found["target"]),
            rates=tuple(Rate(str(r["dtype"]), int(r["threads"]), _positive(r["per_s"]), float(r["noise"])) for r in found["rates"]),
            bandwidths=tuple(
                Bandwidth(
                    str(b["level"]), _direction(b["direction"]), int(b["threads"]), _positive(b["per_s"]), float(b["noise"]),
                    int(b["bytes"]),
                )
                for b in found["bandwidths"]
            ),
            forks=tuple(ForkCost(int(f["threads"]), _positive(f["hot_ns"]), _positive(f["idle_ns"])) for f in found["forks"]),
            call_ns=_positive(found["call_ns"]),
            at=float(found["at"]),
            seconds=float(found["seconds"]),
            missing=tuple((str(n), str(w)) for n, w in found["missing"]),
            hz=None if found.get("hz") is None else _positive(found["hz"]),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"not measured peaks: {e!r}") from e
    return peaks


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value!r} is no rate")
    return number


def _direction(value: Any) -> Direction:
    if value == "read" or value == "write":
        return value
    raise ValueError(f"direction {value!r}")
