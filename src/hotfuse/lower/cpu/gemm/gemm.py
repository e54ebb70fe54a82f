"""C[M, N] = finish(A[M, K] @ B[K, N]) as a tile program, B packed into panels before the call or as each panel begins.

    parallel (group of rows, panel)             a group of A's rows stays in the second-level cache, a panel in the nearer ones
      for block of rows                         balanced: no block is more than one row higher than another; where threads could
                                                not share panels evenly, the parallel loop is over blocks in the same order
        acc = 0                               mr x nr numbers in registers, several sets of them when rows are few
        for k in 0..K step unroll:
          acc = mma(acc, A[rows, k], B[panel, k, :]); ...
        finish(acc)                           bias, activation, residual ... and the stores, row by row

M may be a number or known only at run time. A number gives one or two heights of blocks. Otherwise every height is written that
blocks of some M have, and a call takes at most two of them: all up to `mr` for any M, few where M is a multiple of a number, as the
pixels of an image of known height are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr, factor
from hotfuse.ir.types import DType, bits
from hotfuse.lower.cpu import work_division
from hotfuse.lower.cpu.tiling import GemmTiling, balance
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer, Tile

_LINE = 64
"""Bytes of a cache line."""
_SPREAD = 4
"""Over how many blocks of rows the fetching of the next panel is spread, when their number is not known."""
_MIN_BLOCK = 4096
"""Multiply-adds of vectors in a block that is a task of its own: finding out which one it is takes some divisions."""


@dataclass(frozen=True, slots=True)
class Product:
    """What is to be multiplied."""

    lhs: Callable[[Dim, Dim, int], Tile]
    """A[row : row + rows, k] as a tile of [rows, 1], given row, k and rows; of [rows, 4] with k in fours for bytes."""
    b: Buffer | Callable[[Dim], Tile]
    """[panels, K, nr]; [panels, K / 4, nr, 4] for bytes. Or what gives step k of the panel that was begun, [1, nr] of `acc`."""
    m: Dim
    k: Dim
    panels: Dim
    tiling: GemmTiling
    acc: DType = DType.F32
    """What sums are kept in; B is widened to it, but for bytes, which are multiplied four at a time."""
    prepare: Callable[[Dim, Dim], None] | None = None
    """Called with the first row of a block and its height, before its sums."""
    at_once: int = 0
    """Most rows of A that are read before they are used, 0 for all. Rows a distance apart that only the call tells are found by
    as many addresses: reading all of them first leaves no registers for the sums."""

    first_panel: Dim = 0
    """Where the panels of this product begin in `b`, which may hold those of others before it."""
    last: int = 0
    """Columns that are computed of the last panel, where its other vectors are empty; 0 for all. `panels` is a number then."""
    paired: bool = False
    """Both operands are bf16, two steps of K at a time: A gives [rows, 2] with k in twos, B is [panels, K / 2, nr, 2]."""

    @property
    def group(self) -> int:
        """Steps of K that are one multiplication."""
        return 4 if self.acc is DType.I32 else 2 if self.paired else 1

    @property
    def steps(self) -> Dim:
        """Multiplications along K."""
        return self.k if self.group == 1 else expr("ceildiv", self.k, self.group)


@dataclass(frozen=True, slots=True)
class FinishedTile:
    """One register tile with its sums complete: in registers, or in scratch memory to be read back row by row."""

    builder: KernelBuilder
    sums: Tile | Buffer
    nr: int
    rows: Dim
    """Rows of this tile; a number where the sums are in registers."""
    row: Dim
    """First row of C."""
    panel: Dim
    place: Callable[[Dim], contextlib.AbstractContextManager[Dim]] | None = None
    """Which row of C one of the product is, where rows were put in another order."""

    def each_row(self, body: Callable[[Tile, Dim], None]) -> None:
        """Call the body with every row, [nr], and its number in C: in a loop, or written out."""
        b, nr = self.builder, self.nr
        if isinstance(self.sums, Tile):
            for i in range(self.sums.type.shape[0]):
                body(b.reshape(b.extract(self.sums, (i, 0), (1, nr)), (nr,)), expr("+", self.row, i))
            return
        with b.loop("r", 0, self.rows) as r:
            row = expr("+", self.row, r.var)
            with self.place(row) if self.place is not None else contextlib.nullcontext(row) as number:
                body(b.load(self.sums, (r.var, 0), (nr,)), number)


Finish = Callable[[FinishedTile], None]


@contextlib.contextmanager
def let(b: KernelBuilder, name: str, value: Dim) -> Generator[Dim]:
    """A name for a number inside the `with`, as a loop of one round: what is long is written, and computed, once."""
    if isinstance(value, int) or value.op == "sym":
        yield value
        return
    with b.loop(name, value, expr("+", value, 1)) as once:
        yield once.var


def product(
    b: KernelBuilder, p: Product, finish: Finish, *, in_loop: bool,
    begin: Callable[[Dim], contextlib.AbstractContextManager[None] | None] | None = None,
) -> None:  # fmt: skip
    """Write the loops of a product; `in_loop` keeps long epilogues short by looping over rows through scratch memory.

    `begin` is called where a panel has been chosen and its rows are still to come, which are then written inside what it gives.
    """
    t = p.tiling
    scratch = b.scratch("sums", p.acc, (t.mr, t.nr)) if in_loop else None
    count, rows, extra = _blocks(p)
    cached = _cached_groups(p, count)
    groups = expr("min", count, expr("max", work_division.groups(p.panels, t.threads), cached))
    by_block = begin is None and _uneven(p, count, groups)
    groups = cached if by_block else groups
    span = _span(count, groups)
    with contextlib.ExitStack() as scope:
        count, rows, extra, groups = (scope.enter_context(let(b, "blocks", d)) for d in (count, rows, extra, groups))
        if by_block:
            block, panel, lo = _one_block(b, scope, p.panels, count, groups)
        else:
            task = scope.enter_context(b.parallel("task", expr("*", groups, p.panels))).var
            panel, lo, hi = task, 0, count
            if groups != 1:
                panel = scope.enter_context(let(b, "panel", expr("%", task, p.panels)))
                group = expr("//", task, p.panels)
                lo = scope.enter_context(let(b, "first", expr("//", expr("*", group, count), groups)))
                hi = scope.enter_context(let(b, "end", expr("//", expr("*", expr("+", group, 1), count), groups)))
            if begin is not None and (around := begin(panel)) is not None:
                scope.enter_context(around)
            block = scope.enter_context(b.loop("block", lo, hi)).var
        taller = expr("min", 1, expr("max", 0, expr("+", extra, expr("*", block, -1))))
        height = scope.enter_context(let(b, "height", rows if extra == 0 else expr("+", rows, taller)))
        row = scope.enter_context(let(b, "row", _first_row(block, rows, extra)))
        at = _Block(row, expr("+", p.first_panel, panel), expr("min", expr("+", block, expr("*", lo, -1)), span - 1), span)
        if p.prepare is not None:
            p.prepare(row, height)
        for h in _heights(p):
            with b.when(expr("==", height, h)) if height != h else contextlib.nullcontext():
                for here, of_width in _widths(p, panel):
                    with _if(b, here):
                        acc = _sums(b, of_width, h, at)
                        if scratch is None:
                            (whole,) = acc
                            finish(FinishedTile(b, whole, of_width.tiling.nr, h, row, panel))
                        else:
                            for first, part in zip(_bands(p, h), acc, strict=True):
                                b.store(scratch, (first, 0), part)
        if scratch is not None:
            for here, of_width in _widths(p, panel):
                with _if(b, here):
                    finish(FinishedTile(b, scratch, of_width.tiling.nr, height, row, panel))


def _if(b: KernelBuilder, condition: Dim) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if condition == 1 else b.when(condition)


def _widths(p: Product, panel: Dim) -> list[tuple[Dim, Product]]:
    """For which panels the product is computed how: alike, or fewer vectors of the last one."""
    if not p.last:
        return [(1, p)]
    t = p.tiling
    narrow = replace(p, tiling=replace(t, vectors=p.last // t.lanes, width=0))
    end = expr("+", p.panels, -1)
    return [(expr("<", panel, end), p), (expr("==", panel, end), narrow)]


@dataclass(frozen=True, slots=True)
class _Block:
    """Where in the product a register tile is."""

    row: Dim
    panel: Dim
    """Of `Product.b`."""
    nth: Dim
    """Which of the blocks that fetch the next panel this one is."""
    span: int
    """How many these are."""


def _first_row(block: Dim, rows: Dim, extra: Dim) -> Dim:
    before = expr("*", block, rows)
    return before if extra == 0 else expr("+", before, expr("min", block, extra))


def _blocks(p: Product) -> tuple[Dim, Dim, Dim]:
    """Number of blocks, rows of the lower ones, number of the blocks with one more row."""
    if isinstance(p.m, int):
        blocks = balance(p.m, p.tiling.mr)
        return blocks.count, blocks.rows, blocks.extra
    count = expr("max", 1, expr("ceildiv", p.m, p.tiling.mr))
    return count, expr("//", p.m, count), expr("%", p.m, count)


def _heights(p: Product) -> tuple[int, ...]:
    if isinstance(p.m, int):
        blocks = balance(p.m, p.tiling.mr)
        return tuple(h for h in ((blocks.rows + 1,) if blocks.extra else ()) + (blocks.rows,) if h)
    return heights_of_multiples(factor(p.m), p.tiling.mr)


@functools.cache
def heights_of_multiples(of: int, most: int) -> tuple[int, ...]:
    """Heights of the blocks that multiples of a number are divided into, the tallest first: of 24 rows in blocks of at most 9, and
    of any multiple of 24, all are 8 or 9 high. From `most` blocks on, heights depend on what is left of the number of rows when it
    is divided by `most`, which comes again after `most` multiples.
    """
    found: set[int] = set()
    for m in range(of, most * (most + of) + 1, of):
        blocks = balance(m, most)
        found |= {blocks.rows, blocks.rows + 1} if blocks.extra else {blocks.rows}
    return tuple(sorted(found, reverse=True))


def _cached_groups(p: Product, count: Dim) -> Dim:
    """Groups of rows: as many as keep each in cache."""
    per_group = max(1, p.tiling.group_rows // p.tiling.mr)
    return expr("min", count, expr("max", 1, expr("ceildiv", count, per_group)))


def _uneven(p: Product, count: Dim, groups: Dim) -> bool:
    """Whether threads get too unequal shares of (group, panel), and blocks are large enough to be shared out one by one."""
    t, threads = p.tiling, p.tiling.threads
    if threads <= 2 or count == 1 or not isinstance(p.panels, int) or not isinstance(p.b, Buffer):
        return False
    if isinstance(p.steps, int) and p.steps * t.mr * t.vectors < _MIN_BLOCK:
        return False
    if not isinstance(count, int) or not isinstance(groups, int):  # what is added in groups of rows is uneven by itself
        return work_division.balance(p.panels, threads) < work_division.EVEN
    blocks = [(g + 1) * count // groups - g * count // groups for g in range(groups) for _ in range(p.panels)]
    whole = work_division.balance(count * p.panels, threads)
    return 1 / work_division.largest_share(len(blocks), threads, blocks) < min(work_division.EVEN, whole)


def _one_block(
    b: KernelBuilder, scope: contextlib.ExitStack, panels: Dim, count: Dim, groups: Dim
) -> tuple[Dim, Dim, Dim]:
    """A parallel loop over all blocks, those of a panel one behind the other, and panels group by group: (block, panel, and the
    first block of its group).
    """
    at = scope.enter_context(b.parallel("task", expr("*", count, panels))).var
    if groups == 1:
        panel = scope.enter_context(let(b, "panel", expr("//", at, count)))
        return scope.enter_context(let(b, "block", expr("%", at, count))), panel, 0
    per = scope.enter_context(let(b, "per", expr("ceildiv", count, groups)))
    group = scope.enter_context(let(b, "group", expr("//", at, expr("*", per, panels))))
    lo = scope.enter_context(let(b, "first", expr("*", group, per)))
    here = scope.enter_context(let(b, "here", expr("min", per, expr("+", count, expr("*", lo, -1)))))
    inside = scope.enter_context(let(b, "inside", expr("+", at, expr("*", lo, panels, -1))))
    panel = scope.enter_context(let(b, "panel", expr("//", inside, here)))
    return scope.enter_context(let(b, "block", expr("+", lo, expr("%", inside, here)))), panel, lo


def _span(count: Dim, groups: Dim) -> int:
    """Blocks over which fetching the next panel is spread."""
    if isinstance(count, int) and isinstance(groups, int):
        return max(1, count // groups)
    return _SPREAD


def _streams(p: Product, height: int) -> bool:
    """Whether a panel is read once, from end to end, as happens when one block has all rows: that the hardware foresees."""
    rows = p.m if isinstance(p.m, int) else 2 * height - 1  # two blocks or more have more than half of mr rows each
    return rows <= p.tiling.mr


def _bands(p: Product, height: int) -> range:
    """The first rows of the bands in which a tile's rows are read."""
    return range(0, height, p.at_once or height)


def _sums(b: KernelBuilder, p: Product, height: int, at: _Block) -> list[Tile]:
    """One register tile of A @ B, by bands of rows."""
    t = p.tiling
    sets = t.sets(height)
    unroll = max(t.unroll, sets)
    bands = _bands(p, height)
    zeros = [b.fill(0, p.acc, (min(bands.step, height - first), t.nr)) for first in bands]
    accs = zeros * sets

    def steps_of(accs: Sequence[Tile], k: Dim, nth: int, ahead: int) -> list[Tile]:
        """The accumulators after one step, which goes to one of the sets."""
        start = nth % (len(accs) // len(zeros)) * len(zeros)
        new = _step(b, p, accs[start : start + len(zeros)], at, k, ahead=ahead)
        return [*accs[:start], *new, *accs[start + len(zeros) :]]

    steps = expr("//", p.steps, unroll)
    whole = expr("*", steps, unroll)
    if steps != 0:
        with b.loop("k", 0, whole, unroll, carry=accs) as k:
            if t.next_panel and p.panels != 1 and not _streams(p, height):
                _fetch_next(b, p, at, k.var, steps, unroll)
            accs = list(k.carried)
            for u in range(unroll):
                accs = steps_of(accs, expr("+", k.var, u), u, t.ahead)
                b.effect("barrier_spill")
            k.yields(*accs)
        accs = list(k.outs)
    if isinstance(whole, int) and isinstance(p.steps, int):
        for i in range(p.steps - whole):
            accs = steps_of(accs, whole + i, i, 0)
    else:
        with b.loop("k", whole, p.steps, carry=accs[: len(zeros)]) as k:
            k.yields(*steps_of(k.carried, k.var, 0, 0))
        accs = [*k.outs, *accs[len(zeros) :]]
    held = [accs[i : i + len(zeros)] for i in range(0, len(accs), len(zeros))]
    while len(held) > 1:
        held = [
            [b.map("add", x, y) for x, y in zip(*held[i : i + 2], strict=True)] if i + 1 < len(held) else held[i]
            for i in range(0, len(held), 2)
        ]
    return held[0]


def sums(b: KernelBuilder, p: Product, height: int, row: Dim, panel: Dim) -> Tile:
    """One register tile of A @ B, for loops other than those of `product`: nothing is fetched for a next panel."""
    (acc,) = _sums(b, replace(p, tiling=replace(p.tiling, next_panel=False), at_once=0), height, _Block(row, panel, 0, 1))
    return acc


def _step(b: KernelBuilder, p: Product, accs: Sequence[Tile], at: _Block, k: Dim, *, ahead: int) -> list[Tile]:
    if len(accs) == 1:
        lhs = p.lhs(at.row, k, accs[0].type.shape[0])
        return [b.mma(accs[0], lhs, _right(b, p, at, k, ahead))]
    right = _right(b, p, at, k, ahead)
    new: list[Tile] = []
    for acc in accs:
        if new:
            b.effect("barrier_spill")
        above = sum(t.type.shape[0] for t in new)
        new.append(b.mma(acc, p.lhs(expr("+", at.row, above), k, acc.type.shape[0]), right))
    return new


def _right(b: KernelBuilder, p: Product, at: _Block, k: Dim, ahead: int) -> Tile:
    """One step of the panel."""
    t = p.tiling
    if not isinstance(p.b, Buffer):
        return p.b(k)
    if ahead:
        for j in range(0, t.nr, _line(p.b)):
            b.prefetch(p.b, (at.panel, expr("+", k, ahead), j))
    if p.group > 1:  # the four, or two, of a column lie side by side
        return b.load(p.b, (at.panel, k, 0, 0), (p.group, t.nr), axes=(3, 2))
    return b.cast(b.load(p.b, (at.panel, k, 0), (1, t.nr)), p.acc)


def _line(buffer: Buffer) -> int:
    """Numbers in a cache line."""
    return _LINE * 8 // bits(buffer.dtype)


def _fetch_next(b: KernelBuilder, p: Product, at: _Block, k: Dim, steps: Dim, unroll: int) -> None:
    """This iteration's share of the next panel's lines."""
    if not isinstance(p.b, Buffer):
        return
    line = _line(p.b)
    lines = -(-p.tiling.nr * p.group * unroll // (line * at.span))
    start = expr("+", expr("*", at.nth, steps, lines * line), expr("*", k, lines * line // unroll))
    for i in range(lines):
        inner = (*(0,) * (len(p.b.shape) - 2), expr("+", start, i * line))
        b.prefetch(p.b, (expr("+", at.panel, 1), *inner), level=2)
