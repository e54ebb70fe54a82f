"""Memory given back to the system without its contents being lost: pages that come from a file again when they are read.

The bytes of a range are written to a file without a name, and the whole pages of the range are mapped to it in place, private to
this process. Nothing that holds the memory notices: the address stays, reading brings pages back bit by bit as they were, and
writing makes pages the process's own again. Until they are read, they take no memory.

Only memory that is the process's alone is exchanged: what other processes share, or what somebody else mapped from a file, stays as
it is. Memory that was exchanged before may be again: its owner is gone, and the allocator gave it to a new one.
Nobody may write to a range while it is exchanged.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
_READ, _WRITE, _PRIVATE, _FIXED = 1, 2, 2, 0x10
_PAGEOUT = 21
_TMPFS = {0x01021994, 0x858458F6}
"""File systems that live in memory: tmpfs and ramfs."""
_FROM_FILE = 61
"""The bit of an entry of the page map that is set for pages of a file; those above it: in memory, and swapped out."""
_FAILED = ctypes.c_void_p(-1).value

_files: set[str] = set()
"""Files that memory of this process was exchanged for, by number; a number comes again, but for a file with a name."""

Range = tuple[int, int]
"""First byte, and the one behind the last."""


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def unavailable(folder: Path) -> str:
    """Why memory cannot be given back through files of a folder; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"memory cannot be exchanged in place on {sys.platform}"
    buffer = ctypes.create_string_buffer(256)
    if _libc().statfs(os.fsencode(folder), buffer) != 0:
        return f"{folder} cannot be looked at"
    if ctypes.c_uint64.from_buffer(buffer).value & 0xFFFFFFFF in _TMPFS:
        return f"{folder} lies in memory itself"
    return ""


def whole_pages(ranges: Sequence[Range], keep: Sequence[Range] = ()) -> list[Range]:
    """The whole pages inside ranges, joined where they overlap, without any that `keep` touches."""
    found: list[Range] = []
    for first, last in sorted((-(-a // PAGE) * PAGE, b // PAGE * PAGE) for a, b in _joined(ranges)):
        at = first
        for a, b in sorted(keep):
            begin, end = a // PAGE * PAGE, -(-b // PAGE) * PAGE
            if end <= at or begin >= last:
                continue
            if begin > at:
                found.append((at, begin))
            at = max(at, end)
        if at < last:
            found.append((at, last))
    return found


def _joined(ranges: Sequence[Range]) -> list[Range]:
    made: list[Range] = []
    for a, b in sorted(r for r in ranges if r[0] < r[1]):
        if made and a <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], b))
        else:
            made.append((a, b))
    return made


def _ours() -> list[Range]:
    """Where this process has private memory of its own that it may write: no file behind it but ours, shared with nobody."""
    found: list[Range] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, access, _offset, _device, inode = line.split(maxsplit=5)[:5]
        free = inode == "0" or (inode in _files and line.endswith("(deleted)"))
        if access.startswith("rw") and access.endswith("p") and free:
            a, b = (int(x, 16) for x in where.split("-"))
            found.append((a, b))
    return _joined(found)


def release(ranges: Sequence[Range], folder: Path) -> list[Range]:
    """Give the pages of ranges back; those that were. Raises OSError where the file cannot be written: nothing is lost then."""
    own = _ours()
    chosen = [r for r in ranges if any(a <= r[0] and r[1] <= b for a, b in own)]
    if not chosen:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, prefix="released-") as file:
        for a, b in chosen:
            file.write(memoryview((ctypes.c_char * (b - a)).from_address(a)))
        file.flush()
        os.fsync(file.fileno())
        _files.add(str(os.fstat(file.fileno()).st_ino))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        done: list[Range] = []
        at = 0
        for a, b in chosen:
            got = _libc().mmap(a, b - a, _READ | _WRITE, _PRIVATE | _FIXED, file.fileno(), at)
            if got == _FAILED:
                break  # the range is as it was
            done.append((a, b))
            at += b - a
    return done


def release_unwritten(ranges: Sequence[Range]) -> None:
    """Give back what was read of released pages since; what was written stays."""
    for a, b in ranges:
        _libc().madvise(a, b - a, _PAGEOUT)  # advice: where the system does not know it, pages stay until they are needed


def resident(ranges: Sequence[Range]) -> int:
    """Bytes of ranges, which begin and end with pages, that are in memory now."""
    total = 0
    for a, b in ranges:
        count = (b - a) // PAGE
        seen = (ctypes.c_ubyte * count)()
        if _mapped(a, count, seen):
            total += sum(x & 1 for x in seen) * PAGE
    return total


def written_ranges(ranges: Sequence[Range]) -> list[Range]:
    """The parts of ranges, which begin and end with pages, that are the process's own by now: somebody wrote there.

    All of it where the system does not tell.
    """
    found: list[Range] = []
    for a, b in ranges:
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as table:
                entries = np.frombuffer(os.pread(table.fileno(), 8 * ((b - a) // PAGE), a // PAGE * 8), np.uint64)
        except OSError:
            entries = np.empty(0, np.uint64)
        if len(entries) < (b - a) // PAGE:
            found.append((a, b))
            continue
        mine = ((entries >> np.uint64(62)) != 0) & ((entries >> np.uint64(_FROM_FILE) & np.uint64(1)) == 0)
        found += [(a + int(i) * PAGE, a + (int(i) + 1) * PAGE) for i in np.flatnonzero(mine)]
    return _joined(found)


def _mapped(a: int, count: int, seen: ctypes.Array[ctypes.c_ubyte]) -> bool:
    """Which pages this process has, from its page map (`mincore` would tell of the file's)."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            data = os.pread(pages.fileno(), 8 * count, a // PAGE * 8)
    except OSError:
        return False
    for i in range(min(count, len(data) // 8)):
        seen[i] = data[8 * i + 7] >> 7
    return True
