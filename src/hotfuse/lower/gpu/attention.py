"""Attention on a GPU: a program holds a block of queries of one head and goes through the keys with a running softmax.

    parallel (batch, head, block of queries)
      for block of keys:  s = q kT * scale + mask;  m' = max(m, s);  p = 2^(s - m')
                          l = l 2^(m - m') + sum p;  o = o 2^(m - m') + p v
      out = o / l

Blocks of queries of one head are neighbours in the grid: they read the same keys. Operands are evaluated as any value is, so the
views around an attention cost nothing. Queries that see no key give 0, as torch's operator does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Value, output_values
from hotfuse.ir.types import DType
from hotfuse.lower.common.attention_node import AttentionNode, attention_node, four
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.loop_positions import land
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.common.positions import ORIGIN, Coord, Position, Space, counters_of, scaled, summed
from hotfuse.lower.common.steps import Definitions
from hotfuse.lower.common.tile_values import Evaluator, TileAxis
from hotfuse.lower.gpu.tiling import MIN_OPERAND_EXTENT, GpuTiling, left_over, numbers, power_of_2, write_in_finer_loops
from hotfuse.lower.ops.views import broadcast, shape_of
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Tile

MAX_WIDTH = 256
SMALL = ((16, 128, 4, 2), (32, 64, 4, 2), (64, 64, 4, 2), (16, 64, 4, 3), (32, 128, 4, 2))
"""Queries, keys, warps, stages; where processors would be idle with larger blocks."""
LARGE = ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 4, 3), (64, 32, 4, 3), (64, 128, 4, 2))
_LOG2E = math.log2(math.e)
_NONE = -math.inf
TYPES = (DType.F32, DType.F16, DType.BF16)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes of one attention; `uses` query heads read the same keys."""

    batch: int
    heads: int
    uses: int
    queries: int
    keys: int
    width: int
    value_width: int


def attention_tilings(graph: Graph, *, every: bool = False) -> Sequence[GpuTiling]:
    """Blocks of queries by blocks of keys; `every`: those for few and for many programs, for a model to choose from."""
    sizes = _sizes(attention_node(graph))
    most_q, most_k = (max(MIN_OPERAND_EXTENT, power_of_2(n)) for n in (sizes.queries, sizes.keys))
    small = sizes.batch * sizes.heads * -(-sizes.queries // 64) < 132
    order = (*SMALL, *LARGE) if every else SMALL if small else LARGE
    found = [GpuTiling(min(q, most_q), sizes.value_width, min(k, most_k), warps, stages) for q, k, warps, stages in order]
    return tuple(dict.fromkeys(found))


def lower_attention(graph: Graph, tiling: GpuTiling, strides: Mapping[str, tuple[int, ...]], name: str) -> Lowered:
    """The kernel of a group around one attention; raises CannotLower where there is none."""
    node = attention_node(graph)
    sizes = _sizes(node)
    kv_heads = sizes.heads // sizes.uses
    shape = (sizes.batch, kv_heads, sizes.uses, sizes.queries, sizes.value_width, sizes.keys, sizes.width)
    builder = KernelBuilder(name)
    memory = KernelBuffers(builder, graph, strides)
    write_in_finer_loops(builder, shape, lambda space: AttentionWriter(graph, node, sizes, tiling, memory, space).write())
    return memory.finish(builder.finish())


def _sizes(node: AttentionNode) -> AttentionSizes:
    shapes = [numbers(*four(shape_of(x), 1)) for x in (node.q, node.k, node.v)]
    if node.turned:
        b, h, d, s = shapes[1]
        shapes[1] = (b, h, s, d)
    (batch, heads, queries, width), (kb, kv_heads, keys, kw), (vb, v_heads, v_keys, value_width) = shapes
    types = {tensor_type(x).dtype for x in (node.q, node.k, node.v)}
    if len(types) != 1 or not types <= set(TYPES):
        raise CannotLower(f"attention of {', '.join(sorted(t.value for t in types))}")
    if (batch, batch) != (kb, vb) or kw != width or v_keys != keys or v_heads != kv_heads:
        raise CannotLower("attention whose operands do not have one batch")
    if not kv_heads or heads % kv_heads or (heads != kv_heads and not node.grouped):
        raise CannotLower(f"{heads} query heads meet {kv_heads}")
    if 0 in (batch, heads, queries, keys) or min(queries, width, value_width) < 2 or max(width, value_width) > MAX_WIDTH:
        raise CannotLower(f"attention of {queries} queries, {keys} keys, widths {width} and {value_width}")
    if node.mask is not None and (node.causal or tensor_type(node.mask).dtype not in (DType.BOOL, *TYPES)):
        raise CannotLower("a mask of this form in attention")
    return AttentionSizes(batch, heads, heads // kv_heads, queries, keys, width, value_width)


class AttentionWriter:
    """One kernel while it is written, in loops of one fineness."""

    def __init__(
        self, graph: Graph, node: AttentionNode, sizes: AttentionSizes, tiling: GpuTiling, memory: KernelBuffers, space: Space
    ) -> None:
        if any(len(r) > 1 for r in space.roots[3:]) or any(space.cuts):
            raise CannotLower("queries, keys or widths of the attention are not one dim of an operand")
        self.graph, self.node, self.sizes, self.tiling, self.memory, self.space = graph, node, sizes, tiling, memory, space
        self.builder = memory.builder
        self.definitions = Definitions(graph)
        self.at = Evaluator(memory, graph, space, definitions=self.definitions)
        self.at_q, self.at_e, self.at_k, self.at_i = (space.roots[i][0] for i in (3, 4, 5, 6))
        self.places()
        self.outer = [k for r in space.roots[:3] for k in r]
        self.first_key: Dim = 0
        self.keys: Dim = sizes.keys
        """Where the keys of a program begin, and how many they are."""

    def places(self) -> None:
        """Where operands and results of the attention lie."""
        batch, kv, use, query, element, key, inner = (self.space.root(i) for i in range(7))
        node, head = self.node, summed(scaled(kv, self.sizes.uses), use)
        self.q = _three(node.q, (batch, head, query, inner))
        self.k = _three(node.k, (batch, kv, inner, key) if node.turned else (batch, kv, key, inner))
        self.v = _three(node.v, (batch, kv, key, element))
        self.out = _three(node.node.outs[0], (batch, head, query, element))
        self.scores = (batch, head, query, key)

    def landed(self) -> tuple[list[Value], dict[str, Position]]:
        """The graph's outputs, and where each lies in the attention's loops."""
        outputs = list(dict.fromkeys(output_values(self.graph)))
        landed = land(self.definitions, self.graph, self.space, self.node.node.outs[0], self.out)
        for v in outputs:
            if v.name not in landed or counters_of(landed[v.name]) != counters_of(self.out):
                raise CannotLower(f"output %{v.name} has another shape than the attention it is made from")
        return outputs, landed

    def heads(self, scope: contextlib.ExitStack) -> dict[int, Dim]:
        """Opens the grid's loops over batches and heads; where each counter is, those without a loop at 0."""
        extents = self.space.extents
        open_ = {k: scope.enter_context(self.builder.parallel("h", extents[k])).var for k in self.outer if extents[k] != 1}
        return {**open_, **{k: 0 for k, n in enumerate(extents) if n == 1}}

    def write(self) -> None:
        """The loops over the grid, keys, results."""
        b, s, t = self.builder, self.sizes, self.tiling
        self.block, self.step = t.rows, t.depth
        outputs, landed = self.landed()
        with contextlib.ExitStack() as scope:
            where = self.heads(scope)
            first = scope.enter_context(b.parallel("q", s.queries, self.block)).var
            where[self.at_q] = first
            along_q = TileAxis(self.at_q, self.block, left_over(s.queries, self.block, first))
            along_i = self.wide(self.at_i, s.width)
            along_e = self.wide(self.at_e, s.value_width)
            with self.at.loops({**where, self.at_i: 0, self.at_e: 0}):
                with self.at.loops({}, (along_q, along_i)):
                    q = b.bcast(self.at.tile(self.node.q, self.q), (self.block, along_i.extent))
                sums, total = self.summed(q, first, along_q, along_i, along_e)
                with self.at.loops({}, (along_q, along_e)):
                    self.at.give(self.node.node.outs[0], self.out, self.finished(sums, total))
                    for v in outputs:
                        self.at.store(v, landed[v.name], self.at.tile(v, landed[v.name]))

    @staticmethod
    def wide(counter: int, extent: int) -> TileAxis:
        """The elements of a head, all of them in one tile."""
        width = max(MIN_OPERAND_EXTENT, power_of_2(extent))
        return TileAxis(counter, width, None if width == extent else extent)

    def summed(self, q: Tile, first: Dim, along_q: TileAxis, along_i: TileAxis, along_e: TileAxis) -> tuple[Tile, Tile]:
        """The values of a block of queries, weighed, and what the weights add up to."""
        b, s, node = self.builder, self.sizes, self.node
        block, step = self.block, self.step
        f32 = DType.F32
        begin = [b.fill(_NONE, f32, (block, 1)), b.fill(0.0, f32, (block, 1)), b.fill(0.0, f32, (block, along_e.extent))]
        end: Dim = expr("min", self.keys, expr("+", first, block)) if node.causal else self.keys
        scale = (1 / math.sqrt(s.width) if node.scale is None else node.scale) * _LOG2E
        with b.loop("k", 0, end, step, carry=begin) as loop:
            top, total, sums = loop.carried
            valid = left_over(self.keys, step, loop.var) if isinstance(self.keys, int) else remaining(self.keys, loop.var)
            along_k = TileAxis(self.at_k, step, valid)
            with self.at.loops({self.at_k: expr("+", self.first_key, loop.var)}):
                with self.at.loops({}, (along_i, along_k)):
                    k = b.bcast(self.at.tile(node.k, self.k), (along_i.extent, step))
                x = b.map("mul", b.mma(b.fill(0.0, f32, (block, step)), q, k), scale)
                with self.at.loops({}, (along_q, along_k)):
                    x = self._masked(x, first, loop.var, along_k)
                above = b.map("max", top, b.reduce("max", x, 1))
                safe = b.map("select", b.map("eq", above, b.fill(_NONE, f32)), b.fill(0.0, f32), above)
                p = b.map("exp2", b.map("sub", x, safe))
                shrink = b.map("exp2", b.map("sub", top, safe))
                with self.at.loops({}, (along_k, along_e)):
                    v = b.bcast(self.at.tile(node.v, self.v), (step, along_e.extent))
                total = b.map("add", b.map("mul", total, shrink), b.reduce("sum", p, 1))
                sums = b.mma(b.map("mul", sums, shrink), b.cast(p, v.type.dtype), v)
            loop.yields(above, total, sums)
        _, total, sums = loop.outs
        return sums, total

    def _masked(self, x: Tile, first: Dim, key: Dim, along_k: TileAxis) -> Tile:
        b, node = self.builder, self.node
        nothing = b.fill(_NONE, DType.F32)
        if node.mask is not None:
            shape = shape_of(node.mask)
            full = _shape(self.sizes, len(shape_of(node.node.outs[0])))
            where = self.scores if len(full) == 4 else (self.scores[0], *self.scores[2:]) if len(full) == 3 else self.scores[2:]
            m = self.at.tile(node.mask, broadcast(where, full, shape))
            if m.type.dtype is DType.BOOL:
                x = b.map("select", m, *((nothing, x) if node.hides else (x, nothing)))
            else:
                x = b.map("add", x, b.map("mul", b.cast(m, DType.F32), _LOG2E))
        if along_k.valid is not None:
            there = b.map("lt", b.iota(0, (1, self.step), 1, DType.I32), b.cast(b.index(along_k.valid), DType.I32))
            x = b.map("select", there, x, nothing)
        if node.causal:
            row, column = b.iota(first, (self.block, 1), 0, DType.I32), b.iota(key, (1, self.step), 1, DType.I32)
            x = b.map("select", b.map("le", column, row), x, nothing)
        return x

    def finished(self, sums: Tile, total: Tile) -> Tile:
        """The results of a block."""
        b, node = self.builder, self.node
        if not node.empty_is_nan:
            total = b.map("select", b.map("eq", total, b.fill(0.0, DType.F32)), b.fill(1.0, DType.F32), total)
        done = b.map("div", sums, total)
        if node.nan_is_zero:
            done = b.map("select", b.map("isnan", total), b.fill(0.0, DType.F32), done)
        return b.cast(done, tensor_type(node.node.outs[0]).dtype)


def _shape(s: AttentionSizes, rank: int) -> tuple[int, ...]:
    """The shape of the scores, for operands of so many dims."""
    full = (s.batch, s.heads, s.queries, s.keys)
    return full if rank == 4 else (s.batch, s.queries, s.keys) if rank == 3 else full[2:]


def _three(value: Value, place: tuple[Coord, Coord, Coord, Coord]) -> Position:
    """A place in [batch, head, row, element] as one of a value that may lack the first dims."""
    batch, head, row, element = place
    rank = len(shape_of(value))
    if rank < 4 and head != ORIGIN:
        raise CannotLower("attention over three dims with several heads")
    return (batch, head, row, element)[:4] if rank == 4 else (batch, row, element) if rank == 3 else (row, element)
