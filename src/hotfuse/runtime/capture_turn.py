"""Whose turn a worker is where there is no other: a further capture's, or the first plan's of a graph that is captured already.

A capture by itself saves calls little: its graph runs on the library's kernels, as the interpreter of a file does. What saves them
most of their time is a plan of generated kernels. Captures of further sizes came first nevertheless, one after another: a speech
model called in batches of one and more and at two sampling rates had three graphs after 6 s, and the first plan of any of them
after 9. With the plan before the next capture the last plan comes no later, and all others come sooner (decision 267).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.compile.workers.service import service

MAX_WAIT_S = 15.0
"""A capture waits so long at most, however long a plan takes."""
FREE_S = 1.0
"""A plan that has asked a worker for nothing for so long is being proven or raced: the worker is the capture's. Between two of its
requests, kernels and the native runs of them, helpers are compiled for half a second in a new cache."""
RATE_S, MAX_OTHERS = 0.5, 4
"""Where so many times as many calls wait for a capture as for the plan, seen for so long, the capture goes first."""
TICK_S = 0.02


class CaptureTurn:
    """When one engine's captures run: in the background, on a queue of their own."""

    def __init__(
        self, awaited: Callable[[], int | None], room: Callable[[], bool] | None = None,
        several: Callable[[], bool] | None = None, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._awaited = awaited
        """Calls so far of the graphs whose first plans are being made; None where none is."""
        self._room = room or (lambda: service().pool.room)
        """Whether a worker would begin what it is asked now."""
        self._several = several or (lambda: service().pool.size > 1)
        """Whether there may be more than one of them."""
        self._clock, self._sleep = clock, sleep

    def wait(self, missed: Callable[[], int]) -> float:
        """Until a worker is the capture's; the seconds that it took. `missed` gives the calls so far that wait for captures."""
        if self._awaited() is None or (self._several() and self._room()):
            return 0.0
        with service().others_meanwhile(), background_priority.waiting():
            return self._until_free(missed)

    def _until_free(self, missed: Callable[[], int]) -> float:
        begun = busy = now = self._clock()
        others, own = missed(), self._awaited() or 0
        while (calls := self._awaited()) is not None and now - begun < MAX_WAIT_S:
            if not self._room():
                busy = now
            elif self._several() or now - busy >= FREE_S:
                break
            if now - begun >= RATE_S and missed() - others > MAX_OTHERS * (calls - own):
                break
            self._sleep(TICK_S)
            now = self._clock()
        return now - begun
