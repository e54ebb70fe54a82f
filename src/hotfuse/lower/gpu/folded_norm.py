"""Layer norms that products take in (`ops.own.folded_norm`): what the kernel before one stores of rows, what those behind it read.

    stored      each tile of results, block by block of its columns: mean, and squared distances from it
    read        before the loop, of a program's rows: all blocks of a row put together are its mean and deviation
    in the loop and in epilogues   (x - mean) * deviation * weight + bias, as pointwise work on the way
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Kind, Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import KernelBuffers, tensor_type
from hotfuse.lower.gpu.tiling import numbers, power_of_2
from hotfuse.lower.ops.views import shape_of
from hotfuse.lower.primitives.rules import Draft
from hotfuse.ops.own.folded_norm import BLOCK, MEAN, NORMALIZED, SPREAD
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.program import Tile


@dataclass(frozen=True, slots=True)
class RowMoments:
    """A row's mean and inverse deviation, as values that are given before they are read, and what they are made of."""

    mean: Value
    deviation: Value
    means: Value
    spreads: Value
    width: int
    eps: float


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """A result that says what blocks of another one's columns are like."""

    value: Value
    of: Value
    spread: bool


@dataclass(frozen=True, slots=True)
class FoldedNorms:
    """A group without such nodes, and what was taken out of it."""

    graph: Graph
    moments: tuple[RowMoments, ...] = ()
    blocks: tuple[BlockOutput, ...] = ()


def unfolded(graph: Graph) -> FoldedNorms:
    """The group with pointwise work for every norm that it takes in."""
    if not any(packet(n.op) in (MEAN, SPREAD, NORMALIZED) for n in graph.nodes):
        return FoldedNorms(graph)
    taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs} | {p.value.name for p in graph.params}
    nodes: list[Node] = []
    moments: list[RowMoments] = []
    blocks: list[BlockOutput] = []
    for node in graph.nodes:
        kind = packet(node.op)
        if kind in (MEAN, SPREAD):
            blocks.append(BlockOutput(node.outs[0], node.ins[0], spread=kind == SPREAD))
        elif kind == NORMALIZED:
            draft = Draft(node, taken, cuts=False)
            moments.append(_spelled(draft, node))
            nodes += draft.nodes
        else:
            nodes.append(node)
    return FoldedNorms(replace(graph, nodes=tuple(nodes)), tuple(moments), tuple(blocks))


def _spelled(d: Draft, node: Node) -> RowMoments:
    x, means, spreads, weight, bias = (d.value(n) for n in ("x", "means", "spreads", "weight", "bias"))
    eps = argument(node, "eps")
    if not isinstance(eps, float | int) or len(shape_of(x)) != 2:
        raise CannotLower("a norm that is taken in is of rows and columns")
    one_a_row = (*shape_of(x)[:-1], 1)
    mean, deviation = (d.add("lower.reduce.mean", (v,), DType.F32, one_a_row, {"dims": (1,)}) for v in (means, spreads))
    centered = d.pointwise("sub.Tensor", d.wide(x), mean)
    rows = d.pointwise("mul.Tensor", d.pointwise("mul.Tensor", centered, deviation), d.wide(weight))
    y = d.pointwise("add.Tensor", rows, d.wide(bias))
    out = node.outs[0]
    d.nodes.append(Node(Kind.OPERATOR, "aten._to_copy.default", (y,), (out,), (("dtype", tensor_type(out).dtype),), (), node.loc))
    return RowMoments(mean, deviation, means, spreads, numbers(shape_of(x)[-1])[0], float(eps))


def row_moments(memory: KernelBuffers, m: RowMoments, row: Dim, rows: int, left: Dim | None) -> tuple[Tile, Tile]:
    """The mean and the inverse deviation of so many rows from `row` on, of which `left` exist: tiles of one column."""
    b, (count,) = memory.builder, numbers(shape_of(m.means)[-1])
    wide = power_of_2(count)
    means, spreads = (_table(memory, v, row, rows, count, wide, left) for v in (m.means, m.spreads))
    mean = b.map("mul", b.reduce("sum", means, 1), 1.0 / count)
    apart = b.map("sub", means, mean)
    if wide != count:
        there = b.map("lt", b.iota(0, (1, wide), 1), b.index(count))
        apart = b.map("select", there, apart, b.fill(0.0, DType.F32))
    squares = b.map("add", b.reduce("sum", spreads, 1), b.map("mul", b.reduce("sum", b.map("mul", apart, apart), 1), float(BLOCK)))
    return mean, b.map("rsqrt", b.map("add", b.map("mul", squares, 1.0 / m.width), m.eps))


def _table(memory: KernelBuffers, v: Value, row: Dim, rows: int, count: int, wide: int, left: Dim | None) -> Tile:
    place = memory.place(v)
    if not place.flat:
        raise CannotLower(f"%{v.name} lies in strides")
    valid = (left, None if wide == count else count)
    return memory.builder.load(place.buffer, (expr("*", row, count),), (rows, wide), axes=(0, 0), step=(count, 1), valid=valid)


def store_blocks(
    memory: KernelBuffers, outputs: Sequence[BlockOutput], tile: Tile, row: Dim, column: Dim, left: Dim | None, width: int
) -> None:
    """What the blocks of a tile of results are like; its columns begin at `column`, and all of a block exist or none."""
    b, (rows, columns) = memory.builder, tile.type.shape
    if columns % BLOCK or width % BLOCK:
        raise CannotLower(f"tiles of {columns} columns have no blocks of {BLOCK}")
    count, each = width // BLOCK, columns // BLOCK
    apart = b.reshape(b.cast(tile, DType.F32), (rows, each, BLOCK))
    mean = b.map("mul", b.reduce("sum", apart, 2), 1.0 / BLOCK)
    for out in outputs:
        found = mean
        if out.spread:
            distance = b.map("sub", apart, mean)
            found = b.reduce("sum", b.map("mul", distance, distance), 2)
        first = expr("//", column, BLOCK)
        at = expr("+", expr("*", row, count), first)
        inside = None if width % columns == 0 else expr("+", count, expr("*", first, -1))
        place = memory.output(out.value)
        if not place.flat:
            raise CannotLower(f"%{out.value.name} lies in strides")
        b.store(place.buffer, (at,), b.reshape(found, (rows, each)), axes=(0, 0), step=(count, 1), valid=(left, inside))

