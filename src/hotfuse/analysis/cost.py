"""What a node or a graph costs by what it is: floating-point operations and bytes moved, for given sizes.

Bytes are every tensor read plus every tensor written, once each; ops that only make a view move none. A figure that
depends on data (a size nobody knows, how often a loop runs) is None, never a guess. Which branch is taken depends on data, too: the
dearest counts where nobody says how often each runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.control_bodies import control_name, inside
from hotfuse.ir.dims import Dim, evaluate
from hotfuse.ir.graph import Graph, Kind, Node, Value
from hotfuse.ir.types import ObjectType, OptionalType, SequenceType, TensorType, bits
from hotfuse.ops.table import lookup


@dataclass(frozen=True, slots=True)
class Cost:
    """Operations and bytes; None where they depend on data."""

    flops: int | None
    bytes: int | None

    def __add__(self, other: Cost) -> Cost:
        return Cost(_plus(self.flops, other.flops), _plus(self.bytes, other.bytes))

    def times(self, n: float) -> Cost:
        """The cost of doing it n times, which may be a mean."""
        return Cost(None if self.flops is None else round(self.flops * n), None if self.bytes is None else round(self.bytes * n))


FREE = Cost(0, 0)
UNSEEN = Cost(None, None)
BodyRuns = Callable[[Node, str, int], float | None]
"""How often a body of a control node runs each time that the node does, as calls showed it; None where none did. Control nodes
are told by name: the second argument is what their names begin with (`ir.control_bodies.control_name`)."""


def value_bytes(value: Value, env: Mapping[str, int]) -> int | None:
    """The memory a value fills: 0 for a number of the host, None where its type does not tell."""
    t = value.type
    if isinstance(t, SequenceType | OptionalType | ObjectType):
        return None
    if not isinstance(t, TensorType):
        return 0
    elements = 1
    for dim in t.shape:
        size = _evaluate(dim, env)
        if size is None:
            return None
        elements *= size
    return -(-elements * bits(t.dtype) // 8)


def node_cost(node: Node, env: Mapping[str, int], runs: BodyRuns | None = None, path: str = "") -> Cost:
    """The cost of one node, nested graphs included: as often as `runs` says, else the dearest branch."""
    if node.kind is Kind.CONTROL:
        return _control(node, env) if runs is None else _expected(node, env, runs, path)
    row = lookup(node.op)
    flops = _evaluate(row.flops(node), env)
    moved = 0 if row.view else _total(value_bytes(v, env) for v in (*node.ins, *node.outs))
    return Cost(flops, moved)


def graph_cost(graph: Graph, env: Mapping[str, int]) -> Cost:
    """The sum over the nodes."""
    total = FREE
    for node in graph.nodes:
        total = total + node_cost(node, env)
    return total


def _expected(node: Node, env: Mapping[str, int], runs: BodyRuns, path: str) -> Cost:
    """What a control node cost in calls that were seen."""
    name, total = control_name(node, path), FREE
    for i, body in enumerate(node.graphs):
        often = runs(node, path, i)
        if often is None:
            return UNSEEN
        if often:  # sizes that nobody knows do not matter where nobody goes
            costs = [node_cost(n, env, runs, inside(name, i)) for n in body.nodes]
            total = total + sum(costs, FREE).times(often)
    return total


def _control(node: Node, env: Mapping[str, int]) -> Cost:
    inner = [graph_cost(g, env) for g in node.graphs]
    if node.op == "control.if":
        flops = [c.flops for c in inner]
        moved = [c.bytes for c in inner]
        return Cost(_most(flops), _most(moved))
    if node.op == "control.loop":
        trip, cond = node.args[:2]
        return inner[0].times(trip) if type(trip) is int and cond is None else UNSEEN
    if node.op == "control.scan":
        length = _scan_length(node, env)
        return UNSEEN if length is None else inner[0].times(length)
    return UNSEEN


def _scan_length(node: Node, env: Mapping[str, int]) -> int | None:
    """The scanned inputs' common extent; the axis is the first unless the node says otherwise."""
    scanned = node.args[1]
    first = scanned[0] if isinstance(scanned, tuple) and scanned else None
    axes = node.attr("in_axes")
    axis = axes[0] if isinstance(axes, tuple) and axes else 0
    if not isinstance(first, Value) or not isinstance(first.type, TensorType) or not isinstance(axis, int):
        return None
    shape = first.type.shape
    return _evaluate(shape[axis], env) if -len(shape) <= axis < len(shape) else None


def _evaluate(dim: Dim, env: Mapping[str, int]) -> int | None:
    try:
        return evaluate(dim, env)
    except (KeyError, ZeroDivisionError, ModelError):
        return None


def _plus(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _total(parts: Iterable[int | None]) -> int | None:
    total: int | None = 0
    for part in parts:
        total = _plus(total, part)
    return total


def _most(parts: Iterable[int | None]) -> int | None:
    """The dearest branch, which is not known unless all are."""
    most = 0
    for part in parts:
        if part is None:
            return None
        most = max(most, part)
    return most
