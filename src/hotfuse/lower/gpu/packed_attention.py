"""Attention on packed rows on a GPU: sequences lie one behind the other, and where they begin is read on the device.

    parallel (head, sequence, block of queries up to the longest that may come)
      begin, end = offsets[sequence], offsets[sequence + 1]
      where the block begins before the end:  as `lower.gpu.attention`, over the keys of the sequence alone

So one kernel, in one recording, serves every mask. Programs of blocks that do not exist end at once. Rows of no sequence are not
written: nobody reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from hotfuse.analysis.attention import BOUNDED
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import expr
from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.ir.types import DType
from hotfuse.lower.common.attention_node import AttentionNode
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.common.positions import Space, scaled, summed
from hotfuse.lower.common.tile_values import TileAxis
from hotfuse.lower.gpu.attention import LARGE, MAX_WIDTH, TYPES, AttentionSizes, AttentionWriter
from hotfuse.lower.gpu.tiling import MIN_OPERAND_EXTENT, GpuTiling, numbers, power_of_2, write_in_finer_loops
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder, remaining


@dataclass(frozen=True, slots=True)
class _PackedRows:
    """What a group's attention is to compute."""

    attention: AttentionNode
    offsets: Value
    sizes: AttentionSizes
    sequences: int
    longest: int


def packed_attention_tilings(graph: Graph) -> Sequence[GpuTiling]:
    """Blocks of queries by blocks of keys."""
    asked = _asked(graph)
    most = max(MIN_OPERAND_EXTENT, power_of_2(asked.longest))
    found = [GpuTiling(min(q, most), asked.sizes.value_width, min(k, most), w, stages) for q, k, w, stages in LARGE]
    return tuple(dict.fromkeys(found))


def lower_packed_attention(graph: Graph, tiling: GpuTiling, strides: Mapping[str, tuple[int, ...]], name: str) -> Lowered:
    """The kernel of a group around one packed attention; raises CannotLower where there is none."""
    asked = _asked(graph)
    s = asked.sizes
    shape = (1, s.heads // s.uses, s.uses, s.queries, s.value_width, s.keys, s.width)
    builder = KernelBuilder(name)
    memory = KernelBuffers(builder, graph, strides)
    write_in_finer_loops(builder, shape, lambda space: _PackedAttentionWriter(graph, asked, tiling, memory, space).write())
    return memory.finish(builder.finish())


def _asked(graph: Graph) -> _PackedRows:
    found = [n for n in graph.nodes if packet(n.op) == BOUNDED]
    if len(found) != 1:
        raise CannotLower(f"a group with {len(found)} packed attentions")
    (node,) = found
    if argument(node, "offsets_k") is not None:
        raise CannotLower("packed attention of other queries than keys")
    scale, longest, causal = argument(node, "scale"), argument(node, "longest"), argument(node, "causal", default=False)
    if not isinstance(longest, int) or not isinstance(causal, bool) or not (scale is None or isinstance(scale, int | float)):
        raise CannotLower("packed attention whose bound or scale is known only at run time")
    q, k, v, offsets = (_tensor(node, n) for n in ("query", "key", "value", "offsets"))
    (queries, heads, width), (keys, kv_heads, kw), (v_keys, v_heads, value_width) = (numbers(*shape_of(x)) for x in (q, k, v))
    types = {tensor_type(x).dtype for x in (q, k, v)}
    if len(types) != 1 or not types <= set(TYPES) or tensor_type(offsets).dtype is not DType.I64:
        raise CannotLower("packed attention of these types")
    if kw != width or v_keys != keys or v_heads != kv_heads or not kv_heads or heads % kv_heads:
        raise CannotLower(f"{heads} query heads meet {kv_heads}")
    if min(queries, keys, width, value_width, longest) < 2 or max(width, value_width) > MAX_WIDTH:
        raise CannotLower(f"packed attention of {queries} rows, widths {width} and {value_width}")
    sizes = AttentionSizes(1, heads, heads // kv_heads, queries, keys, width, value_width)
    (count,) = numbers(*shape_of(offsets))
    factor = None if scale is None else float(scale)
    attention = AttentionNode(node, q, k, v, turned=False, scale=factor, causal=causal, grouped=True)
    return _PackedRows(attention, offsets, sizes, count - 1, longest)


def _tensor(node: Node, name: str) -> Value:
    value = argument(node, name)
    if not isinstance(value, Value):
        raise CannotLower(f"packed attention whose {name} is no tensor")
    return value


class _PackedAttentionWriter(AttentionWriter):
    """One kernel while it is written."""

    def __init__(self, graph: Graph, asked: _PackedRows, tiling: GpuTiling, memory: KernelBuffers, space: Space) -> None:
        super().__init__(graph, asked.attention, asked.sizes, tiling, memory, space)
        self.asked = asked

    def places(self) -> None:
        """Operands are [row, head, element]."""
        batch, kv, use, query, element, key, inner = (self.space.root(i) for i in range(7))
        head = summed(scaled(kv, self.sizes.uses), use)
        self.scores = (batch, head, query, key)
        self.q, self.k, self.v = (query, head, inner), (key, kv, inner), (key, kv, element)
        self.out = (query, head, element)

    def write(self) -> None:
        """The loops over the grid, one sequence's keys, results."""
        b, s, t = self.builder, self.sizes, self.tiling
        self.block, self.step = t.rows, t.depth
        outputs, landed = self.landed()
        offsets = self.memory.place(self.asked.offsets).buffer
        most = expr("+", s.queries, 1)
        with contextlib.ExitStack() as scope:
            where = self.heads(scope)
            sequence = scope.enter_context(b.parallel("s", self.asked.sequences)).var
            first = scope.enter_context(b.parallel("q", self.asked.longest, self.block)).var
            begin = scope.enter_context(b.given("begin", offsets, (sequence,), 0, most))
            end = scope.enter_context(b.given("end", offsets, (expr("+", sequence, 1),), 0, most))
            length = remaining(end, begin)
            scope.enter_context(b.when(expr("<", first, length)))
            self.first_key, self.keys = begin, length
            where[self.at_q] = expr("+", begin, first)
            along_q = TileAxis(self.at_q, self.block, remaining(length, first))
            along_i, along_e = self.wide(self.at_i, s.width), self.wide(self.at_e, s.value_width)
            with self.at.loops({**where, self.at_i: 0, self.at_e: 0}):
                with self.at.loops({}, (along_q, along_i)):
                    q = b.bcast(self.at.tile(self.node.q, self.q), (self.block, along_i.extent))
                sums, total = self.summed(q, first, along_q, along_i, along_e)
                with self.at.loops({}, (along_q, along_e)):
                    self.at.give(self.node.node.outs[0], self.out, self.finished(sums, total))
                    for v in outputs:
                        self.at.store(v, landed[v.name], self.at.tile(v, landed[v.name]))
