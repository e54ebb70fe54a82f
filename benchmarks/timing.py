"""Side-by-side timing: contenders take turns call by call, so that a machine that changes speed hurts all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """What one contender's calls took, in milliseconds."""

    median: float
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""
    calls: int

    def to_dict(self) -> dict[str, float]:
        """A plain dict for JSON."""
        return {
            "median_ms": round(self.median, 5),
            "p10_ms": round(self.low, 5),
            "p90_ms": round(self.high, 5),
            "calls": self.calls,
        }


def summarize(times_ms: list[float]) -> Timing:
    """Median and spread; a single call is all three."""
    if len(times_ms) == 1:
        return Timing(times_ms[0], times_ms[0], times_ms[0], 1)
    tenths = statistics.quantiles(times_ms, n=10, method="inclusive")
    return Timing(statistics.median(times_ms), tenths[0], tenths[8], len(times_ms))


def interleave(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, inner: int = 1, warm_up: int = 3, rest_s: float = 0.0,
    apart: Mapping[str, Callable[[int], float]] | None = None,
) -> tuple[dict[str, Timing], dict[str, float]]:  # fmt: skip
    """Time contenders in turns, the order turning round; `inner` calls are timed together where one is too short.

    Gives each one's timing, and the median over rounds of its time divided by the first one's *of the same
    round*, which a drifting machine disturbs least. With `rest_s`, every turn begins with a pause, in which the threads
    of whoever came before stop spinning, and a call that is not counted. Contenders `apart` are in another process: they are told
    how many calls to make, and say themselves how many seconds these took.
    """
    apart = apart or {}
    names = [*contenders, *apart]
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in contenders:
        for _ in range(warm_up * inner):
            contenders[name]()
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for name in names if i % 2 == 0 else reversed(names):
                if rest_s:
                    time.sleep(rest_s)
                if name in apart:
                    times[name].append(apart[name](inner) * 1e3 / inner)
                    continue
                call = contenders[name]
                if rest_s:
                    call()
                start = time.perf_counter()
                for _ in range(inner):
                    call()
                times[name].append((time.perf_counter() - start) * 1e3 / inner)
    finally:
        gc.enable()
    first = times[names[0]]
    ratios = {n: statistics.median(t / base for t, base in zip(times[n], first, strict=True)) for n in names}
    return {name: summarize(found) for name, found in times.items()}, ratios
