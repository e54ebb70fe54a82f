"""When nobody calls: whatever is measured beside serving is measured then, with the machine to itself.

What is only computed (a proof) need not wait for that: while calls are served it has the cores that they leave (`computing`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.machine import team_size
from hotfuse.runtime.concurrency import calls_in_flight
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.tally import calls_everywhere

QUIET_S = 0.05
"""Without a call for so long, nobody calls: threads of a team that served have gone to sleep, too."""
POLL_S = 0.005
NEXT_S = 0.5
"""Longest wait for calls under way to be over, before something is computed beside the next ones."""

Computing = Callable[[], AbstractContextManager[None]]
"""Around what a background thread computes: it has the threads that calls leave meanwhile."""


class Lull:
    """Watches, from a thread beside, whether any model of the process is called."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, calls: Callable[[], int] = calls_everywhere,
        inside: Callable[[], bool] = epochs.inside, sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._calls, self._inside, self._sleep = clock, calls, inside, sleep
        self._seen, self._since = calls(), clock()
        self.disturbed = 0
        """Rounds during which somebody called."""

    def lasts(self) -> bool:
        """Whether nobody has called for long enough, and nobody is in a call."""
        now, calls = self._clock(), self._calls()
        if calls != self._seen or self._inside():
            self._seen, self._since = calls, now
        return now - self._since >= QUIET_S

    def undisturbed(self) -> bool:
        """Whether nobody has called since this or `lasts` was asked."""
        before = self._seen
        quiet = self._calls() == before and not self._inside()
        self.disturbed += not quiet
        return quiet

    @contextmanager
    def computing(self, at_least: int = 1) -> Generator[None]:
        """Around what a background thread computes: on its whole team while nobody calls, else on cores that calls leave, and so
        many threads at least.
        """
        if self.lasts():
            yield
            return
        in_flight, before, whole = calls_in_flight(), self._calls(), team_size.has_every_core()
        with team_size.in_background(in_flight, at_least):
            if whole:
                self._await_next(before + in_flight)
            yield

    def _await_next(self, calls: int) -> None:
        """Calls under way have the cores that they had: wait until they are over, a bounded time."""
        until = self._clock() + NEXT_S
        while self._inside() and self._calls() < calls and self._clock() < until:
            with background_priority.waiting():
                self._sleep(POLL_S)

    def await_one(self, most_s: float) -> bool:
        """Wait until nobody calls, a bounded time."""
        until = self._clock() + most_s
        while not self.lasts():
            if self._clock() >= until:
                return False
            with background_priority.waiting():
                self._sleep(POLL_S)
        return True
