"""Composite ops in terms of a few: pointwise ops, views, and reductions over dims that stay with extent 1.

    softmax(x, -1)   ->   m = lower.reduce.max(x); e = exp(x - m); e / lower.reduce.sum(e)

    lower.reduce.F(x) {dims, less}    F: sum mean prod max min any all argmax argmin; a mean divides by the count minus `less`;
                                      top is a maximum that passes over NaN
    lower.decay(x)                    e^x where x is at most 0
    lower.scan.F(x) {dim}             F: sum prod max min; every element with those before it
    lower.pad(x, dim, before, number)
    lower.roll(x, by, dim)
    lower.alias(x)                    a result under the name that the group gave it

What stays whole keeps its ATen name. Half precision is computed in f32 between a composite op's input and its result, as torch
does. Each expansion is a rule of `ir.rewrite`; what falls with each step is the number of composite ops, so none may be made of
others. The rows are in the modules beside this one, one theme a file; `lower.ops.windows` and `lower.ops.gather_reads` say what
the movements that they use mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from importlib import import_module

from hotfuse.analysis.convolution import is_convolution
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value
from hotfuse.ir.rewrite import Context, Measure, Replacement, Rule, apply
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.common.algebra import same
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.ops.expand import HALVES
from hotfuse.lower.ops.views import shape_of, tensor
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

Expansion = Callable[["Draft", Node], Sequence[Value]]
"""Adds nodes to a draft, and gives a value for each result of the node."""
_EXPANSIONS: dict[str, Expansion] = {}


def decomposes(names: str) -> Callable[[Expansion], Expansion]:
    """Add an expansion for each of these ops."""

    def note(expansion: Expansion) -> Expansion:
        for name in names.split():
            _EXPANSIONS[f"aten.{name}"] = expansion
        return expansion

    return note


@functools.cache
def expansions() -> Mapping[str, Expansion]:
    """Every expansion by the op's name."""
    for name in ("conv", "index", "move", "norms", "pool", "reduce", "resize", "running", "sort"):
        import_module(f"hotfuse.lower.primitives.{name}")
    return _EXPANSIONS


COMPOSITES = Measure("composite ops", lambda n: (int(packet(n.op) in expansions()),))


@dataclass(slots=True)
class Draft:
    """Nodes that take the place of one."""

    node: Node
    """The node being replaced: new ones carry its place in the user's code."""
    taken: set[str]
    """Names of values there are already."""
    cuts: bool
    """Whether loops stop where windows begin and cease to fit, instead of checking every place."""
    nodes: list[Node] = field(default_factory=list[Node])

    def add(
        self, op: str, args: tuple[Arg, ...], dtype: DType, shape: tuple[Dim, ...], attrs: Mapping[str, Arg] | None = None
    ) -> Value:
        """A node with one result."""
        base = f"{self.node.outs[0].name}.{op.split('.')[-1 if op.startswith('lower') else 1]}"
        name, n = base, 0
        while name in self.taken:
            n += 1
            name = f"{base}{n}"
        self.taken.add(name)
        out = Value(name, TensorType(dtype, shape))
        self.nodes.append(Node(Kind.OPERATOR, op, args, (out,), tuple((attrs or {}).items()), (), self.node.loc))
        return out

    def arg(self, name: str, default: Arg = None) -> Arg:
        """An argument of the node being replaced."""
        return argument(self.node, name, default)

    def value(self, name: str = "self") -> Value:
        """A tensor argument of the node being replaced."""
        return tensor(self.arg(name), self.node)

    def maybe(self, name: str) -> Value | None:
        """A tensor argument that may be missing."""
        return None if self.arg(name) is None else self.value(name)

    # -- shorthand for the nodes that rules are made of

    def pointwise(self, op: str, *args: Arg, attrs: Mapping[str, Arg] | None = None) -> Value:
        """A pointwise op on tensors of one element type and numbers, broadcast."""
        values = [a for a in args if isinstance(a, Value)]
        shape: tuple[Dim, ...] = ()
        for v in values:
            shape = broadcast(shape, shape_of(v))
        return self.add(f"aten.{op}", args, dtype(values[0]), shape, attrs)

    def cast(self, x: Value, to: DType) -> Value:
        """The same numbers in another element type."""
        return x if dtype(x) is to else self.add("aten._to_copy.default", (x,), to, shape_of(x), {"dtype": to})

    def wide(self, x: Value) -> Value:
        """Half precision as f32."""
        return self.cast(x, DType.F32) if dtype(x) in HALVES else x

    def reshape(self, x: Value, shape: tuple[Dim, ...]) -> Value:
        """The same elements in another shape."""
        return x if shape_of(x) == shape else self.add("aten.reshape.default", (x,), dtype(x), shape)

    def reduce(self, function: str, x: Value, dims: Sequence[int], *, less: float = 0, out: DType | None = None) -> Value:
        """Over dims, which stay with extent 1."""
        shape = tuple(1 if d in dims else n for d, n in enumerate(shape_of(x)))
        attrs: dict[str, Arg] = {"dims": tuple(dims), "less": less}
        return self.add(f"lower.reduce.{function}", (x,), out or dtype(x), shape, attrs)

    def centered_mean(self, x: Value, dims: Sequence[int], less: float = 0) -> tuple[Value, Value, Value]:
        """(mean, x - mean, mean of squares of that): the exact way to a variance, in two passes."""
        mean = self.reduce("mean", x, dims)
        centered = self.pointwise("sub.Tensor", x, mean)
        return mean, centered, self.reduce("mean", self.pointwise("square.default", centered), dims, less=less)


def dtype(v: Value) -> DType:
    """A tensor's element type."""
    if not isinstance(v.type, TensorType):
        raise CannotLower(f"%{v.name} is not a tensor")
    return v.type.dtype


def broadcast(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """The shape of two operands together."""
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    for m, n in zip(left, right, strict=True):
        if 1 not in (m, n) and not same(m, n):
            raise CannotLower(f"whether a dim of {m} is repeated to {n} is not known")
    return tuple(n if m == 1 else m for m, n in zip(left, right, strict=True))


def expanded(graph: Graph, *, cuts: bool = False, convolutions: bool = False) -> Graph:
    """The group with composite ops replaced; results keep their names. Kernels around a convolution keep it whole."""
    return apply(graph, rules(graph, cuts=cuts, convolutions=convolutions))[0]


def rules(graph: Graph, *, cuts: bool = False, convolutions: bool = False) -> tuple[Rule, ...]:
    """One rule for each composite op of a group, whose new values have names that are still free there."""
    table = expansions()
    taken = {v.name for v in graph.inputs} | {p.value.name for p in graph.params} | {v.name for n in graph.nodes for v in n.outs}

    def expand(node: Node, _context: Context) -> Replacement | None:
        if is_convolution(node) and not convolutions:
            return None
        draft = Draft(node, taken, cuts)
        for out, value in zip(node.outs, table[packet(node.op)](draft, node), strict=False):
            result = draft.reshape(draft.cast(value, dtype(out)), shape_of(out))
            draft.nodes.append(Node(Kind.OPERATOR, "lower.alias", (result,), (out,), (), (), node.loc))
        return Replacement(tuple(draft.nodes))

    return tuple(
        Rule(f"expand-{op.removeprefix('aten.')}", expand, "one composite op less", COMPOSITES, frozenset({op}))
        for op in dict.fromkeys(packet(n.op) for n in graph.nodes) if op in table
    )  # fmt: skip
