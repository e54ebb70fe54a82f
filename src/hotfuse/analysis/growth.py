"""Caches that grow: results that are an input with more behind it, such as the keys and values of a decode step.

    %y = cat((%past, %new), 2)        %past an input that nothing else reads, %y a result, the extent of %past not known ahead

The result of such a call is the input of the next. Memory with room behind the past saves copying it (`ops.movement`), if the dim
that grows is outermost there. A past that lies so is read like any other: `cat` gives the same values whatever the strides are, so
a call needs no guard on them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Node, Value, output_values, readers
from hotfuse.ir.retype import revalued
from hotfuse.ir.types import STRIDED, ScalarType, TensorType
from hotfuse.ops.table import lookup, packet

_RESTRIDES = frozenset(f"aten.{name}" for name in ("view", "_unsafe_view", "view_as", "_reshape_alias", "as_strided", "unfold"))
"""Views that the library has of some strides alone."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A node that gives an input with more behind it."""

    node: int
    input: int
    dim: int


def growing(graph: Graph) -> tuple[Growth, ...]:
    """The caches of a graph that grow."""
    reads, returned = readers(graph), [v.name for v in output_values(graph)]
    places = {v.name: i for i, v in enumerate(graph.inputs)}
    found: list[Growth] = []
    for i, node in enumerate(graph.nodes):
        joined = _joined(node)
        if joined is None or joined[0].name not in places or joined[0].name in returned or node.outs[0].name not in returned:
            continue
        past, dim = joined
        if _restrides(graph, node.outs[0].name, reads):
            continue
        if all(k == i or _reads_sizes(graph.nodes[k]) for k in reads[past.name]):
            found.append(Growth(i, places[past.name], dim))
    return tuple(found)


def read_in_any_strides(graph: Graph) -> tuple[Growth, ...]:
    """Those whose input is one of any strides: see `read_anywhere`, which decides it once for a captured graph."""

    def strided(v: Value) -> bool:
        return isinstance(v.type, TensorType) and v.type.layout.strided

    return tuple(g for g in growing(graph) if strided(graph.inputs[g.input]))


def grown_results(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Results that may lie in the memory of an input, with more behind it: (result, input)."""
    names = [v.name for v in output_values(graph)]
    return tuple((k, g.input) for g in read_in_any_strides(graph)
                 for k, name in enumerate(names) if name == graph.nodes[g.node].outs[0].name)  # fmt: skip


def read_anywhere(graph: Graph, inputs: Container[int]) -> Graph:
    """The graph with those of these inputs that are caches which grow as inputs of any strides."""
    grown = {graph.inputs[g.input].name for g in growing(graph) if g.input in inputs}

    def read(v: Value) -> Value:
        return Value(v.name, replace(v.type, layout=STRIDED)) if v.name in grown and isinstance(v.type, TensorType) else v

    return revalued(graph, read) if grown else graph


def _joined(node: Node) -> tuple[Value, int] | None:
    """The first of two tensors that a node joins, and the dim, where only the call tells how long it is."""
    if node.op != "aten.cat.default" or not node.args or not isinstance(node.args[0], tuple) or len(node.args[0]) != 2:
        return None
    past, new = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else dict(node.attrs).get("dim", 0)
    if not isinstance(past, Value) or not isinstance(new, Value) or past.name == new.name or type(dim) is not int:
        return None
    a, b, made = past.type, new.type, node.outs[0].type
    if not isinstance(a, TensorType) or not isinstance(b, TensorType) or not isinstance(made, TensorType):
        return None
    if len(a.shape) != len(b.shape) or not a.shape or {a.dtype, b.dtype} != {made.dtype}:
        return None
    dim %= len(a.shape)
    return None if isinstance(a.shape[dim], int) else (past, dim)


def _restrides(graph: Graph, name: str, reads: Mapping[str, list[int]]) -> bool:
    """Whether anything asks for the strides that a value has in the model's own code."""
    waiting = [name]
    while waiting:
        for k in reads.get(waiting.pop(), ()):
            node = graph.nodes[k]
            if packet(node.op) in _RESTRIDES or node.graphs:
                return True
            if lookup(node.op).view:
                waiting += [v.name for v in node.outs]
    return False


def _reads_sizes(node: Node) -> bool:
    return bool(node.outs) and all(isinstance(v.type, ScalarType) for v in node.outs)
