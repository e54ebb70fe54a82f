"""Rows that nobody reads are not computed.

    %h: f32[B, S, 64] = linear(%x, %w, %b)              %r: f32[B, 1, 64] = slice(%x, 1, 0, 1)
    %g: f32[B, S, 64] = gelu(%h)                  ->    %h: f32[B, 1, 64] = linear(%r, %w, %b)
    %y: f32[B, 64] = select(%g, 1, 0)                   %g: f32[B, 1, 64] = gelu(%h)
                                                        %y: f32[B, 64] = select(%g, 1, 0)

A classifier on the first token reads one row of what its last layer makes. The pass goes backwards from the outputs. A value is
made for one row alone if every reader wants that row, and if its op makes each row from the same row of its operands
(`analysis.row_axes`): products, norms, residuals, the queries of an attention. Keys and values are wanted whole, and the layers
before with them. That is a fact of the graph, so there is no guard. It is done only where a product gets smaller.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.analysis.inferred_types import possible_sizes, relaid
from hotfuse.analysis.row_axes import AxisIndex, NotByRows, carries, shape_of, whole
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_node, output_values, unused_name
from hotfuse.ir.types import TensorType
from hotfuse.ir.verify import verify
from hotfuse.ops.movement import RESHAPES
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet

_SIZED = frozenset({"aten.view", "aten.reshape", "aten._unsafe_view", "aten.expand", "aten.broadcast_to"})
"""Ops that name all sizes of their result."""
_BY_AXES = frozenset({"aten.unsqueeze", "aten.flatten"})
_WORK = (Access.CONTRACTION, Access.ATTENTION)
_END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Row:
    """The one row of an axis that is wanted."""

    axis: int
    index: int


def without_dead_rows(graph: Graph) -> tuple[Graph, int]:
    """The graph with such values made for one row, and how many products got smaller; the graph itself where none does."""
    if not any(_picked(n) for n in graph.nodes) or any(n.kind is Kind.CONTROL for n in graph.nodes):
        return graph, 0
    wanted = _wanted(graph)
    smaller = [n for n in graph.nodes if lookup(n.op).access in _WORK and any(v.name in wanted for v in n.outs)]
    sizes = possible_sizes(graph) if smaller else None
    if sizes is None:
        return graph, 0
    made, changed = _Rewriter(graph, wanted).run()
    try:
        return verify(relaid(made, changed, sizes)), len(smaller)
    except InternalError:  # an op whose sizes follow another rule than was thought: the graph stays as it is
        return graph, 0


def _picked(node: Node) -> tuple[Value, Row] | None:
    """What a node takes one row of."""
    op, x = packet(node.op), node.args[0] if node.args else None
    if op not in ("aten.select", "aten.slice") or not isinstance(x, Value) or not isinstance(x.type, TensorType):
        return None
    rank = len(x.type.shape)
    axis = argument(node, "dim", 0)
    if not isinstance(axis, int) or not -rank <= axis < rank or x.type.shape[axis % rank] == 1:
        return None
    if op == "aten.select":
        index = argument(node, "index")
        return (x, Row(axis % rank, index)) if isinstance(index, int) else None
    start, end = argument(node, "start", 0), argument(node, "end", _END)
    if isinstance(start, int) and isinstance(end, int) and argument(node, "step", 1) == 1:
        one = (start >= 0 and end == start + 1) or (start == -1 and end == _END) or (start < -1 and end == start + 1)
        return (x, Row(axis % rank, start)) if one and node.outs[0].type != x.type and _one(node, axis % rank) else None
    return None


def _one(node: Node, axis: int) -> bool:
    """Whether a slice surely has one row: a slice of nothing has none."""
    return shape_of(node.outs[0])[axis] == 1


def _wanted(graph: Graph) -> dict[str, Row]:
    """The values of which one row is wanted, and made."""
    row: dict[str, Row] = {}
    whole_of = {v.name for v in output_values(graph)}

    def want(name: str, what: Row | None) -> None:
        if what is None or row.setdefault(name, what) != what:
            whole_of.add(name)

    for node in reversed(graph.nodes):
        asked = {row.get(v.name) for v in node.outs if v.name in row or v.name in whole_of}
        only = asked.pop() if len(asked) == 1 and not any(v.name in whole_of for v in node.outs) else None
        operands = _operands(node, only) if only is not None else None
        if operands is None:
            whole_of.update(v.name for v in node.outs if v.name in row)
            picked = _picked(node)
            operands = dict.fromkeys((v.name for v in node.ins), None) if picked is None else {picked[0].name: picked[1]}
        for name, what in operands.items():
            want(name, what)
    made = {v.name for n in graph.nodes for v in n.outs}
    return {name: r for name, r in row.items() if name not in whole_of and name in made}


def _operands(node: Node, row: Row) -> dict[str, Row | None] | None:
    """What a node that makes one row wants of its operands; None where it has to make all of them."""
    op = packet(node.op)
    if op in RESHAPES and op not in _SIZED | _BY_AXES:
        return None
    y = shape_of(node.outs[0])
    size = y[row.axis]
    found: dict[str, Row | None] = dict.fromkeys((v.name for v in node.ins), None)
    try:
        for name, relation in carries(node).operands.items():
            x = shape_of(next(v for v in node.ins if v.name == name))
            for out in node.outs:
                at = relation.backward(AxisIndex(row.axis), size, x, shape_of(out))
                if at is not None and not whole(at, size, x):
                    return None
                found[name] = None if at is None else Row(at.axis, row.index)
    except NotByRows:
        return None
    return found if any(r is not None for r in found.values()) else None


class _Rewriter:
    def __init__(self, graph: Graph, wanted: dict[str, Row]) -> None:
        self.graph, self.wanted = graph, wanted
        self.rows: dict[tuple[str, Row], Value] = {}
        self.nodes: list[Node] = []
        self.taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs}
        self.taken |= {p.value.name for p in graph.params}

    def run(self) -> tuple[Graph, set[str]]:
        """The graph, and the values in it that are new."""
        for node in self.graph.nodes:
            row = self.wanted.get(node.outs[0].name) if node.outs else None
            if row is not None:
                self._smaller(node, row)
            elif (picked := _picked(node)) is not None and (small := self.rows.get((picked[0].name, picked[1]))) is not None:
                self._from_row(node, small)
            else:
                self.nodes.append(node)
        changed = {v.name for v in self.rows.values()}
        return replace(self.graph, nodes=tuple(self.nodes)), changed

    def _from_row(self, node: Node, small: Value) -> None:
        """A pick from what has that row alone."""
        if packet(node.op) == "aten.select":
            self.nodes.append(replace(node, args=(small, node.args[1], 0)))
        else:
            self.nodes.append(replace(node, args=(small, argument(node, "dim", 0), 0, 1)))

    def _smaller(self, node: Node, row: Row) -> None:
        operands = _operands(node, row)
        if operands is None:
            raise InternalError(f"{node.op} was to make one row", where=str(node.loc))
        given: dict[str, Arg] = {v.name: self._row(v, r) for v in node.ins if (r := operands[v.name]) is not None}
        outs: list[Value] = []
        for v in node.outs:
            shape = tuple(1 if i == row.axis else d for i, d in enumerate(shape_of(v)))
            assert isinstance(v.type, TensorType)
            outs.append(Value(v.name, replace(v.type, shape=shape)))
            self.rows[v.name, row] = outs[-1]
        made = map_node(node, given, tuple(outs))
        if packet(node.op) in _SIZED and isinstance(sizes := made.args[1], tuple):
            sizes = tuple(1 if i == row.axis else s for i, s in enumerate(sizes))
            made = replace(made, args=(made.args[0], sizes, *made.args[2:]))
        self.nodes.append(made)

    def _row(self, v: Value, row: Row) -> Value:
        """A row of a value that is made whole, or the value that was made for it."""
        if (v.name, row) not in self.rows:
            assert isinstance(v.type, TensorType)
            shape = tuple(1 if i == row.axis else d for i, d in enumerate(v.type.shape))
            out = Value(unused_name(f"{v.name}.row", self.taken), replace(v.type, shape=shape))
            end = row.index + 1 if row.index != -1 else _END
            self.nodes.append(Node(Kind.OPERATOR, "aten.slice.Tensor", (v, row.axis, row.index, end), (out,)))
            self.rows[v.name, row] = out
        return self.rows[v.name, row]
