"""Dense convolutions as tile programs: matrix products whose left side is read from the image in place.

    parallel (group of rows, panel of channels)
      for row
        for block of pixels                     register tile: pixels x channels
          for lines of the window that lie inside the image
            for (column, input channel)         one run of memory where channels are innermost
              sums = mma(sums, image[pixels, k], panel[k, :])
          finish(sums)

With several groups of channels, each has panels of its own and reads its own input channels. A transposed convolution is several
such tasks on the same image, each of which makes every so manieth output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import mul
from hotfuse.lower.cpu import work_division
from hotfuse.lower.cpu.conv.conv_epilogue import Channels, Finish, RowPosition
from hotfuse.lower.cpu.conv.output_rows import ConvTask, OutputRow, along, over_window, rows, start, step_of
from hotfuse.lower.cpu.conv.shape import Block, PixelSpan, Segment, strips
from hotfuse.lower.cpu.gemm.gemm import let
from hotfuse.lower.cpu.tiling import Core, GemmTiling
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer, Tile

_LINE = 16
"""fp32 numbers in a cache line."""
_WRITTEN_OUT = 8
"""Up to so many steps of a run are written out instead of looped over: long code does not stay in the instruction cache."""
_SPREAD = 4
"""Over how many blocks the fetching of the next panel is spread, when their number is not known."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of channels that see nothing of each other; one of them where every output reads every input."""

    count: int
    outputs: int
    """Output channels of one."""
    panels: int
    """Panels of one."""


def dense(
    b: KernelBuilder, tasks: Sequence[ConvTask], groups: Groups, tiling: GemmTiling, core: Core, finish: Finish
) -> None:
    """Write the loops of a convolution; several tasks share its panels and differ in the outputs they make."""
    _Dense(b, tasks, groups, tiling, core, finish).write()


class _Dense:
    def __init__(
        self, b: KernelBuilder, tasks: Sequence[ConvTask], groups: Groups, tiling: GemmTiling, core: Core, finish: Finish
    ) -> None:
        self.b, self.tasks, self.groups, self.tiling, self.finish = b, tasks, groups, tiling, finish
        first = tasks[0]
        self.width = tiling.nr
        self.panels = groups.count * groups.panels
        self.fit = self._fit(first, core)
        self.parts = self._parts(first)
        self.by_panel = self.panels > 1 and self.parts != 0 and expr("<=", first.rows, self.fit) == 1
        """Whether tasks that are neighbours share a panel instead of rows: where all rows stay in cache, so that panels are what
        comes from afar, and a thread that has a panel's last rows and the first rows of another has as much to do as the next."""
        self.span = self._span(first)
        """Blocks over which fetching the next panel is spread."""
        self.fetches = self.panels > 1 and 4 * first.steps * self.width > core.l1

    def _fit(self, task: ConvTask, core: Core) -> Dim:
        """Rows whose inputs stay in cache."""
        stride = task.outer[-1].axis.stride if task.outer else 1
        line_bytes = mul(4 * stride * task.inputs * self.groups.count, task.columns.size)
        return expr("max", 1, expr("//", core.l2 // 2, expr("max", 1, line_bytes)))

    def _parts(self, task: ConvTask) -> Dim:
        """Groups of rows: as many as keep their inputs in cache, more when there are few panels to share among threads."""
        return work_division.parts(task.rows, self.panels, self.tiling.threads, expr("ceildiv", task.rows, self.fit))

    def _span(self, task: ConvTask) -> int:
        if not task.columns.static or not isinstance(task.rows, int) or not isinstance(self.parts, int):
            return _SPREAD
        blocks = sum(s.count for s in strips(task.columns, self.tiling.mr, together=task.together))
        parts = 1 if self.by_panel else max(1, self.parts)
        return max(1, task.rows // parts * blocks)

    def write(self) -> None:
        b = self.b
        self.finish.make_room(self.width)
        row = self.tasks[0].row
        scratch = self.finish.room_for_sums(self.tiling.mr, self.width, RowPosition({}, row.dim, row.step))
        with contextlib.ExitStack() as scope:
            parts = scope.enter_context(let(b, "parts", self.parts))
            at = scope.enter_context(b.parallel("task", expr("*", parts, self.panels))).var
            across, down = (("//", parts), ("%", parts)) if self.by_panel else (("%", self.panels), ("//", self.panels))
            panel = scope.enter_context(let(b, "panel", expr(across[0], at, across[1]))) if self.panels > 1 else 0
            part = scope.enter_context(let(b, "part", expr(down[0], at, down[1])))
            channels = self._channels(panel)
            self.finish.prepare(channels, self.width)
            for task in self.tasks:
                with contextlib.ExitStack() as inner:
                    bounds = (expr("//", expr("*", p, task.rows), parts) for p in (part, expr("+", part, 1)))
                    lo, hi = (inner.enter_context(let(b, "rows", d)) for d in bounds)
                    row = inner.enter_context(rows(b, task, lo, hi))
                    _Row(self, task, row, 0 if self.by_panel else lo, panel, channels, scratch).write()

    def _channels(self, panel: Dim) -> Channels:
        g = self.groups
        exact = g.outputs % self.width == 0
        if g.count == 1:
            return Channels(expr("*", panel, self.width), g.outputs, exact)
        group = expr("//", panel, g.panels)
        first = expr("*", group, g.outputs)
        at = expr("+", first, expr("*", expr("%", panel, g.panels), self.width))
        return Channels(at, expr("+", first, g.outputs), exact)


class _Row:
    """One row of outputs of one task and panel."""

    def __init__(
        self, whole: _Dense, task: ConvTask, row: OutputRow, lo: Dim, panel: Dim, channels: Channels, scratch: Buffer | None
    ) -> None:
        self.b, self.whole, self.task, self.row = whole.b, whole, task, row
        self.lo, self.panel, self.channels, self.scratch = lo, panel, channels, scratch
        g = whole.groups
        self.first: Dim = 0 if g.count == 1 else mul(expr("//", panel, g.panels), mul(task.inputs, task.channel))
        """Where the group's input channels begin."""
        self.per_row = 1

    def write(self) -> None:
        task = self.task
        if task.columns.static:
            self.per_row = sum(s.count for s in strips(task.columns, self.whole.tiling.mr, together=task.together))
        else:
            self.per_row = _SPREAD
        along(self.b, task, self.whole.tiling.mr, self._block, self._pixel, together=task.together)

    def _block(self, block: Block, pixel: Dim, number: Dim) -> None:
        b, task = self.b, self.task
        done = expr("*", expr("+", self.row.number, expr("*", self.lo, -1)), self.per_row)
        nth = expr("min", expr("+", done, number), self.whole.span - 1)
        zeros = [b.fill(0.0, DType.F32, (p.rows, self.whole.width)) for p in block.parts]

        def line(taps: tuple[Dim, ...], tiles: list[Tile]) -> list[Tile]:
            for segment in block.segments:
                parts = [block.parts[i] for i in segment.parts]
                active = [tiles[i] for i in segment.parts]
                at = self._at(pixel, taps, segment.first)
                k = step_of(task, taps, segment.first)
                if task.planar:
                    active = self._planes(segment, parts, at, k, active)
                else:
                    steps = (segment.last - segment.first) * task.inputs
                    active = self._run(steps, parts, at, k, nth, active)
                for i, tile in zip(segment.parts, active, strict=True):
                    tiles[i] = tile
            return tiles

        tiles = over_window(b, self.row, zeros, line)
        placed = [(p.start, t) for p, t in zip(block.parts, tiles, strict=True)]
        self.whole.finish.parts(self.row.where, pixel, self.channels, placed, self.scratch)

    def _pixel(self, pixel: Dim) -> None:
        """A pixel whose window's columns are known at run time."""
        b, task = self.b, self.task
        one = [PixelSpan(0, 1)]

        def line(taps: tuple[Dim, ...], tiles: list[Tile]) -> list[Tile]:
            first, last = task.columns.bounds(pixel)
            with b.loop("across", first, last, carry=tiles) as column:
                at, k = self._at(pixel, taps, column.var), step_of(task, taps, column.var)
                inner = list(column.carried)
                if task.planar:
                    inner = self._planes(Segment(0, 1, (0,)), one, at, k, inner)
                else:
                    inner = self._run(task.inputs, one, at, k, 0, inner)
                column.yields(*inner)
            return list(column.outs)

        zeros = [b.fill(0.0, DType.F32, (1, self.whole.width))]
        (tile,) = over_window(b, self.row, zeros, line)
        self.whole.finish.parts(self.row.where, pixel, self.channels, [(0, tile)], self.scratch)

    def _at(self, pixel: Dim, taps: Sequence[Dim], column: Dim) -> Dim:
        return expr("+", start(self.task, self.row, pixel, taps, column), self.first)

    def _run(self, steps: int, parts: Sequence[PixelSpan], at: Dim, k: Dim, nth: Dim, tiles: list[Tile]) -> list[Tile]:
        """Steps along columns and input channels, which are one run of memory."""
        b, unroll = self.b, self.whole.tiling.unroll
        looped = steps // unroll * unroll if steps > _WRITTEN_OUT else 0
        if looped:
            with b.loop("k", 0, looped, unroll, carry=tiles) as loop:
                tiles = list(loop.carried)
                if self.whole.fetches:
                    self._fetch(nth, expr("+", k, loop.var), unroll)
                for u in range(unroll):
                    step = expr("+", loop.var, u)
                    tiles = self._step(parts, expr("+", at, step), expr("+", k, step), tiles)
                loop.yields(*tiles)
            tiles = list(loop.outs)
        for u in range(looped, steps):
            tiles = self._step(parts, expr("+", at, u), expr("+", k, u), tiles)
        return tiles

    def _planes(self, segment: Segment, parts: Sequence[PixelSpan], at: Dim, k: Dim, tiles: list[Tile]) -> list[Tile]:
        """Steps along columns, plane by plane."""
        b, task = self.b, self.task
        apart = mul(task.row.apart, task.columns.dilation)
        with b.loop("plane", 0, task.inputs, carry=tiles) as plane:
            tiles = list(plane.carried)
            here = expr("+", at, expr("*", plane.var, task.channel))
            for column in range(segment.last - segment.first):
                step = expr("+", k, column * task.inputs, plane.var)
                tiles = self._step(parts, expr("+", here, mul(apart, column)), step, tiles)
            plane.yields(*tiles)
        return list(plane.outs)

    def _step(self, parts: Sequence[PixelSpan], at: Dim, k: Dim, tiles: list[Tile]) -> list[Tile]:
        b, task = self.b, self.task
        apart = mul(task.row.apart, task.columns.stride)
        weights = b.load(task.panels, (self.panel, k, 0), (1, self.whole.width))
        made: list[Tile] = []
        for part, tile in zip(parts, tiles, strict=True):
            place = expr("+", at, mul(apart, part.start))
            pixels = b.load(task.x, (place,), (part.rows, 1), axes=(0, 0), step=(apart, 1))
            made.append(b.mma(tile, pixels, weights))
        b.effect("barrier_spill")
        return made

    def _fetch(self, nth: Dim, k: Dim, unroll: int) -> None:
        """This iteration's share of the next panel's lines."""
        whole = self.whole
        count = -(-whole.width * unroll // (_LINE * whole.span))
        begin = expr("*", expr("+", expr("*", nth, self.task.steps), k), count * _LINE // unroll)
        for i in range(count):
            self.b.prefetch(self.task.panels, (expr("+", self.panel, 1), 0, expr("+", begin, i * _LINE)), level=2)
