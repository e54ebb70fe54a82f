"""One step of a recurrent layer is two products and arithmetic on their columns, which kernels take; a cell is nothing they know.

    lstm_cell(x, (h, c), W, U, b, d)   ->   g = linear(h, U, d) + linear(x, W, b)
                                            i, f, o = sigmoid(columns of g);  n = tanh(columns of g)
                                            c' = f * c + i * n;  h' = o * tanh(c')

Models that need an answer before the next step (decoders with attention, memories, vocoders) call a cell in a loop. Whole, each
call is a partition of the library's in the middle of a run. Torch's own cell is these operators in this order, so that tier 0
answers as before. On a device torch has one kernel for a cell's arithmetic: there it stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hotfuse.analysis.inferred_types import lies_as_before, possible_sizes, relaid
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, unused_name
from hotfuse.ir.types import DType, TensorType
from hotfuse.ir.verify import verify
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet


def cells_as_products(graph: Graph) -> tuple[Graph, int]:
    """The graph with such cells as products, and how many; as it is where there is none."""
    if any(n.kind is Kind.CONTROL for n in graph.nodes) or not any(packet(n.op) in _CELLS for n in graph.nodes):
        return graph, 0
    sizes = possible_sizes(graph)
    if sizes is None:
        return graph, 0
    writer = _CellWriter(graph)
    count = writer.run()
    if not count:
        return graph, 0
    try:
        made = verify(relaid(replace(graph, nodes=tuple(writer.nodes)), writer.new, sizes))
    except InternalError:  # operands whose sizes do not fit: torch has its own word for that
        return graph, 0
    cells = {v.name for n in graph.nodes if packet(n.op) in _CELLS for v in n.outs}
    return (made, count) if lies_as_before(made, graph, cells) else (graph, 0)


class _CellWriter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[Node] = []
        self.new: set[str] = set()
        self.taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs} | {
            p.value.name for p in graph.params}  # fmt: skip

    def run(self) -> int:
        """How many cells were written as products."""
        count = 0
        for node in self.graph.nodes:
            cell = _Cell.of(node, self)
            if cell is None:
                self.nodes.append(node)
                continue
            _CELLS[packet(node.op)](cell)
            count += 1
        return count


class _Cell:
    """One cell while it is written; its results take the names of the node's."""

    def __init__(self, node: Node, writer: _CellWriter, x: Value, states: tuple[Value, ...], shape: tuple[Dim, ...]) -> None:
        self.node, self.writer, self.x, self.states, self.shape = node, writer, x, states, shape

    @staticmethod
    def of(node: Node, writer: _CellWriter) -> _Cell | None:
        """None where the node is no cell, or one that stays whole."""
        if packet(node.op) not in _CELLS:
            return None
        x, given = argument(node, "input"), argument(node, "hx")
        states = given if isinstance(given, tuple) else (given,)
        tensors = [v for v in (x, *states) if isinstance(v, Value) and isinstance(v.type, TensorType)]
        if len(tensors) != 1 + len(states) or not all(isinstance(argument(node, n), Value) for n in ("w_ih", "w_hh")):
            return None
        types = [v.type for v in (*tensors, *node.outs) if isinstance(v.type, TensorType)]
        if len(types) != len(tensors) + len(node.outs) or any(t.device != "cpu" or len(t.shape) != 2 for t in types):
            return None
        if {t.dtype for t in types} - {DType.F32, DType.F64} or len({t.dtype for t in types}) != 1:
            return None
        if any(t.shape != types[1].shape for t in types[1:]) or not isinstance(types[1].shape[1], int):
            return None
        return _Cell(node, writer, tensors[0], tuple(tensors[1:]), types[1].shape)

    def product(self, of: Value, side: str, gates: int) -> Value:
        """A linear layer of the inputs (`ih`) or of the state (`hh`)."""
        args = (of, argument(self.node, f"w_{side}"), argument(self.node, f"b_{side}"))
        return self.add("linear.default", args, (self.shape[0], gates * self._width()))

    def columns(self, of: Value, gate: int) -> Value:
        """Those of one gate."""
        width = self._width()
        return self.add("slice.Tensor", (of, 1, gate * width, (gate + 1) * width))

    def add(self, op: str, args: tuple[Arg, ...], shape: tuple[Dim, ...] | None = None, result: int | None = None) -> Value:
        """A node; `result` is which of the cell's results it makes."""
        like, writer = self.node.outs[0], self.writer
        assert isinstance(like.type, TensorType)
        kind = TensorType(like.type.dtype, self.shape if shape is None else shape)
        name = unused_name(f"{like.name}_", writer.taken) if result is None else self.node.outs[result].name
        out = Value(name, kind)
        writer.new.add(name)
        writer.nodes.append(Node(Kind.OPERATOR, f"aten.{op}", args, (out,), loc=self.node.loc))
        return out

    def both(self, gates: int) -> Value:
        """What the inputs and the state give together."""
        return self.add("add.Tensor", (self.product(self.states[0], "hh", gates), self.product(self.x, "ih", gates)),
                        (self.shape[0], gates * self._width()))  # fmt: skip

    def _width(self) -> int:
        width = self.shape[1]
        assert isinstance(width, int)
        return width


def _lstm(cell: _Cell) -> None:
    gates = cell.both(4)
    take, keep, new, show = (cell.add(f"{function}.default", (cell.columns(gates, i),))
                             for i, function in enumerate(("sigmoid", "sigmoid", "tanh", "sigmoid")))  # fmt: skip
    kept = cell.add("mul.Tensor", (keep, cell.states[1]))
    memory = cell.add("add.Tensor", (kept, cell.add("mul.Tensor", (take, new))), result=1)
    cell.add("mul.Tensor", (show, cell.add("tanh.default", (memory,))), result=0)


def _gru(cell: _Cell) -> None:
    inputs, state = cell.product(cell.x, "ih", 3), cell.product(cell.states[0], "hh", 3)
    reset, update = (
        cell.add("sigmoid.default", (cell.add("add.Tensor", (cell.columns(state, i), cell.columns(inputs, i))),)) for i in (0, 1)
    )
    old = cell.add("mul.Tensor", (cell.columns(state, 2), reset))
    new = cell.add("tanh.default", (cell.add("add.Tensor", (cell.columns(inputs, 2), old)),))
    far = cell.add("mul.Tensor", (cell.add("sub.Tensor", (cell.states[0], new)), update))
    cell.add("add.Tensor", (far, new), result=0)


def _plain(function: str) -> Callable[[_Cell], None]:
    def write(cell: _Cell) -> None:
        cell.add(f"{function}.default", (cell.both(1),), result=0)

    return write


_CELLS: Mapping[str, Callable[[_Cell], None]] = {
    "aten.lstm_cell": _lstm, "aten.gru_cell": _gru, "aten.rnn_tanh_cell": _plain("tanh"), "aten.rnn_relu_cell": _plain("relu"),
}  # fmt: skip
