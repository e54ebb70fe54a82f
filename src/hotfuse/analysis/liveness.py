"""When values die, so that a run of the graph can free them early."""

from __future__ import annotations

from hotfuse.ir.graph import Graph, Value, output_values


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
