"""Sizes that recur become numbers.

    %y: f32[s0, 768] = linear(%x: f32[s0, 768], ...)      ->      %y: f32[64, 768] = linear(%x: f32[64, 768], ...)

Loops then have known ends and tails disappear, tilings are chosen for that very size, and arithmetic on sizes is done once. The
guard is that the symbols have these values; everything else the graph assumes was checked before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hotfuse.ir.dims import Sym, substitute
from hotfuse.ir.graph import Arg, Graph, Kind, Node, map_node, map_values
from hotfuse.ir.retype import retyped
from hotfuse.ir.types import ScalarKind, ScalarType, Type, dims_of, with_dims


def at_sizes(graph: Graph, sizes: Mapping[str, int]) -> Graph:
    """The graph for calls in which the symbols have these values."""

    def known(t: Type) -> Type:
        return with_dims(t, tuple(substitute(d, sizes) for d in dims_of(t)))

    guards = tuple(g for g in (substitute(g, sizes) for g in graph.guards) if isinstance(g, Sym))
    return replace(_numbered(retyped(graph, known, nested=True)), guards=guards)


def _numbered(graph: Graph) -> Graph:
    """Integers that are known now stand where they are used, and nothing computes them any more."""
    numbers: dict[str, Arg] = {}
    nodes: list[Node] = []
    for n in graph.nodes:
        node = map_node(n, numbers) if numbers else n
        found = {v.name: number for v in node.outs if (number := _number(v.type)) is not None}
        if node.kind is Kind.OPERATOR and node.outs and len(found) == len(node.outs):
            numbers.update(found)
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(map_values(o, numbers) for o in graph.outputs))


def _number(t: Type) -> int | None:
    known = isinstance(t, ScalarType) and t.kind is ScalarKind.INT and isinstance(t.expr, int)
    return t.expr if known else None  # type: ignore[union-attr]
