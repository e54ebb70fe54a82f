"""Hardware counters around a sampled call: cycles, instructions and cache misses of the thread that serves it, where there are any.

Opened once per thread, by the first sampled call. Where the system has none (most virtual machines), finding that out is all that
is ever spent, and readers of the records derive what they can from times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hotfuse.machine.counters import Counters

EVENTS = ("cycles", "instructions", "cache_misses")
Counted = tuple[int, int, int]


class Meters(threading.local):
    """The calling thread's counters."""

    def __init__(self, make: Callable[[tuple[str, ...]], Counters] = Counters) -> None:
        self._counters: Counters | None = make(EVENTS)
        if set(self._counters.names) != set(EVENTS):
            self._counters.close()
            self._counters = None

    def start(self) -> None:
        """Begin at zero."""
        if self._counters is not None:
            self._counters.start()

    def stop(self) -> Counted | None:
        """What was counted; None where nothing can be."""
        if self._counters is None:
            return None
        self._counters.stop()
        found = self._counters.read()
        if any(e not in found for e in EVENTS):  # others had the counters all the time
            return None
        cycles, instructions, misses = (round(found[e].value) for e in EVENTS)
        return cycles, instructions, misses


def part_of(counted: Counted | None, ns: int, total_ns: int) -> Counted | None:
    """A partition's part of a call's counts, by time: exact for a call that is one partition, else an apportionment."""
    if counted is None or total_ns <= 0:
        return None
    cycles, instructions, misses = (c * ns // total_ns for c in counted)
    return cycles, instructions, misses
