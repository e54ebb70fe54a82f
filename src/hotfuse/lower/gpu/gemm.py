"""Products with what comes before and behind them: a program makes one tile of a result.

    q, k, v = x Wq, x Wk, x Wv              three nests over one grid
    y = silu(x Wg) * (x Wu)                 one nest with two sums
    y = gelu(x W + b) + r                   the epilogue on the tile of sums
    y = bmm(a, b)                           the batch is part of the grid

Operands are evaluated as any value is, so views before a product cost nothing and pointwise work in front of it is done on the way.
Tiles of rows that read the same columns lie next to each other in the grid, in groups, so that both stay in the second-level cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Value, output_values
from hotfuse.ir.types import DType
from hotfuse.lower.common import operands
from hotfuse.lower.common.activation_products import SUMS, Between, between, is_product
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.loop_positions import land
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.common.positions import ORIGIN, Position, Space, counters_of
from hotfuse.lower.common.steps import Definitions
from hotfuse.lower.common.tile_values import Evaluator, TileAxis
from hotfuse.lower.gpu.folded_norm import BlockOutput, FoldedNorms, row_moments, store_blocks, unfolded
from hotfuse.lower.gpu.row_kernels import flattened, whole_strides
from hotfuse.lower.gpu.tiling import MIN_OPERAND_EXTENT, GpuTiling, left_over, numbers, power_of_2, write_in_finer_loops
from hotfuse.lower.ops.views import broadcast, shape_of
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Tile

PROCESSORS = 132
"""Multiprocessors that tilings are made and ranked for; on other devices they are right all the same."""
_NEIGHBOURS = 8
"""Tiles of rows in a group of the grid."""
MAX_TRIED = 8
"""Tilings of one group that are compiled and tried on the device."""
MAX_BULK = 5
"""Of those, such with bulk copies."""
SHAPES = (
    GpuTiling(16, 64, 128, 4, 4), GpuTiling(32, 32, 128, 4, 4), GpuTiling(32, 64, 64, 4, 5), GpuTiling(64, 32, 64, 4, 5),
    GpuTiling(64, 64, 64, 4, 4), GpuTiling(64, 128, 64, 4, 4), GpuTiling(128, 64, 64, 4, 4), GpuTiling(128, 128, 64, 8, 3),
    GpuTiling(128, 256, 64, 8, 3), GpuTiling(256, 128, 64, 8, 3), GpuTiling(16, 32, 256, 4, 3), GpuTiling(16, 128, 64, 4, 4),
    GpuTiling(32, 32, 256, 4, 3), GpuTiling(32, 64, 128, 4, 4), GpuTiling(64, 32, 128, 4, 4), GpuTiling(32, 32, 128, 8, 5),
)  # fmt: skip
BULK = (
    GpuTiling(64, 64, 64, 4, 6), GpuTiling(64, 64, 64, 4, 8), GpuTiling(64, 32, 128, 4, 4), GpuTiling(64, 32, 128, 4, 6),
    GpuTiling(64, 16, 128, 4, 6), GpuTiling(64, 64, 128, 4, 4), GpuTiling(64, 128, 64, 4, 4), GpuTiling(128, 64, 64, 4, 4),
    GpuTiling(128, 128, 64, 4, 3), GpuTiling(128, 128, 64, 8, 4), GpuTiling(128, 256, 64, 8, 4), GpuTiling(128, 256, 64, 8, 3),
)  # fmt: skip
"""Those whose operands a copy engine fetches: no thread computes addresses, so more may be under way."""
SPLIT = (
    GpuTiling(64, 32, 128, 4, 4, split=2), GpuTiling(64, 32, 128, 4, 6, split=2), GpuTiling(64, 64, 64, 4, 8, split=4),
    GpuTiling(64, 64, 128, 4, 4, split=4),
)  # fmt: skip
"""For long products with few results, where one program a tile would leave processors idle."""
TURNS = (
    GpuTiling(128, 256, 64, 8, 4, programs=PROCESSORS), GpuTiling(128, 128, 64, 4, 3, programs=2 * PROCESSORS),
    GpuTiling(128, 128, 64, 8, 4, programs=PROCESSORS),
)  # fmt: skip
"""For many tiles: storing one overlaps with fetching the next."""
LARGE_TILE = 128 * 256
MIN_SPLIT = 1024
"""Steps of a product that is worth sharing."""
ONE_ROW = (GpuTiling(1, 16, 512, 4, 1), GpuTiling(1, 8, 512, 4, 2), GpuTiling(1, 32, 256, 4, 2), GpuTiling(1, 16, 1024, 8, 1))
"""A product of one row reads its weights once: no tensor core helps, and what counts is how much is read at the same time."""


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Products whose results meet in an epilogue: one nest of loops."""

    products: tuple[Between, ...]
    outputs: tuple[Value, ...]


def lower_products(graph: Graph, tiling: GpuTiling, strides: Mapping[str, tuple[int, ...]], name: str) -> Lowered:
    """The kernel of a group around products; raises CannotLower where there is none."""
    flat = None if strides else flattened(graph)
    if flat is None:
        return _lowered(graph, tiling, strides, name)
    try:
        made = _lowered(flat, tiling, strides, name)
    except CannotLower as e:
        try:
            return _lowered(graph, tiling, strides, name)
        except CannotLower:
            raise e from None  # which says more of why there is no kernel
    whole = {v.name: whole_strides(shape_of(v)) for v in output_values(graph)}
    return replace(made, strides=tuple((n, whole[n]) for n, _ in made.strides))


def _lowered(given: Graph, tiling: GpuTiling, strides: Mapping[str, tuple[int, ...]], name: str) -> Lowered:
    builder = KernelBuilder(name)
    memory = KernelBuffers(builder, given, strides)
    norms = unfolded(given)
    graph = norms.graph
    for cluster in _clusters(graph, norms.blocks):
        shape = (*shape_of(cluster.products[0].out), shape_of(cluster.products[0].a)[-1])
        write = partial(_ClusterWriter, graph, cluster, tiling, memory, norms=norms)
        write_in_finer_loops(builder, shape, lambda space, write=write: write(space).write())
    return memory.finish(builder.finish())


def gemm_tilings(graph: Graph, *, bulk: bool = False, every: bool = False) -> Sequence[GpuTiling]:
    """Those that fill the device with the least waste, by a count of what each program has to do; `bulk`: half of them with copies
    by the device's copy engine. `every`: all that there are, for a model to choose from."""
    graph = flattened(graph) or graph
    found = [between(n) for n in graph.nodes if is_product(n)]
    (*batch, m, n), k = numbers(*shape_of(found[0].out)), numbers(shape_of(found[0].a)[-1])[0]
    if m == 1:
        fitting = [replace(t, depth=min(t.depth, power_of_2(k)), columns=min(t.columns, power_of_2(n))) for t in ONE_ROW]
        return tuple(dict.fromkeys(fitting))
    wide = tensor_type(found[0].a).dtype is DType.F32
    many = math.prod(batch) * len(found)
    alone = all(len(c.products) == 1 for c in _clusters(graph))  # two sums of such tiles need more registers than there are

    def cost(t: GpuTiling) -> float:
        programs = many * -(-m // t.rows) * -(-n // t.columns)
        waves = -(-programs // PROCESSORS)
        busy = min(1.0, programs / PROCESSORS)
        flow = t.rows * t.columns / 32 + (t.rows + t.columns) * 4  # what a step costs: sums, and operands to fetch
        return waves * -(-k // t.depth) * (flow * t.depth / 64 + 60) * (1 + 0.2 * (1 - busy))

    most_m, most_n = (max(MIN_OPERAND_EXTENT, power_of_2(extent)) for extent in (m, n))
    fitting = [t for t in SHAPES if t.rows <= most_m and t.columns <= most_n]
    if wide:  # twice the bytes: what is under way must fit in shared memory
        fitting = [replace(t, depth=max(16, t.depth // 2), stages=min(3, t.stages)) for t in fitting if t.rows * t.columns <= 16384]
    fitting = [replace(t, depth=max(MIN_OPERAND_EXTENT, min(t.depth, power_of_2(k)))) for t in fitting]
    fitting = fitting or [GpuTiling(16, 16, 32, 4, 2)]
    plain = list(dict.fromkeys(sorted(fitting, key=cost)))
    if not bulk or wide:
        return tuple(plain if every else plain[:MAX_TRIED])
    by_engine = [replace(t, bulk=True) for t in BULK if t.rows <= power_of_2(m) and t.columns <= power_of_2(n) and t.depth <= k]
    by_engine.sort(key=cost)
    shared = [replace(t, bulk=True) for t in SPLIT if many * -(-m // t.rows) * -(-n // t.columns) <= PROCESSORS * 3 // 4
              and k % (t.depth * t.split) == 0 and k >= MIN_SPLIT and t.rows <= power_of_2(m)]  # fmt: skip
    shared += [replace(t, bulk=True) for t in TURNS
               if alone and many * -(-m // t.rows) * -(-n // t.columns) > t.programs and k >= t.depth]  # fmt: skip
    if any(t.programs for t in shared) and len(found) > 1:  # programs that take turns have all of the shared memory for one nest
        by_engine = [t for t in by_engine if t.rows * t.columns < LARGE_TILE]
    if every:
        return tuple(dict.fromkeys((*by_engine, *shared, *plain)))
    return tuple((*by_engine[:MAX_BULK], *shared, *plain[: MAX_TRIED - min(MAX_BULK, len(by_engine))]))


def _clusters(graph: Graph, blocks: Sequence[BlockOutput] = ()) -> list[_Cluster]:
    products = [between(n) for n in graph.nodes if is_product(n)]
    of: dict[str, frozenset[int]] = {p.out.name: frozenset({i}) for i, p in enumerate(products)}
    for node in graph.nodes:
        if not is_product(node):
            made = frozenset[int]().union(*(of.get(v.name, frozenset[int]()) for v in node.ins))
            of.update({v.name: made for v in node.outs})
    for p in products:
        if of.get(p.a.name) or of.get(p.b.name):
            raise CannotLower("a product of a product's result in one kernel")
    sets: list[set[int]] = [{i} for i in range(len(products))]
    apart = {b.value.name for b in blocks}
    outputs = [v for v in dict.fromkeys(output_values(graph)) if v.name not in apart]
    for v in outputs:
        meets = of.get(v.name, frozenset[int]())
        if not meets:
            raise CannotLower(f"output %{v.name} is made from no product")
        joined = [s for s in sets if s & meets]
        sets = [s for s in sets if not s & meets] + [set[int]().union(*joined)]
    sets.sort(key=min)
    return [
        _Cluster(tuple(products[i] for i in sorted(s)), tuple(v for v in outputs if of[v.name] <= s)) for s in sets
    ]


class _ClusterWriter:
    """One nest while it is written, in loops of one fineness."""

    def __init__(
        self, graph: Graph, cluster: _Cluster, tiling: GpuTiling, memory: KernelBuffers, space: Space, norms: FoldedNorms
    ) -> None:
        self.graph, self.cluster, self.memory, self.space = graph, cluster, memory, space
        self.builder = memory.builder
        first = cluster.products[0]
        self.dtype = tensor_type(first.a).dtype
        if self.dtype is DType.F64:
            raise CannotLower("products of f64 are left to the library on GPUs")
        for p in cluster.products:
            same = shape_of(p.out) == shape_of(first.out) and shape_of(p.a)[-1] == shape_of(first.a)[-1]
            if not same or tensor_type(p.a).dtype is not self.dtype:
                raise CannotLower("products of different shapes meet in one epilogue")
        last = [space.roots[i] for i in (-3, -2, -1)]
        if any(len(r) > 1 for r in last) or any(space.cuts):
            raise CannotLower("rows, columns or steps of the product are not one dim of an operand")
        self.at_m, self.at_n, self.at_k = (r[0] for r in last)
        self.m, self.n, self.k = numbers(*(space.extents[c] for c in (self.at_m, self.at_n, self.at_k)))
        if 0 in (self.m, self.n, self.k) or 1 in (self.n, self.k):  # along one element no tile has an axis
            raise CannotLower(f"a product of {self.m} rows, {self.n} columns and {self.k} steps")
        self.batch = [k for r in space.roots[:-3] for k in r]
        least = 1 if self.m == 1 else MIN_OPERAND_EXTENT
        self.tiling = replace(tiling, rows=1 if self.m == 1 else max(MIN_OPERAND_EXTENT, tiling.rows),
                              depth=max(least, min(tiling.depth, power_of_2(self.k))))  # fmt: skip
        made = {v.name for v in cluster.outputs}
        self.blocks = tuple(b for b in norms.blocks if b.of.name in made)
        self.moments = norms.moments
        self.rows: list[tuple[Tile, Tile]] = []
        """Per norm that is taken in: the mean and the inverse deviation of the program's rows."""
        if (self.moments or norms.blocks) and (self.m == 1 or len(shape_of(first.out)) != 2):
            raise CannotLower("norms are taken in by products of rows and columns")
        self.definitions = Definitions(graph)
        self.at = Evaluator(memory, graph, space, definitions=self.definitions)
        self.roots = tuple(space.root(i) for i in range(len(space.roots)))

    def write(self) -> None:
        """The loops over the grid, and one tile."""
        b, t = self.builder, self.tiling
        tiles_m, tiles_n = -(-self.m // t.rows), -(-self.n // t.columns)
        near = max(d for d in range(1, _NEIGHBOURS + 1) if tiles_m % d == 0)
        outputs = {v.name: v for v in self.cluster.outputs}
        landed = land(self.definitions, self.graph, self.space, self.cluster.products[0].out, self.roots[:-1])
        for p in self.cluster.products:
            landed[p.out.name] = self.roots[:-1]
        full = frozenset(k for k, n in enumerate(self.space.extents) if n != 1 and k != self.at_k)
        for v in outputs.values():
            if v.name not in landed or counters_of(landed[v.name]) != full:
                raise CannotLower(f"output %{v.name} has another shape than the product it is made from")
        with contextlib.ExitStack() as scope:
            where: dict[int, Dim] = {k: scope.enter_context(b.parallel("b", self.space.extents[k])).var for k in self.batch}
            group = scope.enter_context(b.parallel("g", tiles_m // near)).var
            column = scope.enter_context(b.parallel("n", tiles_n)).var
            member = scope.enter_context(b.parallel("m", near)).var
            where[self.at_m] = expr("*", expr("+", expr("*", group, near), member), t.rows)
            where[self.at_n] = expr("*", column, t.columns)
            self.along_m = TileAxis(self.at_m, t.rows, left_over(self.m, t.rows, where[self.at_m]))
            self.along_n = TileAxis(self.at_n, t.columns, left_over(self.n, t.columns, where[self.at_n]))
            with self.at.loops(where):
                self.rows = [row_moments(self.memory, m, where[self.at_m], t.rows, self.along_m.valid) for m in self.moments]
                sums = self._row() if self.m == 1 else self._sums()
                with self.at.loops({}, (self.along_n,) if self.m == 1 else (self.along_m, self.along_n)):
                    self._give_rows()
                    for p, total in zip(self.cluster.products, sums, strict=True):
                        done = operands.completed(self.at, total, p.out, self.roots[:-1], p.scale, p.bias, p.bias_scale)
                        self.at.give(p.out, self.roots[:-1], done)
                    for v in outputs.values():
                        self.at.store(v, landed[v.name], self.at.tile(v, landed[v.name]))
                    for v in outputs.values():
                        if told := [block for block in self.blocks if block.of.name == v.name]:
                            tile = b.bcast(self.at.tile(v, landed[v.name]), (t.rows, t.columns))
                            if landed[v.name] != self.roots[:-1]:
                                raise CannotLower(f"blocks of %{v.name}, whose layout differs from the product's")
                            store_blocks(self.memory, told, tile, where[self.at_m], where[self.at_n], self.along_m.valid, self.n)

    def _give_rows(self) -> None:
        """What norms need of the program's rows, in the loops at hand."""
        for m, (mean, deviation) in zip(self.moments, self.rows, strict=True):
            self.at.give(m.mean, (self.roots[0], ORIGIN), mean)
            self.at.give(m.deviation, (self.roots[0], ORIGIN), deviation)

    def _sums(self) -> Sequence[Tile]:
        b, t = self.builder, self.tiling
        zero = [b.fill(0.0, SUMS[self.dtype], (t.rows, t.columns)) for _ in self.cluster.products]
        with b.loop("k", 0, self.k, t.depth, carry=zero) as k:
            left = left_over(self.k, t.depth, k.var)
            along_k = TileAxis(self.at_k, t.depth, left)
            sums: list[Tile] = []
            with self.at.loops({self.at_k: k.var}):
                for p, acc in zip(self.cluster.products, k.carried, strict=True):
                    with self.at.loops({}, (self.along_m, along_k)):
                        self._give_rows()
                        x = b.bcast(self.at.tile(p.a, self._a(p)), (t.rows, t.depth))
                        if left is not None and p.a.name not in self.definitions.sources:  # computed from fill, it may be NaN
                            there = b.map("lt", b.iota(0, (1, t.depth), 1), b.index(left))
                            x = b.map("select", there, x, b.fill(0.0, self.dtype))
                    with self.at.loops({}, (along_k, self.along_n)):
                        y = b.bcast(self.at.tile(p.b, self._b(p)), (t.depth, t.columns))
                        if left is not None and p.b.name not in self.definitions.sources:
                            there = b.map("lt", b.iota(0, (t.depth, 1), 0), b.index(left))
                            y = b.map("select", there, y, b.fill(0.0, self.dtype))
                    sums.append(b.mma(acc, x, y))
            k.yields(*sums)
        return k.outs

    def _row(self) -> Sequence[Tile]:
        """The sums of one row: numbers are multiplied place by place, and added up at the end."""
        b, t = self.builder, self.tiling
        acc = SUMS[self.dtype]
        zero = [b.fill(0.0, acc, (t.columns, t.depth)) for _ in self.cluster.products]
        with b.loop("k", 0, self.k, t.depth, carry=zero) as k:
            left = left_over(self.k, t.depth, k.var)
            sums: list[Tile] = []
            with self.at.loops({self.at_k: k.var}, (self.along_n, TileAxis(self.at_k, t.depth, left))):
                for p, held in zip(self.cluster.products, k.carried, strict=True):
                    x, y = (b.cast(self.at.tile(v, at), acc) for v, at in ((p.a, self._a(p)), (p.b, self._b(p))))
                    both = b.map("mul", x, y)
                    if left is not None:
                        there = b.map("lt", b.iota(0, (1, t.depth), 1), b.index(left))
                        both = b.map("select", there, both, b.fill(0.0, acc))
                    sums.append(b.map("add", held, both))
            k.yields(*sums)
        return [b.reshape(b.reduce("sum", s, 1), (t.columns,)) for s in k.outs]

    def _a(self, p: Between) -> Position:
        r = self.roots
        return (*broadcast(r[:-3], shape_of(p.out)[:-2], shape_of(p.a)[:-2]), r[-3], r[-1])

    def _b(self, p: Between) -> Position:
        r = self.roots
        last = (r[-2], r[-1]) if p.turned else (r[-1], r[-2])
        return (*broadcast(r[:-3], shape_of(p.out)[:-2], shape_of(p.b)[:-2]), *last)
