"""Rows in the order of their experts, as models spell it, become one node; products by expert one kind of node.

    s, p = sort(ids); h = histc(float(s), 4, 0, 3); e = cumsum(h, 0)        ->   p, r, e = expert_order(ids, 4); s = ids[p]
    r = index_put(empty_like(p), [p], arange(n))                                (s and r only where they are read)
    transformers.grouped_mm_fallback(x, W, e), aten._grouped_mm(x, W, e)   ->   grouped_mm(x, W, e)

A sort of n numbers is n log n comparisons in the library and leaves a native run; numbers of experts are few, so counting does.
An id that is no expert's number is a fault of the call in the kernel, and the model's own code answers it.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Kind, Node, Value, makers, map_node, map_values, output_values, readers, unused_name
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.own.experts import ORDER, PRODUCT
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

_PRODUCTS = {"transformers.grouped_mm_fallback": ("input", "weight", "offs"), "aten._grouped_mm": ("self", "mat2", "offs")}
_TO_FLOAT = frozenset({"aten.to", "aten._to_copy"})
_MAX_EXPERTS = 4096
"""Bins of a histogram over whole numbers, up to which fp32 tells each from the next."""


@dataclass(frozen=True, slots=True)
class _Order:
    """A sort that only brings rows into the order of their experts."""

    experts: int
    ends: int
    """The node that adds up the histogram."""
    ranks: tuple[int, ...]
    """Nodes that turn the order around."""


def experts_in_order(graph: Graph) -> Graph:
    """The graph with one node for each order of rows by expert, and products by expert under one name."""
    if not any(packet(n.op) in _PRODUCTS for n in graph.nodes):
        return graph
    reading, maker = readers(graph), makers(graph)
    orders = {i: found for i in range(len(graph.nodes)) if (found := _order(graph, reading, maker, i)) is not None}
    gone = {i for o in orders.values() for i in (o.ends, *o.ranks)}
    gone |= {i for i, n in enumerate(graph.nodes) if packet(n.op) == "aten.empty_like" and _only_for(n, reading, gone)}
    taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs} | {p.value.name for p in graph.params}
    read = {v.name for n in graph.nodes for v in n.ins} | {v.name for v in output_values(graph)}
    nodes: list[Node] = []
    new: dict[str, Value] = {}
    for i, node in enumerate(graph.nodes):
        if i in orders:
            nodes += _ordered(graph, node, orders[i], taken, read, new)
        elif i not in gone:
            nodes.append(_product(node) or node)
    outputs = tuple(map_values(v, dict(new)) for v in graph.outputs)
    return replace(graph, nodes=tuple(_renamed(n, new) for n in nodes), outputs=outputs)


def _only_for(node: Node, reading: dict[str, list[int]], gone: set[int]) -> bool:
    """Whether a node's result is memory for nodes that are gone."""
    found = reading.get(node.outs[0].name, [])
    return bool(found) and all(r in gone for r in found)


def _renamed(node: Node, new: dict[str, Value]) -> Node:
    return map_node(node, dict(new), node.outs) if any(v.name in new for v in node.ins) else node


def _ordered(graph: Graph, sort: Node, order: _Order, taken: set[str], read: set[str], new: dict[str, Value]) -> list[Node]:
    """The node that brings rows into order, and what was sorted, where somebody reads it."""
    ids = argument(sort, "self")
    assert isinstance(ids, Value)
    values, places = sort.outs
    ranks = [graph.nodes[r].outs[0] for r in order.ranks]
    rank = ranks[0] if ranks else Value(unused_name(f"{places.name}.rank", taken), places.type)
    new.update({v.name: rank for v in ranks[1:]})
    taken.add(rank.name)
    outs = (places, rank, graph.nodes[order.ends].outs[0])
    made = [Node(Kind.OPERATOR, f"{ORDER}.default", (ids, order.experts), outs, (), (), sort.loc)]
    if values.name in read:
        made.append(Node(Kind.OPERATOR, "aten.index.Tensor", (ids, (places,)), (values,), (), (), sort.loc))
    return made


def _product(node: Node) -> Node | None:
    names = _PRODUCTS.get(packet(node.op))
    if names is None:
        return None
    x, weight, ends = (argument(node, n) for n in names)
    plain = all(isinstance(v, Value) for v in (x, weight, ends)) and all(argument(node, n) is None for n in ("bias", "out_dtype"))
    if not plain or not all(isinstance(v, Value) and _dims(v) == d for v, d in ((x, 2), (weight, 3), (ends, 1))):
        return None
    return replace(node, op=f"{PRODUCT}.default", args=(x, weight, ends), attrs=())


def _dims(v: Value) -> int:
    return len(v.type.shape) if isinstance(v.type, TensorType) else -1


def _order(graph: Graph, reading: dict[str, list[int]], maker: dict[str, int], at: int) -> _Order | None:
    """What a sort is for, where it is this."""
    sort = graph.nodes[at]
    ids = argument(sort, "self")
    if packet(sort.op) != "aten.sort" or not isinstance(ids, Value) or _dims(ids) != 1 or argument(sort, "descending"):
        return None
    assert isinstance(ids.type, TensorType)
    if ids.type.dtype is not DType.I64 or ids.type.device != "cpu" or len(sort.outs) != 2:
        return None
    for cast in reading.get(sort.outs[0].name, []):
        if packet(graph.nodes[cast].op) not in _TO_FLOAT or _dtype(graph.nodes[cast]) is not DType.F32:
            continue
        for count in reading.get(graph.nodes[cast].outs[0].name, []):
            bins = _bins(graph.nodes[count])
            for total in reading.get(graph.nodes[count].outs[0].name, []) if bins else []:
                if _adds_up(graph.nodes[total]):
                    return _Order(bins, total, _turned(graph, reading, maker, sort.outs[1]))
    return None


def _bins(node: Node) -> int:
    """How many whole numbers from 0 on a histogram counts, each in a bin of its own; 0 where it does something else."""
    if packet(node.op) != "aten.histc":
        return 0
    bins, low, high = argument(node, "bins", 100), argument(node, "min", 0), argument(node, "max", 0)
    return bins if isinstance(bins, int) and 1 < bins <= _MAX_EXPERTS and low == 0 and high == bins - 1 else 0


def _adds_up(node: Node) -> bool:
    return packet(node.op) == "aten.cumsum" and _dtype(node) is DType.I32


def _dtype(node: Node) -> DType | None:
    t = node.outs[0].type
    return t.dtype if isinstance(t, TensorType) else None


def _turned(graph: Graph, reading: dict[str, list[int]], maker: dict[str, int], order: Value) -> tuple[int, ...]:
    """Nodes that write the number of each place where the order points: the order turned around."""
    found: list[int] = []
    for r in reading.get(order.name, []):
        node = graph.nodes[r]
        places, numbers = argument(node, "indices"), argument(node, "values")
        if packet(node.op) != "aten.index_put" or places != (order,) or argument(node, "accumulate"):
            continue
        target = argument(node, "self")
        if not isinstance(numbers, Value) or numbers.name not in maker or not isinstance(target, Value):
            continue
        counts = graph.nodes[maker[numbers.name]].op == "aten.arange.default"
        if counts and numbers.type == order.type == target.type:
            found.append(r)
    return tuple(found)
