"""Free memory of the C library's heap, given back to the system when background work is done.

Proving and racing plans on library kernels allocates and frees hundreds of megabytes of intermediates. The C library keeps what was
freed, because its threshold for memory of its own mappings grows with every large block that is freed. Measured on a recognizer
of text under mixed sizes: 380 of 880 MB were free pages that nobody used again once generated code served.

Giving back takes the heap's lock for some milliseconds, and pages that are needed again must be mapped again. So it happens only
where the process has grown since the last time, and takes at most one per cent of the time. When nobody has called for a while,
what is kept only to make the next call faster (`spares`) is freed, and all that is free is given back.

glibc gives every thread an arena of its own, and its trim leaves the free end of those arenas alone: 47 MB behind the thread that
had proven a recognizer of text. So a background thread gives back the end of its arena itself (`release_arena_end`), before it ends
and the arena goes to another thread.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
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
PIECE_BYTES, SMALL_PIECE_BYTES = 1 << 20, 96 << 10
"""What the end of an arena is taken in. Blocks above glibc's threshold, 128 KiB at first, are mappings of their own."""
MAX_END_BYTES = 256 << 20
"""Most of an arena's end that is looked at."""
EMPTY_PIECES = 4
"""Pieces in a row without memory behind most of their pages: the rest of the end was never written, or is given back."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAPPED_FLAG = 2
"""In the word before a block: glibc made a mapping for it alone."""


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


class _CLibrary:
    """The C library's calls that give back the end of an arena, with their types."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.malloc, self.free, self.madvise, self.mincore = library.malloc, library.free, library.madvise, library.mincore
        self.malloc.restype = ctypes.c_void_p
        self.malloc.argtypes = [ctypes.c_size_t]
        self.free.argtypes = [ctypes.c_void_p]
        self.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]

    def take(self, size: int) -> int | None:
        """A block of the calling thread's arena; None where there is none, or where it got a mapping of its own."""
        block = self.malloc(size)
        if block is None:
            return None
        if ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & _MAPPED_FLAG:
            self.free(block)
            return None
        return block

    def drop_pages(self, block: int, size: int) -> tuple[int, int]:
        """Give back the whole pages inside a block, whose contents are nobody's: (pages in memory before, pages)."""
        first, last = -(-block // _PAGE), (block + size) // _PAGE
        present = ctypes.create_string_buffer(last - first)
        if self.mincore(first * _PAGE, (last - first) * _PAGE, present):
            return 0, last - first
        found = sum(b & 1 for b in present.raw)
        if found and self.madvise(first * _PAGE, (last - first) * _PAGE, mmap.MADV_DONTNEED):
            found = 0
        return found, last - first


@functools.cache
def _c_library() -> _CLibrary | None:
    """glibc; None where blocks come from elsewhere (another C library, a preloaded allocator, a sanitizer): those keep other words,
    or nothing at all, before a block.
    """
    try:
        here, glibc = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
        own, there = (ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (here, glibc))
    except (OSError, AttributeError):
        return None
    return _CLibrary() if own == there and _malloc_trim() is not None else None


def release_arena_end() -> int:
    """Give back the free end of the calling thread's arena; the bytes.

    Blocks are taken from that end, their pages dropped, and the blocks freed again: what malloc hands out has no contents yet.
    """
    library = _c_library()
    if library is None:
        return 0
    size = PIECE_BYTES
    taken: list[int] = []
    given = empty = 0
    while empty < EMPTY_PIECES and len(taken) * size < MAX_END_BYTES:
        block = library.take(size)
        if block is None:
            if size == SMALL_PIECE_BYTES or taken:
                break
            size = SMALL_PIECE_BYTES
            continue
        taken.append(block)
        present, pages = library.drop_pages(block, size)
        given += present * _PAGE
        empty = empty + 1 if 2 * present < pages else 0
    for block in reversed(taken):
        library.free(block)
    return given


class Trimmer:
    """Decides when the heap is worth trimming."""

    def __init__(
        self, trim: Callable[[], None] = _trim, held: Callable[[], int] = resident,
        clock: Callable[[], float] = time.monotonic, release: Callable[[], int] = release_arena_end,
    ) -> None:
        self._trim = trim
        self._release = release
        self._held = held
        self._clock = clock
        self._lock = threading.Lock()
        self._spares: list[Callable[[], int]] = []
        self._outlived: list[Callable[[], int]] = []
        self._low = 0
        """Bytes held after the last trim."""
        self._not_before = clock() + FIRST_S
        self.trims = 0
        self.bytes = 0
        """Given back so far."""

    def after_work(self) -> int:
        """For a background thread that has finished its jobs: trim if that pays; the bytes given back.

        The end of the thread's own arena goes back every time: no other thread waits for that.
        """
        for give_back in self._outlived:
            give_back()
        self.bytes += (released := self._release())
        return released + self._after_growth()

    def _after_growth(self) -> int:
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

    def outlived(self, give_back: Callable[[], int]) -> None:
        """A function that frees what nothing has used for some seconds; asked whenever background work is done."""
        self._outlived.append(give_back)

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
