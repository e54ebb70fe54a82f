"""Convolutions as numbers: what a window reads, and how a row of outputs is cut so that no tile reads beyond the image.

    row of outputs  ::= strips of equal blocks, left to right
    block           ::= parts: neighbouring pixels that see the same columns of the window
    segment         ::= columns of the window, one behind the other, with the parts that see them

A block in the middle has one part and one segment. At a border, pixels that do not see a column are left out of that column's
segment, so nothing is padded and nothing is multiplied with zeros.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hotfuse.ir.dims import Dim, expr
from hotfuse.lower.tiling import MAX_ROWS, Core, GemmTiling, balance

_PAGE = 4096
_FAR_ROWS = 14
"""Most pixels side by side where their lines do not fall on each other in the cache."""
_PANEL_SHARE = 2.0
"""What reading a line of a panel from the second-level cache costs next to a multiply-add."""
_LOAD_SHARE = 0.5
"""What a load from the nearest cache costs."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One spatial dim: extents and how the window moves along it."""

    size: int
    window: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def out(self) -> int:
        """Outputs along the dim."""
        return (self.size + 2 * self.padding - self.dilation * (self.window - 1) - 1) // self.stride + 1

    @property
    def inside(self) -> bool:
        """Whether no window reaches beyond the image."""
        return self.padding == 0

    def seen(self, at: int) -> tuple[int, int]:
        """The window's elements [first, last) that lie inside the image for one output."""
        start = self.padding - at * self.stride
        first = max(0, -(-start // self.dilation))
        last = min(self.window, -(-(start + self.size) // self.dilation))
        return first, max(first, last)

    def bounds(self, at: Dim) -> tuple[Dim, Dim]:
        """The same for an output known only at run time."""
        if self.inside:
            return 0, self.window
        start = expr("+", self.padding, expr("*", at, -self.stride))
        first = expr("ceildiv", expr("max", 0, start), self.dilation)
        last = expr("ceildiv", expr("max", 0, expr("+", start, self.size)), self.dilation)
        return first, expr("min", self.window, last)


@dataclass(frozen=True, slots=True)
class Part:
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
    parts: tuple[Part, ...]
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
    seen = [axis.seen(at + i) for i in range(rows)]
    parts: list[Part] = []
    views: list[tuple[int, int]] = []
    for view, run in itertools.groupby(range(rows), key=lambda i: seen[i]):
        pixels = list(run)
        parts.append(Part(pixels[0], len(pixels)))
        views.append(view)
    edges = sorted({e for view in views for e in view}) if together else list(range(axis.window + 1))
    segments: list[Segment] = []
    for first, last in itertools.pairwise(edges):
        active = tuple(i for i, (a, b) in enumerate(views) if a <= first and last <= b)
        if active:
            segments.append(Segment(first, last, active))
    return Block(rows, tuple(parts), tuple(segments))


def strips(axis: Axis, most: int, *, together: bool) -> tuple[Strip, ...]:
    """A row of outputs cut into blocks of at most so many pixels, balanced; equal neighbours are one strip."""
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


def choose(core: Core, width: int, channels: int, k: int, apart: int) -> GemmTiling:
    """The register tile for rows of `width` outputs: pixels and channels computed in vain weighed against loads.

    `apart` is how many bytes neighbouring pixels' inputs are apart: multiples of a page push each other out of the cache.
    """
    limit = MAX_ROWS if apart % (_PAGE // 2) == 0 else _FAR_ROWS
    best: tuple[float, int, int] | None = None
    for vectors in (2, 3, 4, 1) if core.registers >= 32 else (2, 1):
        rows = max(1, min(limit, (core.registers - vectors - 1) // vectors))
        columns = vectors * core.lanes
        padded = -(-channels // columns) * columns
        share = _PANEL_SHARE if k * columns * 4 > core.l1 // 2 else _LOAD_SHARE
        blocks = balance(width, rows).count
        cost = padded * (width * (1 + _LOAD_SHARE / vectors) + share * blocks)
        if best is None or cost < best[0] * 0.98:
            best = (cost, vectors, rows)
    assert best is not None
    _, vectors, rows = best
    why = f"{rows}x{vectors * core.lanes} for rows of {width} and {channels} channels"
    return GemmTiling(core.lanes, core.registers, vectors, rows, 4, 0, 0, True, why)
