"""What a sampled call leaves behind: records of one fixed size, whatever they tell.

    record ::= head (32 bytes) | body (144 bytes) | check (8 bytes)
    head   ::= kind, dtype, rank, flags, graph, item, signature, call, at

A record is plain bytes that native code can fill in place: a probe writes its counters straight into a record's body. The
check word ties a record to its place in the ring, so that one read half-written is noticed on any memory model. Numbers
that name things (`graph`, `item`, `signature`) are given out by `profile.names`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass

MAX_RANK = 6
BODY = 32
"""Where the body begins."""
CHECK = 176
"""Where the check word lies."""
SIZE = 184
"""Bytes of a record."""
WORDS = SIZE // 8


class RecordKind(IntEnum):
    """What a record tells."""

    VALUE = 1
    CONTROL = 2
    PARTITION = 3
    CALL = 4


class Flag(IntEnum):
    """Bits of a head's `flags`."""

    MASK = 1
    """The value says which others count: valid rows mean something."""
    PARTIAL = 2
    """The value was too large for the budget, and only part of its rows was looked at."""
    LOOP = 4
    """A control record's outcome is a number of trips, not a branch."""
    COUNTERS = 8
    """A partition record has hardware counters."""
    INPUT = 16
    """The value is an input of the graph."""


_HEAD: list[Any] = [
    ("kind", "u1"), ("dtype", "u1"), ("rank", "u1"), ("flags", "u1"), ("graph", "<u4"), ("item", "<u4"),
    ("signature", "<u4"), ("call", "<u8"), ("at", "<u8"),
]  # fmt: skip
COUNTS = ("zeros", "zero_rows", "zero_cols", "nonfinite", "constant_rows", "valid", "valid_rows")
"""What a probe counts, in the order it writes them."""
RANGES = ("min", "max", "absmax")
"""Of the finite elements; +inf, -inf and 0 where there are none."""
SHAPE_AT = BODY
EXTENT_AT = SHAPE_AT + 8 * MAX_RANK
COUNTS_AT = EXTENT_AT + 16
RANGES_AT = COUNTS_AT + 8 * len(COUNTS)


def _dtype(body: Sequence[Any]) -> np.dtype[Any]:
    made = np.dtype([*_HEAD, *body])
    pad = CHECK - made.itemsize
    if pad < 0:
        raise InternalError(f"a record of {made.itemsize} bytes does not fit")
    return np.dtype([*_HEAD, *body, *([("pad", f"V{pad}")] if pad else []), ("check", "<u8")])


LAYOUTS: dict[RecordKind, np.dtype[Any]] = {
    RecordKind.VALUE: _dtype(
        [("shape", "<i8", (MAX_RANK,)), ("rows", "<i8"), ("cols", "<i8"), *((n, "<i8") for n in COUNTS),
         *((n, "<f8") for n in RANGES)]
    ),
    RecordKind.CONTROL: _dtype([("outcome", "<i8")]),
    RecordKind.PARTITION: _dtype(
        [("ns", "<i8"), ("bytes", "<i8"), ("flops", "<i8"), ("cycles", "<i8"), ("instructions", "<i8"), ("misses", "<i8")]
    ),
    RecordKind.CALL: _dtype([("tier", "<i8"), ("ns", "<i8"), ("cost_ns", "<i8")]),
}  # fmt: skip

_head = struct.Struct("<BBBBIIIQQ")
_value = struct.Struct(f"<{MAX_RANK}qqq")
_six = struct.Struct("<qqqqqq")


@dataclass(frozen=True, slots=True)
class Subject:
    """What the records of one call have in common."""

    graph: int
    signature: int
    call: int
    at: int


class Batch:
    """The records of one call, in memory that native code may write to; published together."""

    __slots__ = ("_view", "address", "count", "room")

    def __init__(self, room: int) -> None:
        memory = np.zeros(room * WORDS, np.uint64)
        self._view = memoryview(memory.data).cast("B")
        self.address = int(memory.__array_interface__["data"][0])
        self.room = room
        self.count = 0

    def clear(self) -> None:
        """Begin again, in the same memory: allocating it costs more than the records of a call."""
        used = self.count * SIZE
        self._view[:used] = bytes(used)
        self.count = 0

    def _head(self, kind: RecordKind, item: int, s: Subject, dtype: int = 0, rank: int = 0, flags: int = 0) -> int:
        """Begin a record; its offset."""
        if self.count >= self.room:
            raise InternalError(f"more than {self.room} records in a batch")
        at = self.count * SIZE
        self.count += 1
        _head.pack_into(self._view, at, kind, dtype, rank, flags, s.graph, item, s.signature, s.call, s.at)
        return at

    def value(
        self, s: Subject, item: int, dtype: int, shape: Sequence[int], rows: int, cols: int, flags: int
    ) -> int:
        """A value's record without its statistics; the address where a probe puts them.

        A rank beyond the limit folds its leading dims into one.
        """
        rank = len(shape)
        if rank > MAX_RANK:
            lead = 1
            for n in shape[: rank - MAX_RANK + 1]:
                lead *= n
            shape = (lead, *shape[rank - MAX_RANK + 1 :])
        at = self._head(RecordKind.VALUE, item, s, dtype, rank, flags)
        _value.pack_into(self._view, at + BODY, *shape, *(0,) * (MAX_RANK - len(shape)), rows, cols)
        return self.address + at + COUNTS_AT

    def write(self, address: int, data: bytes) -> None:
        """Bytes at an address inside."""
        at = address - self.address
        self._view[at : at + len(data)] = data

    def control(self, s: Subject, item: int, outcome: int, *, loop: bool) -> None:
        """A branch taken (0 or 1), or a loop's trips."""
        at = self._head(RecordKind.CONTROL, item, s, flags=Flag.LOOP if loop else 0)
        struct.pack_into("<q", self._view, at + BODY, outcome)

    def partition(
        self, s: Subject, item: int, ns: int, bytes: int, flops: int, counters: tuple[int, int, int] | None = None
    ) -> None:
        """A partition's time, and its bytes and flops by its graph (-1: unknown)."""
        at = self._head(RecordKind.PARTITION, item, s, flags=Flag.COUNTERS if counters else 0)
        _six.pack_into(self._view, at + BODY, ns, bytes, flops, *(counters or (0, 0, 0)))

    def call(self, s: Subject, tier: int, ns: int, cost_ns: int) -> None:
        """The call itself, and what watching it cost."""
        at = self._head(RecordKind.CALL, 0, s)
        struct.pack_into("<qqq", self._view, at + BODY, tier, ns, cost_ns)

    def record(self, i: int) -> bytes:
        """One record's bytes."""
        return bytes(self._view[i * SIZE : (i + 1) * SIZE])


def check_word(words: np.ndarray[Any, Any], ticket: int) -> int:
    """The check of a record's other words at a place in the ring."""
    mixed = int(np.bitwise_xor.reduce(words[..., : WORDS - 1]))
    return mixed ^ ((ticket + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)


def split(raw: np.ndarray[Any, Any]) -> dict[RecordKind, np.ndarray[Any, Any]]:
    """Raw records, one row of bytes each, by kind; unknown kinds are left out."""
    kinds = raw[:, 0]
    return {k: np.ascontiguousarray(raw[kinds == k]).view(layout)[:, 0] for k, layout in LAYOUTS.items() if (kinds == k).any()}
