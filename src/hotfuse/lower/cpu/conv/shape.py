"""Convolutions as numbers: what a window reads, and how a row of outputs is cut so that no tile reads beyond the image.

    row of outputs  ::= strips of equal blocks, left to right
    block           ::= parts: neighbouring pixels that see the same columns of the window
    segment         ::= columns of the window, one behind the other, with the parts that see them

A block in the middle has one part and one segment. At a border, pixels that do not see a column are left out of that column's
segment, so nothing is padded and nothing is multiplied with zeros. A row whose length is known only at run time is cut then:
pixels at the borders one by one, those between them in the highest blocks that fit.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.lower.common.algebra import add
from hotfuse.lower.cpu import tiling
from hotfuse.lower.cpu.tiling import MAX_ROWS, Core, GemmTiling, balance

_PAGE = 4096
_FAR_ROWS = 14
"""Most pixels side by side where their lines do not fall on each other in the cache."""
_PANEL_SHARE = 2.0
"""What reading a line of a panel from the second-level cache costs next to a multiply-add."""
_LOAD_SHARE = 0.5
"""What a load from the nearest cache costs."""
_HALF = 0.55
"""What arithmetic on a vector of at most half the width costs: many cores do wide vectors in two halves."""
_USUAL_ROW = 64
"""The length of a row that is known only at run time, when tiles are chosen."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One spatial dim: extents and how the window moves along it."""

    size: Dim
    window: int
    stride: int = 1
    padding: int = 0
    """How far the first window reaches beyond the image; negative where it begins inside."""
    dilation: int = 1
    after: int | None = None
    """How far windows may reach beyond the image at the other end; None: as far as at the beginning."""
    count: Dim | None = None
    """Outputs, where they are not those that padding gives."""

    @property
    def out(self) -> Dim:
        """Outputs along the dim."""
        if self.count is not None:
            return self.count
        reach = self.padding + self.end - self.dilation * (self.window - 1) - 1
        return add(expr("//", add(self.size, reach), self.stride), 1)

    @property
    def end(self) -> int:
        """How far windows may reach beyond the end."""
        return self.padding if self.after is None else self.after

    @property
    def inside(self) -> bool:
        """Whether no window reaches beyond the image."""
        return self.padding <= 0 and self.end <= 0

    @property
    def trivial(self) -> bool:
        """Whether there is nothing to go along."""
        return self.size == 1 and self.window == 1 and self.out == 1 and self.inside

    @property
    def still(self) -> bool:
        """Whether outputs are where the inputs are."""
        return self.window == self.stride == 1 and self.padding == self.end == 0

    @property
    def static(self) -> bool:
        """Whether the extents are numbers."""
        return isinstance(self.size, int) and isinstance(self.out, int)

    def seen(self, at: int) -> tuple[int, int]:
        """The window's elements [first, last) that lie inside the image for one output."""
        assert isinstance(self.size, int)
        start = self.padding - at * self.stride
        first = max(0, -(-start // self.dilation))
        last = min(self.window, -(-(start + self.size) // self.dilation))
        return first, max(first, last)

    def bounds(self, at: Dim) -> tuple[Dim, Dim]:
        """Like `seen`, for an output known only at run time."""
        if self.inside:
            return 0, self.window
        start = expr("+", self.padding, expr("*", at, -self.stride))
        first = expr("ceildiv", expr("max", 0, start), self.dilation)
        last = expr("ceildiv", expr("max", 0, expr("+", start, self.size)), self.dilation)
        return first, expr("min", self.window, last)

    def middle(self) -> tuple[Dim, Dim]:
        """The outputs [first, end) whose windows lie wholly inside the image, at run time."""
        if self.inside:
            return 0, self.out
        first = expr("min", self.out, max(0, -(-self.padding // self.stride)))
        room = add(self.size, self.padding - self.dilation * (self.window - 1) - 1 + self.stride)
        return first, expr("max", first, expr("min", self.out, expr("//", expr("max", 0, room), self.stride)))


@dataclass(frozen=True, slots=True)
class PixelSpan:
    """Neighbouring pixels of a block."""

    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Columns [first, last) of the window and the parts, by number, that see them."""

    first: int
    last: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One register tile's pixels."""

    rows: int
    parts: tuple[PixelSpan, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """Equal blocks, one behind the other."""

    block: Block
    first: int
    """The first block's first pixel."""
    count: int


def block_at(axis: Axis, at: int, rows: int, *, together: bool) -> Block:
    """The block of some pixels; `together` allows segments of several columns."""
    return _block([axis.seen(at + i) for i in range(rows)], axis.window, together=together)


def block_inside(axis: Axis, rows: int, *, together: bool) -> Block:
    """A block of pixels that see the whole window."""
    return _block([(0, axis.window)] * rows, axis.window, together=together)


def _block(seen: list[tuple[int, int]], window: int, *, together: bool) -> Block:
    parts: list[PixelSpan] = []
    views: list[tuple[int, int]] = []
    for view, run in itertools.groupby(range(len(seen)), key=lambda i: seen[i]):
        pixels = list(run)
        parts.append(PixelSpan(pixels[0], len(pixels)))
        views.append(view)
    edges = sorted({e for view in views for e in view}) if together else list(range(window + 1))
    segments: list[Segment] = []
    for first, last in itertools.pairwise(edges):
        active = tuple(i for i, (a, b) in enumerate(views) if a <= first and last <= b)
        if active:
            segments.append(Segment(first, last, active))
    return Block(len(seen), tuple(parts), tuple(segments))


def strips(axis: Axis, most: int, *, together: bool) -> tuple[Strip, ...]:
    """A row of outputs cut into blocks of at most so many pixels, balanced; equal neighbours are one strip."""
    assert isinstance(axis.out, int)
    cut = balance(axis.out, most)
    heights = [cut.rows + 1] * cut.extra + [cut.rows] * (cut.count - cut.extra)
    found: list[Strip] = []
    at = 0
    for rows in heights:
        block = block_at(axis, at, rows, together=together)
        if found and found[-1].block == block:
            found[-1] = Strip(block, found[-1].first, found[-1].count + 1)
        else:
            found.append(Strip(block, at, 1))
        at += rows
    return tuple(found)


def fewest_kinds(axis: Axis, most: int, *, together: bool) -> int:
    """The height, `most` or not much lower, that cuts a row into the least code, since every strip is written out. A row
    of 160 is blocks of 14 and of 13, with other ones at both ends, or blocks of 10 alone.
    """
    if not axis.static:
        return most

    def written(height: int) -> int:
        return sum(strip.block.rows for strip in strips(axis, height, together=together))

    return min(range(most, most - most // 3 - 1, -1), key=written)


def heights(most: int) -> tuple[int, ...]:
    """Heights of blocks that make up any number of pixels: the most, then powers of two below it."""
    return (most, *(h for h in (32, 16, 8, 4, 2, 1) if h < most))


def choose(core: Core, width: Dim, channels: int, k: int, apart: int) -> GemmTiling:
    """The register tile for rows of `width` outputs: pixels and channels computed in vain weighed against loads.

    `apart` is how many bytes neighbouring pixels' inputs are apart: multiples of a page push each other out of the cache.
    """
    limit = MAX_ROWS if apart % (_PAGE // 2) == 0 else _FAR_ROWS
    row = width if isinstance(width, int) else _USUAL_ROW
    best: tuple[float, int, int, int] | None = None
    for columns in _widths(core, channels):
        vectors = -(-columns // core.lanes)
        rows = max(1, min(limit, (core.registers - vectors - 1) // vectors))
        share = _PANEL_SHARE if k * columns * 4 > core.l1 // 2 else _LOAD_SHARE
        blocks = balance(row, rows).count
        panels = -(-channels // columns)
        work = columns // core.lanes + (0 if columns % core.lanes == 0 else _HALF)
        cost = panels * (row * (work + _LOAD_SHARE) + share * blocks * vectors)
        if best is None or cost < best[0] * 0.98:
            best = (cost, vectors, rows, columns)
    assert best is not None
    _, vectors, rows, columns = best
    why = f"{rows}x{columns} for rows of {width} and {channels} channels"
    unroll = 4 if isinstance(width, int) else 2
    return GemmTiling(
        core.lanes, core.registers, vectors, rows, unroll, 0, 0, next_panel=True, why=why, width=columns, threads=core.threads
    )


def product(core: Core, pixels: Dim, channels: int, k: int) -> GemmTiling:
    """The register tile for a product over all pixels: that of matrices, unless panels can end in a narrower vector."""
    usual = tiling.choose(core, pixels, [channels], k, narrow=True)
    found = choose(core, pixels if isinstance(pixels, int) else _USUAL_ROW, channels, k, 0)
    if found.nr % core.lanes == 0:
        return usual
    rows = tiling.rows_for(core.registers, found.vectors)
    return replace(usual, vectors=found.vectors, mr=rows, width=found.nr, why=found.why, last=0)


def _widths(core: Core, channels: int) -> list[int]:
    """Widths of panels to choose from: whole vectors first, then with half a vector or less at the end."""
    whole = [v * core.lanes for v in ((2, 3, 4, 1) if core.registers >= 32 else (2, 1))]
    half = core.lanes // 2
    if half < 2:
        return whole
    if channels <= half:
        return [1 << (channels - 1).bit_length()]
    return whole + [w - half for w in whole if channels % core.lanes]
