"""The loops of convolutions as tile programs: dense ones as matrix products without a matrix, depthwise ones channel by channel.

    parallel (group of output lines, panel of channels)
      for line
        for block of pixels                     register tile: pixels x channels
          for lines of the window that lie inside the image
            for (column, input channel)         one run of memory where channels are innermost
              sums = mma(sums, image[pixels, k], panel[k, :])
          finish(sums)

Depthwise: the same outer loops, but channels are innermost and a panel is one vector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.algebra import mul
from hotfuse.lower.conv_finish import Finish, Where
from hotfuse.lower.conv_shape import Axis, Block, Part, Segment, Strip, strips
from hotfuse.lower.gemm import MIN_TASKS, let
from hotfuse.lower.tiling import Core, GemmTiling
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile

_LINE = 16
"""fp32 numbers in a cache line."""
_WRITTEN_OUT = 8
"""Up to so many steps of a run are written out instead of looped over: long code does not stay in the instruction cache."""


@dataclass(frozen=True, slots=True)
class Image:
    """The input in memory: elements from one image, channel, line and pixel to the next."""

    buffer: Buffer
    image: Dim
    channel: Dim
    line: Dim
    pixel: Dim


@dataclass(frozen=True, slots=True)
class Task:
    """A convolution to be written."""

    x: Image
    panels: Buffer
    """[panels, k, width]."""
    images: Dim
    inputs: int
    """Input channels that one output channel reads."""
    lines: Axis
    columns: Axis
    count: int
    """Panels."""
    width: int
    """Channels of a panel."""
    planar: bool
    """Whether channels lie plane by plane, so that runs go along columns."""

    @property
    def rows(self) -> Dim:
        """Output lines of all images."""
        return mul(self.images, self.lines.out)

    @property
    def together(self) -> bool:
        """Whether several columns of the window are one run of memory."""
        return self.planar or (self.columns.dilation == 1 and self.x.pixel == self.inputs)


@contextlib.contextmanager
def _lines(b: KernelBuilder, task: Task, lo: Dim, hi: Dim) -> Generator[_Line]:
    """A loop over output lines: where each is, the window's lines that it sees, and where its input begins."""
    with contextlib.ExitStack() as scope:
        row = scope.enter_context(b.loop("row", lo, hi)).var
        per = task.lines.out
        image = scope.enter_context(let(b, "image", expr("//", row, per)))
        line = scope.enter_context(let(b, "line", expr("%", row, per))) if per > 1 else 0
        first, last = (scope.enter_context(let(b, "seen", d)) for d in task.lines.bounds(line))
        top = expr("+", expr("*", line, task.lines.stride), -task.lines.padding)
        base = expr("+", expr("*", image, task.x.image), expr("*", top, task.x.line))
        yield _Line(row, Where(image, line), first, last, base)


@dataclass(frozen=True, slots=True)
class _Line:
    row: Dim
    where: Where
    first: Dim
    last: Dim
    base: Dim


def _start(task: Task, line: _Line, pixel: Dim, window_line: Dim, column: int) -> Dim:
    """Where the input of an output pixel lies, for one place of the window."""
    c = task.columns
    return expr(
        "+", line.base, expr("*", window_line, mul(task.x.line, task.lines.dilation)),
        expr("*", pixel, mul(task.x.pixel, c.stride)), mul(task.x.pixel, column * c.dilation - c.padding),
    )  # fmt: skip


@contextlib.contextmanager
def _blocks(b: KernelBuilder, strip: Strip) -> Generator[tuple[Dim, Dim]]:
    """A loop over the blocks of a strip: the first pixel and the number of each."""
    if strip.count == 1:
        yield strip.first, 0
        return
    with b.loop("block", 0, strip.count) as t:
        yield expr("+", strip.first, expr("*", t.var, strip.block.rows)), t.var


# --- dense


def dense(b: KernelBuilder, task: Task, tiling: GemmTiling, core: Core, finish: Finish) -> None:
    """Every output channel reads every input channel."""
    _Dense(b, task, tiling, core, finish).write()


class _Dense:
    def __init__(self, b: KernelBuilder, task: Task, tiling: GemmTiling, core: Core, finish: Finish) -> None:
        self.b, self.task, self.tiling, self.finish = b, task, tiling, finish
        self.strips = strips(task.columns, tiling.mr, together=task.together)
        self.per_line = sum(s.count for s in self.strips)
        self.run = task.columns.window * task.inputs
        """Steps of one line of the window."""
        line_bytes = 4 * task.lines.stride * task.columns.size * task.inputs
        fit = max(1, core.l2 // 2 // line_bytes)
        share = -(-MIN_TASKS // task.count)
        self.groups = expr("min", task.rows, expr("max", share, expr("ceildiv", task.rows, fit)))
        per_group = task.rows // self.groups if isinstance(task.rows, int) and isinstance(self.groups, int) else 1
        self.span = max(1, per_group * self.per_line)
        """Blocks over which fetching the next panel is spread."""
        self.fetches = task.count > 1 and 4 * self.run * task.lines.window * task.width > core.l1

    def write(self) -> None:
        b, task, width = self.b, self.task, self.task.width
        self.finish.make_room(width)
        scratch = None if self.finish.short else b.scratch("sums", DType.F32, (self.tiling.mr, width))
        with contextlib.ExitStack() as scope:
            groups = scope.enter_context(let(b, "groups", self.groups))
            at = scope.enter_context(b.parallel("task", expr("*", groups, task.count))).var
            panel = scope.enter_context(let(b, "panel", expr("%", at, task.count))) if task.count > 1 else 0
            group = expr("//", at, task.count)
            lo = scope.enter_context(let(b, "first", expr("//", expr("*", group, task.rows), groups)))
            hi = scope.enter_context(let(b, "end", expr("//", expr("*", expr("+", group, 1), task.rows), groups)))
            self.finish.prepare(expr("*", panel, width), width)
            line = scope.enter_context(_lines(b, task, lo, hi))
            before = 0
            for strip in self.strips:
                with _blocks(b, strip) as (pixel, number):
                    done = expr("*", expr("+", line.row, expr("*", lo, -1)), self.per_line)
                    nth = expr("min", expr("+", done, number, before), self.span - 1)
                    tiles = self._sums(strip.block, line, pixel, panel, nth)
                    placed = [(p.start, t) for p, t in zip(strip.block.parts, tiles, strict=True)]
                    self.finish.parts(line.where, pixel, expr("*", panel, width), placed, scratch)
                before += strip.count

    def _sums(self, block: Block, line: _Line, pixel: Dim, panel: Dim, nth: Dim) -> list[Tile]:
        b = self.b
        tiles = [b.fill(0.0, DType.F32, (p.rows, self.task.width)) for p in block.parts]
        if (line.first, line.last) == (0, 1):
            return self._one_line(block, line, pixel, panel, nth, 0, tiles)
        with b.loop("down", line.first, line.last, carry=tiles) as down:
            down.yields(*self._one_line(block, line, pixel, panel, nth, down.var, list(down.carried)))
        return list(down.outs)

    def _one_line(
        self, block: Block, line: _Line, pixel: Dim, panel: Dim, nth: Dim, down: Dim, tiles: list[Tile]
    ) -> list[Tile]:
        for segment in block.segments:
            parts = [block.parts[i] for i in segment.parts]
            active = [tiles[i] for i in segment.parts]
            if self.task.planar:
                active = self._planes(segment, parts, line, pixel, panel, down, active)
            else:
                active = self._run(segment, parts, line, pixel, panel, nth, down, active)
            for i, tile in zip(segment.parts, active, strict=True):
                tiles[i] = tile
        return tiles

    def _run(
        self, segment: Segment, parts: Sequence[Part], line: _Line, pixel: Dim, panel: Dim, nth: Dim, down: Dim,
        tiles: list[Tile],
    ) -> list[Tile]:  # fmt: skip
        """Steps along columns and input channels, which are one run of memory."""
        b, task, unroll = self.b, self.task, self.tiling.unroll
        at = _start(task, line, pixel, down, segment.first)
        k = expr("+", expr("*", down, self.run), segment.first * task.inputs)
        steps = (segment.last - segment.first) * task.inputs
        looped = steps // unroll * unroll if steps > _WRITTEN_OUT else 0
        if looped:
            with b.loop("k", 0, looped, unroll, carry=tiles) as loop:
                tiles = list(loop.carried)
                if self.fetches:
                    self._fetch(panel, nth, expr("+", k, loop.var), unroll)
                for u in range(unroll):
                    step = expr("+", loop.var, u)
                    tiles = self._step(parts, expr("+", at, step), panel, expr("+", k, step), tiles)
                loop.yields(*tiles)
            tiles = list(loop.outs)
        for u in range(looped, steps):
            tiles = self._step(parts, expr("+", at, u), panel, expr("+", k, u), tiles)
        return tiles

    def _planes(
        self, segment: Segment, parts: Sequence[Part], line: _Line, pixel: Dim, panel: Dim, down: Dim, tiles: list[Tile]
    ) -> list[Tile]:
        """Steps along columns, plane by plane."""
        b, task = self.b, self.task
        with b.loop("plane", 0, task.inputs, carry=tiles) as plane:
            tiles = list(plane.carried)
            for column in range(segment.first, segment.last):
                at = expr("+", _start(task, line, pixel, down, column), expr("*", plane.var, task.x.channel))
                k = expr("+", expr("*", down, self.run), column * task.inputs, plane.var)
                tiles = self._step(parts, at, panel, k, tiles)
            plane.yields(*tiles)
        return list(plane.outs)

    def _step(self, parts: Sequence[Part], at: Dim, panel: Dim, k: Dim, tiles: list[Tile]) -> list[Tile]:
        b, task = self.b, self.task
        apart = mul(task.x.pixel, task.columns.stride)
        weights = b.load(task.panels, (panel, k, 0), (1, task.width))
        made: list[Tile] = []
        for part, tile in zip(parts, tiles, strict=True):
            start = expr("+", at, mul(apart, part.start))
            pixels = b.load(task.x.buffer, (start,), (part.rows, 1), axes=(0, 0), step=(apart, 1))
            made.append(b.mma(tile, pixels, weights))
        b.effect("barrier_spill")
        return made

    def _fetch(self, panel: Dim, nth: Dim, k: Dim, unroll: int) -> None:
        """This iteration's share of the next panel's lines."""
        count = -(-self.task.width * unroll // (_LINE * self.span))
        every = self.run * self.task.lines.window
        start = expr("*", expr("+", expr("*", nth, every), k), count * _LINE // unroll)
        for i in range(count):
            self.b.prefetch(self.task.panels, (expr("+", panel, 1), 0, expr("+", start, i * _LINE)), level=2)


# --- depthwise


def depthwise(b: KernelBuilder, task: Task, most: int, channels: int, finish: Finish) -> None:
    """Every output channel reads its own input channel; channels are innermost in memory."""
    width = task.width
    finish.make_room(width * task.count)
    scratch = None if finish.short else b.scratch("sums", DType.F32, (most, width))
    groups = expr("min", task.rows, MIN_TASKS)
    with contextlib.ExitStack() as scope:
        groups = scope.enter_context(let(b, "groups", groups))
        group = scope.enter_context(b.parallel("task", groups)).var
        lo = scope.enter_context(let(b, "first", expr("//", expr("*", group, task.rows), groups)))
        hi = scope.enter_context(let(b, "end", expr("//", expr("*", expr("+", group, 1), task.rows), groups)))
        if finish.channels:
            with b.loop("panel", 0, task.count) as ahead:
                finish.prepare(expr("*", ahead.var, width), width, expr("*", ahead.var, width))
        line = scope.enter_context(_lines(b, task, lo, hi))
        for strip in strips(task.columns, most, together=False):
            with _blocks(b, strip) as (pixel, _), b.loop("panel", 0, task.count) as panel:
                column = expr("*", panel.var, width)
                valid = () if channels % width == 0 else (remaining(channels, column),)
                tiles = _own_sums(b, task, strip, line, pixel, panel.var, valid)
                _finish_own(b, finish, line.where, pixel, column, tiles, scratch)


def _own_sums(
    b: KernelBuilder, task: Task, strip: Strip, line: _Line, pixel: Dim, panel: Dim, valid: tuple[Dim, ...]
) -> tuple[Tile, ...]:
    """One vector of channels for every pixel of a block; each input is loaded once per line of the window."""
    columns = task.columns
    zero = b.fill(0.0, DType.F32, (task.width,))
    seen = [columns.seen(strip.first + i) for i in range(strip.block.rows)]
    uses: dict[int, list[tuple[int, int]]] = {}
    for i, (first, last) in enumerate(seen):
        for c in range(first, last):
            uses.setdefault(i * columns.stride + c * columns.dilation, []).append((i, c))
    with b.loop("down", line.first, line.last, carry=[zero] * strip.block.rows) as down:
        tiles = list(down.carried)
        wanted = sorted({c for use in uses.values() for _, c in use})
        k = expr("*", down.var, columns.window)
        weights = {c: b.load(task.panels, (panel, expr("+", k, c), 0), (task.width,)) for c in wanted}
        at = expr("+", _start(task, line, pixel, down.var, 0), expr("*", panel, task.width))
        for place in sorted(uses):
            x = b.load(task.x.buffer, (expr("+", at, mul(place, task.x.pixel)),), (task.width,), valid=valid)
            for i, c in uses[place]:
                tiles[i] = b.map("fma", x, weights[c], tiles[i])
        b.effect("barrier_spill")
        down.yields(*tiles)
    return down.outs


def _finish_own(
    b: KernelBuilder, finish: Finish, where: Where, pixel: Dim, column: Dim, tiles: Sequence[Tile], scratch: Buffer | None
) -> None:
    if scratch is None:
        for i, tile in enumerate(tiles):
            finish.tile(where, expr("+", pixel, i), column, tile, column)
        return
    for i, tile in enumerate(tiles):
        b.store(scratch, (i, 0), tile)
    with b.loop("pixel", 0, len(tiles)) as i:
        sums = b.load(scratch, (i.var, 0), tiles[0].type.shape)
        finish.tile(where, expr("+", pixel, i.var), column, sums, column)
