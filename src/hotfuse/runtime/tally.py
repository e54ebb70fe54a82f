"""Counters that many threads bump without a lock: one set per thread, added up when asked.

A thread's set outlives it: what it counted goes into one set for all threads that have ended, so that a server which starts a
thread per request does not grow.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from hotfuse.base.living import Living
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.compile.workers.served_calls import served_calls
from hotfuse.runtime.epochs import epochs

MIN_SETS = 32
"""Sets that are kept before those of ended threads are looked for."""


class ThreadCounts:
    """One thread's counters."""

    __slots__ = ("deopts", "guard_misses", "looked_at", "module_calls", "tier0_calls", "tier1_calls", "tier2_calls")

    def __init__(self) -> None:
        self.module_calls = self.tier0_calls = self.tier1_calls = self.tier2_calls = 0
        self.guard_misses = self.deopts = self.looked_at = 0

    def answered(self, tier: int) -> None:
        """A call was answered by a plan of that tier; -1 is the model's own code."""
        if tier < 0:
            self.module_calls += 1
        elif tier == 0:
            self.tier0_calls += 1
        elif tier == 1:
            self.tier1_calls += 1
        else:
            self.tier2_calls += 1


class Rest:
    """How many calls the model's own code answers before anything is looked up again. Takes no lock: a count that two threads take
    down at once is off by one."""

    __slots__ = ("left",)

    def __init__(self, left: int = 0) -> None:
        self.left = left


NEVER = Rest()
"""Where no call rests."""


class RestOfAll(Rest):
    """The rest of a model all of whose calls have one structure: what a call asks before it comes to the engine.

    One object holds all that such a call reads and writes. A process that slept fetches each object from memory, some of them from
    several places there, and a rare small call pays up to a microsecond for each.
    """

    __slots__ = ("own_code", "passed")

    def __init__(self, own_code: Callable[..., Any]) -> None:
        super().__init__()
        self.own_code = own_code
        self.passed = 0
        """Calls that rested here, of all threads."""


def _nothing(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("no engine counts here so far")


class Everyone:
    """The counters of all threads, of those that have ended in one."""

    def __init__(self) -> None:
        self.rest = RestOfAll(_nothing)
        self._past = ThreadCounts()
        self._now: list[tuple[weakref.ref[threading.Thread], ThreadCounts]] = []
        self._room = MIN_SETS
        self._lock = threading.Lock()
        _ALL.add(self)

    def join(self) -> ThreadCounts:
        """Counters for the calling thread."""
        mine = ThreadCounts()
        with self._lock:
            if len(self._now) >= self._room:
                self._fold()
            self._now.append((weakref.ref(threading.current_thread()), mine))
        return mine

    def _fold(self) -> None:
        """Add up what ended threads counted; a thread that has ended counts no more."""
        alive: list[tuple[weakref.ref[threading.Thread], ThreadCounts]] = []
        for thread, counts in self._now:
            running = thread()
            if running is not None and running.is_alive():
                alive.append((thread, counts))
            else:
                for name in ThreadCounts.__slots__:
                    setattr(self._past, name, getattr(self._past, name) + getattr(counts, name))
        self._now = alive
        self._room = max(MIN_SETS, 2 * len(alive))

    @property
    def sets(self) -> int:
        """How many sets are kept."""
        return len(self._now)

    def total(self) -> dict[str, int]:
        """The sum over all threads that ever called."""
        with self._lock:
            each = [self._past, *(counts for _, counts in self._now)]
            found = {name: sum(getattr(c, name) for c in each) for name in ThreadCounts.__slots__}
        found["module_calls"] += self.rest.passed
        graphs = found["tier0_calls"] + found["tier1_calls"] + found["tier2_calls"]
        return {**found, "graph_calls": graphs, "calls": graphs + found["module_calls"]}

    def after_fork(self) -> None:
        """In a forked child: a lock that nobody holds."""
        self._lock = threading.Lock()


class Tally(threading.local):
    """`tally.mine` is the calling thread's counters; `tally.here` the same with its mark for epochs."""

    def __init__(self, everyone: Everyone) -> None:
        background_priority.serves()
        self.mine = everyone.join()
        self.here = (self.mine, epochs.slot())


_ALL: Living[Everyone] = Living()


def calls_everywhere() -> int:
    """Calls of all models of the process so far."""
    return sum(everyone.total()["calls"] for everyone in _ALL)


def _after_fork() -> None:
    for everyone in _ALL:
        everyone.after_fork()


served_calls.in_flight = epochs.in_flight
os.register_at_fork(after_in_child=_after_fork)
