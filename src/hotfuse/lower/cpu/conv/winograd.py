"""Winograd convolutions as tile programs.

    parallel (block of tiles, some panels)      a tile: m x n outputs, and the (m + r - 1) x (n + s - 1) inputs they read
      for tile, for vector of channels
        data[point, tile, channels] = B' inputs B          zeros beyond the image
      for panel
        for point
          sums[point, tile, :] = data[point, tile, :] @ panel[point, :, :]
        for tile, for vector of the panel
          finish(A' sums A)

What is not finite spreads over a tile here: such a call is a fault, which the model's own code answers.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import mul
from hotfuse.lower.common.winograd import Matrix, Scheme, schemes
from hotfuse.lower.cpu import work_division
from hotfuse.lower.cpu.conv.conv_epilogue import Channels, Finish, RowPosition
from hotfuse.lower.cpu.conv.matrix_sums import combined, shared, used
from hotfuse.lower.cpu.conv.output_rows import ConvTask
from hotfuse.lower.cpu.conv.shape import Axis, choose
from hotfuse.lower.cpu.gemm.gemm import let
from hotfuse.lower.cpu.tiling import Core, GemmTiling, balance
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile

_USUAL = 64
"""An extent that is known only at run time, when a tiling is chosen."""
_GAIN = 0.8
"""Winograd's products must be estimated to take at most this share of the plain convolution's time."""
_MAX_GROWTH = 4.0
"""Most that rounding errors may grow, next to plain sums."""
_WEIGHT_BYTES_PER_CYCLE = 8.0
"""Bytes of weights in a cycle from behind the second-level cache."""
_TASKS = 8
"""Iterations of the parallel loop to aim at."""
_REPEATED_TRANSFORMS = 0.11
"""How much longer all may take because groups of panels transform the same data."""
_SHARE, _MAX_SHARE = 0.35, 0.6
"""Of the second-level cache, for a block's transformed data; and at most, if one block then has all of it."""
_NEAREST = 1.25
"""Of the nearest cache, for a register tile's weights and data: the last of them come from the next one."""
_MIN_ROWS, _MAX_ROWS = 8, 14
_LINE = 16
_STEP = 4
_OTHER_REGISTERS = 8
"""Registers that a transform needs beside its points: sums, and numbers that it multiplies with."""


@dataclass(frozen=True, slots=True)
class WinogradTiling:
    """How a convolution is cut: the schemes down and across, the product's tiles, tiles of outputs in a block, groups of panels."""

    down: Scheme
    across: Scheme
    tiling: GemmTiling
    block: int
    groups: int

    @property
    def points(self) -> int:
        """Products that every tile and pair of channels takes."""
        return self.down.points * self.across.points


def cut(core: Core, down: Axis | None, across: Axis, images: Dim, inputs: int, outputs: int) -> WinogradTiling | None:
    """The tiling that takes least time, if one is worth it."""
    if core.lean:
        return None  # transformed weights take two to four times the memory
    axes = [a for a in (down, across) if a is not None]
    if any(a.stride != 1 or a.dilation != 1 or a.window < 1 for a in axes) or inputs < core.lanes or outputs == 1:
        return None
    sizes = [_number(a.out) for a in (down, across) if a is not None]
    count = _number(images) if isinstance(images, int) else 1
    window = math.prod(a.window for a in axes)
    columns = max(outputs / core.lanes, 0.5)
    plain = count * math.prod(sizes) * window * inputs * columns
    best: tuple[float, Scheme, Scheme] | None = None
    for first in schemes(down.window) if down is not None else (Scheme(1, 1),):
        for second in schemes(across.window):
            if first.growth * second.growth > _MAX_GROWTH or first.points * second.points == 1:
                continue
            tiles = count * math.prod(
                -(-n // s.outputs) for n, s in zip(sizes, (first, second)[-len(sizes) :], strict=True)
            )
            cost = _cost(core, first, second, tiles, inputs, columns)
            if best is None or cost < best[0]:
                best = (cost, first, second)
    if best is None or best[0] > _GAIN * plain:
        return None
    _, first, second = best
    return _cut(core, first, second, [down, across], images, inputs, outputs)


def _cost(core: Core, first: Scheme, second: Scheme, tiles: int, inputs: int, columns: float) -> float:
    """About how many vectors are multiplied, loaded and stored."""
    points = first.points * second.points
    product = points * tiles * (inputs + 2) * columns
    weights = 4 * points * inputs * columns * core.lanes
    if weights > core.l2 // 2:
        product = max(product, weights / _WEIGHT_BYTES_PER_CYCLE)
    into = _into(first, second)
    out = points * (2 + first.outputs) + 3 * first.outputs * second.outputs
    return product + tiles * (into * inputs / core.lanes + out * columns)


def _into(first: Scheme, second: Scheme) -> float:
    """About how many vectors are computed, loaded and stored to transform a tile's inputs."""
    return first.points * second.points * (1 + first.points + second.points)


def _cut(
    core: Core, first: Scheme, second: Scheme, axes: Sequence[Axis | None], images: Dim, inputs: int, outputs: int
) -> WinogradTiling:  # fmt: skip
    points = first.points * second.points
    wide = stride(inputs)
    tiles = tile_count(axes, (first, second), images)
    whole = isinstance(tiles, int) and tiles * 4 * points * wide <= core.l2 * _MAX_SHARE
    most = tiles if whole and isinstance(tiles, int) else max(1, int(core.l2 * _SHARE) // (4 * points * wide))
    tiling = _tiling(core, min(tiles, most) if isinstance(tiles, int) else most, outputs, inputs)
    if isinstance(tiles, int):
        blocks = -(-tiles // max(most, 1))
        blocks += blocks % 2 if blocks > 1 else 0  # threads share evenly
        block = -(-tiles // blocks)
    else:
        blocks, block = _TASKS, max(1, most // tiling.mr) * tiling.mr
    panels = -(-outputs // tiling.nr)
    cheap = 1 + int(_REPEATED_TRANSFORMS * points * outputs / _into(first, second))
    groups = max(1, min(panels, _TASKS // blocks, cheap))
    groups = 1 << (groups.bit_length() - 1)
    if core.threads > 1 and isinstance(tiles, int) and tiles:
        blocks, groups = _shared(core, WinogradTiling(first, second, tiling, block, groups), tiles, inputs, panels, blocks)
        block = -(-tiles // blocks)
    return WinogradTiling(first, second, tiling, block, groups)


def _shared(core: Core, how: WinogradTiling, tiles: int, inputs: int, panels: int, least: int) -> tuple[int, int]:
    """Into how many blocks of tiles and groups of panels work is cut for several threads: every block reads all weights of its
    panels, every group transforms all data of its tiles, and the thread with most of both counts.
    """
    vectors = -(-how.tiling.nr // core.lanes)
    into = _into(how.down, how.across) * inputs / core.lanes
    out = how.points * (2 + how.down.outputs) + 3 * how.down.outputs * how.across.outputs
    each = vectors * (how.points * (inputs + 2) + out)
    weights = how.points * inputs * vectors * core.lanes * 4 / _WEIGHT_BYTES_PER_CYCLE

    def longest(blocks: int, groups: int) -> float:
        high, wide = -(-tiles // blocks), -(-panels // groups)
        one = high * into + wide * (max(high, _MIN_ROWS) * each + weights)
        return work_division.rounds(blocks * groups, core.threads) * one

    most = max(least, min(tiles, 4 * core.threads))
    spatial_phases = [(b, 1 << g) for b in range(least, most + 1) for g in range(panels.bit_length())]
    return min(spatial_phases, key=lambda dim: (longest(*dim), dim[0] * dim[1]))


def _tiling(core: Core, tiles: int, outputs: int, inputs: int) -> GemmTiling:
    """The register tile of the products: all steps of its weights and its data are to stay in the nearest cache."""
    found = choose(core, tiles, outputs, inputs, 4 * stride(inputs))
    lines = int(core.l1 * _NEAREST) // (4 * inputs)
    if found.nr + found.mr <= lines:
        return found
    for vectors in range(-(-found.nr // core.lanes), 0, -1):
        width = vectors * core.lanes
        rows = min(_MAX_ROWS, (core.registers - vectors - 1) // vectors, lines - width)
        if vectors == 1 or rows >= _MIN_ROWS:
            rows = max(rows, min(_MIN_ROWS, core.registers - 2))
            return replace(found, vectors=vectors, mr=rows, width=width, why=f"{rows}x{width} in the nearest cache")
    return found


def tile_count(axes: Sequence[Axis | None], by: Sequence[Scheme], images: Dim) -> Dim:
    """Tiles of outputs of all images."""
    along = (1 if a is None else expr("ceildiv", a.out, s.outputs) for a, s in zip(axes, by, strict=True))
    return expr("*", images, *along)


def stride(inputs: int) -> int:
    """Numbers from one tile's channels to the next one's: whole lines, and not a multiple of a page's part."""
    wide = -(-inputs // _LINE) * _LINE
    return wide + (_LINE if wide % 256 == 0 else 0)


def _positive(d: Dim) -> Dim:
    """1 where a number is at least 1, else 0."""
    return expr("min", 1, expr("max", 0, d))


def _number(d: Dim) -> int:
    return d if isinstance(d, int) else _USUAL


class WinogradProgram:
    """Writes the loops."""

    def __init__(self, b: KernelBuilder, task: ConvTask, how: WinogradTiling, core: Core, outputs: int, finish: Finish) -> None:
        self.b, self.task, self.how, self.finish = b, task, how, finish
        self.lanes, self.registers = core.lanes, core.registers
        self.outputs, self.width, self.inputs = outputs, how.tiling.nr, task.inputs
        self.panels = -(-outputs // self.width)
        self.axes: tuple[Axis | None, Axis] = (task.outer[-1].axis if task.outer else None, task.columns)
        self.tiles = tile_count(self.axes, (how.down, how.across), task.images)
        points = how.points
        self.data = b.scratch("data", DType.F32, (points, how.block, stride(self.inputs)))
        self.sums = b.scratch("products", DType.F32, (points, how.block, self.width))
        self.results: Buffer | None = None

    def write(self) -> None:
        """All of them."""
        b, how, finish = self.b, self.how, self.finish
        finish.make_room(self.width)
        if not finish.short:
            self.results = b.scratch("results", DType.F32, (how.down.outputs * how.across.outputs, self.lanes))
        with contextlib.ExitStack() as scope:
            blocks = scope.enter_context(let(b, "blocks", expr("ceildiv", self.tiles, how.block)))
            at = scope.enter_context(b.parallel("task", expr("*", blocks, how.groups))).var
            block: Dim = at
            first: Dim = 0
            last: Dim = self.panels
            if how.groups > 1:
                block = scope.enter_context(let(b, "block", expr("//", at, how.groups)))
                group = expr("%", at, how.groups)
                bounds = (expr("//", expr("*", g, self.panels), how.groups) for g in (group, expr("+", group, 1)))
                first, last = (scope.enter_context(let(b, "panels", d)) for d in bounds)
            lo, hi = (
                scope.enter_context(let(b, "tiles", expr("//", expr("*", n, self.tiles), blocks)))
                for n in (block, expr("+", block, 1))
            )
            count = scope.enter_context(let(b, "count", remaining(hi, lo)))
            self._each(lo, hi, self._into)
            panel = scope.enter_context(b.loop("panel", first, last)).var
            finish.prepare(self._channels(expr("*", panel, self.width)), self.width)
            b.effect("forget")  # what transforms multiply with, for the sake of the sums
            with b.loop("point", 0, how.points) as point:
                self._product(panel, point.var, count)
            b.effect("forget")
            self._each(lo, hi, lambda row, tile, *where: self._out(panel, row, tile, *where))

    def _channels(self, at: Dim) -> Channels:
        return Channels(at, self.outputs, self.outputs % self.width == 0)

    def _each(self, lo: Dim, hi: Dim, body: Callable[..., None]) -> None:
        """Call the body for every tile of a block: its number in the block, and its place by image, down and across."""
        b, how = self.b, self.how
        down, across = self.axes
        with contextlib.ExitStack() as scope:
            tile = scope.enter_context(b.loop("tile", lo, hi)).var
            per_row = expr("ceildiv", across.out, how.across.outputs)
            x = scope.enter_context(let(b, "x", expr("%", tile, per_row)))
            rest = expr("//", tile, per_row)
            y: Dim = 0
            if down is not None:
                per_image = expr("ceildiv", down.out, how.down.outputs)
                y = scope.enter_context(let(b, "y", expr("%", rest, per_image)))
                rest = expr("//", rest, per_image)
            image = scope.enter_context(let(b, "image", rest))
            body(remaining(tile, lo), image, expr("*", y, how.down.outputs), expr("*", x, how.across.outputs))

    # -- inputs

    def _into(self, at: Dim, image: Dim, y: Dim, x: Dim) -> None:
        """A tile's inputs, transformed."""
        b, how, task = self.b, self.how, self.task
        down, across = self.axes
        starts: list[Dim] = []
        inside: list[Dim] = []
        base = expr("*", image, task.image)
        for place, axis, scheme, dim in ((y, down, how.down, task.outer[-1] if task.outer else None),
                                         (x, across, how.across, task.row)):  # fmt: skip
            if axis is None or dim is None:
                starts.append(0)
                continue
            begin = expr("+", place, -axis.padding)
            starts.append(begin)
            base = expr("+", base, expr("*", begin, dim.apart))
            if axis.padding > 0:
                inside.append(expr("<=", 0, begin))
            inside.append(expr("<=", expr("+", begin, scheme.points), axis.size))
        whole = inside[0] if len(inside) == 1 else expr("and", *inside)
        with let(b, "base", base) as here:
            with b.when(whole):
                self._transform(at, here, None)
            with b.when(expr("not", whole)):
                self._transform(at, here, starts)

    def _transform(self, at: Dim, base: Dim, starts: Sequence[Dim] | None) -> None:
        """One tile; `starts` are the places of its first input where some may lie beyond the image.

        All points at once are more than most machines have registers: the rows of the transform are made a pair at a time, and the
        inputs read again for each, which is less than spilling and keeps stores for results.
        """
        b, how, lanes = self.b, self.how, self.lanes
        matrix = how.down.data
        fits = how.points + _OTHER_REGISTERS <= self.registers
        groups = [tuple(range(len(matrix)))] if fits else shared(matrix)
        with contextlib.ExitStack() as scope:
            lines, columns = self._inside(scope, starts)
            c = scope.enter_context(b.loop("c", 0, self.inputs, lanes))
            left = remaining(self.inputs, c.var) if self.inputs % lanes else None

            def load(j: int, i: int) -> Tile:
                place = expr("+", base, c.var, self._apart(i, j))
                valid: tuple[Dim, ...] = () if left is None else (left,)
                if lines[i] != 1:
                    valid = (expr("*", lines[i], lanes if left is None else left),)
                return b.load(self.task.x, (place,), (lanes,), valid=valid)

            for group in groups:
                rows = tuple(matrix[i] for i in group)
                made = [self._column(there, rows, functools.partial(load, j)) for j, there in enumerate(columns)]
                for n, i in enumerate(group):
                    for j, v in enumerate(combined(b, how.across.data, [column[n] for column in made])):
                        b.store(self.data, (i * how.across.points + j, at, c.var), v)
                b.effect("barrier_spill")

    def _column(self, there: Dim, rows: Matrix, load: Callable[[int], Tile]) -> list[Tile]:
        """Some rows' sums of a column; zeros where it lies beyond the image."""
        b, inputs = self.b, used(rows)
        part = tuple(tuple(row[i] for i in inputs) for row in rows)
        if there == 1:
            return combined(b, part, [load(i) for i in inputs])
        with b.loop("there", 0, there, carry=[b.fill(0.0, DType.F32, (self.lanes,))] * len(rows)) as column:
            column.yields(*combined(b, part, [load(i) for i in inputs]))
        return list(column.outs)

    def _inside(self, scope: contextlib.ExitStack, starts: Sequence[Dim] | None) -> tuple[list[Dim], list[Dim]]:
        """Per line and per column of a tile's inputs 1 where it lies inside the image, and 0 beyond it."""
        found: list[list[Dim]] = []
        for n, (axis, scheme) in enumerate(zip(self.axes, (self.how.down, self.how.across), strict=True)):
            there: list[Dim] = [1] * scheme.points
            if starts is not None and axis is not None:
                for k in range(scheme.points):
                    at = expr("+", starts[n], k)
                    inside = expr("*", _positive(expr("+", at, 1)), _positive(remaining(axis.size, at)))
                    there[k] = scope.enter_context(let(self.b, "inside", inside))
            found.append(there)
        return found[0], found[1]

    def _apart(self, i: int, j: int) -> Dim:
        outer = self.task.outer
        down = mul(i, outer[-1].apart) if outer else 0
        return expr("+", down, mul(j, self.task.row.apart))

    # -- products

    def _product(self, panel: Dim, point: Dim, count: Dim) -> None:
        """All tiles' sums at one point."""
        b, how = self.b, self.how
        cut = balance(how.block, how.tiling.mr)
        first = 0
        for height in [cut.rows + 1] * cut.extra + [cut.rows] * (cut.count - cut.extra):
            with b.when(expr("<", first, count)) if first else contextlib.nullcontext():
                self._rows(panel, point, first, height)
            first += height

    def _rows(self, panel: Dim, point: Dim, first: int, height: int) -> None:
        b, k, unroll = self.b, self.inputs, _STEP

        def step(acc: Tile, at: Dim) -> Tile:
            weights = b.load(self.task.panels, (panel, expr("+", expr("*", point, k), at), 0), (1, self.width))
            data = b.load(self.data, (point, first, at), (height, 1), axes=(1, 2))
            made = b.mma(acc, data, weights)
            b.effect("barrier_spill")
            return made

        acc = b.fill(0.0, DType.F32, (height, self.width))
        whole = k // unroll * unroll
        if whole:
            with b.loop("k", 0, whole, unroll, carry=[acc]) as loop:
                (inner,) = loop.carried
                for u in range(unroll):
                    inner = step(inner, expr("+", loop.var, u))
                loop.yields(inner)
            (acc,) = loop.outs
        for u in range(whole, k):
            acc = step(acc, u)
        b.store(self.sums, (point, first, 0), acc, axes=(1, 2))

    # -- results

    def _out(self, panel: Dim, at: Dim, image: Dim, y: Dim, x: Dim) -> None:
        """A tile's outputs of one panel."""
        b, how = self.b, self.how
        with b.loop("v", 0, self.width, self.lanes) as v:
            rows = range(how.down.points)

            def load(i: int, j: int) -> Tile:
                return b.load(
                    self.sums, (i * how.across.points + j, at, v.var), (self.lanes,), valid=self._short(v.var)
                )

            columns = [
                combined(b, how.down.results, [load(i, j) for i in rows]) if how.down.points > 1 else [load(0, j)]
                for j in range(how.across.points)
            ]
            made: list[list[Tile]] = []
            for i in range(how.down.outputs):
                row = [column[i] for column in columns]
                made.append(combined(b, how.across.results, row) if how.across.points > 1 else row)
            self._finite(made)
            column = expr("+", expr("*", panel, self.width), v.var)
            end = expr("min", self.outputs, expr("*", expr("+", panel, 1), self.width))
            channels = Channels(column, end, self.outputs % self.width == 0 and self.width % self.lanes == 0)
            self._finish(channels, v.var, made, image, y, x)

    def _short(self, at: Dim) -> tuple[Dim, ...]:
        """What is left of a panel that is no whole number of vectors wide."""
        return () if self.width % self.lanes == 0 else (remaining(self.width, at),)

    def _finite(self, rows: Sequence[Sequence[Tile]]) -> None:
        """A fault where some number is not finite: then their sum is not, and times 0 it is not 0."""
        b = self.b
        sums = [functools.reduce(lambda x, y: b.map("add", x, y), row) for row in rows]
        total = functools.reduce(lambda x, y: b.map("add", x, y), sums)
        b.effect("require", b.map("eq", b.map("mul", total, 0.0), 0.0))

    def _finish(self, channels: Channels, kept: Dim, made: list[list[Tile]], image: Dim, y: Dim, x: Dim) -> None:
        b, how, finish = self.b, self.how, self.finish
        across = how.across.outputs
        if self.results is None:
            for i, row in enumerate(made):
                for j, tile in enumerate(row):
                    with self._exists(y, x, i, j):
                        finish.tile(self._where(image, expr("+", y, i)), expr("+", x, j), channels, tile, kept)
            return
        for i, row in enumerate(made):
            for j, tile in enumerate(row):
                b.store(self.results, (i * across + j, 0), tile)
        down, along = self.axes
        last_y = how.down.outputs if down is None else expr("min", how.down.outputs, remaining(down.out, y))
        with b.loop("i", 0, last_y) as i, b.loop("j", 0, expr("min", across, remaining(along.out, x))) as j:
            tile = b.load(self.results, (expr("+", expr("*", i.var, across), j.var), 0), (self.lanes,))
            finish.tile(self._where(image, expr("+", y, i.var)), expr("+", x, j.var), channels, tile, kept)

    def _exists(self, y: Dim, x: Dim, i: int, j: int) -> contextlib.AbstractContextManager[None]:
        """Inside, an output of a tile is one of the image: tiles at its end may have more."""
        wanted: list[Dim] = []
        down, across = self.axes
        for axis, scheme, at, k in ((down, self.how.down, y, i), (across, self.how.across, x, j)):
            if axis is not None and k and not (isinstance(axis.out, int) and axis.out % scheme.outputs == 0):
                wanted.append(expr("<", expr("+", at, k), axis.out))
        if not wanted:
            return contextlib.nullcontext()
        return self.b.when(wanted[0] if len(wanted) == 1 else expr("and", *wanted))

    def _where(self, image: Dim, y: Dim) -> RowPosition:
        outer = self.task.outer
        places: dict[int, Dim] = {0: image}
        for w in outer[:-1]:
            places[w.dim] = 0
        if outer:
            places[outer[-1].dim] = y
        return RowPosition(places, self.task.row.dim)
