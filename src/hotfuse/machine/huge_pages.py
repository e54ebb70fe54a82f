"""Large buffers on huge pages: at once where the system has them at hand, later where it has to fetch them first.

Packed weights are read in every call, and on huge pages without misses of the TLB. A virtual machine that reports free memory to
its host has given exactly such pages away: touching one there took 3 to 8 ms instead of 0.2, a second for BERT-base, where small
pages took 0.17 s. So the first huge page of a buffer is timed. Where it came late, the rest of that buffer, and the buffers of
the next seconds, begin on small pages; `gather` makes them huge ones behind the start, in the background.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import time
import weakref
from collections.abc import Callable

SIZE = 2 << 20
"""Bytes of a huge page on the machines we know; elsewhere it is an alignment."""
LATE_S = 1e-3
"""What touching a huge page takes at most where it is at hand."""
REST_S = 30.0
"""Seconds for which huge pages are not asked for after one came late."""
_COLLAPSE = 25
_HUGE, _SMALL = getattr(mmap, "MADV_HUGEPAGE", None), getattr(mmap, "MADV_NOHUGEPAGE", None)


class HugePages:
    """The huge pages of one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rests_until = 0.0
        self._small: list[tuple[weakref.ref[mmap.mmap], int, int]] = []
        """Buffers on small pages: memory, first byte and bytes in it, both whole huge pages."""
        self.late = 0
        """Huge pages that came late."""
        self.gathered = 0
        """Huge pages that small ones were gathered in later."""

    def prefer(self, memory: mmap.mmap, first: int, size: int) -> None:
        """Have memory from byte `first` on lie on huge pages, now or later; nothing has touched it so far."""
        if _HUGE is None or _SMALL is None or (whole := size // SIZE * SIZE) == 0:
            return
        if time.monotonic() >= self._rests_until:
            if not _advised(memory, _HUGE):
                return
            begin = time.perf_counter()
            memory[first] = 0
            if time.perf_counter() - begin < LATE_S:
                return
            self.late += 1
            self._rests_until = time.monotonic() + REST_S
            _advised(memory, _SMALL)
        with self._lock:
            self._small = [s for s in self._small if s[0]() is not None]
            self._small.append((weakref.ref(memory), first, whole))

    @property
    def waiting(self) -> int:
        """Huge pages that buffers are still to be gathered in."""
        return sum(size // SIZE for memory, _, size in self._small if memory() is not None)

    def gather(self) -> None:
        """Make huge pages of small ones, one by one: a call that reads one of them meanwhile waits for it, for milliseconds."""
        while True:
            with self._lock:
                if not self._small:
                    return
                held, first, size = self._small.pop()
            memory = held()
            if memory is None or _HUGE is None or not _advised(memory, _HUGE):
                continue
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + first
            for at in range(address, address + size, SIZE):
                if _madvise()(at, SIZE, _COLLAPSE):  # a kernel without it, or no memory in one piece: small pages are right, too
                    return
                self.gathered += 1

    def after_fork(self) -> None:
        """In a forked child: its memory is the parent's until it writes, and nobody gathers."""
        self._lock = threading.Lock()


def _advised(memory: mmap.mmap, how: int) -> bool:
    """Tell the system how memory should lie; False where it knows no such pages: ordinary ones are right, too."""
    try:
        memory.madvise(how)
    except OSError:
        return False
    return True


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    found = ctypes.CDLL(None).madvise
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


huge_pages = HugePages()
