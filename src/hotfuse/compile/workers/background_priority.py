"""The priority of background jobs below the calls of the same process: short turns with the interpreter lock, no long collections.

A library call of a served model gives the lock up and wants it back for every operator. While a job runs Python code, each of
these waits is one switch interval, five milliseconds unless somebody chose otherwise, and a model of 250 operators takes a second
longer. So the interval is short while jobs run.

That is so where one thread serves. Several that run Python (a server's handlers, which parse and print) then change places every
ten microseconds, and work half of the time: a threaded server took 160 to 200 ms for 8 requests while jobs ran and 95 behind them.
So threads that serve are counted (`serves`), and several of them keep an interval near the usual one. Most jobs wait for a worker
or for calls most of the time (`waiting`); meanwhile they ask nothing of the interpreter (decision 99).

A wait ends late, though, by as much as the system may delay a thread's timers so that several end together: 50 microseconds, five
times the interval. That is a thread's own to choose: threads that serve ask to be woken on time (`punctual`), those that run jobs
say that they can wait (`patient`), so that they take the lock when it is free and seldom ask a call for it. Measured on a model of
300 short operators beside a job that never rests: 2.4 times as long as alone with an interval of 100 microseconds, 1.3 times so.

A job makes many objects, and a full garbage collection is due when a quarter of all objects are new. It walks over the whole
process, which takes a quarter of a second with torch and a model library loaded, while every thread stands still. So while jobs
run, a full collection comes only after many more collections of young objects. Objects that a job leaves count as old when it
ends, so that they make no collection due in the next call. A collection that a program asks for is still done. Objects in cycles
that jobs left (some ten megabytes of a small recognizer) would then stay for good, so they are collected once, when nobody has
called for a while.

A thread that computed keeps its OpenMP team, which makes everybody's loops slower: a job that waits or ends gives it up where a
team leaves a core to background work. On fewer cores threads that sleep between loops are what workers run on (decision 110).

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
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager

from hotfuse.base.collector import take_for_old
from hotfuse.machine.cores import usable_cores
from hotfuse.machine.heap import SHARE, heap
from hotfuse.machine.openmp import give_up_team
from hotfuse.machine.team_size import SPARE_FROM

SWITCH_S = 1e-5
"""Where one thread serves."""
SHARED_S = 1e-3
"""Where several do: as good as the usual 5 ms for threads that parse and print, and a fifth of the wait for operators."""
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


def _waits() -> None:
    """The calling thread computes nothing from here on."""
    if usable_cores() >= SPARE_FROM:
        give_up_team()


class _Depth(threading.local):
    """How many jobs the calling thread is in: one, or one within another."""

    jobs = 0


class BackgroundPriority:
    """The settings of one interpreter while any job runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.jobs = 0
        """That run now, or wait."""
        self._running = 0
        """Those of them that do not wait."""
        self._depth = _Depth()
        self._serving: list[weakref.ref[threading.Thread]] = []
        self._switch = self._short = 0.0
        """The interval that was there, and the one that is there instead; 0 while none is."""
        self._oldest = self._rare = 0
        self._put_off, self._not_before = False, 0.0
        """Whether jobs left objects that no collection has looked at, and when one may."""

    def serves(self) -> None:
        """The calling thread serves: wake it on time, and count it."""
        punctual()
        me = threading.current_thread()
        with self._lock:
            threads = [ref for ref in self._serving if (t := ref()) is not None and t is not me and t.is_alive()]
            self._serving = [*threads, weakref.ref(me)]
            if self._short:
                self._shorten()

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Around a job."""
        with self._lock:
            self.jobs += 1
            if self.jobs == 1:
                self._begin()
            self._resume()
        self._depth.jobs += 1
        try:
            yield
        finally:
            self._depth.jobs -= 1
            _waits()
            with self._lock:
                self.jobs -= 1
                self._rest()
                if not self.jobs:
                    self._end()

    @property
    def at_work(self) -> bool:
        """Whether a job runs that does not wait for somebody else: it may want the interpreter lock at any time."""
        return self._running > 0

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Around a wait of a job, in its thread; elsewhere it does nothing."""
        depth, self._depth.jobs = self._depth.jobs, 0
        if depth:
            _waits()
        with self._lock:
            for _ in range(depth):
                self._rest()
        try:
            yield
        finally:
            self._depth.jobs = depth
            with self._lock:
                for _ in range(depth):
                    self._resume()

    def _resume(self) -> None:
        self._running += 1
        if self._running == 1:
            self._switch = sys.getswitchinterval()
            self._shorten()

    def _shorten(self) -> None:
        """To what the threads that serve now can do with, unless somebody chose another interval meanwhile."""
        if self._short and not self._ours():
            return
        several = sum((t := ref()) is not None and t.is_alive() for ref in self._serving) > 1
        self._short = min(self._switch, SHARED_S if several else SWITCH_S)
        sys.setswitchinterval(self._short)

    def _ours(self) -> bool:
        return abs(sys.getswitchinterval() - self._short) < 1e-6

    def _rest(self) -> None:
        self._running -= 1
        if not self._running and self._short:
            if self._ours():
                sys.setswitchinterval(self._switch)
            self._short = 0.0

    def _begin(self) -> None:
        young, middle, self._oldest = gc.get_threshold()
        self._rare = RARER * self._oldest
        gc.set_threshold(young, middle, self._rare)

    def _end(self) -> None:
        young, middle, oldest = gc.get_threshold()
        if oldest == self._rare:
            gc.set_threshold(young, middle, self._oldest)
        self._put_off |= take_for_old()

    def collect(self) -> int:
        """When nobody has called for a while: the collection that jobs put off, in at most a hundredth of the time."""
        with self._lock:
            begin = time.monotonic()
            if not self._put_off or self.jobs or not gc.isenabled() or begin < self._not_before:
                return 0
            self._put_off = False
        gc.collect()
        end = time.monotonic()
        self._not_before = end + (end - begin) / SHARE
        return 0

    def after_fork(self) -> None:
        """In a forked child no job runs."""
        self._lock = threading.Lock()
        self._depth = _Depth()
        if self._running:
            self._running = 1
            self._rest()
        if self.jobs:
            self.jobs = 0
            self._end()


background_priority = BackgroundPriority()
"""The interpreter's one."""
heap.spares(background_priority.collect)
os.register_at_fork(after_in_child=background_priority.after_fork)
