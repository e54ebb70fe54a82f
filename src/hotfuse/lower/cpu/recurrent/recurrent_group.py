"""`lstm` and `gru` over whole sequences as one kernel: any number of layers, one direction or both.

    zeros -> initial state                       nothing is read
    cat(chunk(select(W)))  -> weight             packed from the param that the views lead to

Weights must come from params, directly or through views and concatenations: ONNX has another order of gates. Where each
element comes from is found by running those nodes on element numbers.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Graph, Node, Value, output_values
from hotfuse.ir.types import DType
from hotfuse.lower.common.algebra import same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import BufferView, KernelBuffers, Lowered, PackArgument, tensor_type
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder
from hotfuse.lower.cpu.recurrent.recurrent_job import GATES, Recurrent, Weights, tiling
from hotfuse.lower.cpu.recurrent.recurrent_kernel import recur
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.ops.views import shape_of
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet, resolve
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer, BufferKind

CELLS = {"aten.lstm.input": "lstm", "aten.gru.input": "gru"}
ZEROS = frozenset({"aten.zeros", "aten.zeros_like", "aten.new_zeros"})


def is_recurrent(node: Node) -> bool:
    """Whether a node is a recurrent layer over padded sequences."""
    return node.op in CELLS


def lower_recurrent(graph: Graph, core: Core, *, name: str = "recurrent") -> Lowered:
    """A kernel for a group around one recurrent node; raises CannotLower where there is none."""
    return _RecurrentGroup(graph, core, name).lower()


class _RecurrentGroup:
    """One group while it is lowered."""

    def __init__(self, graph: Graph, core: Core, name: str) -> None:
        found = [n for n in graph.nodes if is_recurrent(n)]
        if len(found) != 1:
            raise CannotLower(f"a group with {len(found)} recurrent nodes")
        self.graph, self.core, self.node = graph, core, found[0]
        self.cell = CELLS[self.node.op]
        self.where = str(self.node.loc)
        self.builder = KernelBuilder(name, self.node.loc)
        self.memory = KernelBuffers(self.builder, graph)
        self.makers = {v.name: n for n in graph.nodes for v in n.outs}
        self.origins = _Origins(graph)
        self.packs: dict[str, PackArgument] = {}

    def lower(self) -> Lowered:
        """The kernel with its call."""
        node = self.node
        x = argument(node, "input")
        layers, biased, both, batch_first = (
            argument(node, n) for n in ("num_layers", "has_biases", "bidirectional", "batch_first")
        )
        if not isinstance(x, Value) or not isinstance(layers, int):
            raise CannotLower("a recurrent layer of unknown depth or input", where=self.where)
        if argument(node, "train") and argument(node, "dropout") not in (0, 0.0):
            raise CannotLower("a recurrent layer with dropout", where=self.where)
        directions = 2 if both else 1
        shape = self._shape(x, 3)
        steps, batch = (shape[1], shape[0]) if batch_first else (shape[0], shape[1])
        states = self._states()
        hidden = self._hidden(states, layers * directions, batch)
        if not isinstance(shape[2], int) or shape[2] < 1:
            raise CannotLower(f"steps of {shape[2]} elements", where=self.where)
        weights = self._weights(layers, directions, biased=bool(biased), inputs=shape[2], hidden=hidden)
        made = {v.name for v in output_values(self.graph)}
        if not made <= {v.name for v in node.outs}:
            raise CannotLower("a value inside the group is read outside it", where=self.where)
        outs = [self.memory.output(v) if v.name in made else None for v in node.outs]
        job = Recurrent(
            cell=self.cell,
            hidden=hidden,
            steps=steps,
            batch=batch,
            directions=directions,
            weights=weights,
            x=self.memory.place(x),
            batch_first=bool(batch_first),
            initial=tuple(self._initial(v) for v in states),
            y=outs[0],
            finals=tuple(outs[1:]),
        )
        recur(self.builder, job, self.core)
        return self.memory.finish(self.builder.finish(), self.packs)

    # -- operands

    def _shape(self, value: Value, rank: int) -> tuple[Dim, ...]:
        shape = shape_of(value)
        if len(shape) != rank or tensor_type(value).dtype is not DType.F32:
            raise CannotLower(f"%{value.name} is not an fp32 tensor of {rank} dims", where=self.where)
        return shape

    def _states(self) -> tuple[Value, ...]:
        given = argument(self.node, "hx")
        states = given if isinstance(given, tuple) else (given,)
        found = tuple(v for v in states if isinstance(v, Value))
        if len(found) != len(states) or len(found) != len(self.node.outs) - 1:
            raise CannotLower("a recurrent layer without initial states", where=self.where)
        return found

    def _hidden(self, states: tuple[Value, ...], count: int, batch: Dim) -> int:
        shapes = [self._shape(v, 3) for v in states]
        hidden = shapes[0][2]
        if not isinstance(hidden, int) or hidden < 1:
            raise CannotLower(f"{hidden} hidden units", where=self.where)
        for shape in shapes:
            if shape[0] != count or not same(shape[1], batch) or shape[2] != hidden:
                raise CannotLower("initial states of other sizes than the layer's", where=self.where)
        return hidden

    def _initial(self, value: Value) -> BufferView | None:
        maker = self.makers.get(value.name)
        if maker is None:
            return self.memory.place(value)
        if packet(maker.op) not in ZEROS:
            raise CannotLower(f"an initial state is computed by {maker.op} in the group", where=self.where)
        return None

    # -- weights

    def _weights(self, layers: int, directions: int, *, biased: bool, inputs: int, hidden: int) -> tuple[Weights, ...]:
        given = argument(self.node, "params")
        params = [v for v in given if isinstance(v, Value)] if isinstance(given, tuple) else []
        each = 4 if biased else 2
        if len(params) != layers * directions * each:
            raise CannotLower(f"{len(params)} weights for {layers} layers", where=self.where)
        made: list[Weights] = []
        for i in range(layers * directions):
            k = inputs if i < directions else directions * hidden
            mine = params[i * each : (i + 1) * each]
            wi = self._packed(f"wi{i}", mine[0], k, hidden)
            wh = self._packed(f"wh{i}", mine[1], hidden, hidden)
            bi, bh = (
                self._packed(f"b{n}{i}", mine[at], 1, hidden) if biased else None for n, at in (("i", 2), ("h", 3))
            )
            made.append(Weights(k, wi, wh, bi, bh))
        return tuple(made)

    def _packed(self, name: str, value: Value, k: int, hidden: int) -> Buffer:
        """A weight, or a bias as a weight of one column: the same units of all gates side by side."""
        order = GATES[self.cell]
        shape = (len(order) * hidden,) if k == 1 and len(shape_of(value)) == 1 else (len(order) * hidden, k)
        if self._shape(value, len(shape)) != shape:
            raise CannotLower(f"%{value.name} is no weight of {len(order)} gates", where=self.where)
        first = [self.origins.rows(value, g * hidden, hidden, k) for g in order]
        sources = tuple(PackSource(o.param, WeightOrder.ROWS, hidden, o.row) for o in first)
        spec = PackSpec(sources, k, tiling(self.core, self.cell).nr, together=True)
        buffer = self.builder.buffer(name, BufferKind.CONST, spec.dtype, spec.shape, spec.stride)
        self.packs[buffer.name] = PackArgument(buffer.name, spec)
        return buffer


@dataclass(frozen=True, slots=True)
class _Origin:
    """Rows of a param from `row` on, all dims but the last counted as one."""

    param: str
    row: int


class _Origins:
    """Where the elements of values come from: params hold running numbers, and views move them."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = {v.name: n for n in graph.nodes for v in n.outs}
        self.params = {p.value.name: p.value for p in graph.params}
        self.names: list[str] = []
        self.starts: list[int] = []
        self.total = 0
        self.known: dict[str, torch.Tensor] = {}

    def rows(self, value: Value, first: int, count: int, k: int) -> _Origin:
        """The param that has `count` rows of `k` elements, which must lie there as they do here."""
        numbers = self.of(value).reshape(-1, k)[first : first + count].reshape(-1)
        start = int(numbers[0])
        at = bisect.bisect_right(self.starts, start) - 1
        inside = start - self.starts[at]
        if inside % k or not torch.equal(numbers, torch.arange(start, start + count * k)):
            raise CannotLower(f"the rows of %{value.name} are not rows of a param")
        return _Origin(self.names[at], inside // k)

    def of(self, value: Value) -> torch.Tensor:
        """The numbers of a value's elements."""
        if value.name not in self.known:
            if value.name in self.params:
                self._param(value)
            else:
                self._node(value)
        return self.known[value.name]

    def _param(self, value: Value) -> None:
        shape = shape_of(value)
        sizes = [n for n in shape if isinstance(n, int)]
        if len(sizes) != len(shape) or tensor_type(value).dtype is not DType.F32:
            raise CannotLower(f"param %{value.name} is not an fp32 tensor of known sizes")
        count = int(torch.Size(sizes).numel())
        self.names.append(value.name)
        self.starts.append(self.total)
        self.known[value.name] = torch.arange(self.total, self.total + count).reshape(sizes)
        self.total += count + 1  # a gap: rows never run from one param into the next

    def _node(self, value: Value) -> None:
        node = self.nodes.get(value.name)
        if node is None:
            raise CannotLower(f"weight %{value.name} is not constant")
        if lookup(node.op).access is not Access.MOVEMENT:
            raise CannotLower(f"a weight is computed by {node.op}", where=str(node.loc))
        result: Any = resolve(node.op)(*map(self._argument, node.args), **{k: self._argument(a) for k, a in node.attrs})
        for out, numbers in zip(node.outs, result if isinstance(result, tuple | list) else (result,), strict=True):
            self.known[out.name] = numbers

    def _argument(self, arg: Arg) -> Any:
        if isinstance(arg, tuple):
            return [self._argument(a) for a in arg]
        return self.of(arg) if isinstance(arg, Value) else arg
