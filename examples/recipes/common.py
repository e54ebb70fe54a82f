"""What every recipe does around its model: serve it for a while, compare results, time both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hotfuse


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a recipe printed."""

    same: bool
    before_ms: float
    after_ms: float


def compared(
    name: str, before: Callable[[], Any], after: Callable[[], Any], fast: hotfuse.api.Jit, same: Callable[[Any, Any], bool],
    seconds: float,
) -> Outcome:  # fmt: skip
    """Call the served program for some seconds, then both in turns."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        after()
    fast.wait(10 * seconds)
    times: tuple[list[float], list[float]] = ([], [])
    equal = True
    for _ in range(5):
        results: list[Any] = []
        for call, taken in zip((before, after), times, strict=True):
            begin = time.perf_counter()
            results.append(call())
            taken.append((time.perf_counter() - begin) * 1e3)
        equal = equal and same(*results)
    found = Outcome(equal, statistics.median(times[0]), statistics.median(times[1]))
    ratio = found.before_ms / found.after_ms
    print(f"{name}: before {found.before_ms:.2f} ms, after {found.after_ms:.2f} ms ({ratio:.2f} times as fast), "
          f"results {'equal' if equal else 'DIFFER'}")
    print(fast.explain())
    return found
