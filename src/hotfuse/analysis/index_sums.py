"""Ints that count along axes: sums of indices, each times a number, as libraries make them to read a mask or a table at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hotfuse.analysis.row_axes import AxisIndex, NotByRows, carries, product, shape_of
from hotfuse.analysis.uniform import SPREAD
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value
from hotfuse.ir.types import DType, ScalarType, TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

_MAX_ELEMENTS = 1 << 16
"""Elements of the largest weight that is looked through."""


@dataclass(frozen=True, slots=True)
class IndexSum:
    """An int that is a sum of indices along axes, each times a number, and of a number."""

    offset: Dim
    steps: Mapping[int, Dim]


class IndexSums:
    """Those of a graph, in the order of its nodes."""

    def __init__(self, graph: Graph, weights: Mapping[str, torch.Tensor]) -> None:
        self.found: dict[str, IndexSum] = {}
        for p in graph.params:
            w = weights.get(p.key)
            if w is None or w.dtype is not torch.int64 or not 0 < w.numel() <= _MAX_ELEMENTS or w.device.type != "cpu":
                continue
            if isinstance(p.value.type, TensorType) and (total := _counted(w)) is not None:
                self.found[p.value.name] = total

    def note(self, node: Node) -> None:
        """What a node makes of sums."""
        total = self._sum(node)
        if total is not None:
            self.found[node.outs[0].name] = total

    def as_sum(self, arg: Arg) -> IndexSum | None:
        """An argument as a sum of indices."""
        if isinstance(arg, bool):
            return None
        if isinstance(arg, int):
            return IndexSum(arg, {})
        if not isinstance(arg, Value):
            return None
        if isinstance(arg.type, ScalarType):
            return None if arg.type.expr is None else IndexSum(arg.type.expr, {})
        return self.found.get(arg.name)

    def _sum(self, node: Node) -> IndexSum | None:
        op, args = packet(node.op), node.args
        out = node.outs[0].type
        if not isinstance(out, TensorType) or out.dtype is not DType.I64:
            return None
        if op == "aten.arange":
            first, step = argument(node, "start", 0), argument(node, "step", 1)
            return IndexSum(0, {0: 1}) if first == 0 and step == 1 else None
        if op == "aten.scalar_tensor":
            return self.as_sum(args[0])
        if op in ("aten.stack", "aten.cat") and isinstance(args[0], tuple) and len(args[0]) == 1:
            inner = self.as_sum(args[0][0])
            return inner if inner is not None and not inner.steps else None
        if op in SPREAD or op == "aten.to":
            return self._carried(node)
        if op in ("aten.add", "aten.mul") and len(args) == 2 and not node.attrs:
            a, b = self.as_sum(args[0]), self.as_sum(args[1])
            if a is None or b is None:
                return None
            a, b = aligned(a, args[0], out), aligned(b, args[1], out)
            if op == "aten.add":
                return _added(a, b) if not a.steps.keys() & b.steps.keys() else None
            return _scaled(a, b.offset) if not b.steps else _scaled(b, a.offset) if not a.steps else None
        return None

    def _carried(self, node: Node) -> IndexSum | None:
        """The same sum behind a view."""
        x = node.args[0]
        total = self.found.get(x.name) if isinstance(x, Value) else None
        if total is None or not isinstance(x, Value):
            return None
        shape, out = shape_of(x), shape_of(node.outs[0])
        try:
            relation = carries(node).operands[x.name]
            steps: dict[int, Dim] = {}
            for axis, step in total.steps.items():
                place = relation.forward(AxisIndex(axis), shape[axis], shape, out)
                if place.span != 1 or out[place.axis] != shape[axis]:
                    return None
                steps[place.axis] = step
        except NotByRows:
            return None
        return IndexSum(total.offset, steps)


def _counted(w: torch.Tensor) -> IndexSum | None:
    """A weight as a sum of indices, where it is one: exporters fold those that depend on sizes alone."""
    at = (0,) * w.dim()
    offset = int(w[at])
    steps = {a: int(w[(*at[:a], 1, *at[a + 1 :])]) - offset for a, n in enumerate(w.shape) if n > 1}
    total = torch.full_like(w, offset)
    for axis, step in steps.items():
        shape = [-1 if a == axis else 1 for a in range(w.dim())]
        total += step * torch.arange(w.shape[axis]).reshape(shape)
    return IndexSum(offset, {a: s for a, s in steps.items() if s}) if torch.equal(total, w) else None


def aligned(total: IndexSum, arg: Arg, out: TensorType) -> IndexSum:
    """A sum whose axes are those of a broadcast result."""
    shift = len(out.shape) - (len(shape_of(arg)) if isinstance(arg, Value) and isinstance(arg.type, TensorType) else 0)
    return IndexSum(total.offset, {a + shift: s for a, s in total.steps.items()})


def _added(a: IndexSum, b: IndexSum) -> IndexSum:
    return IndexSum(expr("+", a.offset, b.offset), {**a.steps, **b.steps})


def _scaled(total: IndexSum, by: Dim) -> IndexSum:
    return IndexSum(expr("*", total.offset, by), {a: expr("*", s, by) for a, s in total.steps.items()})


def without_identity_reads(graph: Graph, weights: Mapping[str, torch.Tensor]) -> Graph:
    """Reads at indices that count through all that is read, in order, are reshapes: `m[arange(B)[:, None], arange(S)]` is `m`."""
    sums, nodes = IndexSums(graph, weights), list[Node]()
    for node in graph.nodes:
        if node.kind is Kind.OPERATOR and len(node.outs) == 1 and isinstance(node.outs[0].type, TensorType):
            sums.note(node)
            node = _as_reshape(node, sums)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _as_reshape(node: Node, sums: IndexSums) -> Node:
    if packet(node.op) != "aten.index" or len(node.args) != 2 or not isinstance(node.args[0], Value):
        return node
    x, at, out = node.args[0], node.args[1], node.outs[0].type
    shape = shape_of(x)
    if not isinstance(at, tuple) or not isinstance(out, TensorType) or product(shape) != product(out.shape):
        return node
    rest, steps = len(shape) - len(at), dict[int, Dim]()
    for axis, index in enumerate(at):
        total = sums.found.get(index.name) if isinstance(index, Value) else None
        if total is None or total.offset != 0 or not isinstance(index, Value):
            return node
        shift = len(out.shape) - rest - len(shape_of(index))
        for along, step in total.steps.items():
            far = expr("*", step, product(shape[axis + 1 :]))
            steps[along + shift] = expr("+", steps[along + shift], far) if along + shift in steps else far
    inner = len(out.shape) - rest
    if any(out.shape[a] != 1 and steps.get(a) != product(out.shape[a + 1 :]) for a in range(inner)):
        return node
    sizes: list[Arg] = [d if isinstance(d, int) else -1 for d in out.shape]
    if sizes.count(-1) > 1:
        return node
    return replace(node, op="aten.reshape.default", args=(x, tuple(sizes)), attrs=())
