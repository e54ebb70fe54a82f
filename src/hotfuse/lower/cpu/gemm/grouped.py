"""Rows times the weights of their experts: one product for each expert that has rows.

    checked = ends, each between the one before and the last row               anything else is a fault of the call
    for expert with rows:
      C[begin : end] = finish(A[begin : end] @ W[expert])                      as any product (`lower.cpu.gemm.gemm`)
    rows behind the last end: finish(0)

Which rows an expert has is data: the kernel counts its loops by the ends that it reads, so one kernel serves every routing, and the
weights of an expert that nobody chose are not read. Columns that the group cuts the result into (a gate and what it opens) share
panels, so that both halves of a row are in registers at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import replace

from hotfuse.analysis.experts import column_parts
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, output_values
from hotfuse.ir.types import DType
from hotfuse.lower.common import operands
from hotfuse.lower.common.algebra import mul, same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, PackArgument, tensor_type
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder
from hotfuse.lower.common.positions import Space
from hotfuse.lower.common.tile_values import Evaluator, TileAxis
from hotfuse.lower.cpu.gemm.gemm import FinishedTile, Product
from hotfuse.lower.cpu.gemm.gemm import product as write_product
from hotfuse.lower.cpu.gemm.lhs import Left
from hotfuse.lower.cpu.tiling import Core, choose
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.own.experts import PRODUCT
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, BufferKind, Tile

_REALS = (DType.F32, DType.F64, DType.F16, DType.BF16)


def lower_grouped(graph: Graph, core: Core, strides: Mapping[str, tuple[int, ...]] | None = None, *, name: str = "") -> Lowered:
    """The kernel of a group around one such product; raises CannotLower where there is none."""
    if sum(packet(n.op) == PRODUCT for n in graph.nodes) != 1:
        raise CannotLower("several products by expert in one group")
    return _ExpertGroup(graph, core, strides or {}, name).lowered()


class _ExpertGroup:
    """A group while it is lowered."""

    def __init__(self, graph: Graph, core: Core, strides: Mapping[str, tuple[int, ...]], name: str) -> None:
        node = next(n for n in graph.nodes if packet(n.op) == PRODUCT)
        x, weight, self.ends = (operands.tensor(node, n) for n in ("x", "weight", "ends"))
        if weight.name not in {p.value.name for p in graph.params}:
            raise CannotLower("the weights of experts are not constant", where=str(node.loc))
        (self.rows, k), sizes = shape_of(x), shape_of(weight)
        if not all(isinstance(n, int) and n > 0 for n in sizes) or not same(k, sizes[1]):
            raise CannotLower(f"a product over {k} with {sizes}", where=str(node.loc))
        self.experts, self.k, _ = (n for n in sizes if isinstance(n, int))
        dtype = tensor_type(x).dtype
        if dtype not in _REALS or any(tensor_type(v).dtype is not dtype for v in (weight, *node.outs)):
            raise CannotLower(f"experts of {tensor_type(weight).dtype.value} for rows of {dtype.value}", where=str(node.loc))
        self.graph = graph
        self.acc = DType.F64 if dtype is DType.F64 else DType.F32
        if self.acc is DType.F64:  # as many lanes as fp32 has, in twice the registers
            core = replace(core, registers=core.registers // 2)
        self.outs = list(dict.fromkeys(output_values(graph)))
        self.parts = column_parts(graph.nodes, node.outs[0], {v.name for v in self.outs})
        self.n = self.parts[0].n
        self.tiling = choose(core, self.rows, [p.n for p in self.parts], self.k, together=len(self.parts) > 1)
        taken = tuple(PackSource(weight.name, WeightOrder.COLUMNS, p.n, p.first, (p.step,)) for p in self.parts)
        self.spec = PackSpec(taken, self.k, self.tiling.nr, dtype, together=len(self.parts) > 1, experts=self.experts)
        self.builder = KernelBuilder(name or "grouped_mm", loc=node.loc)
        self.memory = KernelBuffers(self.builder, graph, strides)
        self.left = Left(self.memory, x, self.k, self.tiling)

    def lowered(self) -> Lowered:
        """The kernel with its call."""
        b, spec, panels = self.builder, self.spec, self.spec.panels // self.experts
        for v in self.outs:
            shape = shape_of(v)
            if len(shape) != 2 or not same(shape[0], self.rows) or shape[1] != self.n:
                raise CannotLower(f"output %{v.name} has another shape than the product it is made from")
        packed = b.buffer("panels", BufferKind.CONST, spec.dtype, spec.shape, spec.stride)
        begins, lengths = self._checked()
        with (
            b.loop("expert", 0, self.experts) as e,
            self._rows_of(begins, lengths, e.var) as (begin, length),
            b.when(expr("<", 0, length)),
        ):
            write_product(b, self._product(packed, begin, length, e.var, panels),
                          lambda f: self._finish(replace(f, row=expr("+", begin, f.row))), in_loop=True)  # fmt: skip
        with (
            b.given("last", begins, (self.experts,), 0, expr("+", self.rows, 1)) as last,
            b.loop("row", last, self.rows) as row,
            b.loop("panel", 0, panels) as panel,
        ):
            self._finish(FinishedTile(b, b.fill(0, self.acc, (1, spec.nr)), spec.nr, 1, row.var, panel.var))
        return self.memory.finish(b.finish(), {packed.name: PackArgument(packed.name, spec)})

    def _product(self, packed: Buffer, begin: Dim, length: Dim, expert: Dim, panels: int) -> Product:
        """That of one expert."""
        def lhs(row: Dim, k: Dim, rows: int) -> Tile:
            return self.left.column(expr("+", begin, row), k, rows)

        def prepare(row: Dim, height: Dim) -> None:
            self.left.prepare(expr("+", begin, row), height)

        return Product(lhs, packed, length, self.k, panels, self.tiling, self.acc, prepare if self.left.prepares else None,
                       first_panel=expr("*", expert, panels))  # fmt: skip

    def _checked(self) -> tuple[Buffer, Buffer]:
        """Where the rows of each expert begin, with where the last ones end behind; and how many there are."""
        b, i64 = self.builder, DType.I64
        begins, lengths = b.shared("begins", i64, (self.experts + 1,)), b.shared("lengths", i64, (self.experts,))
        place = self.memory.place(self.ends)
        b.store(begins, (0,), b.fill(0, i64))
        with b.loop("expert", 0, self.experts, carry=[b.fill(0, i64)]) as e:
            (before,) = e.carried
            at = mul(e.var, place.strides[0]) if place.flat else e.var
            end = b.cast(b.load(place.buffer, (at,)), i64)
            fits = b.map("and", b.map("le", before, end), b.map("le", end, b.index(self.rows)))
            b.effect("require", fits)
            end = b.map("select", fits, end, before)
            b.store(begins, (expr("+", e.var, 1),), end)
            b.store(lengths, (e.var,), b.map("sub", end, before))
            e.yields(end)
        return begins, lengths

    @contextlib.contextmanager
    def _rows_of(self, begins: Buffer, lengths: Buffer, expert: Dim) -> Generator[tuple[Dim, Dim]]:
        """An expert's first row and how many it has, as numbers to count by."""
        most = expr("+", self.rows, 1)
        with (
            self.builder.given("begin", begins, (expert,), 0, most) as begin,
            self.builder.given("length", lengths, (expert,), 0, most) as length,
        ):
            yield begin, length

    def _finish(self, f: FinishedTile) -> None:
        """Everything that happens to a tile of sums."""
        b, n, width = self.builder, self.n, self.spec.width
        column = mul(f.panel, width)
        space = Space.of((self.rows, n))
        position = (space.root(0), space.root(1))
        at = Evaluator(self.memory, self.graph, space)
        along = [TileAxis(1, width, None if n % width == 0 else remaining(n, column))] if n > 1 else []

        def each(sums: Tile, row: Dim) -> None:
            with at.loops({0: row, 1: column}, along):
                for i, part in enumerate(self.parts):
                    own = sums if len(self.parts) == 1 and n > 1 else b.extract(sums, (i * width,), (width if n > 1 else 1,))
                    own = own if n > 1 else b.reshape(own, ())
                    at.give(part.out, position, b.cast(own, tensor_type(part.out).dtype))
                for v in self.outs:
                    at.store(v, position, at.tile(v, position))

        f.each_row(each)

