"""As many callers at once as Python's lock can keep busy; others wait for their turn, in order.

A program of many small operators takes the lock back after each of them. Handing the lock to the next thread takes time, and an
operator is short. Beyond some number of threads, all of them together are slower than fewer were: an OCR model on 16 cores
answered 139 calls a second on 4 threads, 148 on 8 and 114 on 16. A capture or a proof beside sixteen threads gets a seventeenth of
the lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from hotfuse.base.living import Living
from hotfuse.machine.cores import usable_cores

HANDOVER_S = 8e-6
"""What an operator must take per caller: handing the lock over, and the Python between two operators."""
FIRST_CALLERS, MIN_CALLERS = 4, 2
"""Callers before the first call has shown what its operators take, and whatever they take; more than there are cores never help."""
MEASURED_EVERY = 16
"""Calls between two that are measured."""
UNMEASURED = -1.0


class Turnstile:
    """In front of a program that many threads may call."""

    def __init__(self) -> None:
        self._cores = max(MIN_CALLERS, usable_cores())
        self.most = min(FIRST_CALLERS, self._cores)
        """Callers at once."""
        self.waited = 0
        """Calls that did not find a place at once."""
        self._inside = 0
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._step_s = 0.0
        self._calls = 0
        _ALL.add(self)

    def enter(self, *, measurable: bool) -> float:
        """Wait for a turn; gives the thread's processor time so far where the call is to be measured, which `measurable` allows."""
        gate = None
        with self._lock:
            self._calls += 1
            measured = measurable and (self._calls <= MEASURED_EVERY or not self._calls % MEASURED_EVERY)
            if self._inside < self.most and not self._waiting:
                self._inside += 1
            else:
                gate = threading.Lock()
                gate.acquire()
                self._waiting.append(gate)
                self.waited += 1
        if gate is not None:
            self._wait(gate)
        return time.thread_time() if measured else UNMEASURED

    def _wait(self, gate: threading.Lock) -> None:
        try:
            gate.acquire()  # the caller that leaves hands its place over
        except BaseException:  # an interrupt: the place must not be lost
            with self._lock:
                waits = gate in self._waiting
                if waits:
                    self._waiting.remove(gate)
            if not waits:
                self.leave()
            raise

    def measure(self, since: float, steps: int) -> None:
        """A measured call has run so many operators: what they took decides how many callers there may be."""
        spent = (time.thread_time() - since) / max(1, steps)  # waiting for the lock is no processor time
        self._step_s = spent if not self._step_s else self._step_s + (spent - self._step_s) / 8
        self.most = min(self._cores, max(MIN_CALLERS, round(self._step_s / HANDOVER_S)))

    def leave(self) -> None:
        """A call ends that `enter` began: the caller that has waited longest takes its place."""
        with self._lock:
            self._inside -= 1
            while self._waiting and self._inside < self.most:
                self._inside += 1
                self._waiting.popleft().release()

    def __reduce__(self) -> tuple[type[Turnstile], tuple[()]]:
        """A copy of a program has callers of its own."""
        return Turnstile, ()

    def after_fork(self) -> None:
        """In a forked child: the callers inside and those that waited are in the parent."""
        self._inside, self._lock, self._waiting = 0, threading.Lock(), deque()


_ALL: Living[Turnstile] = Living()


def _after_fork() -> None:
    for each in _ALL:
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)
