"""The way in: a group of pointwise, movement, reduction and normalization nodes becomes one kernel.

Outputs that fit the loops of one root share a nest; others follow in nests of their own, in the same kernel. Each way of
arranging the loops is tried until one works: around the first reduction's input, around each output alone, then without
vectors, which always works where positions can be computed at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotfuse.ir.dims import sym, symbols
from hotfuse.ir.graph import Graph, Kind, Node, Value, output_values, sources
from hotfuse.ir.types import TensorType, dims_of
from hotfuse.lower import expand, primitive
from hotfuse.lower.errors import CannotLower
from hotfuse.lower.index import Refine, Space, counters_of
from hotfuse.lower.landing import land
from hotfuse.lower.lowered import Lowered, Memory, tensor_type
from hotfuse.lower.plan import Goal, Plan, Planner
from hotfuse.lower.values import Definitions
from hotfuse.lower.views import is_move, shape_of
from hotfuse.lower.write import Writer
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.tile.build import KernelBuilder

_MAX_NODES = 150
_MAX_TRIES = 64


@dataclass(frozen=True, slots=True)
class Options:
    """What the target is good at."""

    vector_bytes: int = 64


def supported(node: Node) -> bool:
    """Whether a node's op can be part of such a group, as far as its name says."""
    return (
        node.kind is Kind.OPERATOR
        and not node.graphs
        and (expand.known(node.op) or is_move(node.op) or packet(node.op) in primitive.rules() or _is_host(node))
    )


def _is_host(node: Node) -> bool:
    return lookup(node.op).access is Access.HOST or node.op.startswith("sym.")


def lower_group(graph: Graph, options: Options | None = None, strides: Mapping[str, tuple[int, ...]] | None = None) -> Lowered:
    """One kernel for the group; raises CannotLower with the reason where there is none.

    `strides` gives the strides of inputs whose type does not say them, where they are known.
    """
    if len(graph.nodes) > _MAX_NODES:
        raise CannotLower(f"{len(graph.nodes)} nodes are too many for one kernel")
    for node in graph.nodes:
        if not supported(node):
            raise CannotLower(f"{node.op} is no pointwise op, movement or reduction known here", where=str(node.loc))
    for out in graph.outputs:
        if not isinstance(out, Value) or not isinstance(out.type, TensorType):
            raise CannotLower("an output is not a tensor")
    _sizes_known(graph)
    outputs = list(dict.fromkeys(output_values(graph)))
    for v in outputs:
        tensor_type(v)
    problem: CannotLower | None = None
    for cuts in _ways(graph):
        simple = primitive.simplified(graph, cuts=cuts)
        try:
            return _Kernel(simple, Definitions(simple), outputs, options or Options(), strides or {}).lowered()
        except CannotLower as e:
            problem = problem or e
    assert problem is not None
    raise problem


def _ways(graph: Graph) -> tuple[bool, ...]:
    """How windows are kept inside: checked where channels are vectors anyway, else by cutting loops where that works."""
    if not any("pool" in n.op for n in graph.nodes):
        return (False,)
    orders = [v.type.layout.order for v in graph.inputs if isinstance(v.type, TensorType)]
    last = any(order is not None and order[-1] == 1 for order in orders)
    return (False, True) if last else (True, False)


def _sizes_known(graph: Graph) -> None:
    """Every symbol must be the size of some input's dim, or a call could not give it."""
    shown = {d for v in graph.inputs if isinstance(v.type, TensorType) for d in v.type.shape}
    used = [d for v in (*sources(graph), *(o for n in graph.nodes for o in n.outs)) for d in dims_of(v.type)]
    for name in sorted(frozenset[str]().union(*map(symbols, used))):
        if sym(name) not in shown:
            raise CannotLower(f"no input of the group shows the size {name}")


@dataclass(slots=True)
class _Nest:
    """Loops around a root value; `rows` names the root's dims that stay when it is reduced (None: find out)."""

    root: Value
    outputs: list[Value]
    rows: frozenset[int] | None
    scalar: bool = False
    space: Space | None = None
    extras: dict[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict[tuple[str, ...], tuple[int, ...]])


class _Kernel:
    def __init__(
        self, graph: Graph, definitions: Definitions, outputs: list[Value], options: Options,
        strides: Mapping[str, tuple[int, ...]],
    ) -> None:  # fmt: skip
        self.graph, self.definitions, self.outputs = graph, definitions, outputs
        self.options, self.strides = options, strides

    def lowered(self) -> Lowered:
        problem: CannotLower | None = None
        reductions = [n for n in self.graph.nodes if n.op.startswith("lower.reduce.")]
        for around, scalar in (("reduction", False), ("output", False), ("output", True)):
            if around == "reduction" and not reductions:
                continue
            try:
                return self._with(around, scalar, reductions)
            except CannotLower as e:
                problem = problem or e
        assert problem is not None
        raise problem

    def _with(self, around: str, scalar: bool, reductions: list[Node]) -> Lowered:
        memory = self._memory()
        left = list(self.outputs)
        nests: list[tuple[Plan, Memory]] = []
        if around == "reduction":
            (value,) = reductions[0].ins
            dims = reductions[0].attr("dims")
            kept = frozenset(d for d in range(len(shape_of(value))) if not isinstance(dims, tuple) or d not in dims)
            nest = _Nest(value, left, kept, scalar)
            plan, done = self._planned(nest, memory)
            nests.append((plan, memory))
            left = [v for v in left if v not in done]
        while left:
            root = max(left, key=lambda v: len(shape_of(v)))
            nest = _Nest(root, left, None, scalar)
            plan, done = self._planned(nest, memory)
            nests.append((plan, memory))
            left = [v for v in left if v not in done]
        for plan, _ in nests:
            Writer(memory, self.graph, plan).write()
        return memory.finish(memory.builder.finish())

    def _memory(self) -> Memory:
        return Memory(KernelBuilder(self.graph.name), self.graph, self.strides)

    def _planned(self, nest: _Nest, memory: Memory) -> tuple[Plan, list[Value]]:
        nest.space = Space.of(shape_of(nest.root))
        for _ in range(_MAX_TRIES):
            try:
                return self._attempt(nest, memory)
            except Refine as finer:
                nest.space = nest.space.refined(finer)
        raise CannotLower("the loops do not become fine enough")

    def _attempt(self, nest: _Nest, memory: Memory) -> tuple[Plan, list[Value]]:
        space = nest.space
        assert space is not None
        count = len(shape_of(nest.root))
        base = tuple(space.root(i) for i in range(count))
        landed = land(self.definitions, self.graph, space, nest.root, base)
        goals = [Goal(v, landed[v.name]) for v in nest.outputs if v.name in landed]
        rows = None if nest.rows is None else frozenset(k for r in nest.rows for k in space.roots[r])
        if nest.rows is None:
            goals = self._together(goals, nest.root, space)
        if not goals:
            raise CannotLower("no output fits the loops of the first reduction")
        planner = Planner(self.definitions, memory, space, nest.extras)
        try:
            plan = planner.plan(goals, rows, self.options.vector_bytes, nest.scalar)
        except Refine:
            nest.space = planner.space
            raise
        return plan, [g.value for g in goals]

    def _together(self, goals: list[Goal], root: Value, space: Space) -> list[Goal]:
        """The root, and the outputs that cover its loops as wholly as it does."""
        full = frozenset(k for k, n in enumerate(space.extents) if n != 1)
        own = [g for g in goals if g.value.name == root.name]
        return own + [g for g in goals if g.value.name != root.name and counters_of(g.position) == full]

