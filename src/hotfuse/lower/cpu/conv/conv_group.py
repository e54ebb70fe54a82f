"""Groups around a convolution with constant weights, and what is done to its result.

    y = relu(batch_norm(conv2d(x, W)) + r)      one kernel: the sums stay in registers until y is stored

Windows of one element that move by one are a matrix product over all pixels. The others are products too, whose left side is
read from the image in place. Sizes may be numbers or known only at run time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hotfuse.analysis.convolution import is_convolution
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Value, output_values, sources
from hotfuse.ir.retype import revalued
from hotfuse.ir.types import Layout, TensorType
from hotfuse.lower.common.algebra import mul, product, same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import (
    BufferArgument,
    BufferView,
    KernelBuffers,
    Lowered,
    PackArgument,
    SymbolArgument,
    dense_strides,
)
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder
from hotfuse.lower.common.quant import bytes_taken
from hotfuse.lower.cpu.conv import shape as conv_shape
from hotfuse.lower.cpu.conv import winograd
from hotfuse.lower.cpu.conv.conv_epilogue import Finish, RowPosition, without_division
from hotfuse.lower.cpu.conv.dense_kernel import Groups, dense
from hotfuse.lower.cpu.conv.depthwise import depthwise
from hotfuse.lower.cpu.conv.int8 import lower_bytes
from hotfuse.lower.cpu.conv.output_rows import ConvTask, SpatialDim
from hotfuse.lower.cpu.conv.read import Convolution, ConvPhase, the_convolution
from hotfuse.lower.cpu.gemm import gemm
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.ops.views import is_move, shape_of
from hotfuse.lower.primitives import rules as primitive
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import OWN, Buffer, BufferKind, Tile

_MAX_OWN = 14
"""Most pixels of a depthwise register tile."""

__all__ = ["is_convolution", "lower_convolution"]


def lower_convolution(graph: Graph, core: Core, *, name: str = "") -> Lowered:
    """The kernel of a group; raises CannotLower where it cannot be one. The weight must be a param of the graph."""
    taken, scalings = bytes_taken(graph)
    if scalings:
        (scaling,) = scalings.values()
        return lower_bytes(taken, scaling, core, name=name)
    plain, conv = the_convolution(graph)
    for v in output_values(graph):
        if shape_of(v) != shape_of(conv.out):
            raise CannotLower(f"output %{v.name} has another shape than the convolution")
    return _ConvGroup(primitive.expanded(without_division(plain)), graph, conv, core, name).lowered()


def _channels_last(v: Value) -> bool:
    """Whether pixels lie one behind the other with their channels innermost; dims of extent 1 lie anywhere."""
    t = v.type
    if not isinstance(t, TensorType) or t.layout.strided:
        return False
    shape = t.shape
    wanted = dense_strides(shape, Layout((0, *range(2, len(shape)), 1)))
    found = dense_strides(shape, t.layout)
    return all(n == 1 or same(a, b) for n, a, b in zip(shape, wanted, found, strict=True))


class _ConvGroup:
    """A group while it is lowered."""

    def __init__(self, graph: Graph, original: Graph, conv: Convolution, core: Core, name: str) -> None:
        self.original, self.core = original, core
        self.flat = conv.matrix and self._flattens(graph, conv, core)
        self.graph = _flattened(graph, conv) if self.flat else graph
        node = next(n for n in self.graph.nodes if is_convolution(n))
        x = node.args[0]
        assert isinstance(x, Value)
        self.conv = replace(conv, node=node, x=x)
        self.builder = KernelBuilder(name or "convolution", loc=node.loc)
        self.memory = KernelBuffers(self.builder, self.graph)
        outs = list(dict.fromkeys(output_values(self.graph)))
        self.finish = Finish(self.memory, self.graph, self.conv.out, self.conv.bias, outs, core.lanes)

    @staticmethod
    def _flattens(graph: Graph, conv: Convolution, core: Core) -> bool:
        """Whether pixels may be counted through: every value has all of them, channels innermost, or none.

        Arithmetic on values per channel (a batch norm's) is as well done row by row, unless the last panel can be narrower.
        """
        full = (shape_of(conv.x), shape_of(conv.out))
        narrow = bool(conv_shape.product(core, product(full[0]), conv.outputs, conv.inputs).last)
        rank = len(full[0])
        ends = {v.name for v in (*sources(graph), *output_values(graph))}

        def fits(v: Value) -> bool:
            if v.name == conv.weight.name or not isinstance(v.type, TensorType):
                return True
            shape = v.type.shape
            if shape in full:
                return v.name not in ends or _channels_last(v)
            if len(shape) == 1:  # per channel as a bias, to a view or to others; anything else would spread it along pixels
                return all(is_convolution(n) or is_move(n.op) or (narrow and all(len(shape_of(o)) == 1 for o in n.outs))
                           for n in graph.nodes if v in n.ins)  # fmt: skip
            aligned = (1,) * (rank - len(shape)) + shape
            return len(aligned) == rank and all(n == 1 for i, n in enumerate(aligned) if i != 1)

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
        elif (how := self._winograd(place)) is not None:
            packed, spec = self._by_winograd(place, how)
        else:
            packed, spec = self._dense(place)
        return self._call(packed, spec)

    def _packed(self, sources_: Sequence[PackSource], k: int, width: int) -> tuple[Buffer, PackSpec]:
        spec = PackSpec(tuple(sources_), k, width)
        return self.builder.buffer("panels", BufferKind.CONST, spec.dtype, spec.shape, spec.stride), spec

    def _weight(self, taps: tuple[int, ...] = ()) -> list[PackSource]:
        """Where the panels of every group come from."""
        conv, name = self.conv, self.conv.weight.name
        if conv.turned:
            return [PackSource(name, WeightOrder.TURNED, conv.outputs, g * conv.inputs, taps) for g in range(conv.groups)]
        return [PackSource(name, WeightOrder.WINDOW, conv.outputs, g * conv.outputs) for g in range(conv.groups)]

    def _product(self, place: BufferView) -> tuple[Buffer, PackSpec]:
        """One long line of pixels."""
        b, conv, finish = self.builder, self.conv, self.finish
        pixels = shape_of(conv.x)[-1]
        cut = conv_shape.product(self.core, pixels, conv.outputs, conv.inputs)
        packed, spec = self._packed(self._weight(), conv.inputs, cut.nr)
        finish.make_room(cut.nr)
        step, last = place.strides[-1], len(shape_of(conv.x)) - 1
        where = RowPosition(dict.fromkeys((0, *range(2, last)), 0), last)

        def lhs(row: Dim, k: Dim, rows: int) -> Tile:
            at = expr("+", expr("*", row, step), k)
            return b.load(place.buffer, (at,), (rows, 1), axes=(0, 0), step=(step, 1))

        def done(f: gemm.FinishedTile) -> None:
            channels = finish.channels_from(mul(f.panel, cut.nr), cut.nr)
            if isinstance(f.sums, Tile):
                finish.parts(where, f.row, channels, [(0, f.sums)], None)
            elif finish.single:
                finish.line(where, f.row, f.rows, f.sums)
            else:
                f.each_row(lambda sums, row: finish.tile(where, row, channels, sums))

        in_loop = not finish.short or not isinstance(pixels, int)
        gemm.product(b, gemm.Product(lhs, packed, pixels, conv.inputs, spec.panels, cut, last=cut.last), done, in_loop=in_loop,
                     begin=lambda panel: finish.prepare(finish.channels_from(mul(panel, cut.nr), cut.nr), cut.nr))  # fmt: skip
        return packed, spec

    def _row_dim(self) -> int:
        """The spatial dim that rows run along: the last one that has an extent."""
        dims = self.conv.spatial_phases
        return next((i for i in reversed(range(len(dims))) if not dims[i][0].axis.trivial or len(dims[i]) > 1), len(dims) - 1)

    def _task(self, place: BufferView, packed: Buffer, phases: Sequence[ConvPhase], k: int = 0) -> ConvTask:
        strides, conv, row = place.strides, self.conv, self._row_dim()
        dims = [SpatialDim(p.axis, strides[2 + i], 2 + i, p.step, p.first) for i, p in enumerate(phases)]
        outer = tuple(d for i, d in enumerate(dims) if i != row)
        channel = 1 if conv.inputs * conv.groups == 1 else strides[1]
        return ConvTask(place.buffer, strides[0], channel, outer, dims[row], shape_of(conv.x)[0], conv.inputs, packed, k)

    def _dense(self, place: BufferView) -> tuple[Buffer, PackSpec]:
        conv, row = self.conv, self._row_dim()
        phases = list(itertools.product(*conv.spatial_phases))
        counts = [math.prod(p.axis.window for p in several) for several in phases]
        taps = [t for several in phases for t in self._taps(several)] if conv.turned else []
        columns = conv.spatial_phases[row][0].axis
        apart = place.strides[2 + row]
        cut = conv_shape.choose(
            self.core, columns.out, conv.outputs, max(counts) * conv.inputs,
            4 * columns.stride * (apart if isinstance(apart, int) else 1),
        )  # fmt: skip
        steps = sum(counts) * conv.inputs
        if steps == 0:
            raise CannotLower("no output reads an input")
        packed, spec = self._packed(self._weight(tuple(taps)), steps, cut.nr)
        tasks = [
            self._task(place, packed, several, sum(counts[:i]) * conv.inputs) for i, several in enumerate(phases)
        ]
        groups = Groups(conv.groups, conv.outputs, spec.panels // conv.groups)
        dense(self.builder, tasks, groups, cut, self.core, self.finish)
        return packed, spec

    def _winograd(self, place: BufferView) -> winograd.WinogradTiling | None:
        """How to do it by Winograd transforms; None where that is not possible, or does not pay."""
        conv, row = self.conv, self._row_dim()
        axes = [dim[0].axis for dim in conv.spatial_phases]
        outer = [a for i, a in enumerate(axes) if i != row]
        if conv.groups > 1 or conv.turned or place.strides[1] != 1 or not all(a.trivial for a in outer[:-1]):
            return None
        return winograd.cut(
            self.core, outer[-1] if outer else None, axes[row], shape_of(conv.x)[0], conv.inputs, conv.outputs
        )

    def _by_winograd(self, place: BufferView, how: winograd.WinogradTiling) -> tuple[Buffer, PackSpec]:
        conv, row = self.conv, self._row_dim()
        outputs = [1] * len(conv.spatial_phases)
        if len(outputs) > 1:
            outputs[next(i for i in reversed(range(len(outputs))) if i != row)] = how.down.outputs
        outputs[row] = how.across.outputs
        source = PackSource(conv.weight.name, WeightOrder.WINOGRAD, conv.outputs, 0, tuple(outputs))
        packed, spec = self._packed([source], how.points * conv.inputs, how.tiling.nr)
        task = self._task(place, packed, [dim[0] for dim in conv.spatial_phases])
        winograd.WinogradProgram(self.builder, task, how, self.core, conv.outputs, self.finish).write()
        return packed, spec

    def _taps(self, phases: Sequence[ConvPhase]) -> list[int]:
        """The places of a turned window that a phase of all dims uses, counted through, in the order of its steps.

        Steps go by the outer dims first, and along a row last.
        """
        row = self._row_dim()
        order = [i for i in range(len(phases)) if i != row] + [row]
        found: list[int] = []
        for chosen in itertools.product(*(phases[i].taps for i in order)):
            at = dict(zip(order, chosen, strict=True))
            place = 0
            for i, n in enumerate(self.conv.windows):
                place = place * n + at[i]
            found.append(place)
        return found

    def _own(self, place: BufferView) -> tuple[Buffer, PackSpec]:
        conv = self.conv
        if place.strides[1] != 1:
            raise CannotLower("a depthwise convolution whose channels lie plane by plane")
        columns = conv.spatial_phases[self._row_dim()][0].axis
        source = PackSource(conv.weight.name, WeightOrder.WINDOW, conv.channels)
        packed, spec = self._packed([source], math.prod(conv.windows), self.core.lanes)
        most = conv_shape.fewest_kinds(columns, max(2, min(_MAX_OWN, self.core.registers - columns.window - 2)), together=False)
        task = self._task(place, packed, [dim[0] for dim in conv.spatial_phases])
        depthwise(self.builder, task, spec.nr, most, conv.channels, self.finish, self.core.l1, self.core.threads)
        return packed, spec

    def _call(self, packed: Buffer, spec: PackSpec) -> Lowered:
        kernel, memory = self.builder.finish(), self.memory
        buffers: dict[str, BufferArgument | PackArgument] = {a.buffer: a for a in memory.arguments}
        buffers[packed.name] = PackArgument(packed.name, spec)
        given = [buffers[b.name] for b in kernel.buffers if b.kind not in OWN]
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
    order = Layout((0, *range(2, len(shape_of(conv.x))), 1))

    def flat(t: TensorType) -> TensorType:
        if t.shape not in full:
            return t
        pixels = product((t.shape[0], *t.shape[2:]))
        return replace(t, shape=(1, t.shape[1], *(1,) * (len(t.shape) - 3), pixels), layout=order)

    return revalued(graph, lambda v: v if v.name == conv.weight.name else flat_value(v, flat))


def flat_value(v: Value, change: Callable[[TensorType], TensorType]) -> Value:
    """A value with its type changed, if it is a tensor."""
    return replace(v, type=change(v.type)) if isinstance(v.type, TensorType) else v
