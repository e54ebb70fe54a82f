"""A graph with other types and the same structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hotfuse.ir.graph import Arg, Graph, Node, Param, Value, map_values
from hotfuse.ir.types import Type


def retyped(graph: Graph, fn: Callable[[Type], Type], *, nested: bool = False) -> Graph:
    """Every value with the type that `fn` makes of its own; guards are the caller's. Nested graphs only if asked for."""
    new: dict[str, Arg] = {}

    def value(v: Value) -> Value:
        made = Value(v.name, fn(v.type))
        new[v.name] = made
        return made

    inputs = tuple(value(v) for v in graph.inputs)
    params = tuple(Param(value(p.value), p.key) for p in graph.params)
    nodes: list[Node] = []
    for n in graph.nodes:
        args = tuple(map_values(a, new) for a in n.args)
        attrs = tuple((k, map_values(a, new)) for k, a in n.attrs)
        graphs = tuple(retyped(g, fn, nested=True) for g in n.graphs) if nested else n.graphs
        nodes.append(replace(n, args=args, attrs=attrs, outs=tuple(value(v) for v in n.outs), graphs=graphs))
    outputs = tuple(map_values(o, new) for o in graph.outputs)
    return Graph(graph.name, inputs, params, tuple(nodes), outputs)
