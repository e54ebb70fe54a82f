"""Free memory of the C library's heap, given back to the system when background work is done.

Proving and racing plans on library kernels allocates and frees hundreds of megabytes of intermediates. The C library keeps what was
freed, because its threshold for memory of its own mappings grows with every large block that is freed. Measured on a recognizer
of text under mixed sizes: 380 of 880 MB were free pages that nobody used again once generated code served.

Giving back takes the heap's lock for some milliseconds, and pages that are needed again must be mapped again. So it happens only
where the process has grown since the last time, and takes at most one per cent of the time. When nobody has called for a while,
what is kept only to make the next call faster (`spares`) is freed, and all that is free is given back.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

GROWN_BYTES = 32 << 20
"""The process must have grown by so much since the last trim."""
SHARE = 0.01
"""Part of the time that trimming may take."""
FIRST_S = 10.0
"""No trim beside calls before: one takes up to a tenth of a second of a large heap, and a start has better uses for it."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's own; other C libraries keep less, and have no such call."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _trim() -> None:
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


class Trimmer:
    """Decides when the heap is worth trimming."""

    def __init__(
        self, trim: Callable[[], None] = _trim, held: Callable[[], int] = resident,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trim = trim
        self._held = held
        self._clock = clock
        self._lock = threading.Lock()
        self._spares: list[Callable[[], int]] = []
        self._low = 0
        """Bytes held after the last trim."""
        self._not_before = clock() + FIRST_S
        self.trims = 0
        self.bytes = 0
        """Given back so far."""

    def after_work(self) -> int:
        """For a background thread that has finished its jobs: trim if that pays; the bytes given back."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            held, begin = self._held(), self._clock()
            if held < self._low + GROWN_BYTES or begin < self._not_before:
                return 0
            return self._trimmed(held, begin)
        finally:
            self._lock.release()

    def _trimmed(self, held: int, begin: float) -> int:
        self._trim()
        end = self._clock()
        self._low = self._held()
        self._not_before = end + (end - begin) / SHARE
        given = max(0, held - self._low)
        self.trims += 1
        self.bytes += given
        return given

    def spares(self, give_back: Callable[[], int]) -> None:
        """A function that frees what is kept only to make the next call faster; it tells the bytes."""
        self._spares.append(give_back)

    def when_idle(self) -> int:
        """Nobody has called for a while: free what only the next call would use, and trim; the bytes given back by trimming.

        Whether the process has grown says nothing here: what was freed since the last trim, spares among it, lies inside of what it
        held then. Nothing waits for the heap's lock, and this is asked once for a pause.
        """
        for give_back in self._spares:
            give_back()
        with self._lock:
            return self._trimmed(self._held(), self._clock())

    def after_fork(self) -> None:
        """In a forked child: who held the lock is in the parent."""
        self._lock = threading.Lock()


heap = Trimmer()
"""The process's one."""
os.register_at_fork(after_in_child=heap.after_fork)
