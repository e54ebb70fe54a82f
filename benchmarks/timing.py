"""Side-by-side timing: contenders take turns call by call, so that a machine that changes speed hurts all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

REST_S, LONGEST_REST_S, QUIET = 0.005, 0.3, 0.1
"""Between two contenders' turns: a piece of rest, the most that is rested, and the share of a piece that may be computed in it."""
WARM_S = 0.006
"""After a rest: calls that do not count, some five for all memory to be in cache again. Of megabytes, the second call still takes
twice what later ones do.
"""


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


def rest(piece_s: float = REST_S) -> None:
    """Sleep, piece by piece, until no thread of this process computes.

    Threads of a runtime look for more work after a call, ONNX Runtime's for tens of milliseconds, on a core that whoever comes next
    needs for threads of its own. A pause of fixed length is too short after some and wasted after others. Processes beside this one
    are not seen: for those a piece must be long enough.
    """
    end = time.monotonic() + LONGEST_REST_S
    while time.monotonic() < end:
        begun, used = time.monotonic(), time.process_time()
        time.sleep(piece_s)
        if time.process_time() - used < QUIET * (time.monotonic() - begun):
            return


def interleave(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, inner: int = 1, warm_up: int = 3, rest_s: float = 0.0,
    warm_s: float = 0.0, apart: Mapping[str, Callable[[int], float]] | None = None,
) -> tuple[dict[str, Timing], dict[str, float]]:  # fmt: skip
    """Time contenders in turns, the order turning round; `inner` calls are timed together where one is too short.

    Gives each one's timing, and the median over rounds of its time divided by the first one's *of the same
    round*, which a drifting machine disturbs least. With `rest_s`, every turn begins with a rest in pieces of that length, until
    the threads of whoever came before have stopped spinning, and with calls that are not counted, for `warm_s` and at least one.
    Contenders `apart` are in another process: they are told how many calls to make, and say themselves how many seconds these took.
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
                    rest(rest_s)
                if name in apart:
                    times[name].append(apart[name](inner) * 1e3 / inner)
                    continue
                call = contenders[name]
                if rest_s:
                    warmed = time.perf_counter() + warm_s
                    call()
                    while time.perf_counter() < warmed:
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
