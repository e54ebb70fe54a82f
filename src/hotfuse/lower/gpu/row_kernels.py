"""Pointwise chains, reductions, norms and softmax: a program makes a few rows, and holds whole rows where they are reduced.

    y = layer_norm(x + r)      parallel (batch, block of rows): x, r -> mean, variance over the tile's columns -> y
    y = gelu(a) * b            parallel (…, block of rows, block of columns)

All reductions of a group go over the same dims. A row that is reduced is one tile, its extent the next power of 2 with the rest
masked; rows beyond `MAX_ROW` elements are left to the library.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Node, Value, output_values
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.loop_positions import land
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.common.positions import Position, Space, counters_of, in_finer_loops
from hotfuse.lower.common.steps import Definitions
from hotfuse.lower.common.tile_values import Evaluator, TileAxis
from hotfuse.lower.common.value_needs import trace
from hotfuse.lower.gpu.tiling import GpuTiling, left_over, numbers, power_of_2
from hotfuse.lower.ops.expand import FLOATS
from hotfuse.lower.ops.views import shape_of
from hotfuse.lower.primitives import rules as primitive
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.memory import NUMPY
from hotfuse.tile.program import Tile

MAX_ROW = 16384
"""Elements of a row that is held in registers."""
MAX_TILE = 16384
MAX_NODES = 64
_TRIES = 32
_FUNCTIONS = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "max", "top": "max", "min": "min", "any": "any", "all": "all"}


@dataclass(frozen=True, slots=True)
class _Shape:
    """What loops run over: the counters that make a row, and the others, outermost first."""

    space: Space
    definitions: Definitions
    landed: Mapping[str, Position]
    outputs: tuple[Value, ...]
    reductions: tuple[Node, ...]
    row: tuple[int, ...]
    """Counters along which a program holds a whole row (reduced), or walks columns (the last one)."""
    others: tuple[int, ...]


def lower_rows(graph: Graph, tiling: GpuTiling, strides: Mapping[str, tuple[int, ...]], name: str) -> Lowered:
    """The kernel of such a group; raises CannotLower where there is none."""
    if len(graph.nodes) > MAX_NODES:
        raise CannotLower(f"{len(graph.nodes)} nodes are too many for one kernel")
    simple = primitive.expanded(graph, convolutions=True)
    found = _shaped(simple)
    builder = KernelBuilder(name)
    memory = KernelBuffers(builder, simple, strides)
    _RowWriter(memory, simple, found, tiling).write()
    return memory.finish(builder.finish())


def row_tilings(graph: Graph, *, every: bool = False) -> Sequence[GpuTiling]:
    """Few rows a program where rows are long; few or many warps. `every`: all that there are, for a model to choose from."""
    found = _shaped(primitive.expanded(graph, convolutions=True))
    (*_, rows), columns = _extents(found)
    if every:
        return _every_row_tiling(rows, columns, whole=bool(found.reductions))
    if found.reductions:
        width = power_of_2(columns)
        warps = max(1, min(16, width // 256))
        choices = [GpuTiling(1, width, warps=warps)]
        if 512 <= width <= 2048:  # fewer threads have less to wait for in each other's sums
            choices += [GpuTiling(1, width, warps=n) for n in (1, 2)]
        if width <= 2048:
            choices.append(GpuTiling(max(1, min(power_of_2(rows), 4096 // width)), width, warps=4))
        if width <= 256:
            choices.append(GpuTiling(max(1, min(power_of_2(rows), 1024 // width)), width, warps=1))
        return tuple(dict.fromkeys(choices))
    widths = [w for w in (256, 512, 1024) if w <= power_of_2(columns)] or [power_of_2(columns)]
    width = min(widths, key=lambda w: (-(-columns // w) * w, -w))
    choices = [GpuTiling(max(1, min(power_of_2(rows), n // width)), width, warps=4) for n in (1024, 2048, 512)]
    return tuple(dict.fromkeys(choices))


def _every_row_tiling(rows: int, columns: int, *, whole: bool) -> Sequence[GpuTiling]:
    """By elements of a tile and warps; `whole`: a program holds whole rows."""
    full = power_of_2(columns)
    widths = [full] if whole else [w for w in (256, 1024) if w <= full] or [full]
    shapes = [
        GpuTiling(max(1, min(power_of_2(rows), n // width)), width, warps=warps)
        for width in widths for n in (width, 1024, 2048, 4096) for warps in ((1, 2, 4, 8, 16) if whole else (2, 4, 8))
    ]  # fmt: skip
    fitting = [t for t in shapes if 64 <= t.rows * t.columns // t.warps <= 2048] or shapes[:1]
    return tuple(dict.fromkeys(fitting))


def _extents(found: _Shape) -> tuple[tuple[int, ...], int]:
    """The extents of the loops around, and the elements of a row."""
    others = numbers(*(found.space.extents[k] for k in found.others))
    return others or (1,), math.prod(numbers(*(found.space.extents[k] for k in found.row)))


def _shaped(graph: Graph) -> _Shape:
    """Loops in which every output has its place; raises CannotLower where there are none."""
    outputs = tuple(dict.fromkeys(output_values(graph)))
    for v in outputs:
        if not isinstance(v.type, TensorType):
            raise CannotLower("an output is not a tensor")
        if 0 in numbers(*shape_of(v)):
            raise CannotLower("there is nothing to compute")
    reductions = tuple(n for n in graph.nodes if n.op.startswith("lower.reduce."))
    if any(n.op.startswith("lower.scan.") or n.op == "lower.stored" for n in graph.nodes):
        raise CannotLower("a running sum or a stage of its own on a GPU")
    root = reductions[0].ins[0] if reductions else max(outputs, key=lambda v: math.prod(numbers(*shape_of(v))))
    return in_finer_loops(shape_of(root), _TRIES, lambda space: _attempt(graph, root, space, outputs, reductions))


def _attempt(
    graph: Graph, root: Value, space: Space, outputs: tuple[Value, ...], reductions: tuple[Node, ...]
) -> _Shape:
    definitions = Definitions(graph)
    base = tuple(space.root(i) for i in range(len(shape_of(root))))
    landed = land(definitions, graph, space, root, base)
    if any(space.cuts):
        raise CannotLower("values that are put together from pieces on a GPU")
    for v in (*outputs, *(n.ins[0] for n in reductions)):
        if v.name not in landed and shape_of(v) == shape_of(root):
            landed[v.name] = base
    for v in outputs:
        if v.name not in landed:
            raise CannotLower(f"output %{v.name} does not fit the loops of %{root.name}")
    inputs = [n.ins[0] for n in reductions if n.ins[0].name in landed]
    trace(definitions, space, [(v, landed[v.name]) for v in (*inputs, *outputs)])  # which may ask for finer loops
    wide = [k for k, n in enumerate(space.extents) if n != 1]
    order = [k for r in space.roots for k in r if k in wide]
    if not reductions:
        lies = tensor_type(root).layout.order or range(len(space.roots))  # neighbours in memory are made together
        order = [k for d in lies for k in space.roots[d] if k in wide]
        return _Shape(space, definitions, landed, outputs, (), tuple(order[-1:]), tuple(order[:-1]))
    rows = {_reduced(n, landed) for n in reductions}
    if len(rows) != 1:
        raise CannotLower("reductions over different dims in one kernel")
    (reduced,) = rows
    row = tuple(k for k in order if k in reduced)
    if math.prod(power_of_2(n) for n in numbers(*(space.extents[k] for k in row))) > MAX_ROW:
        raise CannotLower(f"rows of more than {MAX_ROW} elements")
    return _Shape(space, definitions, landed, outputs, reductions, row, tuple(k for k in order if k not in reduced))


def _reduced(node: Node, landed: Mapping[str, Position]) -> frozenset[int]:
    """The counters that a reduction goes over."""
    value, dims = node.ins[0], node.attr("dims")
    if value.name not in landed or not isinstance(dims, tuple):
        raise CannotLower(f"%{value.name} is reduced in loops of another shape")
    return counters_of(tuple(c for d, c in enumerate(landed[value.name]) if d in dims))


class _RowWriter:
    """A kernel while it is written."""

    def __init__(self, memory: KernelBuffers, graph: Graph, found: _Shape, tiling: GpuTiling) -> None:
        self.memory, self.found, self.tiling = memory, found, tiling
        self.builder = memory.builder
        self.at = Evaluator(memory, graph, found.space, definitions=found.definitions)

    def write(self) -> None:
        """Loops, reductions, results."""
        found, b = self.found, self.builder
        extents = numbers(*found.space.extents)
        outer, inner = found.others[:-1], found.others[-1:]
        with contextlib.ExitStack() as scope:
            where: dict[int, Dim] = {k: 0 for k, n in enumerate(extents) if n == 1}
            axes: list[TileAxis] = []
            for k in outer:
                where[k] = scope.enter_context(b.parallel("b", extents[k])).var
            for k in inner:
                rows = min(self.tiling.rows, power_of_2(extents[k]))
                where[k] = scope.enter_context(b.parallel("m", extents[k], rows)).var
                axes.append(TileAxis(k, rows, left_over(extents[k], rows, where[k])))
            for k in found.row:
                if found.reductions:
                    width = power_of_2(extents[k])
                    where[k] = 0
                else:
                    width = min(self.tiling.columns, power_of_2(extents[k]))
                    where[k] = scope.enter_context(b.parallel("n", extents[k], width)).var
                axes.append(TileAxis(k, width, left_over(extents[k], width, where[k])))
            if math.prod(a.extent for a in axes) > 4 * MAX_TILE:
                raise CannotLower("the tile is too large")
            with self.at.loops(where, axes):
                self._body(axes)

    def _body(self, axes: Sequence[TileAxis]) -> None:
        folded: list[tuple[Node, Tile]] = []
        for node in self.found.reductions:
            tile = self._fold(node, axes)
            self.at.give(node.outs[0], self.found.landed[node.outs[0].name], tile)
            folded.append((node, tile))
        reduced = frozenset(self.found.row) if self.found.reductions else frozenset[int]()
        whole = [v for v in self.found.outputs if self._covers(v, axes)]
        for v in whole:
            position = self.found.landed[v.name]
            self.at.store(v, position, self.at.tile(v, position))
        rest = [v for v in self.found.outputs if v not in whole]
        kept = [a for a in axes if a.counter not in reduced]
        if not rest:
            return
        if not reduced or not all(self._covers(v, kept) for v in rest):
            raise CannotLower("an output has another shape than the loops it is made in")
        with self.at.loops({}, kept):
            for node, tile in folded:
                shape = [a.extent for a in kept]
                if not shape:
                    raise CannotLower("a reduction of everything to one number on a GPU")
                self.at.give(node.outs[0], self.found.landed[node.outs[0].name], self.builder.reshape(tile, shape))
            for v in rest:
                position = self.found.landed[v.name]
                self.at.store(v, position, self.at.tile(v, position))

    def _covers(self, v: Value, axes: Sequence[TileAxis]) -> bool:
        return counters_of(self.found.landed[v.name]) == frozenset((*(a.counter for a in axes), *self.found.others[:-1]))

    def _fold(self, node: Node, axes: Sequence[TileAxis]) -> Tile:
        b, value = self.builder, node.ins[0]
        function = node.op.removeprefix("lower.reduce.")
        if function not in _FUNCTIONS:
            raise CannotLower(f"{function} on a GPU")
        x = b.bcast(self.at.tile(value, self.found.landed[value.name]), [a.extent for a in axes])
        places = [i for i, a in enumerate(axes) if a.counter in self.found.row]
        for i in places:
            if (valid := axes[i].valid) is not None:
                there = b.map("lt", b.iota(0, [a.extent if j == i else 1 for j, a in enumerate(axes)], i), b.index(valid))
                x = b.map("select", there, x, b.fill(_neutral(function, x.type.dtype), x.type.dtype))
        for i in places:
            x = b.reduce(_FUNCTIONS[function], x, i)
        if function != "mean":
            return x
        less = node.attr("less", 0)
        count = math.prod(numbers(*(self.found.space.extents[k] for k in self.found.row)))
        return b.map("div", x, float(max(count - (less if isinstance(less, int | float) else 0), 0)))


def _neutral(function: str, dtype: DType) -> float:
    """What changes nothing."""
    match function:
        case "sum" | "mean" | "any":
            return 0
        case "prod" | "all":
            return 1
        case _:
            low = function != "min"
            if dtype in FLOATS:
                return -math.inf if low else math.inf
            limits = np.iinfo(NUMPY[dtype])
            return int(limits.min if low else limits.max)


def flattened(graph: Graph) -> Graph | None:
    """The same group with all dims but the last as one, where every value has them in a row; None where that cannot be.

    Rows of several batches are then cut into tiles together.
    """
    outputs = output_values(graph)
    lead = shape_of(outputs[0])[:-1] if outputs else ()
    if len(lead) < 2:
        return None
    rows = math.prod(numbers(*lead))
    values = {v.name: v for v in (*graph.inputs, *(o for n in graph.nodes for o in n.outs))}
    changed: dict[str, Value] = {}
    for v in values.values():
        t = tensor_type(v)
        if t.layout.strided or t.layout.order is not None:
            return None
        if len(t.shape) == len(lead) + 1 and t.shape[:-1] == lead:
            changed[v.name] = Value(v.name, replace(t, shape=(rows, t.shape[-1])))
        elif len(t.shape) > 1 or v.name not in {i.name for i in graph.inputs}:
            return None
    if any(len(shape_of(p.value)) > 2 for p in graph.params):
        return None
    nodes = tuple(
        replace(n, args=tuple(changed.get(a.name, a) if isinstance(a, Value) else a for a in n.args),
                outs=tuple(changed[o.name] for o in n.outs)) for n in graph.nodes
    )  # fmt: skip
    return replace(graph, inputs=tuple(changed.get(v.name, v) for v in graph.inputs), nodes=nodes,
                   outputs=tuple(changed[v.name] for v in outputs))


def whole_strides(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """The strides of a row-major tensor."""
    step: Dim = 1
    found: list[Dim] = []
    for n in reversed(shape):
        found.append(step)
        step = expr("*", step, n)
    return tuple(reversed(found))
