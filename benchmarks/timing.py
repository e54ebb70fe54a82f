"""Side-by-side timing: contenders take turns call by call, so that a machine that changes speed hurts all alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

REST_S, MAX_REST_S, QUIET = 0.005, 0.3, 0.1
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
    end = time.monotonic() + MAX_REST_S
    while time.monotonic() < end:
        begun, used = time.monotonic(), time.process_time()
        time.sleep(piece_s)
        if time.process_time() - used < QUIET * (time.monotonic() - begun):
            return


def burst(call: Callable[[], object], warm_s: float, turn_s: float) -> float:
    """Seconds a call takes: calls for `turn_s` and at least one, after calls that are not counted, for `warm_s` and at least one.

    Everybody gets the same time, not the same number of calls: a few calls of 50 us would say what memory was in the cache and
    whether one of them was looked at, and a number that is right for the quickest would keep the slowest for minutes.
    """
    calls_for(call, warm_s)
    return calls_for(call, turn_s)


def calls_for(call: Callable[[], object], seconds: float) -> float:
    """Call until this time has passed, at least once; seconds a call."""
    count, start = 0, time.perf_counter()
    while True:
        call()
        count += 1
        spent = time.perf_counter() - start
        if spent >= seconds:
            return spent / count


def interleave(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, inner: int = 1, warm_up: int = 3, rest_s: float = 0.0,
    warm_s: float = 0.0,
) -> tuple[dict[str, Timing], dict[str, float]]:  # fmt: skip
    """Time contenders in turns of `inner` calls, which are timed together where one is too short.

    With `rest_s`, every turn begins with a rest in pieces of that length, until the threads of whoever came before have stopped
    spinning, and with calls that are not counted, for `warm_s` and at least one.
    """

    def turn(call: Callable[[], object]) -> float:
        if rest_s:
            rest(rest_s)
            calls_for(call, warm_s)
        start = time.perf_counter()
        for _ in range(inner):
            call()
        return (time.perf_counter() - start) / inner

    for call in contenders.values():
        for _ in range(warm_up * inner):
            call()
    return in_turns({name: partial(turn, call) for name, call in contenders.items()}, rounds)


def in_turns(
    turns: Mapping[str, Callable[[], float]], rounds: int, spreads: dict[str, tuple[float, float]] | None = None
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Let contenders take their turns, the order turning round; a turn says how many seconds a call of it took.

    Gives each one's timing, and the median over rounds of its time divided by the first one's *of the same round*, which a
    drifting machine disturbs least. `spreads` gets the 10th and 90th percentile of these.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for name in turns if i % 2 == 0 else reversed(list(turns)):
                times[name].append(turns[name]() * 1e3)
    finally:
        gc.enable()
    first = next(iter(times.values()))
    by_round = {n: summarize([t / base for t, base in zip(found, first, strict=True)]) for n, found in times.items()}
    if spreads is not None:
        spreads.update({n: (round(s.low, 4), round(s.high, 4)) for n, s in by_round.items()})
    ratios = {n: s.median for n, s in by_round.items()}
    return {name: summarize(found) for name, found in times.items()}, ratios
