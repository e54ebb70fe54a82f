"""Memory that somebody may give back at any time, read without a fault: the system copies it, and says so where it is gone.

For threads that look at memory which is not theirs. A file in memory takes the bytes (`pwrite` answers "bad address" where a load
would end the process), and is mapped, so that they are read where they came to lie.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

SIZE = 256 << 10
"""Bytes at a time: they stay in the second-level cache between being written and being read."""


class Copied:
    """Room for a copy of a piece of memory."""

    def __init__(self) -> None:
        self._file = os.memfd_create("hotfuse-weights")
        os.ftruncate(self._file, SIZE)
        self._map = mmap.mmap(self._file, SIZE)
        self._room = (ctypes.c_char * SIZE).from_buffer(self._map)
        self.address = ctypes.addressof(self._room)
        """Where the copy lies."""
        self._write = ctypes.CDLL(None, use_errno=True).pwrite
        self._write.restype = ctypes.c_ssize_t
        self._write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]

    def copy(self, address: int, size: int) -> bool:
        """Copy at most `SIZE` bytes, without the interpreter lock; False where they are no longer there."""
        done = 0
        while done < size:
            got = self._write(self._file, address + done, size - done, done)
            if got <= 0:
                if ctypes.get_errno() == errno.EINTR:
                    continue
                return False
            done += got
        return True

    def close(self) -> None:
        """Give the room back."""
        del self._room
        self._map.close()
        os.close(self._file)


def unavailable() -> str:
    """Why memory cannot be read so here; empty if it can."""
    return "" if hasattr(os, "memfd_create") else "the system has no files in memory"
