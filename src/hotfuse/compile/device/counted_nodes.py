"""Nodes written into a graph on a device, and numbers that follow from a count there.

    %each    = arange(16)            %counted = add(%count, 1)            one node for each offset from the count
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.ir.graph import Arg, Graph, Kind, Node, Token, Value, unused_name
from hotfuse.ir.types import ROW_MAJOR, DType, TensorType


class CountedNodes:
    """Collects the nodes of a graph that is written anew; the count is one of its inputs."""

    def __init__(self, graph: Graph, device: str) -> None:
        self.taken = {v.name for v in graph.inputs} | {p.value.name for p in graph.params}
        self.taken |= {v.name for n in graph.nodes for v in n.outs}
        self.nodes: list[Node] = []
        self.values: dict[str, Value] = {p.value.name: p.value for p in graph.params}
        """By the names that they had."""
        self.device = device
        self.count = Value(self._name("count"), TensorType(DType.I64, (), ROW_MAJOR, device))
        self.counted: dict[int, Value] = {0: self.count}
        """The count and an offset, by the offset."""

    def _name(self, stem: str) -> str:
        found = unused_name(stem, self.taken)
        self.taken.add(found)
        return found

    def _emit(self, node: Node) -> Value:
        self.nodes.append(node)
        self.values |= {v.name: v for v in node.outs}
        return node.outs[0]

    def _new(self, stem: str, op: str, args: tuple[Arg, ...], dtype: DType, shape: Sequence[int]) -> Value:
        out = Value(self._name(stem), TensorType(dtype, tuple(shape), ROW_MAJOR, self.device))
        return self._emit(Node(Kind.OPERATOR, op, args, (out,)))

    def _arange(self, n: int) -> Value:
        out = Value(self._name("each"), TensorType(DType.I64, (n,), ROW_MAJOR, self.device))
        return self._emit(self._arange_node(n, out))

    def _arange_node(self, n: int, out: Value) -> Node:
        assert isinstance(out.type, TensorType)
        attrs: tuple[tuple[str, Arg], ...] = (("dtype", out.type.dtype), ("device", Token("device", out.type.device)))
        return Node(Kind.OPERATOR, "aten.arange.default", (n,), (out,), attrs)

    def _counted(self, offset: int) -> Value:
        if offset not in self.counted:
            self.counted[offset] = self._new("counted", "aten.add.Tensor", (self.count, offset), DType.I64, ())
        return self.counted[offset]
