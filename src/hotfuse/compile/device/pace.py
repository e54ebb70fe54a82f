"""Measurements on a device that serves take turns with calls.

A measurement takes the device for some milliseconds, and a program that waits for the whole device waits for it, too. One after
another they would slow every other call. A first plan of generated kernels is worth that for a second or two; what may follow it,
while such a plan serves, is not in a hurry. So each measurement is followed by a rest of several times its length, and time
that was measured, not time that passed, is what is limited.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hotfuse.compile.workers.background_priority import background_priority

RESTS = 16.0
"""A rest, over the measurement before it. Five were not enough: a whole plan's took 6 ms, and 2 of 100 calls of 0.7 ms met one."""
MAX_REST_S = 0.25


def idle(seconds: float) -> None:
    """Wait, and let calls know that nobody works beside them."""
    with background_priority.waiting():
        time.sleep(seconds)


class RestingPace:
    """Runs measurements, and adds up what they took."""

    def __init__(
        self, rests: float = RESTS, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = idle
    ) -> None:
        self.busy_s = 0.0
        self._rests, self._clock, self._sleep = rests, clock, sleep

    def __call__(self, measure: Callable[[], float]) -> float:
        """What it gives."""
        begin = self._clock()
        try:
            return measure()
        finally:
            took = self._clock() - begin
            self.busy_s += took
            if self._rests:
                self._sleep(min(self._rests * took, MAX_REST_S))
