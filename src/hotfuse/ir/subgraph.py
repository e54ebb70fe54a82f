"""A set of a graph's nodes as a graph of its own.

    graph main(%x) { %a = f(%x)  %b = g(%a)  %c = h(%b)  return %c }
    extract(main, {1}, "part")  ->  graph part(%a) { %b = g(%a)  return %b }
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

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
    wanted = _read_outside(graph, chosen, made.keys())
    wanted.update(v.name for v in output_values(graph))
    params = tuple(p for p in graph.params if p.value.name in used_params)
    outputs = tuple(v for v in made.values() if v.name in wanted)
    part = Graph(name, tuple(inputs.values()), params, nodes, outputs)
    bound = frozenset[str]().union(*(symbols(d) for v in sources(part) for d in dims_of(v.type)))
    guards = tuple(g for g in graph.guards if symbols(g) <= bound)
    return Graph(name, part.inputs, params, nodes, outputs, guards)


def _read_outside(graph: Graph, chosen: Sequence[int], made: Container[str]) -> set[str]:
    """Which of the set's values other nodes read; raises where what they compute of them comes back into the set.

    Every group of a large graph asks, so nodes before the set are not looked at and nothing is built for most of the others.
    """
    inside, last = set(chosen), chosen[-1] if chosen else 0
    found: set[str] = set()
    tainted: set[str] = set()
    for i in range(chosen[0] if chosen else len(graph.nodes), len(graph.nodes)):
        node = graph.nodes[i]
        if i in inside:
            if tainted and (back := tainted.intersection(v.name for v in node.ins)):
                raise InternalError(
                    f"nodes of graph {graph.name!r} cannot stand alone",
                    where=f"node {i + 1}, {node.op}",
                    because=f"%{min(back)} depends on the set but is computed outside it",
                )
            continue
        reached = False
        for v in node.ins:
            if v.name in made:
                found.add(v.name)
                reached = True
            elif v.name in tainted:
                reached = True
        if reached and i < last:
            tainted.update(v.name for v in node.outs)
    return found
