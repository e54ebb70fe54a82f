"""The first grouping of a graph for generated code: greedy, by access class, never across a dependence.

Nodes join the group that makes one of their inputs when that keeps the group convex and their access classes fit:

    contraction + pointwise consumers of its own shape     -> one kernel with an epilogue
    pointwise, reduction and view chains                    -> one kernel over rows
    linears with the same input                             -> one kernel with several outputs
    attention with the views around it                      -> one kernel that reads and writes the projections' layout

This is the rule a fused tier starts from; whether a group can be lowered, and whether it pays, is decided later and by others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hotfuse.ir.graph import Graph, Kind, Node, Value, output_values
from hotfuse.ir.types import ScalarType, TensorType
from hotfuse.ops.table import Access, lookup, packet

MAX_NODES = 48
"""Most nodes in a group: beyond it registers spill and compile time grows."""

_LINEAR = frozenset({"aten.linear", "aten.mm", "aten.addmm", "aten.matmul"})
_ATTENTION = "aten.scaled_dot_product_attention"
_ROWS = frozenset({Access.POINTWISE, Access.REDUCTION, Access.MOVEMENT})


@dataclass(frozen=True, slots=True)
class Group:
    """Node indexes in graph order, and what kind of kernel they ask for."""

    nodes: tuple[int, ...]
    kind: str
    """`contract`, `attention`, `rows`, or `library` for nodes left to their operators."""


@dataclass(slots=True)
class _Open:
    """A group while it grows."""

    kind: str
    nodes: list[int] = field(default_factory=list[int])
    shape: tuple[object, ...] | None = None


def group(graph: Graph, fits: Callable[[Node], bool] = lambda _node: True) -> tuple[Group, ...]:
    """Groups in an order in which they can run; `fits` says whether a node could be generated at all."""
    params = {p.value.name for p in graph.params}
    maker = {v.name: i for i, n in enumerate(graph.nodes) for v in n.outs}
    home: list[int] = []
    groups: list[_Open] = []
    reach: list[set[int]] = []  # per node: groups it depends on, its own included

    for i, node in enumerate(graph.nodes):
        makers = [maker[v.name] for v in node.ins if v.name in maker]
        kind = _kind(node, params) if fits(node) else "library"
        chosen = -1
        if kind != "library":
            for m in reversed(makers):  # the latest input is the likeliest to still be in registers
                g = home[m]
                if _joins(groups[g], kind, node) and not _cycle(g, makers, home, reach):
                    chosen = g
                    break
        if chosen < 0:
            chosen = len(groups)
            groups.append(_Open(kind))
        groups[chosen].nodes.append(i)
        groups[chosen].shape = groups[chosen].shape or _shape(node)
        home.append(chosen)
        reach.append({chosen}.union(*(reach[m] for m in makers)) if makers else {chosen})
    merged = _merge_siblings(graph, groups, params)
    _absorb_views(graph, merged)
    return _ordered(graph, [Group(tuple(g.nodes), _settled(graph, g)) for g in merged if g.nodes])


def _absorb_views(graph: Graph, groups: list[_Open]) -> None:
    """Attention takes in the views that only it reads, and those through which alone its result is read."""
    owner = {i: g for g in groups for i in g.nodes}
    maker = {v.name: i for i, n in enumerate(graph.nodes) for v in n.outs}
    readers: dict[str, list[int]] = {}
    for i, n in enumerate(graph.nodes):
        for v in n.ins:
            readers.setdefault(v.name, []).append(i)
    returned = {v.name for v in output_values(graph)}

    def alone(v: Value) -> int:
        """The only reader of a value, -1 if there are others."""
        found = readers.get(v.name, [])
        return found[0] if len(found) == 1 and v.name not in returned else -1

    def take(i: int, into: _Open) -> None:
        owner[i].nodes.remove(i)
        into.nodes.append(i)
        owner[i] = into

    for g in [g for g in groups if g.kind == "attention"]:
        (centre,) = g.nodes
        for v in graph.nodes[centre].ins[:3]:
            reader, name = centre, v
            while (m := maker.get(name.name, -1)) >= 0 and _is_view(graph.nodes[m]) and alone(name) == reader:
                take(m, g)
                reader, name = m, graph.nodes[m].ins[0]
        last = centre
        while (after := alone(graph.nodes[last].outs[0])) >= 0 and _is_view(graph.nodes[after]):
            take(after, g)
            last = after
        g.nodes.sort()


def _is_view(node: Node) -> bool:
    return lookup(node.op).access is Access.MOVEMENT and len(node.outs) == 1 and len(node.ins) >= 1


def _settled(graph: Graph, g: _Open) -> str:
    """A group that only moves data is left to torch, whose views cost nothing."""
    moves = all(lookup(graph.nodes[i].op).access is Access.MOVEMENT for i in g.nodes)
    return "library" if g.kind == "rows" and moves else g.kind


def _kind(node: Node, params: set[str]) -> str:
    if node.kind is not Kind.OPERATOR or any(isinstance(v.type, ScalarType) for v in node.outs) or not node.outs:
        return "library"
    row = lookup(node.op)
    if packet(node.op) == _ATTENTION:
        return "attention"
    if packet(node.op) in _LINEAR:
        weight = node.args[2] if packet(node.op) == "aten.addmm" else node.args[1]
        return "contract" if isinstance(weight, Value) and weight.name in params else "library"
    return "rows" if row.access in _ROWS else "library"


def _shape(node: Node) -> tuple[object, ...] | None:
    first = node.outs[0].type if node.outs else None
    return first.shape if isinstance(first, TensorType) else None


def _joins(into: _Open, kind: str, node: Node) -> bool:
    """Whether a node's access fits a group's."""
    if len(into.nodes) >= MAX_NODES or kind in ("contract", "attention") or into.kind == "attention":
        return False
    if into.kind == "contract":
        return lookup(node.op).access is Access.POINTWISE and _shape(node) == into.shape
    return into.kind == "rows"


def _cycle(g: int, makers: Sequence[int], home: Sequence[int], reach: Sequence[set[int]]) -> bool:
    """Joining would make the group depend on itself through a node outside."""
    return any(home[m] != g and g in reach[m] for m in makers)


def _merge_siblings(graph: Graph, groups: list[_Open], params: set[str]) -> list[_Open]:
    """Contractions of one input whose groups do not depend on each other become one group."""
    by_input: dict[str, list[_Open]] = {}
    for g in groups:
        if g.kind == "contract":
            node = graph.nodes[g.nodes[0]]
            data = node.args[1] if packet(node.op) == "aten.addmm" else node.args[0]
            if isinstance(data, Value) and data.name not in params:
                by_input.setdefault(data.name, []).append(g)
    for family in by_input.values():
        first = family[0]
        for other in family[1:]:
            if len(first.nodes) + len(other.nodes) <= MAX_NODES and _independent(graph, first.nodes, other.nodes):
                first.nodes = sorted(first.nodes + other.nodes)
                other.nodes = []
    return groups


def _independent(graph: Graph, a: Sequence[int], b: Sequence[int]) -> bool:
    """No path leads from one set of nodes to the other."""
    for source, target in ((a, b), (b, a)):
        tainted = {v.name for i in source for v in graph.nodes[i].outs}
        for i in range(min(source), max(target) + 1):
            node = graph.nodes[i]
            if any(v.name in tainted for v in node.ins):
                if i in target:
                    return False
                tainted.update(v.name for v in node.outs)
    return True


def _ordered(graph: Graph, groups: list[Group]) -> tuple[Group, ...]:
    """Groups so that each comes after those it reads from, otherwise in graph order."""
    home = {i: g for g, members in enumerate(groups) for i in members.nodes}
    maker = {v.name: i for i, n in enumerate(graph.nodes) for v in n.outs}
    needs = [
        {home[maker[v.name]] for i in g.nodes for v in graph.nodes[i].ins if v.name in maker} - {k}
        for k, g in enumerate(groups)
    ]
    done: list[Group] = []
    placed: set[int] = set()
    waiting = sorted(range(len(groups)), key=lambda k: groups[k].nodes[0])
    while waiting:
        ready = next(k for k in waiting if needs[k] <= placed)
        waiting.remove(ready)
        placed.add(ready)
        done.append(groups[ready])
    return tuple(done)


def reordered(graph: Graph, groups: Sequence[Group]) -> Graph:
    """The same graph with each group's nodes next to each other, in the groups' order."""
    return replace(graph, nodes=tuple(graph.nodes[i] for g in groups for i in g.nodes))


def outputs_of(graph: Graph, g: Group) -> tuple[Value, ...]:
    """The values a group hands to the outside."""
    inside = set(g.nodes)
    made = [v for i in g.nodes for v in graph.nodes[i].outs]
    outside = {v.name for i, n in enumerate(graph.nodes) if i not in inside for v in n.ins}
    outside |= {v.name for v in output_values(graph)}
    return tuple(v for v in made if v.name in outside)
