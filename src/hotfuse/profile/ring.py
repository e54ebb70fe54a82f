"""A ring of records in memory that two processes share: any number of producers, one consumer, no locks.

    ring ::= header (magic, slots | head | tail | dropped, each on cache lines of its own) slot...
    slot ::= sequence (8 bytes) record (184 bytes)

Slot i begins with sequence i. A producer takes ticket t by advancing `head`, if slot t mod n shows sequence t; writes the
record; and releases it with sequence t+1. The consumer takes it when it sees t+1, and gives the slot back with t+n. A producer
that finds the slot not given back drops its record and counts it: it never waits. A consumer that died in between is followed
by another, which finds its place from the sequences.

Producers are native code (`backends.llvm.probe_pass`), handed in as a function so that this layer knows no compiler. Without it, a
producer in Python does the same under a lock, and what it published is counted.

The memory is an anonymous file that its descriptor stands for: nothing is left behind, however the processes end.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hotfuse.base.errors import InternalError
from hotfuse.profile.records import SIZE, WORDS, Batch, check_word

MAGIC = 0x48_46_52_49_4E_47_31
LINE = 128
"""Two cache lines: neighbours are fetched in pairs."""
HEAD_AT, TAIL_AT, DROPPED_AT, SLOTS_AT = LINE, 2 * LINE, 3 * LINE, 4 * LINE
SLOT = SIZE + 8
SLOTS = 4096

Publish = Callable[[int, int, int], None]
"""Native: (address of the ring, address of records, how many)."""


class Ring:
    """One side's view of the ring."""

    def __init__(self, fd: int, slots: int) -> None:
        """Map a ring; `create` and `attach` make one."""
        self.fd = fd
        self.slots = slots
        self._map = mmap.mmap(fd, SLOTS_AT + slots * SLOT)
        words = np.frombuffer(self._map, np.uint64)
        self.address = int(words.__array_interface__["data"][0])
        self._head, self._tail, self._dropped = (words[at // 8 : at // 8 + 1] for at in (HEAD_AT, TAIL_AT, DROPPED_AT))
        self._words = words
        self._slots: np.ndarray[Any, Any] = words[SLOTS_AT // 8 :].reshape(slots, SLOT // 8)
        self._native: Publish | None = None
        self._lock = threading.Lock()
        self.by_python = 0
        """Records published without native code."""
        self.torn = 0
        """Records the consumer read that did not fit their place; it reads them again."""

    @classmethod
    def create(cls, slots: int = SLOTS) -> Ring:
        """A new ring; the number of slots is a power of two."""
        if slots < 2 or slots & (slots - 1):
            raise InternalError(f"a ring of {slots} slots", because="it must be a power of two")
        fd = os.memfd_create("hotfuse-ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, SLOTS_AT + slots * SLOT)
        ring = cls(fd, slots)
        ring._slots[:, 0] = np.arange(slots, dtype=np.uint64)
        ring._words[1] = slots
        ring._words[0] = MAGIC
        return ring

    @classmethod
    def attach(cls, fd: int) -> Ring:
        """The ring behind a descriptor that another process handed over."""
        size = os.fstat(fd).st_size
        slots = (size - SLOTS_AT) // SLOT
        if slots < 2 or slots & (slots - 1) or size != SLOTS_AT + slots * SLOT:
            raise InternalError(f"descriptor {fd} is not a ring", because=f"it has {size} bytes")
        ring = cls(fd, slots)
        if int(ring._words[0]) != MAGIC or int(ring._words[1]) != slots:
            raise InternalError(f"descriptor {fd} is not a ring", because="its header says otherwise")
        ring._recover()
        return ring

    # --- producers --------------------------------------------------------------------------------

    def use(self, publish: Publish) -> None:
        """Publish natively from now on.

        The switch must not meet a Python producer at work: both would take the same ticket.
        """
        with self._lock:
            self._native = publish

    def publish(self, batch: Batch) -> None:
        """Hand over a call's records; what does not fit is dropped and counted."""
        if not batch.count or self.fd < 0:
            return
        if self._native is not None:
            self._native(self.address, batch.address, batch.count)
            return
        with self._lock:
            if self._native is None:
                for i in range(batch.count):
                    self._publish(np.frombuffer(batch.record(i), np.uint64))
                return
        self._native(self.address, batch.address, batch.count)

    def _publish(self, record: np.ndarray[Any, Any]) -> None:
        ticket = int(self._head[0])
        slot = self._slots[ticket & (self.slots - 1)]
        if int(slot[0]) != ticket:
            self._dropped[0] += np.uint64(1)
            return
        slot[1:] = record
        slot[WORDS] = check_word(record, ticket)
        self._head[0] = ticket + 1
        self.by_python += 1
        slot[0] = ticket + 1

    @property
    def published(self) -> int:
        """Records that went in."""
        return int(self._head[0])

    @property
    def dropped(self) -> int:
        """Records that found no room."""
        return int(self._dropped[0])

    @property
    def consumed(self) -> int:
        """Records that were taken out."""
        return int(self._tail[0])

    # --- the consumer -----------------------------------------------------------------------------

    def _recover(self) -> None:
        """Where the last consumer stopped: it may have died between giving a slot back and saying so."""
        tail = int(self._tail[0])
        while int(self._slots[tail & (self.slots - 1), 0]) > tail + 1:
            tail += 1
        self._tail[0] = tail

    def drain(self, limit: int = 1024) -> np.ndarray[Any, Any]:
        """Take out up to `limit` records, oldest first: one row of bytes each."""
        tail = int(self._tail[0])
        limit = min(limit, self.slots)
        where = np.arange(tail, tail + limit, dtype=np.uint64)
        index = where & np.uint64(self.slots - 1)
        ready = self._slots[index, 0] == where + np.uint64(1)
        n = limit if ready.all() else int(ready.argmin())
        if not n:
            return np.empty((0, SIZE), np.uint8)
        taken = self._slots[index[:n], 1:]  # a copy
        mixed = np.bitwise_xor.reduce(taken[:, : WORDS - 1], axis=1) ^ (where[:n] + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        whole = mixed == taken[:, WORDS - 1]
        if not whole.all():
            n = int(whole.argmin())
            self.torn += 1
        # Giving back depends on the check above, which depends on every word read: no processor moves the one before the other.
        for i in range(n):
            self._slots[int(index[i]), 0] = int(where[i]) + self.slots
            self._tail[0] = tail + i + 1
        return taken[:n].view(np.uint8).reshape(n, SIZE)

    def close(self) -> None:
        """Nothing is published from now on; the memory goes when nobody can be in it any more."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
