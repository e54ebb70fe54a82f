"""What rules need to know before they may touch a node: is it pure, and who can see the memory of its results.

A captured graph has no in-place ops, so sharing memory between intermediates cannot be observed. What a user can
observe is memory shared between an output and an input, a weight or another output, and whether an output *is* one
of them. A value that reaches an output only through nodes which make new memory is therefore free to be any
equal tensor; one that reaches it through nodes which may pass memory on (`escapes`) is not.
"""

from __future__ import annotations

from functools import cache

from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import symbols
from hotfuse.ir.graph import Graph, Kind, Node, Value, sources
from hotfuse.ir.rewrite import Context
from hotfuse.ir.types import ScalarType, TensorType, dims_of
from hotfuse.ops.schema import draws_random
from hotfuse.ops.table import Access, is_mutating, is_view, lookup, schema_of

_PURE_NAMESPACES = ("aten.", "sym.", "quantized_decomposed.")
_CHECKS = ("assert", "constrain")
_SOMETIMES_VIEWS = frozenset({"aten.einsum.default"})
"""Ops that give a view of their input in some cases, though neither schema nor row says so."""


@cache
def _known(op: str) -> bool:
    """Whether the op exists in this torch; a graph read from text may name any."""
    try:
        schema_of(op)
    except InternalError:
        return False
    return True


@cache
def _effect_free(op: str) -> bool:
    return (
        op.startswith(_PURE_NAMESPACES)
        and _known(op)
        and not is_mutating(op)
        and not any(word in op for word in _CHECKS)
    )


def is_pure(node: Node) -> bool:
    """Whether the node only computes its results from its arguments: it may be left out, or done once for two."""
    return (
        node.kind is Kind.OPERATOR
        and bool(node.outs)
        and _effect_free(node.op)
        and not draws_random(node.op, node.args, dict(node.attrs))
    )


@cache
def _may_alias(op: str) -> bool:
    row = lookup(op)
    return row.access is Access.OPAQUE or row.view or op in _SOMETIMES_VIEWS or not _known(op) or is_view(op)


def may_alias(node: Node) -> bool:
    """Whether a result may share memory with an argument; unknown ops and control nodes may."""
    return node.kind is not Kind.OPERATOR or bool(node.graphs) or _may_alias(node.op)


def escapes(value: Value, context: Context) -> bool:
    """Whether an output of the graph may share memory with the value."""
    return not isinstance(value.type, ScalarType) and context.reaches_output(value, may_alias)


def mutates(graph: Graph) -> bool:
    """Whether a node writes into an argument, or might: then no two equal tensors may be swapped."""
    return any(not n.graphs and _known(n.op) and is_mutating(n.op) for n in graph.nodes) or any(
        mutates(g) for n in graph.nodes for g in n.graphs
    )


def source_symbols(graph: Graph) -> frozenset[str]:
    """The symbols that inputs and params mention."""
    return frozenset[str]().union(*(symbols(d) for v in sources(graph) for d in dims_of(v.type)))


def binds_symbols(node: Node, context: Context) -> bool:
    """Whether the node's results mention a size that depends on data, which other types may rest on."""
    mentioned = frozenset[str]().union(*(symbols(d) for v in node.outs for d in dims_of(v.type)))
    return bool(mentioned) and not mentioned <= context.fact(source_symbols)


def is_dense(value: Value, context: Context) -> bool:
    """Whether the tensor surely fills its memory: a weight, or made as new memory by a known op.

    An input may come with any strides, and so may a view of it, whatever they were when the graph was captured.
    """
    if not isinstance(value.type, TensorType) or value.type.layout.strided:
        return False
    producer = context.producer(value)
    return context.is_param(value) if producer is None else not may_alias(producer)
