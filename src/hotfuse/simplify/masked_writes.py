"""A number that is written where a mask says so is a choice between two values, which kernels take, and which says of every element
what decides it; a write to places knows neither.

    index_put(x, [m], 0-d v)              ->    where(m, v, x)                     m: a bool for each element of x
    index_put(x, [m], 0-d v)              ->    where(unsqueeze(m, 2), v, x)       m: a bool for each row of x

So `x[mask == 0] = -1e9` in front of a maximum is what `masked_fill` is (`specialize.packing` reads it).
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.analysis.inferred_types import lies_as_before, possible_sizes, relaid
from hotfuse.base.errors import InternalError
from hotfuse.ir.graph import Graph, Kind, Node, Value, sources, unused_name
from hotfuse.ir.types import DType, TensorType
from hotfuse.ir.verify import verify
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet


def masked_writes(graph: Graph) -> tuple[Graph, int]:
    """The graph with such writes as choices, and how many; as it is where there is none, or a value would lie otherwise."""
    found = {i: parts for i, node in enumerate(graph.nodes) if (parts := _parts(node)) is not None}
    if not found or any(n.kind is Kind.CONTROL for n in graph.nodes) or (sizes := possible_sizes(graph)) is None:
        return graph, 0
    taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in sources(graph)}
    nodes: list[Node] = []
    new = set[str]()
    for i, node in enumerate(graph.nodes):
        if i not in found:
            nodes.append(node)
            continue
        x, mask, number = found[i]
        shape = _tensor(mask).shape
        for axis in range(len(shape), len(_tensor(x).shape)):
            shape = (*shape, 1)
            wider = Value(unused_name(f"{mask.name}.rows", taken), TensorType(DType.BOOL, shape, device=_tensor(x).device))
            nodes.append(Node(Kind.OPERATOR, "aten.unsqueeze.default", (mask, axis), (wider,), loc=node.loc))
            new.add(wider.name)
            mask = wider
        nodes.append(replace(node, op="aten.where.self", args=(mask, number, x), attrs=()))
        new.add(node.outs[0].name)
    try:
        made = verify(relaid(replace(graph, nodes=tuple(nodes)), new, sizes))
    except InternalError:  # a mask of other sizes than what it is for: torch has its own word for that
        return graph, 0
    written = {graph.nodes[i].outs[0].name for i in found}
    return (made, len(found)) if lies_as_before(made, graph, written) else (graph, 0)


def _parts(node: Node) -> tuple[Value, Value, Value] | None:
    """What is written to, where, and the number; None where a node does anything else."""
    if packet(node.op) != "aten.index_put" or argument(node, "accumulate", default=False) is not False:
        return None
    x, places, number = node.args[:3]
    if not isinstance(x, Value) or not isinstance(places, tuple) or len(places) != 1 or not isinstance(number, Value):
        return None
    mask = places[0]
    if not isinstance(mask, Value) or not all(isinstance(v.type, TensorType) for v in (x, mask, number)):
        return None
    of, by, told = _tensor(x), _tensor(mask), _tensor(number)
    if by.dtype is not DType.BOOL or told.shape or told.dtype is not of.dtype or not {by.device, told.device} <= {of.device}:
        return None
    return (x, mask, number) if by.shape and by.shape == of.shape[: len(by.shape)] else None


def _tensor(v: Value) -> TensorType:
    assert isinstance(v.type, TensorType)
    return v.type
