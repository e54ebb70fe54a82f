"""The entry: a group of pointwise, movement, reduction and normalization nodes becomes one kernel.

Outputs that fit the loops of one root share a nest; others follow in nests of their own, in the same kernel. Each way of arranging
the loops is tried until one works: around the first reduction's input, around each output alone, then without vectors. Where none
works (a reduction inside the loop of another one, a running sum wanted in another order, a value read at places that data say),
the value in the way is computed first, in a nest of its own, into memory of the kernel (or into an output, if the value is one:
`stages`). The same is done with a value that one element of a result would compute at many places (`recompute`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from hotfuse.analysis.sorts import is_sort, refusal
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import sym, symbols
from hotfuse.ir.graph import Graph, Kind, Node, Value, output_values, sources
from hotfuse.ir.types import TensorType, dims_of
from hotfuse.lower.common.errors import CannotLower, NotInOneNest
from hotfuse.lower.common.kernel_stages import ordered, sharing_loops
from hotfuse.lower.common.loop_positions import land
from hotfuse.lower.common.lowered import KernelBuffers, Lowered, tensor_type
from hotfuse.lower.common.positions import Refine, Space, counters_of
from hotfuse.lower.common.recompute import read_often
from hotfuse.lower.common.steps import Definitions
from hotfuse.lower.cpu.loop_nest import Goal, NestPlan, NestPlanner
from hotfuse.lower.cpu.write import NestWriter
from hotfuse.lower.ops import expand
from hotfuse.lower.ops.views import is_move, shape_of
from hotfuse.lower.primitives import rules as primitive
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.tile.build import KernelBuilder

_MAX_NODES = 150
_MAX_TRIES = 64
_MAX_ASIDE = 12


@dataclass(frozen=True, slots=True)
class Options:
    """What the target is good at."""

    vector_bytes: int = 64


def supported(node: Node) -> bool:
    """Whether a node's op can be part of such a group, as far as its name (of sorts: what is sorted) says."""
    return (
        node.kind is Kind.OPERATOR
        and not node.graphs
        and not (is_sort(node) and refusal(node))
        and (expand.known(node.op) or is_move(node.op) or packet(node.op) in primitive.expansions() or _is_host(node))
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
    for cuts in _cut_variants(graph):
        simple = primitive.expanded(graph, cuts=cuts, convolutions=True)
        try:
            return _Kernel(simple, outputs, options or Options(), strides or {}).lowered()
        except CannotLower as e:
            problem = problem or e
    assert problem is not None
    raise problem


def _cut_variants(graph: Graph) -> tuple[bool, ...]:
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


def _around(reduction: Node, outputs: list[Value], *, scalar: bool) -> _Nest:
    """Loops around what is reduced."""
    (value,), dims = reduction.ins, reduction.attr("dims")
    kept = frozenset(d for d in range(len(shape_of(value))) if not isinstance(dims, tuple) or d not in dims)
    return _Nest(value, outputs, kept, scalar)


class _Kernel:
    def __init__(
        self, graph: Graph, outputs: list[Value], options: Options, strides: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.graph, self.outputs = graph, outputs
        self.options, self.strides = options, strides
        self.definitions = Definitions(graph)
        self.often: list[Value] = []

    def lowered(self) -> Lowered:
        problem: CannotLower | None = None
        folded = any(n.op.startswith("lower.reduce.") for n in self.graph.nodes)
        attempts = (("reduction", False), ("output", False), ("output", True))
        self.often = read_often(self.graph)
        for attempt in (self._in_stages,) if self.often else (self._with, self._in_stages):
            for around, scalar in attempts if folded else attempts[1:]:
                try:
                    return attempt(around, scalar=scalar)
                except CannotLower as e:
                    problem = problem or e
        assert problem is not None
        raise problem

    def _in_stages(self, around: str, *, scalar: bool) -> Lowered:
        """What the loops around its use cannot make is computed before them, into memory of the kernel's own."""
        aside = list(self.often)
        while True:
            try:
                return self._with(around, ordered(self.graph, aside), scalar=scalar)
            except NotInOneNest as e:
                if e.value in aside or len(aside) >= len(self.often) + _MAX_ASIDE:
                    raise
                aside.append(e.value)

    def _with(self, around: str, aside: Sequence[Value] = (), *, scalar: bool) -> Lowered:
        memory = self._memory()
        nests: list[tuple[NestPlan, Definitions]] = []
        waiting, stored = list(aside), list[str]()
        while waiting:
            stage = sharing_loops(self.graph, waiting)
            for v in stage:
                memory.aside(v)
            self.definitions = Definitions(self.graph, stored, (v.name for v in stage))
            done = self._stage(stage, scalar=scalar, memory=memory, nests=nests)
            waiting = [v for v in waiting if v not in done]
            stored += [v.name for v in done]
        self.definitions = Definitions(self.graph, stored)
        left = [v for v in self.outputs if v.name not in stored]
        reductions = [n for n in self.graph.nodes if n.op.startswith("lower.reduce.") and n.outs[0].name not in stored]
        if around == "reduction" and reductions:
            left = self._nest(_around(reductions[0], left, scalar=scalar), memory, nests)
        while left:
            root = max(left, key=lambda v: len(shape_of(v)))
            left = self._nest(_Nest(root, left, None, scalar), memory, nests)
        for plan, definitions in nests:
            NestWriter(memory, definitions, plan).write()
        return memory.finish(memory.builder.finish())

    def _stage(
        self, stage: list[Value], *, scalar: bool, memory: KernelBuffers, nests: list[tuple[NestPlan, Definitions]]
    ) -> list[Value]:
        """The nest of what is stored next; gives what it stores."""
        node, _ = self.definitions.nodes[stage[0].name]
        if node.op.startswith("lower.reduce."):
            left = self._nest(_around(node, stage, scalar=scalar), memory, nests)
        else:
            left = self._nest(_Nest(stage[0], stage[:1], None, scalar), memory, nests)
        return [v for v in stage if v not in left]

    def _nest(self, nest: _Nest, memory: KernelBuffers, nests: list[tuple[NestPlan, Definitions]]) -> list[Value]:
        """Plan one more nest; gives the outputs that are left."""
        plan, done = self._planned(nest, memory)
        nests.append((plan, self.definitions))
        return [v for v in nest.outputs if v not in done]

    def _memory(self) -> KernelBuffers:
        return KernelBuffers(KernelBuilder(self.graph.name), self.graph, self.strides)

    def _planned(self, nest: _Nest, memory: KernelBuffers) -> tuple[NestPlan, list[Value]]:
        nest.space = Space.of(shape_of(nest.root))
        for _ in range(_MAX_TRIES):
            try:
                return self._attempt(nest, memory)
            except Refine as finer:
                nest.space = nest.space.refined(finer)
        raise CannotLower("the loops do not become fine enough")

    def _attempt(self, nest: _Nest, memory: KernelBuffers) -> tuple[NestPlan, list[Value]]:
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
        planner = NestPlanner(self.definitions, memory, space, nest.extras)
        try:
            plan = planner.plan(goals, rows, self.options.vector_bytes, scalar=nest.scalar)
        except Refine:
            nest.space = planner.space
            raise
        return plan, [g.value for g in goals]

    def _together(self, goals: list[Goal], root: Value, space: Space) -> list[Goal]:
        """The root, and the outputs that cover its loops as wholly as it does."""
        full = frozenset(k for k, n in enumerate(space.extents) if n != 1)
        own = [g for g in goals if g.value.name == root.name]
        return own + [g for g in goals if g.value.name != root.name and counters_of(g.position) == full]

