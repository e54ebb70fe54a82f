"""C[M, N] = finish(A[M, K] @ B[K, N]) for a matrix unit: blocks of up to 32 x 32 sums, from memory to memory (`mma.memory`).

    parallel (group of rows, panel of 32 columns)
      for part of K                             a part of the panel stays in the nearest cache while the group's rows pass
        for block of rows: sums[block] (+)= A[block, part] @ B[panel, part]
      for row of the group: finish(sums[row])

A is rounded to bf16 beforehand, all rows of it, and laid out block by block: [blocks of rows][K / 32][rows of a block][32], so that
what one instruction reads lies in one piece. Rows that no block's rows fill are computed and never read; steps that are missing
at K's end are zeros on both sides. B's panels are those of products by pairs of bf16, 32 columns wide.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.gemm import MIN_TASKS, Finish, Finished, let
from hotfuse.lower.tiling import Core, GemmTiling
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer
from hotfuse.tile.rules import BLOCK_STEPS

COLUMNS = 32
_TILE = 16
_MOST = 2 * _TILE
"""Rows of a block: two tiles."""
_GROUP_ROWS = 256
"""Most rows whose sums are kept while K is gone through."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut into blocks."""

    rows: int
    """Of a block."""
    group: int
    """Most blocks in a group of rows."""
    part: int
    """Blocks of 32 steps that are gone through for all rows of a group before the next ones."""
    steps: int
    """Blocks of 32 steps in all."""


def fits(core: Core, products: int, together: bool) -> bool:
    """Whether products are made on the matrix unit: those that share panels must fill them evenly."""
    return core.tiles and core.precision == "bf16" and (not together or products in (1, 2))


def cut(core: Core, m: Dim, k: int) -> Cut:
    """Rows in equal blocks; groups of them that stay in the second-level cache, parts of K that stay in the first-level one."""
    steps = -(-k // BLOCK_STEPS)
    rows = _MOST
    if isinstance(m, int):
        high = -(-max(m, 1) // max(1, -(-m // _MOST)))
        rows = high if high <= _TILE else high + high % 2
    kept = core.l2 // 2 // (2 * BLOCK_STEPS * steps)
    group = max(1, min(_GROUP_ROWS, kept) // rows)
    parts = -(-steps * COLUMNS * BLOCK_STEPS * 2 // max(1, core.l1 // 2))
    alone = isinstance(m, int) and m <= rows
    return Cut(rows, group, steps if alone else -(-steps // max(1, parts)), steps)


def tiling(core: Core, plain: GemmTiling, how: Cut) -> GemmTiling:
    """The tiling of vectors with panels and rows of blocks."""
    why = f"{how.rows}x{COLUMNS} on the matrix unit"
    return replace(plain, vectors=max(1, COLUMNS // core.lanes), mr=how.rows, width=COLUMNS, why=why)


def product(b: KernelBuilder, m: Dim, a: Buffer, panels: Buffer, how: Cut, finish: Finish) -> None:
    """Write the loops of a product; `a` is laid out as this file says."""
    many, rows = panels.shape[0], how.rows
    sums = b.scratch("sums", DType.F32, (how.group * rows, COLUMNS))
    with contextlib.ExitStack() as scope:
        count = scope.enter_context(let(b, "blocks", expr("ceildiv", m, rows)))
        share = expr("max", expr("ceildiv", count, how.group), expr("ceildiv", MIN_TASKS, expr("max", 1, many)))
        groups = scope.enter_context(let(b, "groups", expr("min", count, share)))
        task = scope.enter_context(b.parallel("task", expr("*", groups, many))).var
        panel = scope.enter_context(let(b, "panel", expr("%", task, many)))
        group = expr("//", task, many)
        first = scope.enter_context(let(b, "first", expr("//", expr("*", group, count), groups)))
        end = scope.enter_context(let(b, "end", expr("//", expr("*", expr("+", group, 1), count), groups)))

        def part(start: Dim, length: int, add: bool) -> None:
            with b.loop("block", first, end) as block:
                at = expr("*", expr("+", block.var, expr("*", first, -1)), rows)
                left = expr("+", m, expr("*", block.var, -rows))
                for h, here in _heights(m, rows, left):
                    with b.when(here) if here is not None else contextlib.nullcontext():
                        b.mma_memory(
                            b.access(sums, (at, 0), 2), b.access(a, (block.var, start, 0, 0), 3),
                            b.access(panels, (panel, expr("*", start, BLOCK_STEPS // 2), 0, 0), 3),
                            rows=h, columns=COLUMNS, blocks=length, add=add,
                        )  # fmt: skip

        part(0, how.part, add=False)
        whole = how.steps // how.part * how.part
        if whole > how.part:
            with b.loop("part", how.part, whole, how.part) as k:
                part(k.var, how.part, add=True)
        if how.steps > whole:
            part(whole, how.steps - whole, add=True)
        row = scope.enter_context(let(b, "row", expr("*", first, rows)))
        present = expr("min", expr("+", m, expr("*", row, -1)), expr("*", expr("+", end, expr("*", first, -1)), rows))
        finish(Finished(b, sums, COLUMNS, present, row, panel))


def _heights(m: Dim, rows: int, left: Dim) -> list[tuple[int, Dim | None]]:
    """Heights of blocks with the condition for each: where rows are known only at run time, the last block may be half as high."""
    if isinstance(m, int):
        return [(rows, None)]
    return [(rows // 2, expr("<=", left, rows // 2)), (rows, expr("<", rows // 2, left))]
