"""Values of a group that are computed before the loops that use them, and which of them one nest can compute together.

    log_softmax(x, -1).sum()   ->   m, s = max and sum of each row, aside;  then one sum over (x - m) - log(s)

The memory is the kernel's own: shared among its threads, on the stack or in the arena, never seen by the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.lower.common.algebra import same
from hotfuse.lower.ops.views import shape_of


def ordered(graph: Graph, values: Iterable[Value]) -> list[Value]:
    """In the order in which the group makes them."""
    wanted = {v.name for v in values}
    return [v for n in graph.nodes for v in n.outs if v.name in wanted]


def sharing_loops(graph: Graph, waiting: Sequence[Value]) -> list[Value]:
    """The first of those waiting, and the reductions that its loops make on the way: over the same dims of the same shape, and
    needing nothing else that waits."""
    maker = {v.name: n for n in graph.nodes for v in n.outs}
    first = maker[waiting[0].name]
    if not first.op.startswith("lower.reduce."):
        return [waiting[0]]
    like = [v for v in waiting if _alike(first, maker[v.name])]
    apart = {v.name for v in waiting} - {v.name for v in like}
    return [v for v in like if not _below(graph, v) & apart]


def _alike(one: Node, other: Node) -> bool:
    if not other.op.startswith("lower.reduce.") or one.attr("dims") != other.attr("dims"):
        return False
    a, b = shape_of(one.ins[0]), shape_of(other.ins[0])
    return len(a) == len(b) and all(same(m, n) for m, n in zip(a, b, strict=True))


def _below(graph: Graph, value: Value) -> set[str]:
    """The names of all that a value is made from."""
    names = {value.name}
    for n in reversed(graph.nodes):
        if any(v.name in names for v in n.outs):
            names.update(v.name for v in n.ins)
    return names - {value.name}
