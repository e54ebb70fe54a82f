"""Masks that a graph makes of its inputs by itself: of token numbers, or of lengths.

    %m: bool[B, S] = ne(%ids, 0)                 graph main(%ids, %m)                     made(%ids):  %m = ne(%ids, 0)  return %m
    %k = to(%m, f32)                        ->     %k = to(%m, f32)
    %e = eq(%ids, 0)                               %e = logical_not(%m)

Cut off there, such a mask is one that a graph is given, and all that is known of those holds (`analysis.mask_facts`). What makes it
is a handful of cheap operators on whole numbers; a call runs them once more, in front of the plan.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.analysis.mask_facts import mask_axes
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Kind, Node, Value, makers
from hotfuse.ir.rewrite import without_unused_params
from hotfuse.ir.subgraph import extract
from hotfuse.ir.types import DType, ScalarType, TensorType
from hotfuse.ir.verify import verify
from hotfuse.ops.schema import draws_random
from hotfuse.ops.table import Access, is_mutating, lookup, packet
from hotfuse.specialize.pooled_rows import one_each

MAX_TRIED = 6
"""Values of a graph that are looked at as masks, the first ones."""
MAX_NODES = 24
"""Operators that a mask may be made by."""
_WHOLE = frozenset({DType.BOOL, DType.I64, DType.I32, DType.I16, DType.I8, DType.U8})
_CHEAP = (Access.POINTWISE, Access.MOVEMENT, Access.HOST, Access.REDUCTION)
_MADE = frozenset({"aten.arange", "aten.full", "aten.zeros", "aten.ones", "aten.scalar_tensor", "aten.sym_size"})
_OPPOSITE = {"aten.eq": "aten.ne", "aten.ne": "aten.eq", "aten.lt": "aten.ge", "aten.ge": "aten.lt", "aten.gt": "aten.le",
             "aten.le": "aten.gt"}  # fmt: skip
"""Comparisons of whole numbers, and those that are false where they are true."""
_TURNED = {"aten.eq": "aten.eq", "aten.ne": "aten.ne", "aten.lt": "aten.gt", "aten.gt": "aten.lt", "aten.le": "aten.ge",
           "aten.ge": "aten.le"}  # fmt: skip
"""The same with their operands exchanged."""


@dataclass(frozen=True, slots=True)
class DerivedMask:
    """A mask, what makes it, and the graph that is given it."""

    value: Value
    made: Graph
    """Makes the mask of inputs of the graph."""
    graph: Graph
    """Has the mask as one more input, the last."""


def derived_masks(graph: Graph) -> tuple[Value, ...]:
    """Values that may be masks of the rows of sequences, and that a few cheap operators make of inputs; the first ones."""
    found = (v for v in _told(graph) if isinstance(v.type, TensorType) and v.type.dtype is DType.BOOL and len(mask_axes(v)) == 2)
    return tuple(found)[:MAX_TRIED]


def told_rows(graph: Graph) -> frozenset[str]:
    """Values of one axis, others aside that are 1 long, that a few cheap operators make of inputs: they may say which row of each
    sequence is read."""
    return frozenset(v.name for v in _told(graph) if one_each(v))


def _told(graph: Graph) -> list[Value]:
    """What a few cheap operators make of inputs, in the graph's order."""
    found: list[Value] = []
    by: dict[str, frozenset[int]] = {v.name: frozenset() for v in (*graph.inputs, *(p.value for p in graph.params)) if _whole(v)}
    of_inputs = {v.name for v in graph.inputs}
    for i, node in enumerate(graph.nodes):
        of_sizes = packet(node.op) == "aten.sym_size" and node.ins[0] in graph.inputs  # of real numbers, too
        if not _is_cheap(node) or not (of_sizes or all(v.name in by for v in node.ins)):
            continue
        nodes = frozenset({i}).union(*(by.get(v.name, ()) for v in node.ins))
        if len(nodes) > MAX_NODES:
            continue
        (out,) = node.outs
        by[out.name] = nodes
        if any(v.name in of_inputs for v in node.ins):
            of_inputs.add(out.name)
            found.append(out)
    return found


def made_of_inputs(graph: Graph, v: Value) -> Graph:
    """What makes such a value, as a graph of its own."""
    maker = makers(graph)
    needed, waiting = set[int](), [v.name]
    while waiting:
        if (i := maker.get(waiting.pop())) is not None and i not in needed:
            needed.add(i)
            waiting += [x.name for x in graph.nodes[i].ins]
    return verify(replace(extract(graph, sorted(needed), f"{graph.name}.{v.name}"), outputs=(v,)))


def derived_mask(graph: Graph, v: Value) -> DerivedMask:
    """The graph cut at such a value."""
    made, at = made_of_inputs(graph, v), makers(graph)[v.name]
    nodes: list[Node] = []
    for i, node in enumerate(graph.nodes):
        if i == at:
            continue
        same = _compares_the_same(graph.nodes[at], node)
        if same is None:
            nodes.append(node)
        else:
            op = "aten.alias.default" if same else "aten.logical_not.default"
            nodes.append(Node(Kind.OPERATOR, op, (v,), node.outs, loc=node.loc))
    rest = replace(graph, inputs=(*graph.inputs, v), nodes=tuple(nodes))
    return DerivedMask(v, made, verify(without_unused_params(rest)))


def _compares_the_same(mask: Node, node: Node) -> bool | None:
    """Whether a node gives what the mask is (True), or the opposite of it (False); None for anything else."""
    op, other = packet(mask.op), packet(node.op)
    if op not in _OPPOSITE or other not in _OPPOSITE or len(mask.args) != 2 or len(node.args) != 2:
        return None
    if node.outs[0].type != mask.outs[0].type:
        return None
    spelled = {other} if node.args == mask.args else set[str]()
    if node.args == mask.args[::-1]:
        spelled.add(_TURNED[other])
    return True if op in spelled else False if _OPPOSITE[op] in spelled else None


def _is_cheap(node: Node) -> bool:
    if node.kind is not Kind.OPERATOR or len(node.outs) != 1 or is_mutating(node.op):
        return False
    if draws_random(node.op, node.args, dict(node.attrs)):
        return False
    if packet(node.op) in _MADE:
        return True
    return lookup(node.op).access in _CHEAP and _whole(node.outs[0])


def _whole(v: Value) -> bool:
    """Whether a value is whole numbers on the host."""
    if isinstance(v.type, ScalarType):
        return True
    return isinstance(v.type, TensorType) and v.type.dtype in _WHOLE and v.type.device == "cpu"

