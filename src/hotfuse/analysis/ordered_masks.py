"""What a mask says of values that depend on which of two rows comes first as well: causal masks.

    %c: bool[1, 1, S, S] = le(%keys, %queries)                  true where a key is not ahead of its query
    %m: bool[B, 1, S, S] = %c & %live[:, None, None, :]         false where the key is dead, and where it is ahead

Facts are found twice (`analysis.mask_facts`): as if every key stood at its query or before it, and as if every key stood ahead
of it. What begins such an order is a comparison of two indices, a triangle of a value that is one number, or a weight that is a
triangle. Facts hold under their assumption only, so values without an order are not told here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hotfuse.analysis.index_sums import aligned
from hotfuse.analysis.mask_facts import MaskFact, MaskFactPass, MaskInput, OrderedFact, constant_fact
from hotfuse.analysis.row_axes import AxisIndex, NotByRows, carries, shape_of
from hotfuse.analysis.uniform import number_of
from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

Axes = tuple[int, int]
"""Of queries, and of keys."""
_TRIANGLES = frozenset({"aten.tril", "aten.triu"})
_KEY_FIRST = {"aten.le": False, "aten.gt": True}
"""Comparisons of a key with a query that tell whether it is ahead, and what they are where it is."""
_QUERY_FIRST = {"aten.ge": False, "aten.lt": True}
_MAX_ELEMENTS = 1 << 22
"""Elements of the largest weight that is compared with a triangle."""


def ordered_facts(graph: Graph, mask: MaskInput, weights: Mapping[str, torch.Tensor]) -> dict[str, OrderedFact]:
    """Facts of every value that the mask and the order of two rows decide."""
    seen, ahead = (_OrderedPass(graph, mask, weights, ahead=a) for a in (False, True))
    seen.run()
    ahead.run()
    return {name: OrderedFact(seen.known[name], ahead.known[name], axes) for name, axes in seen.orders.items()
            if ahead.orders.get(name) == axes}  # fmt: skip


class _OrderedPass(MaskFactPass):
    """Facts as if keys were ahead of queries everywhere, or nowhere."""

    def __init__(self, graph: Graph, mask: MaskInput, weights: Mapping[str, torch.Tensor], *, ahead: bool) -> None:
        super().__init__(graph, mask, weights)
        self._ahead = ahead
        self.orders: dict[str, Axes] = {}
        """Values that are known under the assumption alone."""
        for p in graph.params:
            halves = _halves(weights.get(p.key))
            if halves is not None:
                rank = len(shape_of(p.value))
                self.orders[p.value.name] = (rank - 2, rank - 1)
                self.known[p.value.name] = constant_fact(number_of(p.value, halves[ahead]))

    def fact(self, node: Node) -> MaskFact | None:
        """What is known of a node's result under the assumption; nothing where the order cannot be followed."""
        out = node.outs[0]
        begun = self._compared_rows(node) or self._triangle(node)
        if begun is not None:
            number, self.orders[out.name] = begun
            return constant_fact(number_of(out, number))
        operands = [v for v in node.ins if v.name in self.orders]
        found = super().fact(node)
        if found is None or not operands:
            return found
        axes = self._followed(node, operands)
        if axes is None:
            return None
        self.orders[out.name] = axes
        return found

    def _compared_rows(self, node: Node) -> tuple[float | bool, Axes] | None:
        """A comparison of a key's place with a query's; the later axis is that of keys."""
        op, out = packet(node.op), node.outs[0].type
        if (op not in _KEY_FIRST and op not in _QUERY_FIRST) or len(node.args) != 2 or not isinstance(out, TensorType):
            return None
        places: list[int] = []
        for arg in node.args:
            total = self._indices.as_sum(arg)
            total = None if total is None else aligned(total, arg, out)
            if total is None or total.offset != 0 or list(total.steps.values()) != [1]:
                return None
            places += total.steps
        left, right = places
        if left == right or any(out.shape[a] != self.mask.rows for a in places):
            return None
        when_ahead = (_KEY_FIRST if left > right else _QUERY_FIRST).get(op)
        return None if when_ahead is None else (when_ahead if self._ahead else not when_ahead, (min(places), max(places)))

    def _triangle(self, node: Node) -> tuple[float | bool, Axes] | None:
        """The lower half of a value that is one number, or its upper one without the diagonal."""
        op, x = packet(node.op), node.args[0] if node.args else None
        if op not in _TRIANGLES or not isinstance(x, Value) or x.name in self.orders or (fact := self.known.get(x.name)) is None:
            return None
        shape, upper = shape_of(x), op == "aten.triu"
        if fact.places is not None or len(shape) < 2 or shape[-1] != shape[-2] or argument(node, "diagonal", 0) != int(upper):
            return None
        return fact.dead.item() if self._ahead is upper else 0, (len(shape) - 2, len(shape) - 1)

    def _followed(self, node: Node, operands: list[Value]) -> Axes | None:
        """Where the two rows lie in a result, which all operands agree on."""
        y, found = shape_of(node.outs[0]), set[Axes]()
        try:
            for v in operands:
                axes = self.orders[v.name]
                if self._cut_from_first(node, axes):
                    found.add(axes)
                    continue
                relation, x = carries(node).operands[v.name], shape_of(v)
                places = [relation.forward(AxisIndex(a), x[a], x, y) for a in axes]
                if any(p.span != 1 for p in places):
                    return None
                found.add((places[0].axis, places[1].axis))
        except (NotByRows, KeyError):
            return None
        return found.pop() if len(found) == 1 else None

    def _cut_from_first(self, node: Node, axes: Axes) -> bool:
        """Whether a node gives the first rows along one of the axes: their order stays."""
        if packet(node.op) != "aten.slice":
            return False
        axis = argument(node, "dim", 0)
        begin, step = argument(node, "start", 0), argument(node, "step", 1)
        return isinstance(axis, int) and axis % len(shape_of(node.outs[0])) in axes and begin in (0, None) and step == 1


def _halves(w: torch.Tensor | None) -> tuple[float | bool, float | bool] | None:
    """The number on and below the diagonal of a weight, and the other one above it."""
    if w is None or w.dim() < 2 or not 1 < w.shape[-1] == w.shape[-2] or w.numel() != w.shape[-1] ** 2 or w.numel() > _MAX_ELEMENTS:
        return None
    if w.device.type != "cpu" or w.is_complex():
        return None
    square = w.detach().reshape(w.shape[-2:])
    below, above = square[0, 0], square[0, -1]
    if bool(below == above) or not bool((square[0, 1:] == above).all()):  # which most weights fail at once
        return None
    triangle = torch.where(torch.ones_like(square, dtype=torch.bool).tril(), below, above)
    return (below.item(), above.item()) if torch.equal(square, triangle) else None
