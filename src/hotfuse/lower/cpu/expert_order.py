"""Rows in the order of the experts that they go to: counted, not sorted.

    for row: count[id[row]] += 1                    an id that is no expert's is a fault of the call
    for expert: begin[expert], ends[expert]         sums of the counts
    for row: rank[row] = begin[id[row]]++; order[rank[row]] = row

Rows of one expert stay in their order. Three passes over few numbers, on one thread: what follows waits for them anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph
from hotfuse.ir.types import DType
from hotfuse.lower.common import operands
from hotfuse.lower.common.algebra import mul
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferView, KernelBuffers, Lowered, tensor_type
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.own.experts import ORDER
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder


def lower_order(graph: Graph, strides: Mapping[str, tuple[int, ...]] | None = None, *, name: str = "expert_order") -> Lowered:
    """The kernel of a group that is one such node."""
    if len(graph.nodes) != 1 or packet(graph.nodes[0].op) != ORDER:
        raise CannotLower("rows are brought into the order of experts by a kernel of its own")
    (node,) = graph.nodes
    ids, experts = operands.tensor(node, "ids"), argument(node, "experts")
    if not isinstance(experts, int) or experts < 1 or tensor_type(ids).dtype is not DType.I64:
        raise CannotLower(f"ids of {tensor_type(ids).dtype.value} for {experts} experts", where=str(node.loc))
    b = KernelBuilder(name, node.loc)
    memory = KernelBuffers(b, graph, strides or {})
    (rows,) = shape_of(ids)
    for v in node.outs:  # what nobody reads is counted by all the same
        memory.aside(v)
    order, rank, ends = (memory.output(v) for v in node.outs)
    _write(b, memory.place(ids), rows, experts, order, rank, ends)
    return memory.finish(b.finish())


def _write(
    b: KernelBuilder, ids: BufferView, rows: Dim, experts: int, order: BufferView, rank: BufferView, ends: BufferView
) -> None:
    room = expr("max", 1, rows)
    own, begins = b.shared("own", DType.I64, (room,)), b.shared("begins", DType.I64, (experts,))
    zero = b.fill(0, DType.I64)
    with b.loop("expert", 0, experts) as e:
        b.store(begins, (e.var,), zero)
    with b.loop("row", 0, rows) as r:
        at = mul(r.var, ids.strides[0]) if ids.flat else r.var
        given = b.load(ids.buffer, (at,))
        fits = b.map("and", b.map("le", zero, given), b.map("lt", given, b.fill(experts, DType.I64)))
        b.effect("require", fits)
        b.store(own, (r.var,), b.map("select", fits, given, zero))
        with b.given("expert", own, (r.var,), 0, experts) as e:
            b.store(begins, (e,), b.map("add", b.load(begins, (e,)), 1))
    with b.loop("expert", 0, experts, carry=[zero]) as e:
        (before,) = e.carried
        count = b.load(begins, (e.var,))
        b.store(begins, (e.var,), before)
        after = b.map("add", before, count)
        b.store(ends.buffer, (e.var,), b.cast(after, DType.I32))
        e.yields(after)
    with b.loop("row", 0, rows) as r, b.given("expert", own, (r.var,), 0, experts) as e:
        place = b.load(begins, (e,))
        b.store(rank.buffer, (r.var,), place)
        b.scatter(order.buffer, (0,), place, b.index(r.var), dim=0)
        b.store(begins, (e,), b.map("add", place, 1))
