"""Convolutions of bytes: sums of products of 8-bit integers, exact, four at a time.

    parallel row of the image                   a copy with borders, channels innermost, in fours
      padded[row] = zero point, x[row], zero point
    parallel (group of rows, panel)
      for row, for block of pixels
        sums = 0                                32-bit integers
        for line of the window, for four of a run of (column, channel)
          sums = mma(sums, padded[pixels, k : k + 4], panel[k : k + 4, :])
          all  = mma(all, padded[pixels, k : k + 4], ones)             where the weight has a zero point of its own
        finish((sums - zero point * sum of weights - weight's zero point * (all - K * zero point)) * scales)

Real zeros around the image are zero points in bytes: with a border of these, every window is whole, and what zero points add to the
sums is the same for every pixel. An image that needs no border and whose channels lie in fours is read where it is.
Without an instruction for four products of bytes, the copy and the weights are 16-bit numbers, two at a time (decision 73).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

from hotfuse.analysis.convolution import is_convolution
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Value, output_values
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.common.algebra import add, mul, product
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferView, KernelBuffers, Lowered, PackArgument, tensor_type
from hotfuse.lower.common.pack import BYTE_GROUP, WORD_GROUP, PackSource, PackSpec, WeightOrder
from hotfuse.lower.common.positions import Position
from hotfuse.lower.common.quant import MAX_K, Scaling, corrected, scaled
from hotfuse.lower.common.tile_values import Evaluator
from hotfuse.lower.cpu import work_division
from hotfuse.lower.cpu.conv import shape as conv_shape
from hotfuse.lower.cpu.conv.conv_epilogue import Channels, Finish, RowPosition
from hotfuse.lower.cpu.conv.output_rows import ConvTask, OutputRow, SpatialDim, along, over_window, rows, start, step_of
from hotfuse.lower.cpu.conv.read import Convolution, the_convolution
from hotfuse.lower.cpu.conv.shape import Axis, Block
from hotfuse.lower.cpu.gemm.gemm import let
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.ops.views import broadcast, shape_of
from hotfuse.lower.primitives import rules as primitive
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, BufferKind, Tile

_COPIED = 64
"""Bytes that are copied at once."""
_ROW_SUMS = 1 << 13
"""Sums of a row that stay in the first cache until it is written."""


def lower_bytes(graph: Graph, scaling: Scaling, core: Core, *, name: str = "") -> Lowered:
    """The kernel of a group whose convolution reads bytes; raises CannotLower where it cannot be one."""
    plain, conv = the_convolution(graph, scaled=True)
    for v in output_values(graph):
        if shape_of(v) != shape_of(conv.out):
            raise CannotLower(f"output %{v.name} has another shape than the convolution")
    if conv.groups > 1 or conv.turned or len(conv.spatial_phases) > 2:
        raise CannotLower("a convolution of bytes in groups, transposed, or in three dims")
    return _Bytes(primitive.expanded(plain), graph, conv, scaling, core, name).lowered()


class _Bytes:
    """A group while it is lowered."""

    def __init__(
        self, graph: Graph, original: Graph, conv: Convolution, scaling: Scaling, core: Core, name: str
    ) -> None:  # fmt: skip
        node = next(n for n in graph.nodes if is_convolution(n))
        self.original, self.conv, self.scaling, self.core = original, replace(conv, node=node), scaling, core
        self.b = KernelBuilder(name or "convolution_of_bytes", loc=node.loc)
        self.memory = KernelBuffers(self.b, graph)
        self.kind = tensor_type(conv.x).dtype
        outs = list(dict.fromkeys(output_values(graph)))
        self.finish = Finish(self.memory, graph, self.conv.out, self.conv.bias, outs, core.lanes)
        self.finish.real = self._real
        self.square: Buffer | None = None
        """Sums of a block, where results lie plane by plane; of a whole row, where that is short: squares are full then."""
        self.by_row = False
        wide = not core.dots_bytes and not core.lean
        self.held = DType.I16 if wide else self.kind
        """What the copy of the image holds."""
        self.group = WORD_GROUP if wide else BYTE_GROUP
        self.channels = -(-conv.inputs // self.group) * self.group
        axes = [dim[0].axis for dim in conv.spatial_phases]
        self.axes: tuple[Axis, Axis] = (axes[0] if len(axes) > 1 else Axis(1, 1), axes[-1])
        self.sizes = tuple(self._padded(a) for a in self.axes)
        window = math.prod(conv.windows)
        if window * self.channels > MAX_K:
            raise CannotLower(f"a sum over {window * self.channels} products of bytes")
        width = self.axes[1].out
        self.cut = conv_shape.choose(core, width, conv.outputs, window * self.channels // self.group, 0)
        if self.cut.nr % core.lanes:
            whole = -(-self.cut.nr // core.lanes)
            self.cut = replace(self.cut, width=whole * core.lanes, vectors=whole)
        if scaling.zero_w != 0:  # one more vector of sums for each pixel, and one of ones
            vectors = self.cut.vectors
            rows = max(1, (core.registers - vectors - 2) // (vectors + 1))
            self.cut = replace(self.cut, mr=min(self.cut.mr, rows))
        source = PackSource(conv.weight.name, WeightOrder.WINDOW, conv.outputs)
        self.spec = PackSpec((source,), window * self.channels, self.cut.nr, DType.I16 if wide else DType.I8)
        self.sums_spec = replace(self.spec, dtype=DType.I32)

    @staticmethod
    def _padded(axis: Axis) -> Dim:
        """An extent with its borders: as far as windows reach."""
        return add(axis.size, axis.padding + axis.end)

    def lowered(self) -> Lowered:
        """The kernel with its call."""
        if any(a.padding < 0 or a.end < 0 for a in self.axes):
            raise CannotLower("windows that leave out a border of the image")
        b, spec = self.b, self.spec
        place = self.memory.place(self.conv.x)
        if not place.flat:
            raise CannotLower(f"%{self.conv.x.name} lies in memory with gaps")
        self.panels = b.buffer("panels", BufferKind.CONST, spec.dtype, spec.shape, spec.stride)
        shape, stride = (spec.panels, spec.nr), (self.sums_spec.panel_stride, 1)
        self.column_sums = b.buffer("column_sums", BufferKind.CONST, DType.I32, shape, stride)
        images = shape_of(self.conv.x)[0]
        self.image = product((*self.sizes, self.channels))
        self.padded = place.buffer if self._as_it_lies(place) else b.shared(
            "padded", self.held, (product((images, self.image, 1)) if images != 1 else self.image,))  # fmt: skip
        self.sums = b.scratch("sums", DType.I32, (self.cut.mr, spec.nr))
        if self.scaling.zero_w != 0:
            self.row_sums = b.scratch("row_sums", DType.I32, (self.cut.mr, self.core.lanes))
        if self.padded is not place.buffer:
            self._copy(place, images)
        self._products(images)
        packs = {"panels": PackArgument("panels", spec), "column_sums": PackArgument("column_sums", self.sums_spec)}
        lowered = replace(self.memory, graph=self.original).finish(b.finish(), packs)
        for v in output_values(self.original):
            if not isinstance(v.type, TensorType) or v.type.layout.strided:
                raise CannotLower(f"output %{v.name} would be written with gaps")
        return lowered

    # -- the image with its borders

    def _zero(self, shape: tuple[int, ...]) -> Tile:
        zero = self.scaling.zero_x
        if isinstance(zero, Value):
            return self.b.bcast(self.b.cast(self._scalar(zero), self.held), shape)
        return self.b.fill(int(zero), self.held, shape)

    def _scalar(self, value: Value) -> Tile:
        place = self.memory.place(value)
        return self.b.load(place.buffer, (0,) * len(place.buffer.shape))

    def _as_it_lies(self, place: BufferView) -> bool:
        """Whether a copy with borders would be the image itself."""
        if self.held is not self.kind or self.channels != self.conv.inputs or len(place.buffer.shape) != 1:
            return False
        if any(a.padding or a.end for a in self.axes):
            return False
        steps = (*self.sizes[-(len(place.strides) - 2) :], self.channels)
        dense = [product(steps[i + 1 :]) for i in range(len(steps) - 1)]
        wanted = (self.image, 1, *dense)
        images = shape_of(self.conv.x)[0]
        return place.strides[1:] == wanted[1:] and (images == 1 or place.strides[0] == wanted[0])

    def _in_pieces(self, name: str, count: Dim, each: Callable[[Dim, int], None]) -> None:
        """So many bytes, a whole number of groups: most at once, the rest in the largest pieces that fit, without masks."""
        whole = expr("*", expr("//", count, _COPIED), _COPIED)
        if whole != 0:
            with self.b.loop(name, 0, whole, _COPIED) as i:
                each(i.var, _COPIED)
        if not isinstance(count, int) or not isinstance(whole, int):
            with self.b.loop(name, whole, count, self.group) as i:
                each(i.var, self.group)
            return
        while whole < count:
            piece = 1 << (count - whole).bit_length() - 1
            each(whole, piece)
            whole += piece

    def _fill(self, at: Dim, count: Dim) -> None:
        """Zero points into so many bytes."""
        self._in_pieces("border", count, lambda i, n: self.b.store(self.padded, (expr("+", at, i),), self._zero((n,))))

    def _copy(self, place: BufferView, images: Dim) -> None:
        b, (down, across), (height, width) = self.b, self.axes, self.sizes
        line = mul(width, self.channels)
        strides = place.strides
        apart = (strides[2] if len(strides) == 4 else 0, strides[-1])
        with contextlib.ExitStack() as scope:
            row = scope.enter_context(b.parallel("line", product((images, height)))).var
            y = scope.enter_context(let(b, "y", expr("+", expr("%", row, height), -down.padding)))
            at = scope.enter_context(let(b, "at", expr("*", row, line)))
            inside = expr("and", expr("<=", 0, y), expr("<", y, down.size))
            with b.when(expr("not", inside)):
                self._fill(at, line)
            with b.when(inside):
                left = across.padding * self.channels
                self._fill(at, left)
                source = expr("+", expr("*", expr("//", row, height), strides[0]), expr("*", y, apart[0]))
                with let(b, "source", source) as begin:
                    self._line(place.buffer, begin, expr("+", at, left), strides[1], apart[1])
                behind = expr("+", at, left, mul(across.size, self.channels))
                self._fill(behind, across.end * self.channels)

    def _line(self, x: Buffer, source: Dim, at: Dim, channel: Dim, apart: Dim) -> None:
        """A line of pixels, with zero points where channels are missing from the last group."""
        b, inputs, size = self.b, self.conv.inputs, self.axes[1].size
        if channel == 1 and inputs == self.channels and apart == inputs:
            def piece(i: Dim, n: int) -> None:
                b.store(self.padded, (expr("+", at, i),), b.cast(b.load(x, (expr("+", source, i),), (n,)), self.held))

            self._in_pieces("byte", mul(size, inputs), piece)
            return
        with b.loop("pixel", 0, size) as p:
            here, there = expr("+", source, mul(apart, p.var)), expr("+", at, expr("*", p.var, self.channels))
            if inputs != self.channels:
                last = add(there, self.channels - self.group)
                b.store(self.padded, (last,), self._zero((self.group,)))
            with b.loop("c", 0, inputs, self.core.lanes) as c:
                left = (remaining(inputs, c.var),) if inputs % self.core.lanes else ()
                place = expr("+", here, mul(channel, c.var))
                tile = b.load(x, (place,), (self.core.lanes,), axes=(0,), step=(channel,), valid=left)
                b.store(self.padded, (expr("+", there, c.var),), b.cast(tile, self.held), valid=left)

    # -- products

    def _products(self, images: Dim) -> None:
        b, spec, finish = self.b, self.spec, self.finish
        task = self._task(images)
        finish.make_room(spec.nr)
        where = RowPosition({}, task.row.dim)
        if finish.by_squares(where):  # written pixel by pixel, channels are planes apart: pages, and often of one set of a cache
            row_pixels = task.columns.out
            self.by_row = task.columns.static and isinstance(row_pixels, int) and row_pixels * spec.nr <= _ROW_SUMS
            pixels = row_pixels if self.by_row and isinstance(row_pixels, int) else self.cut.mr
            self.square = finish.room_for_sums(pixels, spec.nr, where, DType.I32)
        with contextlib.ExitStack() as scope:
            parts = scope.enter_context(let(b, "parts", work_division.parts(task.rows, spec.panels, self.core.threads)))
            at = scope.enter_context(b.parallel("task", expr("*", parts, spec.panels))).var
            panel = scope.enter_context(let(b, "panel", expr("%", at, spec.panels)))
            part = scope.enter_context(let(b, "part", expr("//", at, spec.panels)))
            channels = finish.channels_from(expr("*", panel, spec.nr), spec.nr)
            finish.prepare(channels, spec.nr)
            bounds = (expr("//", expr("*", p, task.rows), parts) for p in (part, expr("+", part, 1)))
            lo, hi = (scope.enter_context(let(b, "rows", d)) for d in bounds)
            row = scope.enter_context(rows(b, task, lo, hi))

            def block(shape: Block, pixel: Dim, _number: Dim) -> None:
                self._block(task, row, shape, pixel, panel, channels)

            along(b, task, self.cut.mr, block, _never, together=True)
            if self.square is not None and self.by_row:
                assert isinstance(task.columns.out, int)
                finish.through(row.where, 0, channels, task.columns.out, spec.nr, self.square)

    def _task(self, images: Dim) -> ConvTask:
        """The convolution of the padded image, whose steps are groups of bytes."""
        width, rank = self.sizes[1], len(self.conv.spatial_phases)
        steps = (mul(width, self.channels), self.channels)
        spatial_phases = [
            SpatialDim(replace(axis, size=size, padding=0, after=0, count=axis.out), step, dim)
            for axis, size, step, dim in zip(self.axes, self.sizes, steps, (2, 1 + rank), strict=True)
        ]
        outer = (spatial_phases[0],) if rank > 1 else ()
        return ConvTask(self.padded, self.image, 1, outer, spatial_phases[1], images, self.channels // self.group, self.panels)

    def _block(self, task: ConvTask, row: OutputRow, block: Block, pixel: Dim, panel: Dim, channels: Channels) -> None:
        b, columns = self.b, task.columns
        zeros = [b.fill(0, DType.I32, (block.rows, self.spec.nr))]
        if self.scaling.zero_w != 0:
            zeros.append(b.fill(0, DType.I32, (block.rows, self.core.lanes)))

        def line(taps: tuple[Dim, ...], tiles: list[Tile]) -> list[Tile]:
            if columns.dilation == 1:
                at, k = start(task, row, pixel, taps, 0), step_of(task, taps, 0)
                return self._run(task, columns.window * task.inputs, at, k, panel, tiles)
            with b.loop("across", 0, columns.window, carry=tiles) as column:
                at, k = start(task, row, pixel, taps, column.var), step_of(task, taps, column.var)
                column.yields(*self._run(task, task.inputs, at, k, panel, list(column.carried)))
            return list(column.outs)

        acc, *all_of_row = over_window(b, row, zeros, line)
        b.store(self.sums, (0, 0), acc)
        for tile in all_of_row:
            b.store(self.row_sums, (0, 0), tile)
        with b.loop("pixel", 0, block.rows) as i:
            sums = self._shifted(b.load(self.sums, (i.var, 0), (self.spec.nr,)), panel, i.var)
            if self.square is None:
                self.finish.tile(row.where, expr("+", pixel, i.var), channels, sums)
            else:
                b.store(self.square, (expr("+", pixel, i.var) if self.by_row else i.var, 0), sums)
        if self.square is not None and not self.by_row:
            self.finish.through(row.where, pixel, channels, block.rows, self.spec.nr, self.square)

    def _run(self, task: ConvTask, steps: int, at: Dim, k: Dim, panel: Dim, tiles: list[Tile]) -> list[Tile]:
        """Sums of products, and those of the image alone where they are wanted."""
        b, height = self.b, tiles[0].type.shape[0]
        apart = task.columns.stride * self.channels
        ones = b.fill(1, self.spec.dtype, (self.group, self.core.lanes)) if len(tiles) > 1 else None
        with b.loop("k", 0, steps, carry=tiles) as loop:
            here = expr("+", at, expr("*", loop.var, self.group))
            x = b.load(self.padded, (here,), (height, self.group), axes=(0, 0), step=(apart, 1))
            weights = b.load(
                self.panels, (panel, expr("+", k, loop.var), 0, 0), (self.group, self.spec.nr), axes=(3, 2)
            )
            made = [b.mma(loop.carried[0], x, weights)]
            if ones is not None:
                made.append(b.mma(loop.carried[1], x, ones))
            loop.yields(*made)
        return list(loop.outs)

    # -- real numbers

    def _shifted(self, sums: Tile, panel: Dim, pixel: Dim) -> Tile:
        """Without what zero points added."""
        b = self.b

        def of_columns() -> Tile:
            return b.load(self.column_sums, (panel, 0), sums.type.shape)

        def of_row() -> Tile:
            return b.load(self.row_sums, (pixel, 0))

        return corrected(b, sums, self.scaling, self.spec.k, self._scalar, of_columns, of_row)

    def _real(self, at: Evaluator, position: Position, sums: Tile) -> Tile:
        """The sums as what the graph's convolution gives."""
        out = self.conv.out

        def of_weight(scale: Value) -> Tile:
            shape = shape_of(scale)
            place = list(broadcast(position, shape_of(out), (1,) * len(shape)))
            if any(n != 1 for n in shape):
                if len(shape) != len(shape_of(out)) or shape[0] != self.conv.outputs or any(n != 1 for n in shape[1:]):
                    raise CannotLower(f"a weight whose scales are {list(shape)}")
                place[0] = position[1]
            return at.tile(scale, tuple(place))

        real = self.b.cast(sums, tensor_type(out).dtype)
        return scaled(self.b, real, self.scaling, self._scalar, of_weight)


def _never(_pixel: Dim) -> None:
    raise CannotLower("a window that reaches beyond a padded image")
