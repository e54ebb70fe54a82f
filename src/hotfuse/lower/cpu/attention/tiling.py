"""How attention is cut for a core: panels of queries, tiles of scores and of outputs, blocks of keys."""

from __future__ import annotations

from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.lower.cpu import work_division
from hotfuse.lower.cpu.tiling import Core

MAX_KEY_ROWS = 16
"""Keys of a score tile: beyond it nothing is gained, and a tail of keys wastes more."""
MAX_OUT_ROWS = 12
"""Queries of an output tile: more broadcasts per multiply-add than this would fill the load ports."""


NARROWER = 0.05
"""How much dearer attention is with panels of half the width, where all of them are full."""


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """A tiling of attention."""

    lanes: int
    registers: int
    vectors: int
    """Vectors of queries in a panel."""
    out_vectors: int
    """Most vectors of V's width in an output tile."""
    out_rows: int
    """Queries of an output tile."""
    block: int
    """Keys whose scores are held at once; more keys go block by block."""
    unroll: int
    """Steps written out in inner loops; divides every width."""

    @property
    def panel(self) -> int:
        """Queries of a panel."""
        return self.lanes * self.vectors

    def key_rows(self, vectors: int) -> int:
        """Keys of a score tile for a panel that has so many vectors of queries."""
        return max(1, min(MAX_KEY_ROWS, (self.registers - vectors - 1) // vectors))

    def few_rows(self, queries: int) -> int:
        """Keys of a tile when there are few queries: a power of 2, at most a vector's lanes."""
        rows = self.lanes
        while rows > 1 and rows * queries + queries > self.registers - 4:
            rows //= 2
        return rows

    def out_widths(self, width: int) -> list[int]:
        """V's width in parts of at most `out_vectors` vectors, none much narrower than another."""
        vectors = -(-width // self.lanes)
        parts = -(-vectors // self.out_vectors)
        each = [vectors // parts + (i < vectors % parts) for i in range(parts)]
        widths = [n * self.lanes for n in each]
        widths[-1] -= vectors * self.lanes - width
        return widths


def shared(t: AttentionTiling, lines: Dim, queries: Dim, threads: int) -> AttentionTiling:
    """This tiling with panels that threads can share. Where there are few, they become narrower, which takes a little longer."""
    if threads <= 2 or not isinstance(queries, int) or queries < 1:
        return t
    heads = lines if isinstance(lines, int) else 1

    def longest(vectors: int) -> float:
        tasks = heads * -(-queries // (t.lanes * vectors))
        used = min(vectors, -(-queries // t.lanes))
        return work_division.rounds(tasks, threads) * used * (1 + NARROWER * (t.vectors / vectors - 1))

    widths = [t.vectors >> n for n in range(t.vectors.bit_length())]
    return replace(t, vectors=min(widths, key=longest))


def choose(core: Core, width: int) -> AttentionTiling:
    """The tiling for a head's width.

    Scores of a block of keys and the block's part of V are meant to stay in the second-level cache, a panel of queries in the
    first.
    """
    vectors, out_vectors = (4 if core.registers >= 32 else 2), 2
    panel_bytes = 4 * core.lanes * vectors
    while vectors > 1 and panel_bytes * width > core.l1 * 3 // 4:
        vectors //= 2
        panel_bytes //= 2
    out_rows = min(MAX_OUT_ROWS, (core.registers - out_vectors - 1) // out_vectors)
    block = max(64, min(512, core.l2 // 4 // panel_bytes // 64 * 64))
    return AttentionTiling(core.lanes, core.registers, vectors, out_vectors, out_rows, block, 2)
