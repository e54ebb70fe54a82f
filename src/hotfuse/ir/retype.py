"""A graph with other types and the same structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hotfuse.ir.graph import Arg, Graph, Value, map_node, map_values
from hotfuse.ir.types import DType, TensorType, Type

_NARROWER = frozenset({DType.F32, DType.F16, DType.BF16})


def retyped(graph: Graph, fn: Callable[[Type], Type], *, nested: bool = False) -> Graph:
    """Every value with the type that `fn` makes of its own; guards are the caller's. Nested graphs only if asked for."""
    made = revalued(graph, lambda v: Value(v.name, fn(v.type)))
    if nested:
        inner = (replace(n, graphs=tuple(retyped(g, fn, nested=True) for g in n.graphs)) if n.graphs else n for n in made.nodes)
        made = replace(made, nodes=tuple(inner))
    return replace(made, guards=())


def revalued(graph: Graph, change: Callable[[Value], Value]) -> Graph:
    """Every value as `change` makes it, wherever it stands; nested graphs and guards stay."""
    new: dict[str, Arg] = {}

    def changed(v: Value) -> Value:
        made = change(v)
        new[v.name] = made
        return made

    inputs = tuple(changed(v) for v in graph.inputs)
    params = tuple(replace(p, value=changed(p.value)) for p in graph.params)
    nodes = tuple(map_node(n, new, tuple(changed(v) for v in n.outs)) for n in graph.nodes)
    return replace(graph, inputs=inputs, params=params, nodes=nodes, outputs=tuple(map_values(o, new) for o in graph.outputs))


def widened(graph: Graph) -> Graph:
    """The graph in float64: what is made as a narrower float, or cast to one, is float64. Halves, too: operators refuse to mix
    them with weights of float64, and what their rounding costs is part of any answer's error, that of the baseline first.
    """

    def wide_type(t: Type) -> Type:
        return replace(t, dtype=DType.F64) if isinstance(t, TensorType) and t.dtype in _NARROWER else t

    return _wide_args(retyped(graph, wide_type, nested=True))


def _wide_args(graph: Graph) -> Graph:
    nodes = (
        replace(
            n, args=tuple(map(_wide_arg, n.args)), attrs=tuple((name, _wide_arg(a)) for name, a in n.attrs),
            graphs=tuple(map(_wide_args, n.graphs)),
        )
        for n in graph.nodes
    )  # fmt: skip
    return replace(graph, nodes=tuple(nodes))


def _wide_arg(arg: Arg) -> Arg:
    if isinstance(arg, tuple):
        return tuple(map(_wide_arg, arg))
    return DType.F64 if isinstance(arg, DType) and arg in _NARROWER else arg
