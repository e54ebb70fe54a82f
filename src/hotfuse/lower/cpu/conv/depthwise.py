"""Depthwise convolutions as tile programs: every channel for itself, a vector of channels at a time.

    parallel group of rows
      for row, for block of pixels, for vector of channels
        for lines of the window that lie inside the image
          every input once, multiplied with the weights of all pixels that see it
        finish(sums)

Where the lines that a window sees do not stay in the nearest cache, blocks come first and rows inside them, so that a line is there
still when the next row reads it.
"""

from __future__ import annotations

import contextlib

from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import mul
from hotfuse.lower.cpu import work_division
from hotfuse.lower.cpu.conv.conv_epilogue import Channels, Finish, RowPosition
from hotfuse.lower.cpu.conv.output_rows import ConvTask, OutputRow, along, over_window, rows, start, step_of
from hotfuse.lower.cpu.conv.shape import Block
from hotfuse.lower.cpu.gemm.gemm import let
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Tile

_EVEN_ROWS = 0.8
"""From which balance on rows alone are shared: pieces of a line of channels are read less well than whole ones."""


def depthwise(
    b: KernelBuilder, task: ConvTask, width: int, most: int, channels: int, finish: Finish, nearest: int, threads: int = 1
) -> None:
    """Every output channel reads its own input channel; channels are innermost in memory, `width` of them in a panel. The
    nearest cache has `nearest` bytes; where there are fewer rows than threads, these share the panels as well.
    """
    _Own(b, task, width, most, channels, finish, threads).write(nearest)


class _Own:
    def __init__(
        self, b: KernelBuilder, task: ConvTask, width: int, most: int, channels: int, finish: Finish, threads: int
    ) -> None:
        self.b, self.task, self.width, self.most, self.finish, self.threads = b, task, width, most, finish, threads
        self.all, self.panels = channels, -(-channels // width)
        self.first: Dim = 0
        self.last: Dim = self.panels
        """The panels of the task in hand."""

    def _far(self, nearest: int) -> bool:
        """Whether the lines that a window sees are known to be more than stays in the nearest cache."""
        columns, outer = self.task.columns, self.task.outer
        lines = outer[-1].axis.window if outer else 1
        size = columns.size if columns.static and isinstance(columns.size, int) else 0
        return lines > 1 and 4 * lines * size * self.all > nearest

    def write(self, nearest: int) -> None:
        b, task, finish, width = self.b, self.task, self.finish, self.width
        finish.make_room(width * self.panels)
        self.scratch = finish.room_for_sums(self.most, width, RowPosition({}, task.row.dim))
        with contextlib.ExitStack() as scope:
            parts = scope.enter_context(let(b, "parts", work_division.parts(task.rows, 1, self.threads)))
            pieces = self._pieces()
            part = scope.enter_context(b.parallel("task", expr("*", parts, pieces))).var
            if pieces > 1:
                piece = scope.enter_context(let(b, "piece", expr("%", part, pieces)))
                part = scope.enter_context(let(b, "part", expr("//", part, pieces)))
                ends = (expr("//", expr("*", n, self.panels), pieces) for n in (piece, expr("+", piece, 1)))
                self.first, self.last = (scope.enter_context(let(b, "panels", d)) for d in ends)
            bounds = (expr("//", expr("*", p, task.rows), parts) for p in (part, expr("+", part, 1)))
            lo, hi = (scope.enter_context(let(b, "rows", d)) for d in bounds)
            if finish.channels:
                with b.loop("panel", self.first, self.last) as ahead:
                    finish.prepare(self._channels(ahead.var), width, expr("*", ahead.var, width))
            if self._far(nearest):
                along(b, task, self.most, lambda block, pixel, _: self._rows(lo, hi, block, pixel), _never, together=False)
                return
            row = scope.enter_context(rows(b, task, lo, hi))
            along(
                b, task, self.most, lambda block, pixel, _: self._block(row, block, pixel),
                lambda pixel: self._pixel(row, pixel), together=False,
            )  # fmt: skip

    def _pieces(self) -> int:
        """Into how many pieces panels are cut where there are not enough rows."""
        rows, threads = self.task.rows, self.threads
        if threads <= 2 or not isinstance(rows, int) or rows < 1 or work_division.balance(rows, threads) >= _EVEN_ROWS:
            return 1
        most = range(1, max(1, min(self.panels, threads)) + 1)
        return max(most, key=lambda n: (min(work_division.balance(rows * n, threads), work_division.EVEN), -n))

    def _rows(self, lo: Dim, hi: Dim, block: Block, pixel: Dim) -> None:
        """A block of all rows."""
        with rows(self.b, self.task, lo, hi) as row:
            self._block(row, block, pixel)

    def _channels(self, panel: Dim) -> Channels:
        return self.finish.channels_from(expr("*", panel, self.width), self.width)

    def _valid(self, channels: Channels) -> tuple[Dim, ...]:
        return () if channels.exact else (remaining(self.all, channels.at),)

    def _block(self, row: OutputRow, block: Block, pixel: Dim) -> None:
        with self.b.loop("panel", self.first, self.last) as panel:
            channels = self._channels(panel.var)
            self._finish(row, pixel, channels, self._sums(row, block, pixel, panel.var, channels))

    def _sums(self, row: OutputRow, block: Block, pixel: Dim, panel: Dim, channels: Channels) -> list[Tile]:
        """One vector of channels for every pixel of a block; each input is loaded once per line of the window."""
        b, task, columns = self.b, self.task, self.task.columns
        uses: dict[int, list[tuple[int, int]]] = {}
        for segment in block.segments:
            for part in (block.parts[i] for i in segment.parts):
                for i in range(part.start, part.start + part.rows):
                    for c in range(segment.first, segment.last):
                        uses.setdefault(i * columns.stride + c * columns.dilation, []).append((i, c))
        wanted = sorted({c for use in uses.values() for _, c in use})

        def line(taps: tuple[Dim, ...], tiles: list[Tile]) -> list[Tile]:
            k = step_of(task, taps, 0)
            weights = {c: b.load(task.panels, (panel, expr("+", k, c), 0), (self.width,)) for c in wanted}
            at = expr("+", start(task, row, pixel, taps, 0), channels.at)
            for place in sorted(uses):
                here = expr("+", at, mul(place, task.row.apart))
                x = b.load(task.x, (here,), (self.width,), valid=self._valid(channels))
                for i, c in uses[place]:
                    tiles[i] = b.map("fma", x, weights[c], tiles[i])
            b.effect("barrier_spill")
            return tiles

        zero = b.fill(0.0, DType.F32, (self.width,))
        return over_window(b, row, [zero] * block.rows, line)

    def _pixel(self, row: OutputRow, pixel: Dim) -> None:
        """A pixel whose window's columns are known at run time."""
        b, task = self.b, self.task
        first, last = task.columns.bounds(pixel)
        with b.loop("panel", self.first, self.last) as panel:
            channels = self._channels(panel.var)

            def line(taps: tuple[Dim, ...], tiles: list[Tile]) -> list[Tile]:
                with b.loop("across", first, last, carry=tiles) as column:
                    weight = b.load(task.panels, (panel.var, step_of(task, taps, column.var), 0), (self.width,))
                    at = expr("+", start(task, row, pixel, taps, column.var), channels.at)
                    x = b.load(task.x, (at,), (self.width,), valid=self._valid(channels))
                    column.yields(b.map("fma", x, weight, column.carried[0]))
                return list(column.outs)

            tiles = over_window(b, row, [b.fill(0.0, DType.F32, (self.width,))], line)
            self._finish(row, pixel, channels, tiles)

    def _finish(self, row: OutputRow, pixel: Dim, channels: Channels, tiles: list[Tile]) -> None:
        b, finish = self.b, self.finish
        if self.scratch is None:
            for i, tile in enumerate(tiles):
                finish.tile(row.where, expr("+", pixel, i), channels, tile, channels.at)
            return
        for i, tile in enumerate(tiles):
            b.store(self.scratch, (i, 0), tile)
        finish.through(row.where, pixel, channels, len(tiles), self.width, self.scratch, channels.at)


def _never(pixel: Dim) -> None:
    """Rows whose length is a number have no pixels of their own at their borders."""
    raise InternalError(f"a pixel at {pixel} outside of all blocks")
