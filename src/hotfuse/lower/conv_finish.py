"""What happens to a convolution's sums before they are stored: bias, normalization, activation, residual.

What depends on the channel alone (a batch norm's scale and shift, say) is computed once per panel and kept in scratch memory.
Short epilogues work on whole register tiles; long ones go through scratch memory pixel by pixel, to keep the code short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Value
from hotfuse.ir.types import DType
from hotfuse.lower.errors import CannotLower
from hotfuse.lower.index import Position, Space, counters_of
from hotfuse.lower.lowered import Memory, tensor_type
from hotfuse.lower.values import Along, Apply, Definitions, Evaluator
from hotfuse.lower.views import Alias, shape_of
from hotfuse.ops.table import packet
from hotfuse.tile.build import remaining
from hotfuse.tile.program import Buffer, Tile

_CHEAP = frozenset({"add", "sub", "mul", "relu", "neg", "maximum", "minimum", "hardtanh", "relu6", "clamp", "alias"})
_FEW = 6
"""Up to so many cheap nodes are done on whole register tiles."""


@dataclass(frozen=True, slots=True)
class Where:
    """The output row that is being computed."""

    image: Dim
    line: Dim


class Finish:
    """Writes epilogues; one per kernel."""

    def __init__(self, memory: Memory, graph: Graph, sums: Value, bias: Value | None, outs: Sequence[Value]) -> None:
        self.builder = memory.builder
        self.sums, self.bias, self.outs = sums, bias, tuple(outs)
        self.shape = shape_of(sums)
        self.space = Space.of(self.shape)
        self.position: Position = tuple(self.space.root(i) for i in range(len(self.shape)))
        self.at = Evaluator(memory, graph, self.space)
        after = self._after(graph)
        self.channels = self._per_channel(after)
        self.kept: list[Buffer] = []
        later = [n for n in graph.nodes if any(v.name in after for v in n.ins)]
        self.short = len(later) <= _FEW and all(packet(n.op).split(".")[-1] in _CHEAP for n in later)

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

    def _along(self, column: Dim, width: int) -> list[Along]:
        n = self.columns
        return [Along(1, width, None if n % width == 0 else remaining(n, column))] if n > 1 else []

    def make_room(self, width: int) -> None:
        """Scratch memory for what is computed once per channel: `width` of them at a time."""
        for i in range(len(self.channels)):
            self.kept.append(self.builder.scratch(f"channel{i}", DType.F32, (width,)))

    def prepare(self, column: Dim, width: int, at: Dim = 0) -> None:
        """Compute it for the channels from `column` on, and keep it at a place of the scratch memory."""
        if not self.channels:
            return
        shape = (width,) if self.columns > 1 else (1,)
        with self.at.loops({1: column}, self._along(column, width)):
            for (value, position), buffer in zip(self.channels, self.kept, strict=True):
                self.builder.store(buffer, (at,), self.builder.bcast(self.at.tile(value, position), shape))

    def tile(self, where: Where, pixel: Dim, column: Dim, sums: Tile, kept: Dim = 0) -> None:
        """The sums of one pixel, [width], or of several, [rows, width]."""
        b, at = self.builder, self.at
        width = sums.type.shape[-1]
        several = len(sums.type.shape) == 2
        places = {0: where.image, 1: column, len(self.shape) - 1: pixel}
        if len(self.shape) == 4:
            places[2] = where.line
        axes = self._along(column, width)
        if self.columns == 1:
            sums, width = b.reshape(b.extract(sums, (0,), (1,)), ()), 1
        if several:
            axes = [Along(len(self.shape) - 1, sums.type.shape[0]), *axes]
        with at.loops(places, axes):
            for (value, position), buffer in zip(self.channels, self.kept, strict=True):
                at.give(value, position, b.load(buffer, (kept,), (width,) if self.columns > 1 else ()))
            at.give(self.sums, self.position, self._with_bias(sums))
            for v in self.outs:
                at.store(v, self.position, at.tile(v, self.position))

    def _with_bias(self, sums: Tile) -> Tile:
        if self.bias is None:
            return sums
        return self.builder.map("add", sums, self.at.tile(self.bias, (self.position[1],)))

    def parts(self, where: Where, pixel: Dim, column: Dim, parts: Sequence[tuple[int, Tile]], scratch: Buffer | None) -> None:
        """All sums of a block: tiles of [rows, width] with the place of their first pixel in the block."""
        b = self.builder
        if scratch is not None:
            for start, tile in parts:
                b.store(scratch, (start, 0), tile)
            rows = max(start + tile.type.shape[0] for start, tile in parts)
            with b.loop("pixel", 0, rows) as i:
                sums = b.load(scratch, (i.var, 0), (parts[0][1].type.shape[1],))
                self.tile(where, expr("+", pixel, i.var), column, sums)
            return
        for start, tile in parts:
            rows, width = tile.type.shape
            if rows > 1 and self.columns > 1:
                self.tile(where, expr("+", pixel, start), column, tile)
                continue
            for i in range(rows):
                one = b.reshape(b.extract(tile, (i, 0), (1, width)), (width,))
                self.tile(where, expr("+", pixel, start + i), column, one)
