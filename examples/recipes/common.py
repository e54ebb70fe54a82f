"""What every recipe does around its model: serve it for a while, compare results, time both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hotfuse

MIN_CALLS, ROUNDS = 4, 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a recipe printed."""

    same: bool
    before_ms: float
    after_ms: float
    in_plans: int
    """Calls of the model that a captured graph answered."""


def compared(
    name: str, before: Callable[[], Any], after: Callable[[], Any], fast: hotfuse.api.Jit | hotfuse.InferenceSession,
    same: Callable[[Any, Any], bool], seconds: float, least: int = MIN_CALLS, rounds: int = ROUNDS,
) -> Outcome:  # fmt: skip
    """Call the served program for some seconds, and so many times at least, then both in turns."""
    until, calls = time.monotonic() + seconds, 0
    while calls < least or time.monotonic() < until:
        after()
        calls += 1
    fast.wait(10 * seconds)
    times: tuple[list[float], list[float]] = ([], [])
    equal = True
    for _ in range(rounds):
        results: list[Any] = []
        for call, taken in zip((before, after), times, strict=True):
            begin = time.perf_counter()
            results.append(call())
            taken.append((time.perf_counter() - begin) * 1e3)
        equal = equal and same(*results)
    found = Outcome(equal, statistics.median(times[0]), statistics.median(times[1]), fast.stats()["graph_calls"])
    ratio = found.before_ms / found.after_ms
    print(f"{name}: before {found.before_ms:.2f} ms, after {found.after_ms:.2f} ms ({ratio:.2f} times as fast), "
          f"results {'equal' if equal else 'DIFFER'}")
    print(fast.explain())
    return found
