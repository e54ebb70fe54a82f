"""How a graph reads its rows at the end: one row of each sequence, or a sum of them whose weights are 0 at dead ones.

    %first = select(%h: f32[B, S, 64], 1, 0)                                 the first row
    %last = index(%h, [arange(B), sum(%mask, 1) - 1])                        as many rows on as live, less one; `gather` as well
    %end = index(%h, [arange(B), argmax(%ids, 1)])                           the row at a place that inputs tell; `gather` as well
    %mean = bmm(%mask[:, None, :], %h)                                       dead rows count nothing; `matmul`, `einsum`
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from hotfuse.analysis.mask_facts import MaskFact, RowPlaces
from hotfuse.analysis.row_axes import AxisIndex, shape_of
from hotfuse.ir.graph import Graph, Node, Value, makers
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.movement import RESHAPES
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

_END = 2**63 - 1
_PRODUCTS = frozenset({"aten.matmul", "aten.bmm"})
_SAME = frozenset({*RESHAPES, "aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.repeat", "aten.to", "aten._to_copy",
                   "aten.contiguous", "aten.clone", "aten.alias", "aten.detach"})  # fmt: skip
"""Ops whose result has the number of a sequence wherever it had it, if it has one number a sequence."""


class PickedRow(StrEnum):
    """Which row of each sequence is read."""

    FIRST = "first"
    LAST = "last"
    COUNTED = "counted"
    """The one at the place that the number of live rows says, less one: the last live one where these lie in front."""
    TOLD = "told"
    """The one at a place that a call's inputs tell."""


def picked_row(
    node: Node, places: RowPlaces, graph: Graph, facts: Mapping[str, MaskFact], told: Collection[str] = ()
) -> PickedRow | None:
    """Which row a node takes of each sequence of its first operand, where these lie there; `told`: places that inputs tell."""
    op, x = packet(node.op), node.args[0]
    if op not in ("aten.select", "aten.slice", "aten.index", "aten.gather") or places.row is None or not isinstance(x, Value):
        return None
    if op in ("aten.index", "aten.gather"):
        at = _gathered_at(node, places) if op == "aten.gather" else told_place(node, places, graph)
        if at is not None and _counts(at, graph, facts):
            return PickedRow.COUNTED
        rows = told_place(node, places, graph)
        return PickedRow.TOLD if rows is not None and rows.name in told else None
    axis, rank = argument(node, "dim", 0), len(shape_of(x))
    if not isinstance(axis, int) or axis % rank != places.row.axis:
        return None
    if op == "aten.select":
        index = argument(node, "index")
    else:
        start, end, step = argument(node, "start", 0), argument(node, "end", _END), argument(node, "step", 1)
        one = shape_of(node.outs[0])[axis % rank] == 1 and step == 1
        index = 0 if one and start in (0, None) and end == 1 else -1 if one and start == -1 else None
    if index not in (0, -1) or isinstance(index, bool):
        return None
    return PickedRow.FIRST if index == 0 else PickedRow.LAST


def one_each(v: Value) -> bool:
    """Whether a value has one number for each sequence, if its first axis is that of sequences."""
    return isinstance(v.type, TensorType) and len(v.type.shape) > 0 and all(n == 1 for n in v.type.shape[1:])


def told_place(node: Node, places: RowPlaces, graph: Graph) -> Value | None:
    """The place that each sequence is read at by `x[arange(B), place]`, or by `gather(x, 1, place[:, None, None].expand(..))`."""
    if packet(node.op) == "aten.gather":
        return _one_a_sequence(_gathered_at(node, places), graph)
    at = node.args[1]
    if places != RowPlaces(AxisIndex(0), AxisIndex(1)) or not isinstance(at, tuple) or len(at) != 2:
        return None
    sequences, rows = at
    if not isinstance(sequences, Value) or not isinstance(rows, Value) or len(shape_of(sequences)) != 1 or len(shape_of(rows)) != 1:
        return None
    maker = makers(graph)
    made = graph.nodes[maker[sequences.name]] if sequences.name in maker else None
    if made is None or packet(made.op) != "aten.arange" or argument(made, "start", 0) != 0 or argument(made, "step", 1) != 1:
        return None
    x = node.args[0]
    return rows if isinstance(x, Value) and shape_of(sequences)[0] == shape_of(x)[0] == shape_of(rows)[0] else None


def _gathered_at(node: Node, places: RowPlaces) -> Value | None:
    """The index of a `gather` that has one row where its operand has all, and is as long along every other axis."""
    x, axis, at = node.args[0], argument(node, "dim"), argument(node, "index")
    if not isinstance(x, Value) or not isinstance(at, Value) or places.row is None or places.sequence != AxisIndex(0):
        return None
    shape = shape_of(x)
    if not isinstance(axis, int) or axis % len(shape) != places.row.axis:
        return None
    return at if shape_of(at) == tuple(1 if i == places.row.axis else d for i, d in enumerate(shape)) else None


def _one_a_sequence(v: Value | None, graph: Graph) -> Value | None:
    """The value with one number a sequence that such an index repeats along other axes."""
    maker = makers(graph)
    while v is not None and not one_each(v):
        node = graph.nodes[maker[v.name]] if v.name in maker else None
        x = node.args[0] if node is not None and packet(node.op) in _SAME else None
        v = x if isinstance(x, Value) and shape_of(x)[:1] == shape_of(v)[:1] else None
    return v


def _counts(v: Value, graph: Graph, facts: Mapping[str, MaskFact]) -> bool:
    """Whether a value is the number of a sequence's live rows, less one, whatever else it is repeated along."""
    maker = makers(graph)

    def node_of(x: object) -> Node | None:
        while isinstance(x, Value) and x.name in maker:
            node = graph.nodes[maker[x.name]]
            if packet(node.op) not in _SAME:
                return node
            x = node.args[0]
        return None

    less = node_of(v)
    if less is None or (packet(less.op), less.args[1:]) not in (("aten.sub", (1,)), ("aten.add", (-1,))) or less.attrs:
        return False
    total = node_of(less.args[0])
    if total is None or packet(total.op) != "aten.sum" or not isinstance(mask := total.args[0], Value):
        return False
    fact, along = facts.get(mask.name), argument(total, "dim")
    if fact is None or fact.live is None or fact.places is None or fact.places.sequence != AxisIndex(0) or len(shape_of(mask)) != 2:
        return False
    whole = isinstance(total.outs[0].type, TensorType) and total.outs[0].type.dtype in (DType.I64, DType.I32)
    row = fact.places.row
    return whole and row == AxisIndex(1) and along in ((1,), (-1,), 1, -1) and fact.dead.item() == 0 and fact.live.item() == 1


def weighed_rows(node: Node, facts: Mapping[str, MaskFact], hints: Mapping[str, RowPlaces]) -> Value | None:
    """What a node sums along rows with weights that are 0 at dead ones; dead rows have to be finite."""
    along = _summed(node)
    if along is None:
        return None
    for (weights, there), (x, here) in (along, along[::-1]):
        fact, hint = facts.get(weights.name), hints.get(x.name)
        if fact is None or fact.places is None or hint is None or x.name in facts or fact.dead.item() != 0:
            continue
        if fact.places == RowPlaces(AxisIndex(0), AxisIndex(there)) and hint == RowPlaces(AxisIndex(0), AxisIndex(here)):
            return x
    return None


def _summed(node: Node) -> tuple[tuple[Value, int], tuple[Value, int]] | None:
    """Both operands of a product, with the axis of each that it sums along; their first axes are one."""
    op = packet(node.op)
    if op in _PRODUCTS:
        left, right = node.args[:2]
        if not isinstance(left, Value) or not isinstance(right, Value) or len(shape_of(left)) != len(shape_of(right)):
            return None
        rank = len(shape_of(left))
        return None if rank < 3 else ((left, rank - 1), (right, rank - 2))
    if op != "aten.einsum" or not isinstance(node.args[0], str) or not isinstance(node.args[1], tuple) or len(node.args[1]) != 2:
        return None
    operands, _, result = node.args[0].replace(" ", "").partition("->")
    (left, right), letters = node.args[1], operands.split(",")
    if not isinstance(left, Value) or not isinstance(right, Value) or len(letters) != 2 or "." in operands or not result:
        return None
    gone = (set(letters[0]) & set(letters[1])) - set(result)
    if len(gone) != 1 or letters[0][0] != letters[1][0] or any(len(set(one)) != len(one) for one in letters):
        return None
    letter = gone.pop()
    return (left, letters[0].index(letter)), (right, letters[1].index(letter))
