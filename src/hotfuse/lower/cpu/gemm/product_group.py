"""Groups around matrix products with constant weights: linears that share an input, and what is done to their results.

    y = gelu(linear(x, W, b)) + r        one kernel: the sums stay in registers until y is stored
    q, k, v = linear(x, Wq), ...           one kernel over the panels of all three, three outputs
    y = silu(linear(x, Wg)) * linear(x, Wu)  one kernel whose panels have columns of both

The batch dims of x are one dimension of rows where that costs nothing (`lower.cpu.gemm.rows_through`). Otherwise each row finds
its batch indices by division.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Value, output_values, sources
from hotfuse.ir.types import ROW_MAJOR, DType
from hotfuse.lower.common import operands
from hotfuse.lower.common.algebra import mul, product, same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import (
    BufferArgument,
    KernelBuffers,
    Lowered,
    PackArgument,
    StateArgument,
    SymbolArgument,
    dense_strides,
    tensor_type,
)
from hotfuse.lower.common.pack import PackSource, PackSpec
from hotfuse.lower.common.positions import Position, Space
from hotfuse.lower.common.products import BYTES, Contraction, origins, products
from hotfuse.lower.common.quant import Scaling, bytes_taken, column_of, corrected, scaled
from hotfuse.lower.common.tile_values import Evaluator, TileAxis
from hotfuse.lower.cpu.gemm import amx
from hotfuse.lower.cpu.gemm.gemm import FinishedTile, Product, let
from hotfuse.lower.cpu.gemm.gemm import product as write_product
from hotfuse.lower.cpu.gemm.lhs import Left, rows_apart
from hotfuse.lower.cpu.gemm.rows_through import ProductRows
from hotfuse.lower.cpu.gemm.skipping import ActiveRows
from hotfuse.lower.cpu.gemm.sparse import ActiveSteps
from hotfuse.lower.cpu.tiling import Core, choose
from hotfuse.lower.ops.views import broadcast, shape_of
from hotfuse.lower.run.kernel_state import DENSE, NEVER, SKIPPED
from hotfuse.ops.contract import is_contraction
from hotfuse.ops.movement import RESHAPES
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import OWN, Buffer, BufferKind, Tile
from hotfuse.tile.type_rules import BLOCK_STEPS

_CHEAP = frozenset({"aten.add", "aten.sub", "aten.mul", "aten.relu", "aten.neg", "aten.maximum", "aten.minimum"})
_MAX_UNROLLED_NODES = 3
"""Up to so many cheap nodes are written out row by row; a longer epilogue is a loop over rows."""


def lower_contraction(
    graph: Graph, core: Core, strides: Mapping[str, tuple[int, ...]] | None = None, *, name: str = "", skipping: bool = False,
    sparse: int = 0,
) -> Lowered:  # fmt: skip
    """The kernel of a group; raises CannotLower where it cannot be one. Weights must be params of the graph.

    `skipping`: one that looks for rows of zeros, and does not multiply them where there are enough (`lower.cpu.gemm.skipping`).
    `sparse`: one that leaves out steps at which so many rows are zero (`lower.cpu.gemm.sparse`); 0 for none.
    """
    graph, scalings = bytes_taken(graph)
    found = products(graph, scalings)
    if not found:
        raise CannotLower("there is no product in the group")
    first = found[0]
    if any(c.x.name != first.x.name for c in found):
        raise CannotLower("the products of the group do not share their input")
    return _GemmGroup(graph, found, core, strides or {}, name, scalings).lowered(skipping=skipping, sparse=sparse)


class _GemmGroup:
    """A group while it is lowered."""

    def __init__(
        self,
        graph: Graph,
        found: tuple[Contraction, ...],
        core: Core,
        strides: Mapping[str, tuple[int, ...]],
        name: str,
        scalings: Mapping[str, Scaling],
    ) -> None:
        dims = shape_of(found[0].x)[:-1]
        batch = ProductRows(dims, product(dims))
        self.original = graph
        self.k = found[0].k
        self.m = batch.number
        self.together = self._meet(graph, found)
        dtype = tensor_type(found[0].x).dtype
        self.acc = DType.I32 if dtype in BYTES else DType.F64 if dtype is DType.F64 else DType.F32
        self.paired = core.precision == "bf16" and dtype is DType.F32
        if self.acc is DType.F64:  # as many lanes as fp32 has, in twice the registers
            core = replace(core, registers=core.registers // 2)
        real = self.acc is not DType.I32 and not self.paired
        self.tiling = choose(core, self.m, [c.n for c in found], self.k, together=self.together, narrow=real)
        self.blocks: amx.BlockTiling | None = None
        """How the matrix unit makes the products, where it does."""
        if self.paired and amx.fits(core, len(found), together=self.together):
            self.blocks = amx.cut(core, self.m, self.k)
            self.tiling = amx.tiling(core, self.tiling, self.blocks)
        if (matrices := batch.through(graph, found, strides)) is not None:
            graph, found = matrices, products(matrices, scalings)
            self.rows: tuple[Dim, ...] = (self.m,)
        elif any(packet(n.op) in RESHAPES for n in graph.nodes):
            raise CannotLower("rows are counted along several dims, and not every operand is laid out for that")
        else:
            self.rows = dims
        self.graph, self.found = graph, found
        weights = tuple(PackSource(c.weight.name, c.order, c.n) for c in found)
        kept = DType.I8 if self.acc is DType.I32 else DType.BF16 if self.paired else dtype
        self.spec = PackSpec(weights, self.k, self.tiling.nr, kept, together=self.together, paired=self.paired,
                             whole=BLOCK_STEPS // 2 if self.blocks else 1)  # fmt: skip
        self.builder = KernelBuilder(name or self.title(), loc=found[0].node.loc)
        self.memory = KernelBuffers(self.builder, graph, strides)
        shifted = any(c.scaling is not None and c.scaling.zero_w != 0 for c in found)
        x = found[0].x
        # A row that is read in pieces from all over the place is put together once, as a computed one is.
        made = any(v.name == x.name for n in graph.nodes for v in n.outs) or (
            self.acc is not DType.I32 and bool(rows_apart(self.memory.place(x), shape_of(x))))
        self.left = Left(self.memory, x, self.k, self.tiling, row_sums=shifted, paired=self.paired,
                         computed=self._computed if made else None, m=self.m,
                         block=self.blocks.rows if self.blocks else 0)  # fmt: skip
        self.column_sums: Buffer | None = None

    def title(self) -> str:
        """The ops, and the tile they are done in."""
        ops = [packet(n.op).split(".")[-1] for n in self.graph.nodes]
        return f"{'_'.join(ops[:6])}_{self.tiling.mr}x{self.tiling.nr}"

    # -- the kernel

    def lowered(self, *, skipping: bool = False, sparse: int = 0) -> Lowered:
        """The kernel with its call."""
        b, spec = self.builder, self.spec
        owners = self._owners()
        packed = b.buffer("panels", BufferKind.CONST, spec.dtype, spec.shape, spec.stride)
        if self.blocks is not None and not skipping and not sparse:
            assert self.left.ready is not None
            self.left.prepare_all()
            amx.product(b, self.m, self.left.ready, packed, self.blocks, lambda f: self._finish(f, owners),
                           self.tiling.threads)
            return self._call(packed)
        prepare = self.left.prepare if self.left.prepares else None
        p = Product(self.left.column, packed, self.m, self.k, spec.panels, self.tiling, self.acc, prepare, paired=self.paired,
                    last=self.tiling.last)  # fmt: skip
        long = [n for n in self.graph.nodes if not is_contraction(n) and packet(n.op) not in RESHAPES]
        simple = len(long) <= _MAX_UNROLLED_NODES and all(packet(n.op) in _CHEAP for n in long) and self.acc is DType.F32
        in_loop = not simple or not isinstance(self.m, int) or len(self.found) > 1 or self.rows != (self.m,)
        if skipping:
            return self._skipping(p, owners, in_loop=in_loop)
        if sparse:
            return self._sparse(p, owners, sparse, in_loop=in_loop)
        self.left.prepare_all()
        write_product(b, p, lambda f: self._finish(f, owners), in_loop=in_loop)
        return self._call(packed)

    def _skipping(self, p: Product, owners: list[list[Value]], *, in_loop: bool) -> Lowered:
        """Both sides: with rows of zeros left out, and as it always is."""
        if self.paired or self.acc is DType.I32:
            raise CannotLower("rows of zeros are looked for in products of real numbers that are not rounded")
        b, x = self.builder, self.found[0].x
        rows = ActiveRows(b, self.m, self.k, self.tiling.lanes, self._part)
        with rows.counted() as (active, enough):
            with b.when(enough):
                rows.tell(SKIPPED)
                left = Left(self.memory, x, self.k, self.tiling, computed=rows.gathered)
                some = replace(p, lhs=left.column, m=active, prepare=left.prepare)
                write_product(b, some, lambda f: self._finish(replace(f, place=rows.place), owners), in_loop=True)
                rows.rest(active, p.panels, self.tiling.nr, self.acc, lambda f: self._finish(f, owners))
            with b.when(expr("not", enough)):
                rows.tell(DENSE)
                write_product(b, p, lambda f: self._finish(f, owners), in_loop=in_loop)
        assert isinstance(p.b, Buffer)
        return self._call(p.b, rows.state)

    def _sparse(self, p: Product, owners: list[list[Value]], together: int, *, in_loop: bool) -> Lowered:
        """Both sides: with steps left out at which a few rows are zero, and as it always is."""
        if self.paired or self.acc is DType.I32 or self.left.ready is not None:
            raise CannotLower("zeros within rows are looked for in rows that are multiplied as they lie")
        b = self.builder
        steps = ActiveSteps(b, self.m, self.k, self.tiling.lanes, self.left, together)
        with steps.counted() as enough:
            with b.when(enough):
                steps.tell(SKIPPED)
                steps.product(p, lambda f: self._finish(f, owners))
            with b.when(expr("not", enough)):
                steps.tell(DENSE)
                write_product(b, p, lambda f: self._finish(f, owners), in_loop=in_loop)
        assert isinstance(p.b, Buffer)
        return self._call(p.b, steps.state)

    def _part(self, row: Dim, step: Dim, width: int, left: Dim | None, then: Callable[[Tile], None]) -> None:
        """A part of a row of the left operand, computed or as it lies."""
        if self.left.computed is not None:
            self._computed(row, step, width, left, then)
        else:
            then(self.left.read(row, step, (1, width), valid=() if left is None else (None, left)))

    def _computed(self, row: Dim, step: Dim, width: int, left: Dim | None, then: Callable[[Tile], None]) -> None:
        """A part of a row of what the group computes in front of its products: arithmetic on elements, and nothing else."""
        b, rank, x = self.builder, len(self.rows), self.found[0].x
        space = Space.of((*self.rows, self.k))
        at = Evaluator(self.memory, self.graph, space)
        with _batch(b, row, self.rows) as where, at.loops({**where, rank: step}, [TileAxis(rank, width, left)]):
            then(at.tile(x, tuple(space.root(i) for i in range(rank + 1))))

    def _meet(self, graph: Graph, found: tuple[Contraction, ...]) -> bool:
        """Whether an output needs several products at once."""
        of = origins(graph, found)
        meet = any(len(of.get(v.name, ())) > 1 for v in output_values(graph))
        if meet and len({c.n for c in found}) > 1:
            raise CannotLower("products of different widths meet in one output")
        return meet

    def _owners(self) -> list[list[Value]]:
        """Per product, the outputs that are made from its result; those of products that meet are all the first one's."""
        of = origins(self.graph, self.found)
        owners: list[list[Value]] = [[] for _ in self.found]
        for v in dict.fromkeys(output_values(self.graph)):
            if not of.get(v.name):
                raise CannotLower(f"output %{v.name} is not made from a product of the group")
            owner = 0 if self.together else min(of[v.name])
            full = (*self.rows, self.found[owner].n)
            shape = shape_of(v)
            if len(shape) != len(full) or not all(same(a, b) for a, b in zip(shape, full, strict=True)):
                raise CannotLower(f"output %{v.name} has another shape than the product it is made from")
            owners[owner].append(v)
        return owners

    def _finish(self, f: FinishedTile, owners: list[list[Value]]) -> None:
        """Everything that happens to a tile of sums; each product has its own panels."""
        if self.together or len(self.found) == 1:
            self._finish_some(f, self.found, owners[0], f.panel)
            return
        start = 0
        for c, outs, source in zip(self.found, owners, self.spec.sources, strict=True):
            end = start + self.spec.panels_of(source)
            if outs:
                with self.builder.when(expr("and", expr("<=", start, f.panel), expr("<", f.panel, end))):
                    self._finish_some(f, (c,), outs, expr("+", f.panel, -start))
            start = end

    def _finish_some(self, f: FinishedTile, some: tuple[Contraction, ...], outs: list[Value], panel: Dim) -> None:
        """The outputs of products whose columns lie side by side in the tile."""
        b, n, width, rank = self.builder, some[0].n, self.spec.width, len(self.rows)
        column = mul(panel, width)
        space = Space.of((*self.rows, n))
        position = tuple(space.root(i) for i in range(rank + 1))
        at = Evaluator(self.memory, self.graph, space)
        wide = f.nr if len(some) == 1 else width
        along = [TileAxis(rank, wide, None if n % width == 0 else remaining(n, column))] if n > 1 else []

        def each(sums: Tile, number: Dim) -> None:
            with _batch(b, number, self.rows) as where, at.loops({**where, rank: column}, along):
                for i, c in enumerate(some):
                    own = sums if len(some) == 1 and n > 1 else b.extract(sums, (i * width,), (width if n > 1 else 1,))
                    own = own if n > 1 else b.reshape(own, ())
                    if c.scaling is not None:
                        columns, row = (f.panel, i * width), expr("+", number, expr("*", f.row, -1))
                        own = self._real(at, c, own, position, columns, row)
                    at.give(c.out, position, self._with_bias(at, c, own, position))
                for v in outs:
                    at.store(v, position, at.tile(v, position))

        f.each_row(each)

    def _with_bias(self, at: Evaluator, c: Contraction, sums: Tile, position: Position) -> Tile:
        if c.bias is not None:
            shape, given = shape_of(c.bias), tensor_type(c.bias).dtype
            if shape and shape[-1] not in (1, c.n):
                raise CannotLower(f"the bias has {shape[-1]} columns, the product {c.n}")
            if given is not tensor_type(c.out).dtype:
                raise CannotLower(f"the bias is {given.value}")
        return operands.completed(at, sums, c.out, position, c.scale, c.bias, c.bias_scale)

    def _real(
        self, at: Evaluator, c: Contraction, sums: Tile, position: Position, columns: tuple[Dim, int], row: Dim
    ) -> Tile:
        """Sums of bytes as real numbers; `columns` is where their columns' sums are, `row` their row in the block."""
        b, s, real = self.builder, c.scaling, tensor_type(c.out).dtype
        assert s is not None
        values = {v.name: v for v in sources(self.graph)}

        def number(v: Value) -> Tile:
            return at.tile(values[v.name], broadcast(position, shape_of(c.out), shape_of(v)))

        def of_columns() -> Tile:
            if self.column_sums is None:
                spec = replace(self.spec, dtype=DType.I32)
                shape, stride = (spec.panels, spec.nr), (spec.panel_stride, 1)
                self.column_sums = b.buffer("column_sums", BufferKind.CONST, spec.dtype, shape, stride)
            return b.load(self.column_sums, columns, sums.type.shape)

        def of_row() -> Tile:
            assert self.left.sums is not None
            return b.load(self.left.sums, (row,))

        def of_weight(scale: Value) -> Tile:
            column = column_of(scale, c.order, c.n)
            zeros = list(broadcast(position, shape_of(c.out), (1,) * len(shape_of(scale))))
            if column >= 0:
                zeros[column] = position[-1]
            return at.tile(values[scale.name], tuple(zeros))

        return scaled(b, b.cast(corrected(b, sums, s, self.k, number, of_columns, of_row), real), s, number, of_weight)

    def _call(self, packed: Buffer, state: Buffer | None = None) -> Lowered:
        kernel, memory = self.builder.finish(), self.memory
        buffers: dict[str, BufferArgument | PackArgument | StateArgument] = {a.buffer: a for a in memory.arguments}
        buffers[packed.name] = PackArgument(packed.name, self.spec)
        if state is not None:
            buffers[state.name] = StateArgument(state.name, (NEVER, 0, 0))
        if self.column_sums is not None:
            name = self.column_sums.name
            buffers[name] = PackArgument(name, replace(self.spec, dtype=DType.I32))
        sizes = {a.size: a for a in memory.runtime}
        written = dict.fromkeys(output_values(self.original))
        strides = tuple((v.name, self._written(v)) for v in written)
        given = [buffers[b.name] for b in kernel.buffers if b.kind not in OWN]
        return Lowered(kernel, (*given, *(sizes.get(s, SymbolArgument(s, s)) for s in kernel.sizes)), strides)

    def _written(self, v: Value) -> tuple[Dim, ...]:
        """An output's strides in its own shape; one that was written as a matrix is row-major."""
        strides, shape = self.memory.output(v).strides, shape_of(v)
        return strides if len(strides) == len(shape) else dense_strides(shape, ROW_MAJOR)


@contextlib.contextmanager
def _batch(b: KernelBuilder, row: Dim, rows: tuple[Dim, ...]) -> Generator[dict[int, Dim]]:
    """Where a row is along each batch dim."""
    with contextlib.ExitStack() as scope:
        found: dict[int, Dim] = {}
        for i, extent in enumerate(rows):
            at = row if i == len(rows) - 1 else expr("//", row, product(rows[i + 1 :]))
            found[i] = scope.enter_context(let(b, "at", at if i == 0 else expr("%", at, extent)))
        yield found
