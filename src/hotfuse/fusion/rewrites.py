"""Candidates that change the graph, not only its groups: blocks of rows, and cheap values computed again.

    tiled        %h = f(%x); %y = g(%h)   ->   for each block of rows: %y_i = g(f(%x_i)); %y = cat(%y_0, ...)
    recomputed   %m = f(%x), read by two groups   ->   each group has its own f

Both are equal to the original in exact arithmetic, element by element. A new graph keeps the names of all values that others read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.fusion.closed import UseIndex
from hotfuse.fusion.groups import Group
from hotfuse.fusion.kinds import GroupKind
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_node, unused_name
from hotfuse.ir.types import TensorType
from hotfuse.ops.table import Access, is_random, lookup, packet

MAX_BLOCKS = 32
"""Blocks of rows that a graph is written out for; each is a call."""
_LAST_DIMS = frozenset({"aten.layer_norm", "aten.rms_norm"})
_LINEAR = frozenset({"aten.linear", "aten.mm", "aten.addmm"})


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A graph, where its nodes were before (-1 for new ones), and the groups that took the place of the old ones."""

    graph: Graph
    origin: tuple[int, ...]
    groups: tuple[Group, ...]


def rows_of(value: Value) -> int | None:
    """The leading dim of a tensor of at least two, where it is a number."""
    t = value.type
    if not isinstance(t, TensorType) or len(t.shape) < 2 or t.layout.strided or t.layout.order is not None:
        return None
    return t.shape[0] if isinstance(t.shape[0], int) else None


def row_wise(node: Node, rows: int) -> bool:
    """Whether row i of a node's result depends on row i of what it reads and on whole operands without rows."""
    if node.kind is not Kind.OPERATOR or len(node.outs) != 1 or rows_of(node.outs[0]) != rows or is_random(node.op):
        return False
    first = node.args[0] if node.args else None
    if not isinstance(first, Value):
        return False
    name, out = packet(node.op), node.outs[0].type
    assert isinstance(out, TensorType)
    if lookup(node.op).access is Access.POINTWISE:
        return all(_aligned(v, out, rows) for v in node.ins)
    if name in _LINEAR:
        x = node.args[1] if name == "aten.addmm" else first
        if name == "aten.addmm" and rows_of(first) == rows:
            return False  # what is added has rows of its own, and operands besides the first are taken whole
        return isinstance(x, Value) and rows_of(x) == rows
    if name in _LAST_DIMS:
        return rows_of(first) == rows and len(out.shape) > len(node.args[1]) if isinstance(node.args[1], tuple) else False
    if "softmax" in name:
        dim = node.args[1] if len(node.args) > 1 else None
        return rows_of(first) == rows and isinstance(dim, int) and dim % len(out.shape) != 0
    return False


def _aligned(v: Value, out: TensorType, rows: int) -> bool:
    t = v.type
    if not isinstance(t, TensorType):
        return True
    if len(t.shape) < len(out.shape):
        return True
    return len(t.shape) == len(out.shape) and (t.shape[0] == 1 or rows_of(v) == rows)


def tiled(
    index: UseIndex, first: Sequence[int], second: Sequence[int], kinds: tuple[GroupKind, GroupKind], block: int
) -> Rewritten | str:
    """Two groups over blocks of rows; or why not."""
    graph, nodes = index.graph, sorted((*first, *second))
    leaving = index.leaving(nodes)
    rows = rows_of(leaving[0]) if leaving else None
    if rows is None:
        return "the number of rows is known only at run time"
    if bad := [graph.nodes[i] for i in nodes if not row_wise(graph.nodes[i], rows)]:
        return f"{packet(bad[0].op).removeprefix('aten.')} does not work row by row"
    blocks = -(-rows // block)
    if not 2 <= blocks <= MAX_BLOCKS:
        return f"{rows} rows in blocks of {block} are {blocks} blocks, not 2 to {MAX_BLOCKS}"
    whole = {v.name for i in nodes for v in _whole(graph.nodes[i])}
    if both := whole & _by_rows(graph, nodes, rows):
        return f"%{min(both)} is read whole, and row by row"
    weights = set(index.params) | whole
    sliced = [v for v in index.entering(nodes) if rows_of(v) == rows and v.name not in weights]
    if not sliced:
        return "nothing they read has rows"
    made, parts, origin = list[Node](), list[list[Value]](), list[int]()
    groups: list[Group] = []
    parts = [[] for _ in leaving]
    at = 0
    for b in range(blocks):
        lo, hi = b * block, min(rows, (b + 1) * block)
        new: dict[str, Arg] = {}
        for v in sliced:
            made.append(Node(Kind.OPERATOR, "aten.slice.Tensor", (v, 0, lo, hi), (_part(v, b, hi - lo),)))
            new[v.name] = made[-1].outs[0]
            groups.append(Group((at,), GroupKind.LIBRARY))
            at += 1
        halves: tuple[list[int], list[int]] = ([], [])
        inside = set(first)
        for i in nodes:
            node = graph.nodes[i]
            outs = tuple(_part(v, b, hi - lo) for v in node.outs)
            made.append(map_node(node, new, outs))
            new.update({old.name: v for old, v in zip(node.outs, outs, strict=True)})
            halves[0 if i in inside else 1].append(at)
            at += 1
        groups += [Group(tuple(h), k) for h, k in zip(halves, kinds, strict=True)]
        for n, v in enumerate(leaving):
            part = new[v.name]
            assert isinstance(part, Value)
            parts[n].append(part)
    for n, v in enumerate(leaving):
        made.append(Node(Kind.OPERATOR, "aten.cat.default", (tuple(parts[n]), 0), (v,)))
        groups.append(Group((at,), GroupKind.LIBRARY))
        at += 1
    origin = [-1] * len(made)
    return _spliced(graph, set(nodes), made, origin, tuple(groups))


def recomputed(index: UseIndex, cheap: Sequence[int], readers: Sequence[Group]) -> Rewritten | str:
    """A group of cheap nodes inside each group that reads it, none of its own; or why not."""
    graph, inside = index.graph, set(cheap)
    if any(v.name in index.returned for i in cheap for v in graph.nodes[i].outs):
        return "what it computes is a result"
    kinds = {lookup(graph.nodes[i].op).access for i in cheap}
    if not kinds <= {Access.POINTWISE, Access.MOVEMENT} or any(is_random(graph.nodes[i].op) for i in cheap):
        return "it is more than arithmetic on elements"
    home = {i: g for g in readers for i in g.nodes}
    outside = {r for i in cheap for v in graph.nodes[i].outs for r in index.readers.get(v.name, ()) if r not in inside}
    if outside - home.keys():
        return "others read it too"
    taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs} | set(index.params)
    nodes: list[Node] = []
    origin: list[int] = []
    members: dict[tuple[int, ...], list[int]] = {g.nodes: [] for g in readers}
    named: dict[tuple[int, ...], dict[str, Arg]] = {}
    for i, node in enumerate(graph.nodes):
        if i in inside:
            continue
        group = home.get(i)
        if group is not None and group.nodes not in named:
            new: dict[str, Arg] = {}
            for c in sorted(cheap):
                outs = tuple(Value(unused_name(f"{v.name}.again", taken), v.type) for v in graph.nodes[c].outs)
                members[group.nodes].append(len(nodes))
                nodes.append(map_node(graph.nodes[c], new, outs))
                origin.append(-1)
                new.update({old.name: v for old, v in zip(graph.nodes[c].outs, outs, strict=True)})
            named[group.nodes] = new
        if group is not None:
            members[group.nodes].append(len(nodes))
            node = map_node(node, named[group.nodes], node.outs)
        nodes.append(node)
        origin.append(i)
    made = tuple(Group(tuple(members[g.nodes]), g.kind) for g in readers)
    return Rewritten(replace(graph, nodes=tuple(nodes)), tuple(origin), made)


def _spliced(graph: Graph, old: set[int], made: list[Node], origin: list[int], groups: tuple[Group, ...]) -> Rewritten:
    """Old nodes replaced by new ones where all that they read is there; what depends on them comes after."""
    last_read = max(old)
    tainted = {v.name for i in old for v in graph.nodes[i].outs}
    before: list[int] = []
    after: list[int] = []
    for i, node in enumerate(graph.nodes):
        if i in old:
            continue
        if i < last_read and not any(v.name in tainted for v in node.ins):
            before.append(i)
        else:
            tainted |= {v.name for v in node.outs} if i < last_read else set()
            after.append(i)
    nodes = [*(graph.nodes[i] for i in before), *made, *(graph.nodes[i] for i in after)]
    shift = len(before)
    moved = tuple(Group(tuple(n + shift for n in g.nodes), g.kind) for g in groups)
    return Rewritten(replace(graph, nodes=tuple(nodes)), (*before, *origin, *after), moved)


def _whole(node: Node) -> list[Value]:
    """Operands that have no rows of the result: weights."""
    name = packet(node.op)
    if name in _LINEAR:
        at = 1 if name == "aten.addmm" else 0
        return [a for i, a in enumerate(node.args) if i != at and isinstance(a, Value)]
    return [v for v in node.ins[1:]] if name in _LAST_DIMS else []


def _by_rows(graph: Graph, nodes: Sequence[int], rows: int) -> set[str]:
    """Values of which a block sees its own rows only: what it computes, and operands that are not whole."""
    found = {v.name for i in nodes for v in graph.nodes[i].outs}
    for i in nodes:
        whole = {v.name for v in _whole(graph.nodes[i])}
        found |= {v.name for v in graph.nodes[i].ins if rows_of(v) == rows and v.name not in whole}
        x = graph.nodes[i].args[1 if packet(graph.nodes[i].op) == "aten.addmm" else 0]
        found |= {x.name} if isinstance(x, Value) else set()
    return found


def _part(v: Value, block: int, rows: int) -> Value:
    assert isinstance(v.type, TensorType)
    return Value(f"{v.name}.rows{block}", replace(v.type, shape=(rows, *v.type.shape[1:])))
