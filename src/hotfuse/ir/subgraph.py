"""A set of a graph's nodes as a graph of its own.

    graph main(%x) { %a = f(%x)  %b = g(%a)  %c = h(%b)  return %c }
    extract(main, {1}, "part")  ->  graph part(%a) { %b = g(%a)  return %b }
"""

from __future__ import annotations

from collections.abc import Iterable

from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import symbols
from hotfuse.ir.graph import Graph, Value, output_values, sources
from hotfuse.ir.types import dims_of


def extract(graph: Graph, node_indexes: Iterable[int], name: str) -> Graph:
    """The closed graph of some nodes, which must be convex: no path leaves the set and comes back.

    Inputs are the values that come from outside, in order of first use; params in use stay params; outputs
    are the values used outside, in order of definition. A graph output that is no value of the set is not its concern.
    """
    chosen = sorted(set(node_indexes))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < len(graph.nodes):
        raise InternalError(f"graph {graph.name!r} has no node {chosen[-1]}", because=f"it has {len(graph.nodes)}")
    _check_convex(graph, set(chosen))
    nodes = tuple(graph.nodes[i] for i in chosen)
    made = {v.name: v for n in nodes for v in n.outs}
    param_names = {p.value.name for p in graph.params}
    inputs: dict[str, Value] = {}
    used_params: set[str] = set()
    for node in nodes:
        for v in node.ins:
            if v.name in param_names:
                used_params.add(v.name)
            elif v.name not in made:
                inputs.setdefault(v.name, v)
    inside = set(chosen)
    wanted = {v.name for v in output_values(graph)}
    for i, node in enumerate(graph.nodes):
        if i not in inside:
            wanted.update(v.name for v in node.ins)
    params = tuple(p for p in graph.params if p.value.name in used_params)
    outputs = tuple(v for v in made.values() if v.name in wanted)
    part = Graph(name, tuple(inputs.values()), params, nodes, outputs)
    bound = frozenset[str]().union(*(symbols(d) for v in sources(part) for d in dims_of(v.type)))
    guards = tuple(g for g in graph.guards if symbols(g) <= bound)
    return Graph(name, part.inputs, params, nodes, outputs, guards)


def _check_convex(graph: Graph, chosen: set[int]) -> None:
    """Follow what the set reaches outside itself; no chosen node may read from there."""
    from_set: set[str] = set()
    tainted: set[str] = set()
    for i, node in enumerate(graph.nodes):
        names = {v.name for v in node.ins}
        if i in chosen:
            if back := names & tainted:
                raise InternalError(
                    f"nodes of graph {graph.name!r} cannot stand alone",
                    where=f"node {i + 1}, {node.op}",
                    because=f"%{min(back)} depends on the set but is computed outside it",
                )
            from_set.update(v.name for v in node.outs)
        elif names & from_set or names & tainted:
            tainted.update(v.name for v in node.outs)
