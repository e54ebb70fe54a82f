"""Courtesy of background jobs towards the calls in the same process: short turns with the interpreter lock, no long collections.

A library call of a served model gives the lock up and wants it back for every operator. While a job runs Python code, each of
these waits is one switch interval, five milliseconds unless somebody chose otherwise, and a model of 250 operators takes a second
longer. So the interval is short while jobs run.

A wait ends late, though, by as much as the system may delay a thread's timers so that several end together: 50 microseconds, five
times the interval. That is a thread's own to choose: threads that serve ask to be woken on time (`punctual`), those that run jobs
say that they can wait (`patient`), so that they take the lock when it is free and seldom ask a call for it. Measured on a model of
300 short operators beside a job that never rests: 2.4 times as long as alone with an interval of 100 microseconds, 1.3 times so.

A job makes many objects, and a full garbage collection is due when a quarter of all objects are new: it then walks over the whole
process, a quarter of a second with torch and a model library loaded, while every thread stands still. While jobs run, many more
collections of young objects come before one of all, and what a job leaves counts as old when it ends, instead of making a
collection due in the next call; one that somebody asks for is done all the same.

A call that does much at once (one that records what a device is given) had better come when no job runs Python code (`at_work`).

The first two are settings of the whole interpreter: they are put back when the last job ends, unless somebody changed them.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

SWITCH_S = 1e-5
"""Shorter is better for one thread that serves, but where several do they then change places more than they work."""
RARER = 10
"""Times as many collections of the middle generation before one of all objects."""

_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_USUAL_NS = 50_000
PUNCTUAL_NS, PATIENT_NS = 100, 2_000_000
"""How late timers may end: of threads that serve, and of threads that run jobs."""


@functools.cache
def _prctl() -> Callable[[int, int], int] | None:
    """Linux's own; elsewhere timers are what they are."""
    if not sys.platform.startswith("linux"):
        return None
    return ctypes.CDLL(None).prctl


def _late(ns: int, before: tuple[int, ...]) -> bool:
    """Let the calling thread's timers end so late, if they may end as late as usual, or as the other kind of our threads."""
    prctl = _prctl()
    return prctl is not None and prctl(_PR_GET_TIMERSLACK, 0) in before and prctl(_PR_SET_TIMERSLACK, ns) == 0


def punctual() -> bool:
    """For a thread that serves: wake it on time. False where somebody chose otherwise for it, or the system has no such choice."""
    return _late(PUNCTUAL_NS, (_USUAL_NS, PATIENT_NS))


def patient() -> bool:
    """For a thread that runs jobs; it has what the thread had that started it."""
    return _late(PATIENT_NS, (_USUAL_NS, PUNCTUAL_NS))


class BackgroundPriority:
    """The settings of one interpreter while any job runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.jobs = 0
        """That run now."""
        self._waiting = 0
        """Of those, how many wait for somebody else."""
        self._here = threading.local()
        self._switch = 0.0
        self._oldest = self._rare = 0

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Around a job."""
        with self._lock:
            self.jobs += 1
            if self.jobs == 1:
                self._begin()
        outer, self._here.job = getattr(self._here, "job", False), True
        try:
            yield
        finally:
            self._here.job = outer
            with self._lock:
                self.jobs -= 1
                if not self.jobs:
                    self._end()

    @property
    def at_work(self) -> bool:
        """Whether a job runs that does not wait for somebody else: it may want the interpreter lock at any time."""
        return self.jobs > self._waiting

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Around what a job waits for without the interpreter lock; elsewhere it means nothing."""
        if not getattr(self._here, "job", False):
            yield
            return
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def _begin(self) -> None:
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch, SWITCH_S))
        young, middle, self._oldest = gc.get_threshold()
        self._rare = RARER * self._oldest
        gc.set_threshold(young, middle, self._rare)

    def _end(self) -> None:
        if abs(sys.getswitchinterval() - SWITCH_S) < SWITCH_S / 2:
            sys.setswitchinterval(self._switch)
        young, middle, oldest = gc.get_threshold()
        if oldest == self._rare:
            gc.set_threshold(young, middle, self._oldest)
        if not gc.get_freeze_count():  # somebody who froze objects wants them to stay so
            gc.freeze()
            gc.unfreeze()

    def after_fork(self) -> None:
        """In a forked child no job runs."""
        self._lock, self._here, self._waiting = threading.Lock(), threading.local(), 0
        if self.jobs:
            self.jobs = 0
            self._end()


background_priority = BackgroundPriority()
"""The interpreter's one."""
os.register_at_fork(after_in_child=background_priority.after_fork)
