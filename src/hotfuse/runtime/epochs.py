"""When code may be freed: no sooner than every call that could be in it has ended, and never on a thread that serves.

    slot = epochs.slot()                 # the calling thread's own; no lock is taken from here on
    outer = slot.epoch
    slot.epoch = outer or epochs.now     # before the plan is read
    try:
        plan = entry.plan
        ...
    finally:
        slot.epoch = outer

    entry.plan = better                  # first nobody can find the old one any more
    epochs.retire(old)                   # then it is retired; a background thread frees it when it can

A call that begins after `retire` has a number at least as great as that of what was retired, so a thing is out of reach as soon
as every thread is outside, or has such a number. Reading numbers of other threads without a lock may see them a moment late; so
nothing is freed before it was out of reach twice, a pause apart, which is ages longer than a store takes to show.

The interpreter's reference counts already keep a plan alive that a call is in. What this adds: memory is unmapped at a known time
on a thread that serves nobody, things that native code knows only by address count too, and what was retired can be compared with
what was freed.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable

from hotfuse.base.faults import faults, is_alive, is_begun, steady
from hotfuse.base.lazy_dataclass import dataclass

PAUSE_S = 0.002
"""Between two looks; also how long a thing is out of reach at least before it is freed."""
LONG_PAUSE_S = 0.05
"""The same while a call takes long."""
STOP_S = 2.0


class ThreadMark:
    """One thread's mark: 0 outside of calls, else the number under which its outermost call began."""

    __slots__ = ("__weakref__", "epoch")

    def __init__(self) -> None:
        self.epoch = 0


class _Mine(threading.local):
    """Makes a thread's slot the first time the thread asks."""

    def __init__(self, register: Callable[[ThreadMark], None]) -> None:
        self.slot = ThreadMark()
        register(self.slot)


@dataclass(slots=True)
class _Retired:
    epoch: int
    thing: object
    free: Callable[[], None] | None
    out_of_reach: float = 0.0
    """Since when; 0 while a call may be in it."""


class Epochs:
    """Marks of threads, things that were retired, and the thread that frees them, which runs only while there are any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, background: bool = True) -> None:
        self.now = 1
        """The current number; calls put it into their slot."""
        self._clock = clock
        self._background = background
        self._begin()
        self.retired = 0
        self.freed = 0
        self.failed = 0
        """Things whose `free` raised: `base.faults` has what they said."""

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._slots: list[weakref.ref[ThreadMark]] = []
        self._mine = _Mine(self._register)
        self._waiting: list[_Retired] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopping = False

    def slot(self) -> ThreadMark:
        """The calling thread's mark."""
        return self._mine.slot

    def inside(self) -> bool:
        """Whether any thread is in a call, as far as can be seen without a lock."""
        return any((slot := mark()) is not None and slot.epoch for mark in self._slots)

    def in_flight(self) -> int:
        """How many threads are in a call, as far as can be seen without a lock."""
        return sum((slot := mark()) is not None and slot.epoch > 0 for mark in self._slots)

    def _register(self, slot: ThreadMark) -> None:
        with self._lock:
            self._slots = [s for s in self._slots if s() is not None]
            self._slots.append(weakref.ref(slot))

    def retire(self, thing: object, free: Callable[[], None] | None = None) -> None:
        """Hold a thing that no new call can find until no call can be in it; then call `free` and let go of it."""
        with self._lock:
            self.now += 1
            self.retired += 1
            self._waiting.append(_Retired(self.now, thing, free))
            if self._background and not is_alive(self._thread) and not self._stopping:
                thread = self._thread = steady(self._reclaim, "hotfuse-epochs")
                if not is_begun(thread):
                    self._thread = None
        self._wake.set()

    def drain(self) -> int:
        """Free what is out of reach; returns how many things."""
        with self._lock:
            marks = [slot.epoch for ref in self._slots if (slot := ref()) is not None]
            oldest = min((m for m in marks if m), default=self.now)
            now = self._clock()
            ready: list[_Retired] = []
            for item in self._waiting:
                if item.epoch > oldest:
                    item.out_of_reach = 0.0
                elif not item.out_of_reach:
                    item.out_of_reach = now
                elif now - item.out_of_reach >= PAUSE_S:
                    ready.append(item)
            self._waiting = [i for i in self._waiting if i not in ready]
        for item in ready:  # outside the lock: a free may retire something else, and takes its time
            try:
                if item.free is not None:
                    item.free()
            except Exception as e:
                self.failed += 1
                faults.note("freeing what is out of reach", e)
            item.thing = item.free = None
        count = len(ready)
        with self._lock:
            self.freed += count
        return count

    @property
    def waiting(self) -> int:
        """How many things are retired and not yet freed."""
        return self.retired - self.freed

    def counts(self) -> dict[str, int]:
        """Counters for `stats()`."""
        return {"retired": self.retired, "freed": self.freed, "failed": self.failed}

    def quiesce(self, timeout: float = 10.0) -> bool:
        """Wait until everything retired is freed, for tests; False if calls are still in some of it."""
        end = time.monotonic() + timeout
        while self.waiting:
            if time.monotonic() > end:
                return False
            if not self._background:
                self.drain()
            time.sleep(PAUSE_S)
        return True

    def _reclaim(self) -> None:
        """The background thread: ends when nothing is left, so that an idle process has no thread of ours."""
        pause = PAUSE_S
        while True:
            time.sleep(pause)
            freed = self.drain()
            pause = PAUSE_S if freed else min(2 * pause, LONG_PAUSE_S)
            with self._lock:
                if self._stopping or (not self._waiting and self.freed == self.retired):
                    self._thread = None
                    return
            if self._wake.is_set():
                self._wake.clear()
                pause = PAUSE_S

    def stop(self, timeout: float = STOP_S) -> None:
        """At the end of the process: no thread may be inside native code that unmaps memory when the interpreter goes."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def after_fork(self) -> None:
        """In a forked child only this thread lives: the others' marks are void; what waited goes with the next thing retired."""
        mine, waiting = self._mine.slot, self._waiting
        self._begin()
        self._mine.slot = mine
        self._slots = [weakref.ref(mine)]
        self._waiting = waiting
        self.freed = self.retired - len(waiting)  # what the parent's thread was freeing at the fork is the parent's


epochs = Epochs()
"""The process's one: a thread has one mark, whichever models it calls."""


def _after_fork() -> None:
    epochs.after_fork()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(epochs.stop)
