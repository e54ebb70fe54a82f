"""What happens to a convolution's sums before they are stored: bias, normalization, activation, residual.

What depends on the channel alone (a batch norm's scale and shift, say) is computed once per panel and kept in scratch memory.
Short epilogues work on whole register tiles; long ones go through scratch memory pixel by pixel, to keep the code short. The
sums of a single output channel lie one behind the other there, and are finished many pixels at once. Where the result, or what is
added to it, lies plane by plane, squares of as many pixels as channels are taken from there: these are turned by shuffles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Node, Value, sources
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import KernelBuffers, dense_strides, tensor_type
from hotfuse.lower.common.positions import Position, Space, counters_of, scaled, shifted
from hotfuse.lower.common.steps import Apply, Definitions
from hotfuse.lower.common.tile_values import Evaluator, TileAxis
from hotfuse.lower.ops.quotients import parts_of_reciprocal
from hotfuse.lower.ops.views import Alias, shape_of
from hotfuse.ops.table import packet
from hotfuse.tile.build import remaining
from hotfuse.tile.program import Buffer, Tile

_CHEAP = frozenset({
    "add", "sub", "mul", "relu", "neg", "maximum", "minimum", "hardtanh", "relu6", "clamp", "alias", "hardswish", "hardsigmoid",
})  # fmt: skip
_MAX_TILE_NODES = 8
"""Up to so many cheap nodes are done on whole register tiles."""
_SPELLED_SQUARES = 2
"""More of them side by side are a loop."""
_FEW_PIXELS = 2
"""Up to so many pixels are written to planes one by one."""


@dataclass(frozen=True, slots=True)
class RowPosition:
    """The row of outputs that is being computed."""

    places: Mapping[int, Dim]
    """Where it is along the dims of the result that are neither channels nor the row's own."""
    pixel: int
    """The row's own dim."""
    step: int = 1
    """How far apart neighbours of the row are."""
    first: int = 0
    """Where the row begins."""


@dataclass(frozen=True, slots=True)
class Channels:
    """A panel's channels."""

    at: Dim
    end: Dim
    """The first that does not belong to it any more, if the panel is wider."""
    exact: bool
    """Whether panels are never wider."""

    def along(self, width: int) -> TileAxis:
        """The panel as a tile axis."""
        return TileAxis(1, width, None if self.exact else remaining(self.end, self.at))


def without_division(graph: Graph) -> Graph:
    """The group with products by 1 / c instead of quotients by a number c: a division takes as long as ten products."""

    def changed(n: Node) -> Node:
        by = n.args[1] if packet(n.op) == "aten.div" and len(n.args) == 2 and not n.attrs else None
        if not isinstance(by, int | float) or not 2.0**-100 < abs(by) < 2.0**100 or not _f32(n):
            return n
        if parts_of_reciprocal(n, graph) is not None:  # as fast, and exact
            return n
        return replace(n, op="aten.mul.Tensor", args=(n.args[0], 1.0 / by))

    return replace(graph, nodes=tuple(changed(n) for n in graph.nodes))


def _f32(node: Node) -> bool:
    return all(isinstance(v.type, TensorType) and v.type.dtype is DType.F32 for v in (*node.ins, *node.outs))


class Finish:
    """Writes epilogues; one per kernel."""

    def __init__(
        self, memory: KernelBuffers, graph: Graph, sums: Value, bias: Value | None, outs: Sequence[Value], lanes: int
    ) -> None:
        self.builder = memory.builder
        self.sums, self.bias, self.outs, self.lanes = sums, bias, tuple(outs), lanes
        self.shape = shape_of(sums)
        self.space = Space.of(self.shape)
        self.real: Callable[[Evaluator, Position, Tile], Tile] | None = None
        """What makes real numbers of the sums, where these are integers."""
        self.position: Position = tuple(self.space.root(i) for i in range(len(self.shape)))
        self.at = Evaluator(memory, graph, self.space)
        after = self._after(graph)
        self.channels = self._per_channel(after)
        self.kept: list[Buffer] = []
        later = [n for n in graph.nodes if any(v.name in after for v in n.ins)]
        cheap = all(packet(n.op).split(".")[-1] in _CHEAP for n in later)
        self.short = len(later) <= _MAX_TILE_NODES and cheap and not self.single
        read = [v for v in sources(graph) if isinstance(v.type, TensorType) and any(v in n.ins for n in later)]
        self.images = [v for v in (*read, *outs) if shape_of(v) == self.shape]
        """What the epilogue reads and writes pixel by pixel."""
        self.squares = False

    @property
    def single(self) -> bool:
        """Whether there is one output channel, so that vectors run along pixels."""
        return self.shape[1] == 1

    def _after(self, graph: Graph) -> set[str]:
        """The sums and everything made from them."""
        after = {self.sums.name}
        for n in graph.nodes:
            if any(v.name in after for v in n.ins):
                after.update(v.name for v in n.outs)
        return after

    def _per_channel(self, after: set[str]) -> list[tuple[Value, Position]]:
        """Computed values that the epilogue reads and that are the same for every pixel."""
        definitions: Definitions = self.at.definitions
        found: dict[tuple[str, Position], tuple[Value, Position]] = {}
        seen: set[tuple[str, Position]] = set()

        def visit(value: Value, position: Position) -> None:
            if (value.name, position) in seen or value.name == self.sums.name:
                return
            seen.add((value.name, position))
            step = definitions.step(value, position, self.space)
            if isinstance(step, Alias):
                visit(step.value, step.position)
            elif isinstance(step, Apply):
                if value.name not in after and counters_of(position) <= {1} and tensor_type(value).dtype is DType.F32:
                    found[value.name, position] = (value, position)
                    return
                for operand in step.operands:
                    visit(operand.value, operand.position)

        for v in self.outs:
            visit(v, self.position)
        return list(found.values())

    @property
    def columns(self) -> int:
        """Output channels."""
        n = self.shape[1]
        if not isinstance(n, int):
            raise CannotLower(f"the number of output channels is {n}")
        return n

    def channels_from(self, at: Dim, width: int) -> Channels:
        """The channels of a panel where all panels lie behind each other."""
        return Channels(at, self.columns, self.columns % width == 0)

    def make_room(self, width: int) -> None:
        """Scratch memory for what is computed once per channel: `width` of them at a time."""
        for i in range(len(self.channels)):
            self.kept.append(self.builder.scratch(f"channel{i}", DType.F32, (self._whole(width),)))

    def by_squares(self, where: RowPosition) -> bool:
        """Whether sums of a row go through scratch memory to be turned, which `room_for_sums` makes room for."""
        self.squares = not self.single and where.step == 1 and any(_plane_by_plane(v, where.pixel) for v in self.images)
        return self.squares

    def room_for_sums(self, rows: int, width: int, where: RowPosition, dtype: DType = DType.F32) -> Buffer | None:
        """Scratch memory for the sums of a block of so many pixels along some row, where they are to go through there."""
        if self.by_squares(where):
            rows, width = self._whole(rows), self._whole(width)
        elif self.short:
            return None
        return self.builder.scratch("sums", dtype, (rows, width))

    def _whole(self, count: int) -> int:
        """So many, in whole vectors."""
        return -(-count // self.lanes) * self.lanes

    def prepare(self, channels: Channels, width: int, at: Dim = 0) -> None:
        """Compute it for a panel's channels, and keep it at a place of the scratch memory."""
        if not self.channels:
            return
        shape = (1,) if self.single else (width,)
        with self.at.loops({1: channels.at}, [] if self.single else [channels.along(width)]):
            for (value, position), buffer in zip(self.channels, self.kept, strict=True):
                self.builder.store(buffer, (at,), self.builder.bcast(self.at.tile(value, position), shape))

    def tile(self, where: RowPosition, pixel: Dim, channels: Channels, sums: Tile, kept: Dim = 0) -> None:
        """The sums of one pixel, [width], or of several, [rows, width]; of a single channel, [pixels]."""
        b = self.builder
        width = sums.type.shape[-1]
        axes = [channels.along(width)]
        if len(sums.type.shape) == 2:
            axes = [TileAxis(where.pixel, sums.type.shape[0]), *axes]
        self._store(where, pixel, channels.at, sums, axes, lambda buffer: b.load(buffer, (kept,), (width,)))

    def line(self, where: RowPosition, pixel: Dim, rows: Dim, scratch: Buffer) -> None:
        """The sums of a single channel for some pixels, one behind the other in scratch memory."""
        b = self.builder
        if self.shape[where.pixel] == 1:
            self._store(where, pixel, 0, b.load(scratch, (0, 0)), [], lambda buffer: b.load(buffer, (0,)))
            return
        with b.loop("pixel", 0, rows, self.lanes) as i:
            left = remaining(rows, i.var)
            sums = b.load(scratch, (i.var, 0), (self.lanes,), axes=(0,), valid=(left,))
            axes = [TileAxis(where.pixel, self.lanes, left)]
            self._store(where, expr("+", pixel, i.var), 0, sums, axes, lambda buffer: b.load(buffer, (0,)))

    def _store(
        self, where: RowPosition, pixel: Dim, column: Dim, sums: Tile, axes: list[TileAxis], kept: Callable[[Buffer], Tile]
    ) -> None:
        at, position = self.at, self._position(where)
        with at.loops({**where.places, 1: column, where.pixel: pixel}, axes):
            for (value, place), buffer in zip(self.channels, self.kept, strict=True):
                at.give(value, place, kept(buffer))
            if self.real is not None:
                sums = self.real(at, position, sums)
            if self.bias is not None:
                sums = self.builder.map("add", sums, at.tile(self.bias, (position[1],)))
            at.give(self.sums, position, sums)
            for v in self.outs:
                at.store(v, position, at.tile(v, position))

    def _position(self, where: RowPosition) -> Position:
        if where.step == 1 and where.first == 0:
            return self.position
        moved = shifted(scaled(self.position[where.pixel], where.step), where.first)
        return (*self.position[: where.pixel], moved, *self.position[where.pixel + 1 :])

    def parts(
        self, where: RowPosition, pixel: Dim, channels: Channels, parts: Sequence[tuple[int, Tile]], scratch: Buffer | None
    ) -> None:
        """All sums of a block: tiles of [rows, width] with the place of their first pixel in the block."""
        b = self.builder
        if scratch is None:
            for start, tile in parts:
                rows, width = tile.type.shape
                self.tile(where, expr("+", pixel, start), channels, tile if rows > 1 else b.reshape(tile, (width,)))
            return
        for start, tile in parts:
            b.store(scratch, (start, 0), tile)
        rows = max(start + tile.type.shape[0] for start, tile in parts)
        if self.single:
            self.line(where, pixel, rows, scratch)
            return
        self.through(where, pixel, channels, rows, parts[0][1].type.shape[1], scratch)

    def through(
        self, where: RowPosition, pixel: Dim, channels: Channels, rows: int, width: int, scratch: Buffer, kept: Dim = 0
    ) -> None:
        """All sums of a block, [rows, width] in scratch memory."""
        b, lanes = self.builder, self.lanes
        if not self.squares or rows <= _FEW_PIXELS:
            with b.loop("pixel", 0, rows) as i:
                self.tile(where, expr("+", pixel, i.var), channels, b.load(scratch, (i.var, 0), (width,)), kept)
            return
        turned = all(_plane_by_plane(v, where.pixel) for v in self.outs)
        with b.loop("vector", 0, width, lanes) as v:
            at, exact = expr("+", channels.at, v.var), channels.exact and width % lanes == 0
            last = expr("+", channels.at, width)
            here = Channels(at, last if channels.exact else expr("min", channels.end, last), exact)

            def square(first: Dim, left: int | None) -> None:
                sums, at = b.load(scratch, (first, v.var), (lanes, lanes)), expr("+", pixel, first)
                self._square(where, at, here, TileAxis(where.pixel, lanes, left), sums, expr("+", kept, v.var), turned=turned)

            whole = rows // lanes * lanes
            if whole > _SPELLED_SQUARES * lanes:
                with b.loop("square", 0, whole, lanes) as first:
                    square(first.var, None)
            else:
                for n in range(0, whole, lanes):
                    square(n, None)
            if rows > whole:
                square(whole, rows - whole)

    def _square(
        self, where: RowPosition, pixel: Dim, channels: Channels, pixels: TileAxis, sums: Tile, kept: Dim, *, turned: bool
    ) -> None:
        """As many pixels as channels; turned round, so that vectors run along pixels, where results lie like that."""
        b, lanes = self.builder, self.lanes
        axes = [pixels, channels.along(lanes)]
        if turned:
            axes, sums = axes[::-1], b.transpose(sums, (1, 0))
        shape = (lanes, 1) if turned else (lanes,)
        self._store(
            where, pixel, channels.at, sums, axes, lambda buffer: b.reshape(b.load(buffer, (kept,), (lanes,)), shape)
        )


def _plane_by_plane(v: Value, pixel: int) -> bool:
    """Whether neighbours along a row lie side by side, and channels do not."""
    t = v.type
    if not isinstance(t, TensorType) or t.layout.strided or t.shape[1] == 1 or t.shape[pixel] == 1:
        return False
    strides = dense_strides(t.shape, t.layout)
    return strides[pixel] == 1 and strides[1] != 1
