"""Other spellings of loops over experts, as `simplify.expert_loops` knows them.

    mask = one_hot(ids, E).permute(2, 1, 0)
    k, rows = where(mask[e])                                     rows, k = where(ids == e)
    y = expert(x[None, rows].reshape(-1, D)) * w[rows, k]  ->    y = expert(x[rows]) * w[rows, k]
    out[rows] += y                                               out = out.index_add(0, rows, y)

Pairs may come in another order, and rows that are written twice would add up: neither is seen where each expert's rows are distinct
and are only added. So the caller keeps the new spelling where the loop becomes products, and forgets it elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hotfuse.ir.graph import Graph, Kind, Node, Value, makers, output_values, readers, sources, unused_name
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.movement import RESHAPES
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

PAIRS = frozenset({"aten.where.default", "aten.nonzero_numpy.default"})
"""`torch.where(mask)` and `mask.nonzero(as_tuple=True)`."""


def respelled(graph: Graph) -> Graph | None:
    """The graph in the spelling that is known; None where it has no other one."""
    compared = _by_comparison(graph)
    added = _added_by_index(compared or graph)
    return added or compared


def _by_comparison(graph: Graph) -> Graph | None:
    """Each expert's pairs are found by a comparison; None where no mask of one-hot numbers tells them."""
    maker, taken = makers(graph), {v.name for v in sources(graph)} | {v.name for n in graph.nodes for v in n.outs}
    made: list[Node] = []
    found = False
    for node in graph.nodes:
        told = _expert_of(node, graph, maker)
        if told is None:
            made.append(node)
            continue
        found, (ids, expert, turned) = True, told
        assert isinstance(ids.type, TensorType)
        equal = Value(unused_name("expert.", taken), TensorType(DType.BOOL, ids.type.shape, device=ids.type.device))
        taken.add(equal.name)
        outs = node.outs[::-1] if turned else node.outs
        compare = Node(Kind.OPERATOR, "aten.eq.Scalar", (ids, expert), (equal,), loc=node.loc)
        made += [compare, replace(node, args=(equal,), outs=outs)]
    return _rows_picked_at_once(replace(graph, nodes=tuple(made))) if found else None


def _expert_of(node: Node, graph: Graph, maker: Mapping[str, int]) -> tuple[Value, int, bool] | None:
    """The choices, the expert, and whether choices come before rows, where a node finds the pairs of one expert so."""
    if node.op not in PAIRS or len(node.outs) != 2:
        return None
    one = _made(node.args[0], "aten.select", graph, maker)
    if one is None:
        return None
    dim, expert, hot = argument(one, "dim"), argument(one, "index"), one.args[0]
    order: tuple[object, ...] = (0, 1, 2)
    if (permuted := _made(hot, "aten.permute", graph, maker)) is not None:
        dims = argument(permuted, "dims")
        order, hot = tuple(d % 3 if isinstance(d, int) else d for d in dims) if isinstance(dims, tuple) else (), permuted.args[0]
    spread = _made(hot, "aten.one_hot", graph, maker)
    if spread is None or len(order) != 3 or type(dim) is not int or type(expert) is not int or order[dim % 3] != 2:
        return None
    ids, rest = spread.args[0], [a for i, a in enumerate(order) if i != dim % 3]
    if expert < 0 or not isinstance(ids, Value) or not isinstance(ids.type, TensorType) or len(ids.type.shape) != 2:
        return None
    return ids, expert, rest == [1, 0]


def _made(v: object, by: str, graph: Graph, maker: Mapping[str, int]) -> Node | None:
    node = graph.nodes[maker[v.name]] if isinstance(v, Value) and v.name in maker else None
    return node if node is not None and packet(node.op) == by else None


def _rows_picked_at_once(graph: Graph) -> Graph:
    """`index(unsqueeze(x, 0), [None, rows])`, whose first axis is taken away again, is `index(x, [rows])`."""
    maker, reading, returned = makers(graph), readers(graph), {v.name for v in output_values(graph)}
    nodes: dict[int, Node | None] = {}
    for i, node in enumerate(graph.nodes):
        places = argument(node, "indices") if packet(node.op) == "aten.index" else None
        wide = _made(node.args[0], "aten.unsqueeze", graph, maker) if isinstance(places, tuple) and len(places) == 2 else None
        if wide is None or not isinstance(places, tuple) or places[0] is not None or argument(wide, "dim") != 0:
            continue
        out, after = node.outs[0], reading.get(node.outs[0].name, ())
        assert isinstance(out.type, TensorType)
        alike = [packet(graph.nodes[r].op) in RESHAPES and _shape(graph.nodes[r].outs[0]) == out.type.shape[1:] for r in after]
        if out.name in returned or not alike or not all(alike):
            continue
        nodes[i] = None
        nodes |= {r: replace(node, args=(wide.args[0], places[1:]), outs=graph.nodes[r].outs) for r in after}
    kept = (nodes.get(i, n) for i, n in enumerate(graph.nodes))
    return replace(graph, nodes=tuple(n for n in kept if n is not None))


def _added_by_index(graph: Graph) -> Graph | None:
    """`out[rows] += y` adds at rows; None where nothing is written so. What was read of `out` is read for that alone."""
    maker, reading, returned = makers(graph), readers(graph), {v.name for v in output_values(graph)}
    nodes: dict[int, Node | None] = {}
    for i, node in enumerate(graph.nodes):
        places = argument(node, "indices") if packet(node.op) == "aten.index_put" else None
        if not isinstance(places, tuple) or len(places) != 1 or argument(node, "accumulate", default=False):
            continue
        base, total = node.args[0], _made(argument(node, "values"), "aten.add", graph, maker)
        if total is None or len(total.args) != 2 or total.attrs or total.outs[0].name in returned:
            continue
        for before, y in (total.args, total.args[::-1]):
            read = _made(before, "aten.index", graph, maker)
            if read is None or read.args[0] != base or argument(read, "indices") != places or read.outs[0].name in returned:
                continue
            alone = all(len(reading.get(n.outs[0].name, ())) == 1 for n in (read, total))
            if alone and isinstance(y, Value) and y.type == read.outs[0].type:
                nodes |= {maker[read.outs[0].name]: None, maker[total.outs[0].name]: None}
                nodes[i] = replace(node, op="aten.index_add.default", args=(base, 0, places[0], y), attrs=())
                break
    kept = (nodes.get(i, n) for i, n in enumerate(graph.nodes))
    return replace(graph, nodes=tuple(n for n in kept if n is not None)) if nodes else None


def _shape(v: Value) -> tuple[object, ...]:
    return v.type.shape if isinstance(v.type, TensorType) else ()
