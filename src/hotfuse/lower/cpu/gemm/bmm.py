"""Products of two activations: neither side is known before the call, so panels of the right one are laid out as they are needed.

    y = gelu(bmm(a, b)) + r          parallel (batch, panel of columns, group of rows)
                                       B[batch, :, columns] into scratch memory, turned where it lies turned
                                       for block of rows: sums in registers, epilogue, stores

Where all rows are one block, by their number or by a bound that the group promises, a panel would be read once only: then B is
read where it lies. The same holds for A, unless it lies turned or is to be widened: then each block of its rows is made ready
first. Views in front of either side are followed, not carried out. All sizes may be known at run time only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import replace

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Value, output_values
from hotfuse.ir.types import DType
from hotfuse.lower.common import operands
from hotfuse.lower.common.activation_products import SUMS, Between, between, is_product
from hotfuse.lower.common.algebra import mul, product, same, sub
from hotfuse.lower.common.bounds import at_most
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.common.positions import Position, Space, in_finer_loops
from hotfuse.lower.common.steps import Definitions
from hotfuse.lower.common.tile_values import Evaluator, TileAxis
from hotfuse.lower.common.value_needs import trace
from hotfuse.lower.cpu.gemm.gemm import FinishedTile, Product, let
from hotfuse.lower.cpu.gemm.gemm import product as write_product
from hotfuse.lower.cpu.tiling import Core, GemmTiling, choose
from hotfuse.lower.ops.views import broadcast, shape_of
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, Tile

_MAX_TRIES = 16
_USUAL = 192
"""Columns to choose a panel for where their number is not known."""
_STEPS = 4
"""Steps of K that are laid out at once."""
_BAND = 3
"""Rows of A that are read together where their distance is not known."""


def lower_product(graph: Graph, core: Core, strides: Mapping[str, tuple[int, ...]] | None = None, *, name: str = "") -> Lowered:
    """The kernel of a group around one product; raises CannotLower where there is none."""
    found = [between(n) for n in graph.nodes if is_product(n)]
    if len(found) != 1:
        raise CannotLower(f"there are {len(found)} products in the group")
    shape = (*shape_of(found[0].out), shape_of(found[0].a)[-1])
    return in_finer_loops(shape, _MAX_TRIES, lambda space: _BmmGroup(graph, found[0], core, strides or {}, name, space).lowered())


def rows_at_once(graph: Graph, core: Core) -> int:
    """Most rows that are one block in the kernel of a group around one product; raises CannotLower where there is none."""
    found = next(between(n) for n in graph.nodes if is_product(n))
    (*_, m, n), k = shape_of(found.out), shape_of(found.a)[-1]
    return _tiling(core, SUMS[tensor_type(found.a).dtype], m, n, k).mr


def _tiling(core: Core, acc: DType, m: Dim, n: Dim, k: Dim) -> GemmTiling:
    if acc is DType.F64:  # as many lanes as fp32 has, in twice the registers
        core = replace(core, registers=core.registers // 2)
    columns = n if isinstance(n, int) and n > 0 else _USUAL
    return replace(choose(core, m, [columns], k if isinstance(k, int) else _USUAL), next_panel=False)


class _BmmGroup:
    """A group while it is lowered, in loops of one fineness."""

    def __init__(
        self, graph: Graph, found: Between, core: Core, strides: Mapping[str, tuple[int, ...]], name: str, space: Space
    ) -> None:
        self.graph, self.found, self.space = graph, found, space
        *_, self.m, self.n, self.k = (product(tuple(space.extents[c] for c in r)) for r in space.roots)
        last = [space.roots[i] for i in (-3, -2, -1)]
        if any(len(r) > 1 for r in last) or any(space.cuts):
            raise CannotLower("rows, columns or steps of the product are not one dim of an operand")
        self.at_m, self.at_n, self.at_k = (r[0] for r in last)
        self.batch = [k for r in space.roots[:-3] for k in r]
        self.dtype = tensor_type(found.a).dtype
        self.acc = SUMS[self.dtype]
        self.tiling = _tiling(core, self.acc, self.m, self.n, self.k)
        self.builder: KernelBuilder = KernelBuilder(name or packet(found.node.op).partition(".")[2], loc=found.node.loc)
        self.memory = KernelBuffers(self.builder, graph, strides)
        self.at = Evaluator(self.memory, graph, space)
        roots = tuple(space.root(i) for i in range(len(space.roots)))
        self.place: Position = roots[:-1]
        self.a_at = (*broadcast(roots[:-3], shape_of(found.out)[:-2], shape_of(found.a)[:-2]), roots[-3], roots[-1])
        last_two = (roots[-2], roots[-1]) if found.turned else (roots[-1], roots[-2])
        self.b_at = (*broadcast(roots[:-3], shape_of(found.out)[:-2], shape_of(found.b)[:-2]), *last_two)
        self.first: Dim = 0
        """The first row of the block that was made ready."""
        self.where: dict[int, Dim] = {}
        """The counters of the batch, and where a panel begins, while its rows are worked on."""
        self.in_a_row = self._stands(found.a, self.a_at, self.at_k) and self.dtype in (DType.F32, DType.F64)
        self.b_in_a_row = self._stands(found.b, self.b_at, self.at_n)
        lanes = self.tiling.lanes
        wide = expr("*", expr("ceildiv", self.k, lanes), lanes)
        self.tall = 1 << (self.tiling.mr - 1).bit_length()
        self.ready: Buffer | None = None
        if not self.in_a_row:
            self.ready = self.builder.scratch("ready", self.acc, (self.tall, wide))
        self.panel: Buffer | None = None
        rows = at_most(graph.guards, self.m)
        one_block = rows is not None and rows <= self.tiling.mr
        if not (one_block and self.b_in_a_row and self.dtype is self.acc):
            self.panel = self.builder.scratch("panel", self.acc, (expr("+", wide, lanes), self.tiling.nr))

    def _stands(self, value: Value, position: Position, counter: int) -> bool:
        """Whether a value is in memory, and its elements along a counter next to each other."""
        found = trace(Definitions(self.graph), self.space, [(value, position)])
        if found.computed or found.folds or found.scans or found.picks or len(found.loads) != 1:
            raise CannotLower(f"%{value.name} is computed, not a view")
        ((_, where), source), = found.loads.items()
        place = self.memory.place(source)
        walk: list[Dim] = [mul(f, s) for c, s in zip(where, place.strides, strict=True) for k, f in c.terms if k == counter]
        return walk in ([], [1])

    # -- the kernel

    def lowered(self) -> Lowered:
        """The kernel with its call."""
        outs = list(dict.fromkeys(output_values(self.graph)))
        for v in outs:
            shape, full = shape_of(v), shape_of(self.found.out)
            if len(shape) != len(full) or not all(same(a, b) for a, b in zip(shape, full, strict=True)):
                raise CannotLower(f"output %{v.name} has another shape than the product it is made from")
        t = self.tiling
        self.panels = expr("ceildiv", self.n, t.nr)
        many = mul(self.panels, *(self.space.extents[k] for k in self.batch))
        prepare = None if self.ready is None else self._prepare
        at_once = 0 if isinstance(self.k, int) else _BAND
        p = Product(self._column, self._step, self.m, self.k, many, t, self.acc, prepare, at_once)
        write_product(self.builder, p, lambda f: self._finish(f, outs), in_loop=True, begin=self._begin)
        return self.memory.finish(self.builder.finish())

    @contextlib.contextmanager
    def _begin(self, task: Dim) -> Generator[None]:
        """Find out which batch and which columns a panel is, and lay its part of B out."""
        with contextlib.ExitStack() as scope:
            left = task if self.panels == 1 else expr("//", task, self.panels)
            column = 0 if self.panels == 1 else mul(expr("%", task, self.panels), self.tiling.nr)
            self.where = {self.at_n: scope.enter_context(let(self.builder, "column", column))}
            for i, k in reversed(list(enumerate(self.batch))):
                extent = self.space.extents[k]
                at = left if i == 0 else expr("%", left, extent)
                self.where[k] = scope.enter_context(let(self.builder, "batch", at))
                left = expr("//", left, extent)
            if self.panel is not None:
                self._lay_out(self.panel)
            yield

    def _columns(self) -> Dim | None:
        """How many of a panel's columns exist; None where all do."""
        whole = isinstance(self.n, int) and self.n % self.tiling.nr == 0
        return None if whole else remaining(self.n, self.where[self.at_n])

    def _lay_out(self, panel: Buffer) -> None:
        """A panel of B into scratch memory, a few steps of all columns or a square of both at a time."""
        b, t, left = self.builder, self.tiling, self._columns()
        steps, width = (_STEPS, t.nr) if self.b_in_a_row else (t.lanes, t.lanes)
        with b.loop("p", 0, self.k, steps) as k:
            for j in range(0, t.nr, width):
                valid = None if left is None else expr("+", left, -j)
                along = (TileAxis(self.at_k, steps, remaining(self.k, k.var)), TileAxis(self.at_n, width, valid))
                here = {**self.where, self.at_k: k.var, self.at_n: expr("+", self.where[self.at_n], j)}
                with self.at.loops(here, along):
                    x = b.cast(b.bcast(self.at.tile(self.found.b, self.b_at), (steps, width)), self.acc)
                    b.store(panel, (k.var, j), x)

    def _prepare(self, row: Dim, height: Dim) -> None:
        """A block of A's rows into scratch memory."""
        b, lanes = self.builder, self.tiling.lanes
        assert self.ready is not None
        self.first = row
        with b.loop("c", 0, self.k, lanes) as k:
            along = (TileAxis(self.at_m, self.tall, height), TileAxis(self.at_k, lanes, remaining(self.k, k.var)))
            with self.at.loops({**self.where, self.at_m: row, self.at_k: k.var}, along):
                x = b.bcast(self.at.tile(self.found.a, self.a_at), (self.tall, lanes))
                b.store(self.ready, (0, k.var), b.cast(x, self.acc))

    def _column(self, row: Dim, k: Dim, rows: int) -> Tile:
        """What is multiplied with one step of B."""
        b = self.builder
        if self.ready is not None:
            return b.load(self.ready, (sub(row, self.first), k), (rows, 1))
        along = (TileAxis(self.at_m, rows), TileAxis(self.at_k, 1))
        with self.at.loops({**self.where, self.at_m: row, self.at_k: k}, along):
            return b.bcast(self.at.tile(self.found.a, self.a_at), (rows, 1))

    def _step(self, k: Dim) -> Tile:
        """One step of the panel."""
        b, nr = self.builder, self.tiling.nr
        if self.panel is not None:
            return b.load(self.panel, (k, 0), (1, nr))
        along = (TileAxis(self.at_k, 1), TileAxis(self.at_n, nr, self._columns()))
        with self.at.loops({**self.where, self.at_k: k}, along):
            return b.bcast(self.at.tile(self.found.b, self.b_at), (1, nr))

    def _finish(self, f: FinishedTile, outs: list[Value]) -> None:
        """Everything that happens to a tile of sums."""
        b, c = self.builder, self.found
        along = () if self.n == 1 else (TileAxis(self.at_n, self.tiling.nr, self._columns()),)

        def each(sums: Tile, number: Dim) -> None:
            with self.at.loops({**self.where, self.at_m: number}, along):
                if self.n == 1:
                    sums = b.reshape(b.extract(sums, (0,), (1,)), ())
                whole = operands.completed(self.at, sums, c.out, self.place, c.scale, c.bias, c.bias_scale)
                self.at.give(c.out, self.place, whole)
                for v in outs:
                    self.at.store(v, self.place, self.at.tile(v, self.place))

        f.each_row(each)
