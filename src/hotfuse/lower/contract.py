"""Groups around matrix products with constant weights: linears that share an input, and what is done to their results.

    y = gelu(linear(x, W, b)) + r        one kernel: the sums stay in registers until y is stored
    q, k, v = linear(x, Wq), ...           one kernel over the panels of all three, three outputs
    y = silu(linear(x, Wg)) * linear(x, Wu)  one kernel whose panels have columns of both

The batch dims of x are one dimension of rows where that costs nothing: when every other operand either has all of them, in order,
or none. Otherwise each row finds its batch indices by division.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace

from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Arg, Graph, Node, Value, map_values, output_values, sources
from hotfuse.ir.types import ROW_MAJOR, DType, TensorType
from hotfuse.lower.algebra import mul, product, same
from hotfuse.lower.errors import CannotLower
from hotfuse.lower.gemm import Finished, Product, let
from hotfuse.lower.gemm import product as write_product
from hotfuse.lower.index import Position, Space
from hotfuse.lower.lowered import BufferArgument, Lowered, Memory, PackArgument, Place, SymbolArgument, dense_strides
from hotfuse.lower.pack import Order, PackSource, PackSpec, supported
from hotfuse.lower.tiling import Core, choose
from hotfuse.lower.values import Along, Evaluator
from hotfuse.lower.views import broadcast, shape_of
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.tile.build import KernelBuilder, remaining
from hotfuse.tile.program import Buffer, BufferKind, Tile

CONTRACTIONS = frozenset({"aten.linear", "aten.mm", "aten.addmm", "aten.matmul"})
_CHEAP = frozenset({"aten.add", "aten.sub", "aten.mul", "aten.relu", "aten.neg", "aten.maximum", "aten.minimum"})
_FEW = 3
"""Up to so many cheap nodes are written out row by row; a longer epilogue is a loop over rows."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """One product of a group: out = scale * (x @ weight) + bias_scale * bias."""

    node: Node
    x: Value
    weight: Value
    order: Order
    n: int
    k: int
    bias: Value | None = None
    scale: float = 1.0
    bias_scale: float = 1.0

    @property
    def out(self) -> Value:
        """The result."""
        return self.node.outs[0]


def is_contraction(node: Node) -> bool:
    """Whether a node is a product that this file knows."""
    return packet(node.op) in CONTRACTIONS


def lower_contraction(
    graph: Graph, core: Core, strides: Mapping[str, tuple[int, ...]] | None = None, *, name: str = ""
) -> Lowered:
    """The kernel of a group; raises CannotLower where it cannot be one. Weights must be params of the graph."""
    params = {p.value.name for p in graph.params}
    found = [_contraction(n, params) for n in graph.nodes if is_contraction(n)]
    if not found:
        raise CannotLower("there is no product in the group")
    first = found[0]
    if any(c.x.name != first.x.name for c in found):
        raise CannotLower("the products of the group do not share their input")
    return _Group(graph, tuple(found), core, strides or {}, name).lowered()


def _contraction(node: Node, params: set[str]) -> Contraction:
    """A node's operands by role."""
    kind = packet(node.op)
    names = {"aten.linear": ("input", "weight"), "aten.addmm": ("mat1", "mat2"), "aten.mm": ("self", "mat2")}
    left, right = names.get(kind, ("self", "other"))
    x, weight = _tensor(node, left), _tensor(node, right)
    if weight.name not in params:
        raise CannotLower(f"the right operand %{weight.name} is not constant", where=str(node.loc))
    xs, ws = shape_of(x), shape_of(weight)
    if len(ws) != 2 or not xs:
        raise CannotLower(f"the weight has {len(ws)} dims and the input {len(xs)}", where=str(node.loc))
    order = Order.NK if kind == "aten.linear" else Order.KN
    n, k = ws if order is Order.NK else ws[::-1]
    if not isinstance(n, int) or not isinstance(k, int) or not same(xs[-1], k) or n < 1 or k < 1:
        raise CannotLower(f"a product over {k} of {n} columns", where=str(node.loc))
    for v in (x, weight, node.outs[0]):
        if not isinstance(v.type, TensorType) or v.type.dtype is not DType.F32 or not supported(v.type.dtype):
            raise CannotLower(f"%{v.name} is not fp32", where=str(node.loc))
    if kind == "aten.addmm":
        scale, bias_scale = (_number(node, a) for a in ("alpha", "beta"))
        bias = None if bias_scale == 0 else _tensor(node, "self")
        return Contraction(node, x, weight, order, n, k, bias, scale, bias_scale)
    bias = argument(node, "bias") if kind == "aten.linear" else None
    if bias is not None and not isinstance(bias, Value):
        raise CannotLower(f"the bias is {bias}", where=str(node.loc))
    return Contraction(node, x, weight, order, n, k, bias)


def _tensor(node: Node, name: str) -> Value:
    found = argument(node, name)
    if not isinstance(found, Value):
        raise CannotLower(f"{node.op} takes {found} as {name}", where=str(node.loc))
    return found


def _number(node: Node, name: str) -> float:
    found = argument(node, name, 1)
    if not isinstance(found, int | float):
        raise CannotLower(f"{node.op} takes {found} as {name}", where=str(node.loc))
    return float(found)


class _Group:
    """A group while it is lowered."""

    def __init__(
        self,
        graph: Graph,
        found: tuple[Contraction, ...],
        core: Core,
        strides: Mapping[str, tuple[int, ...]],
        name: str,
    ) -> None:
        self.batch = shape_of(found[0].x)[:-1]
        self.original = graph
        self.k = found[0].k
        self.m = product(self.batch)
        self.together = self._meet(graph, found)
        self.tiling = choose(core, self.m, [c.n for c in found], self.k, together=self.together)
        if self.flattens(graph, found, strides):
            graph = self.flattened(graph, found)
            found = tuple(
                _contraction(n, {p.value.name for p in graph.params}) for n in graph.nodes if is_contraction(n)
            )
            self.rows: tuple[Dim, ...] = (self.m,)
        else:
            self.rows = self.batch
        self.graph, self.found = graph, found
        weights = tuple(PackSource(c.weight.name, c.order, c.n) for c in found)
        self.spec = PackSpec(weights, self.k, self.tiling.nr, together=self.together)
        self.builder = KernelBuilder(name or self.title(), loc=found[0].node.loc)
        self.memory = Memory(self.builder, graph, strides)

    def title(self) -> str:
        """The ops, and the tile they are done in."""
        ops = [packet(n.op).split(".")[-1] for n in self.graph.nodes]
        return f"{'_'.join(ops[:6])}_{self.tiling.mr}x{self.tiling.nr}"

    # -- one dimension of rows

    def flattens(self, graph: Graph, found: tuple[Contraction, ...], strides: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether rows may be counted through: every operand has all batch dims, densely, or none."""
        weights = {c.weight.name for c in found}
        plain = [v for v in (*sources(graph), *(v for n in graph.nodes for v in n.outs)) if v.name not in weights]
        return all(self._flat(v, strides) for v in plain if isinstance(v.type, TensorType))

    def _flat(self, value: Value, strides: Mapping[str, tuple[int, ...]]) -> bool:
        t, shape = value.type, shape_of(value)
        assert isinstance(t, TensorType)
        if self._matrix(shape) == shape:
            return True
        dense = not t.layout.strided and t.layout.order is None and value.name not in strides
        return dense and (self._has_rows(shape) or all(n == 1 for n in shape[:-1]))

    def _has_rows(self, shape: tuple[Dim, ...]) -> bool:
        return len(shape) == len(self.batch) + 1 and all(same(a, b) for a, b in zip(shape, self.batch, strict=False))

    def _matrix(self, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        if self._has_rows(shape):
            return shape if len(shape) == 2 else (self.m, shape[-1])
        return shape[-1:]

    def flattened(self, graph: Graph, found: tuple[Contraction, ...]) -> Graph:
        """The same group on matrices: types only, as nothing in it looks at batch dims."""
        weights = {c.weight.name for c in found}
        new: dict[str, Arg] = {}

        def changed(v: Value) -> Value:
            t = v.type
            if isinstance(t, TensorType) and v.name not in weights:
                v = replace(v, type=replace(t, shape=self._matrix(t.shape)))
            new[v.name] = v
            return v

        inputs = tuple(changed(v) for v in graph.inputs)
        params = tuple(replace(p, value=changed(p.value)) for p in graph.params)
        nodes: list[Node] = []
        for n in graph.nodes:
            args = tuple(map_values(a, new) for a in n.args)
            attrs = tuple((k, map_values(a, new)) for k, a in n.attrs)
            nodes.append(replace(n, args=args, attrs=attrs, outs=tuple(changed(v) for v in n.outs)))
        outputs = tuple(map_values(a, new) for a in graph.outputs)
        return replace(graph, inputs=inputs, params=params, nodes=tuple(nodes), outputs=outputs)

    # -- the kernel

    def lowered(self) -> Lowered:
        """The kernel with its call."""
        b, spec = self.builder, self.spec
        owners = self._owners()
        packed = b.buffer("panels", BufferKind.CONST, spec.dtype, spec.shape, spec.stride)
        p = Product(self._lhs(), packed, self.m, self.k, spec.panels, self.tiling)
        long = [n for n in self.graph.nodes if not is_contraction(n)]
        simple = len(long) <= _FEW and all(packet(n.op) in _CHEAP for n in long)
        in_loop = not simple or not isinstance(self.m, int) or len(self.found) > 1 or self.rows != (self.m,)
        write_product(b, p, lambda f: self._finish(f, owners), in_loop=in_loop)
        return self._call(packed)

    @staticmethod
    def _origins(graph: Graph, found: tuple[Contraction, ...]) -> dict[str, set[int]]:
        """Per value, the products that it is made from."""
        of: dict[str, set[int]] = {c.out.name: {i} for i, c in enumerate(found)}
        for node in graph.nodes:
            if not is_contraction(node):
                union = set[int]().union(*(of.get(v.name, set()) for v in node.ins))
                of.update({v.name: union for v in node.outs})
        return of

    def _meet(self, graph: Graph, found: tuple[Contraction, ...]) -> bool:
        """Whether an output needs several products at once."""
        of = self._origins(graph, found)
        meet = any(len(of.get(v.name, ())) > 1 for v in output_values(graph))
        if meet and len({c.n for c in found}) > 1:
            raise CannotLower("products of different widths meet in one output")
        return meet

    def _owners(self) -> list[list[Value]]:
        """Per product, the outputs that are made from its result; those of products that meet are all the first one's."""
        of = self._origins(self.graph, self.found)
        owners: list[list[Value]] = [[] for _ in self.found]
        for v in dict.fromkeys(output_values(self.graph)):
            if not of.get(v.name):
                raise CannotLower(f"output %{v.name} is not made from a product of the group")
            owner = 0 if self.together else min(of[v.name])
            full = (*self.rows, self.found[owner].n)
            shape = shape_of(v)
            if len(shape) != len(full) or not all(same(a, b) for a, b in zip(shape, full, strict=True)):
                raise CannotLower(f"output %{v.name} has another shape than the product it is made from")
            owners[owner].append(v)
        return owners

    def _lhs(self) -> Callable[[Dim, Dim, int], Tile]:
        """How a column of x's rows is loaded."""
        x = self.found[0].x
        place, shape, b = self.memory.place(x), shape_of(x), self.builder
        if place.flat:
            step = self._row_step(place, shape)
            k_step = place.strides[-1]

            def flat(row: Dim, k: Dim, rows: int) -> Tile:
                at = expr("+", expr("*", row, step), expr("*", k, k_step))
                return b.load(place.buffer, (at,), (rows, 1), axes=(0, 0), step=(step, k_step))

            return flat
        moving = [d for d, n in enumerate(shape[:-1]) if n != 1]
        if len(moving) > 1:
            raise CannotLower(f"the rows of %{x.name} are strided in {len(moving)} dims")
        along = moving[0] if moving else 0

        def strided(row: Dim, k: Dim, rows: int) -> Tile:
            index: list[Dim] = [0] * len(shape)
            index[along], index[-1] = (row if moving else 0), k
            return b.load(place.buffer, index, (rows, 1), axes=(along if moving else -1, len(shape) - 1))

        return strided

    def _row_step(self, place: Place, shape: tuple[Dim, ...]) -> Dim:
        """Elements from one row of x to the next, over all batch dims."""
        steps = [(n, s) for n, s in zip(shape[:-1], place.strides[:-1], strict=True) if n != 1]
        if not steps:
            return 0
        for (_, outer), (n, inner) in itertools.pairwise(steps):
            if not same(outer, mul(n, inner)):
                raise CannotLower(f"the rows of %{self.found[0].x.name} do not lie one behind the other")
        return steps[-1][1]

    def _finish(self, f: Finished, owners: list[list[Value]]) -> None:
        """Everything that happens to a tile of sums; each product has its own panels."""
        if self.together or len(self.found) == 1:
            self._finish_some(f, self.found, owners[0], f.panel)
            return
        start = 0
        for c, outs, source in zip(self.found, owners, self.spec.sources, strict=True):
            end = start + self.spec.panels_of(source)
            if outs:
                with self.builder.when(expr("and", expr("<=", start, f.panel), expr("<", f.panel, end))):
                    self._finish_some(f, (c,), outs, expr("+", f.panel, -start))
            start = end

    def _finish_some(self, f: Finished, some: tuple[Contraction, ...], outs: list[Value], panel: Dim) -> None:
        """The outputs of products whose columns lie side by side in the tile."""
        b, n, width, rank = self.builder, some[0].n, self.spec.width, len(self.rows)
        column = mul(panel, width)
        space = Space.of((*self.rows, n))
        position = tuple(space.root(i) for i in range(rank + 1))
        at = Evaluator(self.memory, self.graph, space)
        along = [Along(rank, width, None if n % width == 0 else remaining(n, column))] if n > 1 else []

        def row(sums: Tile, number: Dim) -> None:
            with _batch(b, number, self.rows) as where, at.loops({**where, rank: column}, along):
                for i, c in enumerate(some):
                    own = sums if len(some) == 1 and n > 1 else b.extract(sums, (i * width,), (width if n > 1 else 1,))
                    own = own if n > 1 else b.reshape(own, ())
                    at.give(c.out, position, self._with_bias(at, c, own, position))
                for v in outs:
                    at.store(v, position, at.tile(v, position))

        f.each_row(row)

    def _with_bias(self, at: Evaluator, c: Contraction, sums: Tile, position: Position) -> Tile:
        b = self.builder
        if c.scale != 1:
            sums = b.map("mul", sums, c.scale)
        if c.bias is None:
            return sums
        shape = shape_of(c.bias)
        if shape and shape[-1] not in (1, c.n):
            raise CannotLower(f"the bias has {shape[-1]} columns, the product {c.n}")
        bias = at.tile(c.bias, broadcast(position, shape_of(c.out), shape))
        if bias.type.dtype is not DType.F32:
            raise CannotLower(f"the bias is {bias.type.dtype.value}")
        return b.map("add", sums, bias if c.bias_scale == 1 else b.map("mul", bias, c.bias_scale))

    def _call(self, packed: Buffer) -> Lowered:
        kernel, memory = self.builder.finish(), self.memory
        buffers: dict[str, BufferArgument | PackArgument] = {a.buffer: a for a in memory.arguments}
        buffers[packed.name] = PackArgument(packed.name, self.spec)
        sizes = {a.size: a for a in memory.runtime}
        written = dict.fromkeys(output_values(self.original))
        strides = tuple((v.name, self._written(v)) for v in written)
        given = [buffers[b.name] for b in kernel.buffers if b.kind is not BufferKind.SCRATCH]
        return Lowered(kernel, (*given, *(sizes.get(s, SymbolArgument(s, s)) for s in kernel.sizes)), strides)

    def _written(self, v: Value) -> tuple[Dim, ...]:
        """An output's strides in its own shape; one that was written as a matrix is row-major."""
        strides, shape = self.memory.output(v).strides, shape_of(v)
        return strides if len(strides) == len(shape) else dense_strides(shape, ROW_MAJOR)


@contextlib.contextmanager
def _batch(b: KernelBuilder, row: Dim, rows: tuple[Dim, ...]) -> Generator[dict[int, Dim]]:
    """Where a row is along each batch dim."""
    with contextlib.ExitStack() as scope:
        found: dict[int, Dim] = {}
        for i, extent in enumerate(rows):
            at = row if i == len(rows) - 1 else expr("//", row, product(rows[i + 1 :]))
            found[i] = scope.enter_context(let(b, "at", at if i == 0 else expr("%", at, extent)))
        yield found
