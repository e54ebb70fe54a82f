"""Groups around a convolution with constant weights, and what is done to its result.

    y = relu(batch_norm(conv2d(x, W)) + r)      one kernel: the sums stay in registers until y is stored

Windows of one element that move by one are a matrix product over all pixels. The others are products too, whose left side is
read from the image in place. A convolution along one dim is one over images of a single line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Arg, Graph, Node, Value, map_values, output_values, sources
from hotfuse.ir.types import DType, Layout, TensorType
from hotfuse.lower import conv_shape, gemm, primitive, tiling
from hotfuse.lower.algebra import mul, product, same
from hotfuse.lower.conv_finish import Finish, Where
from hotfuse.lower.conv_kernel import Image, Task, dense, depthwise
from hotfuse.lower.conv_shape import Axis
from hotfuse.lower.errors import CannotLower
from hotfuse.lower.lowered import (
    BufferArgument,
    Lowered,
    Memory,
    PackArgument,
    Place,
    SymbolArgument,
    dense_strides,
)
from hotfuse.lower.pack import Order, PackSource, PackSpec
from hotfuse.lower.tiling import Core
from hotfuse.lower.views import shape_of
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Buffer, BufferKind, Tile

CONVOLUTIONS = frozenset({"aten.conv1d", "aten.conv2d", "aten.convolution"})
_MOST_OWN = 14
"""Most pixels of a depthwise register tile."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """The convolution of a group."""

    node: Node
    x: Value
    weight: Value
    bias: Value | None
    inputs: int
    """Input channels that one output channel reads."""
    outputs: int
    lines: Axis
    columns: Axis
    own: bool
    """Depthwise: every channel for itself."""

    @property
    def out(self) -> Value:
        """The result."""
        return self.node.outs[0]

    @property
    def matrix(self) -> bool:
        """Whether it is a plain matrix product over pixels."""
        still = all(a.window == a.stride == 1 and a.padding == 0 for a in (self.lines, self.columns))
        return still and not self.own


def is_convolution(node: Node) -> bool:
    """Whether a node is one that this file knows."""
    return packet(node.op) in CONVOLUTIONS


def lower_convolution(graph: Graph, core: Core, *, name: str = "") -> Lowered:
    """The kernel of a group; raises CannotLower where it cannot be one. The weight must be a param of the graph."""
    found = [n for n in graph.nodes if is_convolution(n)]
    if len(found) != 1:
        raise CannotLower(f"{len(found)} convolutions in one group")
    conv = _convolution(found[0], {p.value.name for p in graph.params})
    for v in output_values(graph):
        if shape_of(v) != shape_of(conv.out):
            raise CannotLower(f"output %{v.name} has another shape than the convolution")
    return _Group(primitive.simplified(graph), graph, conv, core, name).lowered()


def _convolution(node: Node, params: set[str]) -> Convolution:
    """A node's operands by role."""
    where = str(node.loc)
    x, weight, bias = (argument(node, n) for n in ("input", "weight", "bias"))
    if not isinstance(x, Value) or not isinstance(weight, Value) or not isinstance(bias, Value | None):
        raise CannotLower(f"{node.op} of {x} and {weight}", where=where)
    if weight.name not in params:
        raise CannotLower(f"the weight %{weight.name} is not constant", where=where)
    if argument(node, "transposed", False):
        raise CannotLower("a transposed convolution", where=where)
    for v in (x, weight, node.outs[0], *(() if bias is None else (bias,))):
        if not isinstance(v.type, TensorType) or v.type.dtype is not DType.F32:
            raise CannotLower(f"%{v.name} is not fp32", where=where)
    xs, ws = shape_of(x), shape_of(weight)
    if len(xs) != len(ws) or len(xs) not in (3, 4):
        raise CannotLower(f"an input of {len(xs)} dims and a weight of {len(ws)}", where=where)
    numbers = [n for n in (*ws, *xs[1:]) if isinstance(n, int) and n > 0]
    if len(numbers) != len(ws) + len(xs) - 1:
        raise CannotLower("the size of the images is known only at run time", where=where)
    outputs, inputs, groups = numbers[0], numbers[1], argument(node, "groups", 1)
    own = groups == outputs == xs[1] and inputs == 1 and outputs > 1
    if groups != 1 and not own:
        raise CannotLower(f"{groups} groups of channels", where=where)
    rank = len(xs) - 2
    windows = numbers[2 : 2 + rank]
    stride, dilation = (_numbers(node, n, 1, rank) for n in ("stride", "dilation"))
    padding = _padding(node, windows, dilation)
    axes = [Axis(*axis) for axis in zip(numbers[-rank:], windows, stride, padding, dilation, strict=True)]
    if any(a.out < 1 for a in axes):
        raise CannotLower("the window is larger than the image", where=where)
    lines = axes[0] if rank == 2 else Axis(1, 1)
    return Convolution(node, x, weight, bias, inputs, outputs, lines, axes[-1], own)


def _padding(node: Node, windows: list[int], dilation: tuple[int, ...]) -> tuple[int, ...]:
    """How far the window reaches beyond the image on both sides; by name it must be equally far."""
    given = argument(node, "padding", 0)
    if not isinstance(given, str):
        return _numbers(node, "padding", 0, len(windows))
    beyond = [0 if given == "valid" else d * (k - 1) for k, d in zip(windows, dilation, strict=True)]
    if any(n % 2 for n in beyond):
        raise CannotLower(f"{node.op} with padding {given}, which is more on one side", where=str(node.loc))
    return tuple(n // 2 for n in beyond)


def _numbers(node: Node, name: str, default: int, rank: int) -> tuple[int, ...]:
    given = argument(node, name, default)
    many = given if isinstance(given, tuple) else (given,)
    numbers = tuple(n for n in many if isinstance(n, int))
    if len(numbers) != len(many) or len(numbers) not in (1, rank):
        raise CannotLower(f"{node.op} with {name} {given}", where=str(node.loc))
    return numbers * rank if len(numbers) == 1 else numbers


def _channels_last(v: Value) -> bool:
    """Whether pixels lie one behind the other with their channels innermost; dims of extent 1 lie anywhere."""
    t = v.type
    if not isinstance(t, TensorType) or t.layout.strided:
        return False
    shape = t.shape
    wanted = dense_strides(shape, Layout((0, *range(2, len(shape)), 1)))
    found = dense_strides(shape, t.layout)
    return all(n == 1 or same(a, b) for n, a, b in zip(shape, wanted, found, strict=True))


class _Group:
    """A group while it is lowered."""

    def __init__(self, graph: Graph, original: Graph, conv: Convolution, core: Core, name: str) -> None:
        self.original, self.core = original, core
        flat = conv.matrix and self._flattens(graph, conv)
        self.graph = _flattened(graph, conv) if flat else graph
        params = {p.value.name for p in self.graph.params}
        node = next(n for n in self.graph.nodes if is_convolution(n))
        self.conv = replace(conv, node=node, x=node.ins[0]) if flat else _convolution(node, params)
        self.flat = flat
        self.builder = KernelBuilder(name or "convolution", loc=node.loc)
        self.memory = Memory(self.builder, self.graph)
        outs = list(dict.fromkeys(output_values(self.graph)))
        self.finish = Finish(self.memory, self.graph, self.conv.out, self.conv.bias, outs)

    @staticmethod
    def _flattens(graph: Graph, conv: Convolution) -> bool:
        """Whether pixels may be counted through: every value has all of them, channels innermost, or none."""
        full = (shape_of(conv.x), shape_of(conv.out))
        ends = {v.name for v in (*sources(graph), *output_values(graph))}

        def fits(v: Value) -> bool:
            if v.name == conv.weight.name or not isinstance(v.type, TensorType):
                return True
            shape = v.type.shape
            if shape in full:
                return v.name not in ends or _channels_last(v)
            spread = (*shape[:-3], *shape[-2:]) if len(shape) == 4 else shape[1:]
            return all(n == 1 for n in spread) and len(shape) <= 4

        return all(fits(v) for v in (*sources(graph), *(v for n in graph.nodes for v in n.outs)))

    def lowered(self) -> Lowered:
        """The kernel with its call."""
        place = self.memory.place(self.conv.x)
        if not place.flat:
            raise CannotLower(f"%{self.conv.x.name} lies in memory with gaps")
        if self.flat:
            packed, spec = self._product(place)
        elif self.conv.own:
            packed, spec = self._own(place)
        else:
            packed, spec = self._dense(place)
        return self._call(packed, spec)

    def _packed(self, order: Order, k: int, width: int) -> tuple[Buffer, PackSpec]:
        spec = PackSpec((PackSource(self.conv.weight.name, order, self.conv.outputs),), k, width)
        return self.builder.buffer("panels", BufferKind.CONST, spec.dtype, spec.shape, spec.stride), spec

    def _product(self, place: Place) -> tuple[Buffer, PackSpec]:
        """One long line of pixels."""
        b, conv, finish = self.builder, self.conv, self.finish
        pixels = shape_of(conv.x)[-1]
        cut = tiling.choose(self.core, pixels, [conv.outputs], conv.inputs)
        packed, spec = self._packed(Order.WINDOW, conv.inputs, cut.nr)
        finish.make_room(cut.nr)
        step = place.strides[-1]

        def lhs(row: Dim, k: Dim, rows: int) -> Tile:
            at = expr("+", expr("*", row, step), k)
            return b.load(place.buffer, (at,), (rows, 1), axes=(0, 0), step=(step, 1))

        def done(f: gemm.Finished) -> None:
            column = mul(f.panel, cut.nr)
            if isinstance(f.sums, Tile):
                finish.parts(Where(0, 0), f.row, column, [(0, f.sums)], None)
            else:
                f.each_row(lambda sums, row: finish.tile(Where(0, 0), row, column, sums))

        in_loop = not finish.short or not isinstance(pixels, int)
        gemm.product(b, gemm.Product(lhs, packed, pixels, conv.inputs, spec.panels, cut), done, in_loop=in_loop,
                     begin=lambda panel: finish.prepare(mul(panel, cut.nr), cut.nr))  # fmt: skip
        return packed, spec

    def _task(self, place: Place, packed: Buffer, spec: PackSpec, planar: bool) -> Task:
        shape, strides, conv = shape_of(self.conv.x), place.strides, self.conv
        line: Dim = strides[2] if len(shape) == 4 else 0
        image = Image(place.buffer, strides[0], strides[1], line, strides[-1])
        return Task(image, packed, shape[0], conv.inputs, conv.lines, conv.columns, spec.panels, spec.nr, planar)

    def _dense(self, place: Place) -> tuple[Buffer, PackSpec]:
        conv = self.conv
        planar = conv.inputs > 1 and place.strides[1] != 1
        k = conv.inputs * conv.lines.window * conv.columns.window
        apart = place.strides[-1]
        cut = conv_shape.choose(
            self.core, conv.columns.out, conv.outputs, k,
            4 * conv.columns.stride * (apart if isinstance(apart, int) else 1),
        )  # fmt: skip
        packed, spec = self._packed(Order.WINDOW, k, cut.nr)
        dense(self.builder, self._task(place, packed, spec, planar), cut, self.core, self.finish)
        return packed, spec

    def _own(self, place: Place) -> tuple[Buffer, PackSpec]:
        conv = self.conv
        if place.strides[1] != 1:
            raise CannotLower("a depthwise convolution whose channels lie plane by plane")
        packed, spec = self._packed(Order.WINDOW, conv.lines.window * conv.columns.window, self.core.lanes)
        most = max(2, min(_MOST_OWN, self.core.registers - conv.columns.window - 2))
        depthwise(self.builder, self._task(place, packed, spec, False), most, conv.outputs, self.finish)
        return packed, spec

    def _call(self, packed: Buffer, spec: PackSpec) -> Lowered:
        kernel, memory = self.builder.finish(), self.memory
        buffers: dict[str, BufferArgument | PackArgument] = {a.buffer: a for a in memory.arguments}
        buffers[packed.name] = PackArgument(packed.name, spec)
        given = [buffers[b.name] for b in kernel.buffers if b.kind is not BufferKind.SCRATCH]
        sizes = [SymbolArgument(s, s) for s in kernel.sizes]
        return Lowered(kernel, (*given, *sizes), tuple(self._written(v) for v in dict.fromkeys(output_values(self.original))))

    @staticmethod
    def _written(v: Value) -> tuple[str, tuple[Dim, ...]]:
        t = v.type
        if not isinstance(t, TensorType) or t.layout.strided:
            raise CannotLower(f"output %{v.name} would be written with gaps")
        return v.name, dense_strides(t.shape, t.layout)


def _flattened(graph: Graph, conv: Convolution) -> Graph:
    """The same group on images of one line that has all pixels: types only, as nothing in it looks at them."""
    full = {shape_of(conv.x), shape_of(conv.out)}
    order = Layout((0, 2, 1)) if len(shape_of(conv.x)) == 3 else Layout((0, 2, 3, 1))

    def flat(t: TensorType) -> TensorType:
        if t.shape not in full:
            return t
        pixels = product((t.shape[0], *t.shape[2:]))
        return replace(t, shape=(1, t.shape[1], *(1,) * (len(t.shape) - 3), pixels), layout=order)

    return _retyped(graph, lambda v: v if v.name == conv.weight.name else flat_value(v, flat))


def flat_value(v: Value, change: Callable[[TensorType], TensorType]) -> Value:
    """A value with its type changed, if it is a tensor."""
    return replace(v, type=change(v.type)) if isinstance(v.type, TensorType) else v


def _retyped(graph: Graph, change: Callable[[Value], Value]) -> Graph:
    new: dict[str, Arg] = {}

    def changed(v: Value) -> Value:
        made = change(v)
        new[v.name] = made
        return made

    inputs = tuple(changed(v) for v in graph.inputs)
    params = tuple(replace(p, value=changed(p.value)) for p in graph.params)
    nodes: list[Node] = []
    for n in graph.nodes:
        args = tuple(map_values(a, new) for a in n.args)
        attrs = tuple((k, map_values(a, new)) for k, a in n.attrs)
        nodes.append(replace(n, args=args, attrs=attrs, outs=tuple(changed(v) for v in n.outs)))
    outputs = tuple(map_values(a, new) for a in graph.outputs)
    return replace(graph, inputs=inputs, params=params, nodes=tuple(nodes), outputs=outputs)
