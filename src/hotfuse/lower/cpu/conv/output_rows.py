"""What all loops over a convolution's outputs share: the task, its rows, and how a row of pixels is run through.

    parallel (group of rows, ...)               a row is a line of outputs of one image; in three dims, of one of its planes
      for row
        for strip, for block of pixels          where the row's length is a number
        or: pixels at the left border, blocks between the borders, pixels at the right border
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.lower.common.algebra import mul, product
from hotfuse.lower.cpu.conv.conv_epilogue import RowPosition
from hotfuse.lower.cpu.conv.shape import Axis, Block, block_inside, heights, strips
from hotfuse.lower.cpu.gemm.gemm import let
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer, Tile

_USUAL_BLOCKS = 4
"""Blocks in a row whose length is known only at run time."""


@dataclass(frozen=True, slots=True)
class SpatialDim:
    """One spatial dim of the image."""

    axis: Axis
    apart: Dim
    """Elements from one input to the next."""
    dim: int
    """Which dim of the result it is."""
    step: int = 1
    """How far apart in the result neighbouring outputs are: a phase of a transposed convolution makes every so manieth."""
    first: int = 0
    """Where in the result the first of them is."""


@dataclass(frozen=True, slots=True)
class ConvTask:
    """A convolution to be written, or one phase of a transposed one."""

    x: Buffer
    image: Dim
    """Elements from one image to the next."""
    channel: Dim
    outer: tuple[SpatialDim, ...]
    """Dims around a row, outermost first."""
    row: SpatialDim
    images: Dim
    inputs: int
    """Input channels that one output channel reads."""
    panels: Buffer
    """[panels, k, width]."""
    k: int = 0
    """Where in a panel this task's steps begin."""

    @property
    def rows(self) -> Dim:
        """Rows of outputs of all images."""
        return product((self.images, *(w.axis.out for w in self.outer)))

    @property
    def columns(self) -> Axis:
        """The row's own dim."""
        return self.row.axis

    @property
    def planar(self) -> bool:
        """Whether channels lie plane by plane, so that runs go along columns."""
        return self.inputs > 1 and self.channel != 1

    @property
    def together(self) -> bool:
        """Whether several columns of the window are one run of memory."""
        return self.planar or (self.columns.dilation == 1 and self.row.apart == self.inputs)

    @property
    def steps(self) -> int:
        """Steps of the whole window."""
        count = self.columns.window * self.inputs
        for w in self.outer:
            count *= w.axis.window
        return count


@dataclass(frozen=True, slots=True)
class OutputRow:
    """A row of outputs while it is written."""

    number: Dim
    """Counted through all rows of the task."""
    where: RowPosition
    seen: tuple[tuple[Dim, Dim], ...]
    """Per outer dim, the places of the window that lie inside the image."""
    base: Dim
    """Where the input of the row's first pixel begins."""


@contextlib.contextmanager
def rows(b: KernelBuilder, task: ConvTask, lo: Dim, hi: Dim) -> Generator[OutputRow]:
    """A loop over rows [lo, hi)."""
    with contextlib.ExitStack() as scope:
        number = scope.enter_context(b.loop("row", lo, hi)).var
        rest: Dim = number
        at: list[Dim] = []
        for w in reversed(task.outer):
            per = w.axis.out
            at.insert(0, 0 if per == 1 else scope.enter_context(let(b, "line", expr("%", rest, per))))
            rest = expr("//", rest, per)
        image = scope.enter_context(let(b, "image", rest))
        base = expr("*", image, task.image)
        places: dict[int, Dim] = {0: image}
        seen: list[tuple[Dim, Dim]] = []
        for w, i in zip(task.outer, at, strict=True):
            first, last = (scope.enter_context(let(b, "seen", d)) for d in w.axis.bounds(i))
            seen.append((first, last))
            places[w.dim] = expr("+", expr("*", i, w.step), w.first)
            start = expr("+", expr("*", i, w.axis.stride), -w.axis.padding)
            base = expr("+", base, expr("*", start, w.apart))
        yield OutputRow(number, RowPosition(places, task.row.dim, task.row.step, task.row.first), tuple(seen), base)


def start(task: ConvTask, row: OutputRow, pixel: Dim, taps: Sequence[Dim], column: Dim) -> Dim:
    """Where the input of an output pixel lies, for one place of the window."""
    c, apart = task.columns, task.row.apart
    moved = [expr("*", t, mul(w.apart, w.axis.dilation)) for t, w in zip(taps, task.outer, strict=True)]
    return expr(
        "+", row.base, *moved, expr("*", pixel, mul(apart, c.stride)),
        expr("*", column, mul(apart, c.dilation)), mul(apart, -c.padding),
    )  # fmt: skip


def step_of(task: ConvTask, taps: Sequence[Dim], column: Dim) -> Dim:
    """The number, in a panel, of the first step of one place of the window."""
    at: Dim = 0
    for t, w in zip(taps, task.outer, strict=True):
        at = expr("+", expr("*", at, w.axis.window), t)
    return expr("+", task.k, expr("*", expr("+", expr("*", at, task.columns.window), column), task.inputs))


def over_window(
    b: KernelBuilder, row: OutputRow, tiles: Sequence[Tile], body: Callable[[tuple[Dim, ...], list[Tile]], list[Tile]]
) -> list[Tile]:
    """Loops over the lines of the window that the row sees, with tiles carried through; none where that is one line."""

    def nest(taps: tuple[Dim, ...], inner: list[Tile]) -> list[Tile]:
        if len(taps) == len(row.seen):
            return body(taps, inner)
        first, last = row.seen[len(taps)]
        if (first, last) == (0, 1):
            return nest((*taps, 0), inner)
        with b.loop("down", first, last, carry=inner) as down:
            down.yields(*nest((*taps, down.var), list(down.carried)))
        return list(down.outs)

    return nest((), list(tiles))


def along(
    b: KernelBuilder, task: ConvTask, most: int, block: Callable[[Block, Dim, Dim], None], pixel: Callable[[Dim], None],
    *, together: bool,
) -> int:  # fmt: skip
    """Run through a row: `block` is given a block, its first pixel and its number, `pixel` a pixel at a border.

    Gives back how many blocks a row has, or about so many.
    """
    columns = task.columns
    if columns.static:
        before = 0
        for strip in strips(columns, most, together=together):
            if strip.count == 1:
                block(strip.block, strip.first, before)
            else:
                with b.loop("block", 0, strip.count) as t:
                    at = expr("+", strip.first, expr("*", t.var, strip.block.rows))
                    block(strip.block, at, expr("+", before, t.var))
            before += strip.count
        return before
    with contextlib.ExitStack() as scope:
        first, end = (scope.enter_context(let(b, "middle", d)) for d in columns.middle())
        if not columns.inside:
            with b.loop("edge", 0, first) as edge:
                pixel(edge.var)
        count = scope.enter_context(let(b, "pixels", expr("+", end, expr("*", first, -1))))
        rest = expr("%", count, most)
        for h in heights(most):
            inner = block_inside(columns, h, together=together)
            if h == most:
                with b.loop("block", 0, expr("//", count, most)) as t:
                    block(inner, expr("+", first, expr("*", t.var, h)), t.var)
            else:
                with b.when(expr("==", expr("%", expr("//", rest, h), 2), 1)):
                    done = expr("*", expr("//", rest, 2 * h), 2 * h)
                    at = expr("+", end, expr("*", rest, -1), done)
                    with let(b, "at", at) as here:
                        block(inner, here, 0)
        if not columns.inside:
            with b.loop("edge", end, columns.out) as edge:
                pixel(edge.var)
    return _USUAL_BLOCKS
