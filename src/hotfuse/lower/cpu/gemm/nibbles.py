"""Few rows times weights of four bits, which become floats in registers.

    parallel panel of 64 columns:
      for block of K:
        part = 0
        for word:                              eight weights of each of 64 columns, 16 columns a vector
          for nibble:
            w = float(word & mask | magic) - (magic + zero)
            part = fma(x[row, k], w, part)     for every row
        acc = fma(part, scale, acc)
      y = acc

A nibble in the lower 20 bits of a word is a part of a float's fraction where it stands: with an exponent in front of it the
float is `magic + q`, where `magic` is a power of two, and taking `magic + zero` off is exact. So a weight costs a mask, a
subtraction and a multiplication; the three highest nibbles of a word share one shift. One row reads each weight once: half a byte
instead of four, which is what bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common import operands
from hotfuse.lower.common.algebra import mul
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferView, KernelBuffers, Lowered, tensor_type
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.own.nibbles import MAX_ROWS, MIDDLE, PANEL, PRODUCT, WORD, nibble_product
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile

_LANES = 16
"""Columns of a vector; narrower machines take two."""
_ROWS = 4
"""Rows whose sums are in registers at once."""
_IN_PLACE = 5
"""Nibbles of a word that are masked where they stand; the others after a shift that puts the last one where the fifth was."""
_SHIFT = 4 * (WORD - _IN_PLACE)
_UNROLLED = 4
"""Words of a block that are written out."""
_FRACTION, _BIAS = 23, 127
"""Of a float."""


def lower_nibbles(graph: Graph, strides: Mapping[str, tuple[int, ...]] | None = None, *, name: str = "nibble_mm") -> Lowered:
    """The kernel of a group that is one such product."""
    if len(graph.nodes) != 1 or packet(graph.nodes[0].op) != PRODUCT:
        raise CannotLower("weights of four bits are multiplied by a kernel of its own")
    (node,) = graph.nodes
    if not nibble_product(node, {p.value.name for p in graph.params}):
        raise CannotLower(f"a product of four bits with more than {MAX_ROWS} rows, or of other types", where=str(node.loc))
    b = KernelBuilder(name, node.loc)
    memory = KernelBuffers(b, graph, strides or {})
    _NibbleKernel(b, memory, graph).write()
    return memory.finish(b.finish())


class _NibbleKernel:
    """One product while its kernel is written."""

    def __init__(self, b: KernelBuilder, memory: KernelBuffers, graph: Graph) -> None:
        (node,) = graph.nodes
        self.b = b
        x, panels, scales = (operands.tensor(node, n) for n in ("x", "panels", "scales"))
        zeros, columns = argument(node, "zeros"), argument(node, "columns")
        (rows, _), sizes, blocks = shape_of(x), shape_of(panels), shape_of(scales)[1]
        assert isinstance(columns, int) and isinstance(rows, int) and isinstance(blocks, int) and isinstance(sizes[1], int)
        self.rows, self.columns, self.panels, self.words, self.blocks = rows, columns, sizes[0], sizes[1], blocks
        self.x, self.weights, self.scales = memory.place(x), memory.place(panels), memory.place(scales)
        self.zeros = memory.place(zeros) if isinstance(zeros, Value) else None
        self.y = memory.output(node.outs[0])
        assert tensor_type(x).dtype is DType.F32
        self.vectors = PANEL // _LANES

    def write(self) -> None:
        """All panels, and for each all rows, a few at a time."""
        with self.b.parallel("panel", self.panels) as panel:
            for first in range(0, self.rows, _ROWS):
                self._some(panel.var, range(first, min(first + _ROWS, self.rows)))

    def _some(self, panel: Dim, rows: range) -> None:
        b, v = self.b, self.vectors
        zero = b.fill(0, DType.F32, (_LANES,))
        with b.loop("block", 0, self.blocks, carry=[zero] * (len(rows) * v)) as block:
            parts = self._block(panel, block.var, rows, zero)
            scales = [self._column(self.scales, self.blocks, panel, block.var, i) for i in range(v)]
            block.yields(*(b.map("fma", p, scales[i % v], a) for i, (p, a) in enumerate(zip(parts, block.carried, strict=True))))
        for r, row in enumerate(rows):
            for i in range(v):
                column = expr("+", mul(panel, PANEL), i * _LANES)
                left = None if self.columns % PANEL == 0 else remaining(self.columns, column)
                at = _index(self.y, row, column)
                with b.when(expr("<", column, self.columns)):
                    b.store(self.y.buffer, at, block.outs[r * v + i], valid=[left])

    def _block(self, panel: Dim, block: Dim, rows: range, zero: Tile) -> list[Tile]:
        """The sums of one block of K, which its scale is for."""
        b, words = self.b, self.words // self.blocks
        shifts = self._shifts(panel, block)
        parts = [zero] * (len(rows) * self.vectors)
        first = mul(block, words)
        if words <= _UNROLLED:
            for w in range(words):
                parts = self._word(panel, expr("+", first, w), rows, parts, shifts)
            return parts
        whole = words // _UNROLLED * _UNROLLED
        with b.loop("word", 0, whole, _UNROLLED, carry=parts) as word:
            inner = list(word.carried)
            for w in range(_UNROLLED):
                inner = self._word(panel, expr("+", first, word.var, w), rows, inner, shifts)
            word.yields(*inner)
        parts = list(word.outs)
        for w in range(whole, words):
            parts = self._word(panel, expr("+", first, w), rows, parts, shifts)
        return parts

    def _shifts(self, panel: Dim, block: Dim) -> list[list[Tile | float]]:
        """What is to be taken off a float, by vector and by place in the word: `magic + zero`."""
        if self.zeros is None:
            return [[_magic(j) + MIDDLE for j in range(_IN_PLACE)]] * self.vectors
        b = self.b
        told = [self._column(self.zeros, self.blocks, panel, block, i) for i in range(self.vectors)]
        real = [b.cast(b.cast(z, DType.I32), DType.F32) for z in told]
        return [[b.map("add", z, _magic(j)) for j in range(_IN_PLACE)] for z in real]

    def _word(
        self, panel: Dim, word: Dim, rows: range, parts: Sequence[Tile], shifts: Sequence[Sequence[Tile | float]]
    ) -> list[Tile]:
        """The sums with eight weights of each column more."""
        b, v, new = self.b, self.vectors, list(parts)
        low = [b.load(*self._at(self.weights, self.words, panel, word, i), (_LANES,)) for i in range(v)]
        high = [b.map("shr", t, _SHIFT) for t in low]
        for k in range(WORD):
            place = k if k < _IN_PLACE else k - (WORD - _IN_PLACE)
            numbers = [
                b.bcast(b.load(self.x.buffer, _index(self.x, row, expr("+", mul(word, WORD), k))), (_LANES,)) for row in rows
            ]
            for i in range(v):
                bits = b.map("and", (low if k < _IN_PLACE else high)[i], 15 << 4 * place)
                real = b.bitcast(b.map("or", bits, (_BIAS + _FRACTION - 4 * place) << _FRACTION), DType.F32)
                weight = b.map("sub", real, shifts[i][place])
                for r, number in enumerate(numbers):
                    new[r * v + i] = b.map("fma", number, weight, new[r * v + i])
        return new

    def _column(self, view: BufferView, inner: int, panel: Dim, block: Dim, vector: int) -> Tile:
        return self.b.load(*self._at(view, inner, panel, block, vector), (_LANES,))

    def _at(self, view: BufferView, inner: int, panel: Dim, step: Dim, vector: int) -> tuple[Buffer, tuple[Dim, ...]]:
        """Columns of a vector in what lies as [panels, inner, 64]."""
        if not view.flat:
            return view.buffer, (panel, step, vector * _LANES)
        return view.buffer, (expr("+", mul(expr("+", mul(panel, inner), step), PANEL), vector * _LANES),)


def _magic(place: int) -> float:
    """The number whose last bit of precision is the first bit of a nibble at a place."""
    return float(1 << (_FRACTION - 4 * place))


def _index(view: BufferView, row: Dim, column: Dim) -> tuple[Dim, ...]:
    if not view.flat:
        return (row, column)
    return (expr("+", mul(row, view.strides[0]), mul(column, view.strides[1])),)
