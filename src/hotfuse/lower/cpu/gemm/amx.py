"""C[M, N] = finish(A[M, K] @ B[K, N]) for a matrix unit: blocks of up to 32 x 32 sums, from memory to memory (`mma.memory`).

    parallel (group of rows, panel of 32 columns)   a group of A's rows stays in the second-level cache
      for block of rows:                            a panel is read from there as well, and the next one fetched meanwhile
        sums = A[block] @ B[panel]
        finish(sums), row by row

A is rounded to bf16 beforehand, all rows of it, and laid out block by block: [blocks of rows][K / 32][rows of a block][32], so that
what one instruction reads lies in one piece. Rows that no block's rows fill are computed and never read; steps that are missing
at K's end are zeros on both sides. B's panels are those of products by pairs of bf16, 32 columns wide.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.cpu import work_division
from hotfuse.lower.cpu.gemm.gemm import Finish, FinishedTile, let
from hotfuse.lower.cpu.tiling import Core, GemmTiling
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer
from hotfuse.tile.type_rules import BLOCK_STEPS

COLUMNS = 32
_TILE = 16
_BLOCK_ROWS = 2 * _TILE
"""Rows of a block: two tiles."""
_LINE = 32
"""Numbers of a cache line."""
_PREFETCH_BLOCKS = 8
"""Blocks of rows from which on a panel is worked on long enough for the next one to be fetched meanwhile."""


@dataclass(frozen=True, slots=True)
class BlockTiling:
    """How a product is cut into blocks."""

    rows: int
    """Of a block."""
    group: int
    """Most blocks in a group of rows."""
    steps: int
    """Blocks of 32 steps."""


def fits(core: Core, products: int, *, together: bool) -> bool:
    """Whether products are made on the matrix unit: those that share panels must fill them evenly."""
    return core.tiles and core.precision == "bf16" and (not together or products in (1, 2))


def cut(core: Core, m: Dim, k: int) -> BlockTiling:
    """Rows in equal blocks, and groups of them that take three eighths of the second-level cache: panels pass through the rest."""
    steps = -(-k // BLOCK_STEPS)
    rows = _BLOCK_ROWS
    if isinstance(m, int):
        high = -(-max(m, 1) // max(1, -(-m // _BLOCK_ROWS)))
        rows = high if high <= _TILE else high + high % 2
    kept = core.l2 * 3 // 8 // (2 * BLOCK_STEPS * steps)
    return BlockTiling(rows, max(1, kept // rows), steps)


def tiling(core: Core, plain: GemmTiling, how: BlockTiling) -> GemmTiling:
    """The tiling of vectors with panels and rows of blocks."""
    why = f"{how.rows}x{COLUMNS} on the matrix unit"
    return replace(plain, vectors=max(1, COLUMNS // core.lanes), mr=how.rows, width=COLUMNS, why=why)


def product(b: KernelBuilder, m: Dim, a: Buffer, panels: Buffer, how: BlockTiling, finish: Finish, threads: int = 1) -> None:
    """Write the loops of a product; `a` is laid out as this file says."""
    many, rows = panels.shape[0], how.rows
    sums = b.scratch("sums", DType.F32, (rows, COLUMNS))
    with contextlib.ExitStack() as scope:
        count = scope.enter_context(let(b, "blocks", expr("ceildiv", m, rows)))
        share = expr("max", expr("ceildiv", count, how.group), work_division.groups(many, threads))
        groups = scope.enter_context(let(b, "groups", expr("min", count, share)))
        task = scope.enter_context(b.parallel("task", expr("*", groups, many))).var
        panel = scope.enter_context(let(b, "panel", expr("%", task, many)))
        group = expr("//", task, many)
        first = scope.enter_context(let(b, "first", expr("//", expr("*", group, count), groups)))
        end = scope.enter_context(let(b, "end", expr("//", expr("*", expr("+", group, 1), count), groups)))
        block = scope.enter_context(b.loop("block", first, end)).var
        _fetch_next(b, panels, panel, how, block, first, end)
        left = expr("+", m, expr("*", block, -rows))
        for h, here in _heights(m, rows, left):
            with b.when(here) if here is not None else contextlib.nullcontext():
                places = b.access(sums, (0, 0), 2), b.access(a, (block, 0, 0, 0), 3), b.access(panels, (panel, 0, 0, 0), 3)
                b.mma_memory(*places, rows=h, columns=COLUMNS, blocks=how.steps)
        row = scope.enter_context(let(b, "row", expr("*", block, rows)))
        finish(FinishedTile(b, sums, COLUMNS, expr("min", left, rows), row, panel))


def _fetch_next(b: KernelBuilder, panels: Buffer, panel: Dim, how: BlockTiling, block: Dim, first: Dim, end: Dim) -> None:
    """This block's share of the next panel's lines, where there are blocks enough to hide the fetching behind."""
    lines, many = how.steps * COLUMNS, expr("+", end, expr("*", first, -1))
    if panels.shape[0] == 1 or many in range(_PREFETCH_BLOCKS):
        return
    nth = expr("+", block, expr("*", first, -1))
    lo, hi = (expr("//", expr("*", n, lines), many) for n in (nth, expr("+", nth, 1)))
    with b.when(expr("<=", _PREFETCH_BLOCKS, many)), b.loop("line", lo, hi) as line:
        b.prefetch(panels, (expr("+", panel, 1), 0, 0, expr("*", line.var, _LINE)), level=2)


def _heights(m: Dim, rows: int, left: Dim) -> list[tuple[int, Dim | None]]:
    """Heights of blocks with the condition for each: where rows are known only at run time, the last block may be half as high."""
    if isinstance(m, int):
        return [(rows, None)]
    return [(rows // 2, expr("<=", left, rows // 2)), (rows, expr("<", rows // 2, left))]
