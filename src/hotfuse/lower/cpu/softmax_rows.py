"""Softmax of rows that lie one behind the other: three rows in hand at a time.

    m, q = max(x[0]), 1
    for row
      for vector                      one loop; what it does to three rows does not wait for each other
        y[row] = e = exp(x[row] - m);  s += e
        n = max(n, x[row + 1])
        y[row - 1] *= q
      m, q = n, 1 / s
    y[last] *= q

Row by row, the maximum, the exponentials and the products are three short loops that each wait for a number the one before
ends with, and each leaves most of the core idle. The first row has none before it and takes itself, times 1, instead; the last
one takes its own maximum again, which nobody reads. Where data is large, the loop asks for the lines of the rows after those as
well (`ahead`). Other softmaxes (of dims that are not the last, of sizes that only a call tells, fused with what is around them)
are ordinary groups.
"""

from __future__ import annotations

from hotfuse.analysis.vector_loops import HEAVY_VECTORS, fits_three_rows
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Node, Value, output_values
from hotfuse.ir.types import DType, Layout
from hotfuse.lower.common.algebra import product
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.cpu import prefetch
from hotfuse.lower.cpu.folds import highest
from hotfuse.lower.cpu.gemm.gemm import let
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer, Tile

OPS = frozenset({"aten.softmax", "aten._softmax", "aten.special_softmax"})
BLOCK_ROWS, MIN_ROWS = 16, 4
"""Rows that a thread takes at once, and those it takes where there are few for many threads: beginning and ending cost a quarter
of a row."""


def is_rows(graph: Graph, core: Core) -> bool:
    """Whether a group is one softmax of dense rows of known length, four of which the second-level cache keeps easily."""
    if len(graph.nodes) != 1 or packet(graph.nodes[0].op) not in OPS:
        return False
    (node,) = graph.nodes
    x, y = argument(node, "self"), node.outs[0]
    if not isinstance(x, Value) or not shape_of(x) or output_values(graph) != (y,):
        return False
    types = (tensor_type(x), tensor_type(y))
    if any(t.dtype is not DType.F32 or t.layout != Layout() for t in types):
        return False
    columns, dim = shape_of(x)[-1], argument(node, "dim")
    if not isinstance(columns, int) or not isinstance(dim, int) or dim % len(shape_of(x)) != len(shape_of(x)) - 1:
        return False
    return fits_three_rows(columns, core.lanes, core.l2)


def lower_rows(graph: Graph, core: Core, *, name: str = "softmax") -> Lowered:
    """The kernel of a group that `is_rows`."""
    (node,) = graph.nodes
    builder = KernelBuilder(name, node.loc)
    memory = KernelBuffers(builder, graph)
    _Rows(builder, memory, node, core).write()
    return memory.finish(builder.finish())


class _Rows:
    """One kernel while it is written."""

    def __init__(self, b: KernelBuilder, memory: KernelBuffers, node: Node, core: Core) -> None:
        (x,), (y,) = node.ins, node.outs
        self.b, self.width, self.threads = b, HEAVY_VECTORS * core.lanes, core.threads
        self.x, self.y = memory.place(x).buffer, memory.output(y).buffer
        self.large = prefetch.exceeds_caches((self.x, self.y), core)
        *outer, columns = shape_of(x)
        assert isinstance(columns, int)
        self.rows, self.columns = product(tuple(outer)), columns

    def write(self) -> None:
        """Blocks of rows, which threads share."""
        b = self.b
        each: Dim = BLOCK_ROWS
        if self.threads > 2:
            each = expr("max", MIN_ROWS, expr("min", BLOCK_ROWS, expr("ceildiv", self.rows, self.threads)))
        with (
            let(b, "each", each) as high,
            b.parallel("block", expr("ceildiv", self.rows, high)) as block,
            let(b, "first", expr("*", block.var, high)) as first,
            let(b, "end", expr("min", self.rows, expr("+", first, high))) as end,
        ):
            self._block(first, end)

    def _block(self, first: Dim, end: Dim) -> None:
        b = self.b
        high = self._highest(first)
        with b.loop("row", first, end, carry=[high, b.fill(1.0, DType.F32)]) as row:
            before = expr("max", first, expr("+", row.var, -1))
            behind = expr("min", expr("+", row.var, 1), expr("+", end, -1))
            row.yields(*self._three(row.var, before, behind, *row.carried))
        share = row.outs[1]
        with b.loop("k", 0, self._whole, self.width) as k:
            self._scale(expr("+", end, -1), k.var, None, share)
        if self._left:
            self._scale(expr("+", end, -1), self._whole, self._left, share)

    @property
    def _whole(self) -> int:
        return self.columns // self.width * self.width

    @property
    def _left(self) -> int:
        return self.columns - self._whole

    def _three(self, row: Dim, before: Dim, behind: Dim, high: Tile, share: Tile) -> tuple[Tile, Tile]:
        """The exponentials of a row, the maximum of the next, the products of the one before: that maximum and the row's share."""
        b = self.b

        def step(k: Dim, valid: int | None, top: Tile, total: Tile) -> tuple[Tile, Tile]:
            e = b.map("decay", b.map("sub", self._load(self.x, row, k, valid), high))
            self._store(row, k, valid, e)
            other = self._load(self.x, behind, k, valid)
            self._scale(before, k, valid, share)
            if valid is None and self.large != 0:
                self._ask(row, behind, k)
            return b.map("select", b.map("gt", other, top), other, top), b.map("add", e, total)

        carry = [b.fill(-float("inf"), DType.F32, (self.width,)), b.fill(0.0, DType.F32, (self.width,))]
        with b.loop("k", 0, self._whole, self.width, carry=carry) as k:
            k.yields(*step(k.var, None, *k.carried))
        top, total = k.outs
        if self._left:
            top, total = step(self._whole, self._left, top, total)
        summed = b.reshape(b.reduce("sum", total, 0), ())
        return highest(b, top), b.map("div", b.fill(1.0, DType.F32), summed)

    def _ask(self, row: Dim, behind: Dim, k: Dim) -> None:
        """The lines that the next row's turn will read from memory, and those it will write."""
        with self.b.when(self.large):
            for n in range(0, self.width, prefetch.LINE_BYTES // 4):
                for buffer, at in ((self.x, behind), (self.y, row)):
                    where = self._at(expr("+", at, 1), expr("+", k, n))
                    self.b.prefetch(buffer, where, prefetch.LEVEL, write=buffer is self.y)

    def _highest(self, row: Dim) -> Tile:
        b = self.b

        def step(k: Dim, valid: int | None, top: Tile) -> Tile:
            x = self._load(self.x, row, k, valid)
            return b.map("select", b.map("gt", x, top), x, top)

        with b.loop("k", 0, self._whole, self.width, carry=[b.fill(-float("inf"), DType.F32, (self.width,))]) as k:
            k.yields(step(k.var, None, *k.carried))
        (top,) = k.outs
        return highest(b, step(self._whole, self._left, top) if self._left else top)

    def _scale(self, row: Dim, k: Dim, valid: int | None, share: Tile) -> None:
        self._store(row, k, valid, self.b.map("mul", self._load(self.y, row, k, valid), share))

    def _at(self, row: Dim, k: Dim) -> tuple[Dim, ...]:
        return (expr("+", expr("*", row, self.columns), k),)

    def _load(self, buffer: Buffer, row: Dim, k: Dim, valid: int | None) -> Tile:
        """Elements; what is beyond the row is -inf, which is no maximum and whose exponential is 0."""
        return self.b.load(buffer, self._at(row, k), (self.width,), valid=(valid,), fill=-float("inf"))

    def _store(self, row: Dim, k: Dim, valid: int | None, tile: Tile) -> None:
        self.b.store(self.y, self._at(row, k), tile, valid=(valid,))
