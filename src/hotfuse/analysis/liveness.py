"""When values die, so that a run of the graph can free them early; and a graph without what nobody reads."""

from __future__ import annotations

from dataclasses import replace

from hotfuse.ir.graph import Graph, Node, Value, output_values, values_in
from hotfuse.ops.table import is_mutating, is_random


def last_uses(graph: Graph) -> tuple[tuple[Value, ...], ...]:
    """For each node, the values that nothing reads after it: its arguments' last use, or results that nobody wants.

    Inputs die like any other value; params and outputs never do. An input that no node reads is in no list.
    """
    keep = {v.name for v in output_values(graph)} | {p.value.name for p in graph.params}
    dying: list[tuple[Value, ...]] = []
    seen: set[str] = set(keep)
    for node in reversed(graph.nodes):
        here: dict[str, Value] = {}
        for v in (*node.ins, *node.outs):
            if v.name not in seen:
                here[v.name] = v
        seen.update(here)
        dying.append(tuple(here.values()))
    return tuple(reversed(dying))


def without_unread(graph: Graph) -> Graph:
    """The graph without nodes and params that nobody reads; what draws random numbers or writes to memory stays."""
    live = {v.name for v in output_values(graph)}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if any(v.name in live for v in node.outs) or not node.outs or is_random(node.op) or is_mutating(node.op):
            nodes.append(node)
            live |= {v.name for a in (*node.args, *(a for _, a in node.attrs)) for v in values_in(a)}
    params = tuple(p for p in graph.params if p.value.name in live)
    return replace(graph, params=params, nodes=tuple(reversed(nodes)))
