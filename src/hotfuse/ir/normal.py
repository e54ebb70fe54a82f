"""A graph under names that depend on position alone, so that the twelve layers of an encoder are one text.

Unlike the structural hash this keeps the order of inputs, params and outputs, which callers rely on: whatever is compiled for the
normal form is called with the original's values, place by place.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.ir.graph import Arg, Graph, Loc, Node, Param, Value, map_values


def normalized(graph: Graph) -> Graph:
    """The graph with values, params and places renamed by position; nested graphs keep their own names."""
    names: dict[str, Arg] = {}

    def fresh(v: Value) -> Value:
        new = Value(f"v{len(names)}", v.type)
        names[v.name] = new
        return new

    inputs = tuple(fresh(v) for v in graph.inputs)
    params = tuple(Param(fresh(p.value), f"k{i}") for i, p in enumerate(graph.params))
    nodes: list[Node] = []
    for node in graph.nodes:
        args = tuple(map_values(a, names) for a in node.args)
        attrs = tuple((k, map_values(a, names)) for k, a in node.attrs)
        outs = tuple(fresh(v) for v in node.outs)
        nodes.append(Node(node.kind, node.op, args, outs, attrs, node.graphs, Loc()))
    outputs = tuple(map_values(o, names) for o in graph.outputs)
    return replace(graph, name="group", inputs=inputs, params=params, nodes=tuple(nodes), outputs=outputs)
