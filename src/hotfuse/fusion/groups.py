"""The first grouping of a graph for generated code: greedy, by access class, never across a dependence.

Nodes join the group that makes one of their inputs when that keeps the group convex and their access classes fit:

    contraction + pointwise consumers of its own rows, under whatever batch dims -> one kernel with an epilogue
    convolution + pointwise consumers and batch norms       -> one kernel with an epilogue
    pointwise, reduction and view chains                    -> one kernel over rows
    linears with the same input                             -> one kernel with several outputs
    product of two activations, with views before and pointwise behind -> one kernel that lays panels out as it goes
    products of bytes with what makes numbers of them         -> one kernel that sums integers
    attention, whole or spelled out, with the views around it -> one kernel that reads and writes the projections' layout
    a recurrent layer with what makes its weights and zeros -> one kernel over the whole sequence
    rows times the weights of their experts, halves of the result and pointwise consumers -> one kernel

This is the rule a fused tier starts from; whether a group can be lowered, and whether it pays, is decided later and by others.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import field, replace

from hotfuse.analysis.attention import BOUNDED, PACKED, WHOLE, written
from hotfuse.analysis.convolution import is_convolution, padding_in_front
from hotfuse.analysis.experts import expert_products, has_kernel
from hotfuse.analysis.quantized import byte_products
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.fusion.kinds import ANCHORS, WHOLE_GROUPS, GroupKind
from hotfuse.fusion.memory_reads import from_memory, reads_places
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Graph, Kind, Node, Value, makers, output_values, readers, values_in
from hotfuse.ir.types import ScalarType, TensorType
from hotfuse.ops.movement import RESHAPES
from hotfuse.ops.own.experts import EXPERT_OPS
from hotfuse.ops.own.nibbles import PRODUCT as NIBBLE_PRODUCT
from hotfuse.ops.own.nibbles import nibble_product
from hotfuse.ops.table import Access, lookup, packet

MAX_NODES = 48
"""Most nodes in a group: beyond it registers spill and compile time grows."""

_LINEAR = frozenset({"aten.linear", "aten.mm", "aten.addmm", "aten.matmul"})
_BETWEEN = frozenset({"aten.bmm", "aten.baddbmm"})
_BATCH_NORM = "aten.batch_norm"
_RECURRENT = frozenset({"aten.lstm.input", "aten.gru.input"})
_ZEROS = frozenset({"aten.zeros", "aten.zeros_like", "aten.new_zeros"})
_ROWS = frozenset({Access.POINTWISE, Access.REDUCTION, Access.MOVEMENT})


@dataclass(frozen=True, slots=True)
class Group:
    """Node indexes in graph order, and what kind of kernel they ask for."""

    nodes: tuple[int, ...]
    kind: GroupKind


@dataclass(slots=True)
class _Open:
    """A group while it grows."""

    kind: GroupKind
    nodes: list[int] = field(default_factory=list[int])


def group(graph: Graph, fits: Callable[[Node], bool] = lambda _node: True) -> tuple[Group, ...]:
    """Groups in an order in which they can run; `fits` says whether a node could be generated at all."""
    params = {p.value.name for p in graph.params}
    maker = makers(graph)
    home: list[int] = []
    groups: list[_Open] = []
    needs: list[set[int]] = []  # per group: the groups it reads from
    fed: dict[str, int] = {}  # input of a product -> the group of products that reads it
    bound = _bound(graph, fits)
    begun: dict[object, int] = {}  # what binds nodes together -> their group

    for i, node in enumerate(graph.nodes):
        made_by = [maker[v.name] for v in node.ins if v.name in maker]
        kind = node_kind(node, params) if fits(node) else GroupKind.LIBRARY
        chosen = -1
        if i in bound:
            kind, chosen = bound[i][0], begun.get(bound[i], -1)
            if chosen >= 0 and _cycle(chosen, {home[m] for m in made_by}, needs):
                chosen = -1
        elif kind != GroupKind.LIBRARY:
            joinable = [home[m] for m in reversed(made_by) if _joins(groups[home[m]], kind, node, graph.nodes[m])]
            if (data := from_memory(node)) in maker:
                joinable = [g for g in joinable if g != home[maker[data]]]
            if kind == GroupKind.GEMM_WEIGHT and (sibling := fed.get(_data(node))) is not None:
                joinable.append(sibling)  # linears of one input are one kernel
            for g in joinable:  # the latest input is the likeliest to still be in registers
                if len(groups[g].nodes) < MAX_NODES and not _cycle(g, {home[m] for m in made_by}, needs):
                    chosen = g
                    break
        if chosen < 0:
            chosen = len(groups)
            groups.append(_Open(kind))
            needs.append(set())
        groups[chosen].nodes.append(i)
        if i in bound:
            begun[bound[i]] = chosen
        elif kind == GroupKind.GEMM_WEIGHT:
            fed.setdefault(_data(node), chosen)
        home.append(chosen)
        needs[chosen] |= {home[m] for m in made_by} - {chosen}
    _release_views(graph, groups)
    _absorb_views(graph, groups)
    _absorb_constants(graph, groups, params)
    _absorb_padding(graph, groups)
    return _ordered(graph, [Group(tuple(g.nodes), _final_kind(graph, g)) for g in groups if g.nodes])


def _bound(graph: Graph, fits: Callable[[Node], bool]) -> dict[int, tuple[GroupKind, object]]:
    """Nodes that belong together before anything else is looked at: the kind of their group, and what binds them."""
    bound: dict[int, tuple[GroupKind, object]] = {}
    for w in written(graph):
        if all(fits(graph.nodes[i]) for i in w.nodes):
            bound |= {i: (GroupKind.ATTENTION, w.nodes[-1]) for i in w.nodes}
    for centre, nodes in expert_products(graph).items():
        if all(fits(graph.nodes[i]) for i in nodes):
            bound |= {i: (GroupKind.EXPERTS, ("expert", centre)) for i in nodes}
    for p in byte_products(graph).values():
        alone = is_convolution(graph.nodes[p.node])
        if all(fits(graph.nodes[i]) for i in p.nodes):
            bound |= {i: (GroupKind.CONVOLUTION, p.node) if alone else (GroupKind.GEMM_WEIGHT, p.x.raw.name) for i in p.nodes}
    return bound


def _data(node: Node) -> str:
    """The activation that a product with a constant weight reads."""
    data = node.args[1] if packet(node.op) == "aten.addmm" else node.args[0]
    return data.name if isinstance(data, Value) else ""


def _release_views(graph: Graph, groups: list[_Open]) -> None:
    """A product keeps a reshape of its result only for an epilogue behind it: a last one costs nothing outside."""
    for g in [g for g in groups if g.kind == GroupKind.GEMM_WEIGHT]:
        read = {v.name for i in g.nodes if not _keeps_rows(graph.nodes[i]) for v in graph.nodes[i].ins}
        for i in sorted(g.nodes, reverse=True):
            node = graph.nodes[i]
            if not _keeps_rows(node):
                continue
            if node.outs[0].name in read:
                read |= {v.name for v in node.ins}
            else:
                g.nodes.remove(i)
                groups.append(_Open(GroupKind.ROWS, [i]))


def _absorb_views(graph: Graph, groups: list[_Open]) -> None:
    """Attention takes in the views that only it reads, and those through which alone its result is read; a product of two
    activations takes in those that only it reads."""
    owner = {i: g for g in groups for i in g.nodes}
    maker, reading = makers(graph), readers(graph)
    returned = {v.name for v in output_values(graph)}

    def alone(v: Value) -> int:
        """The only reader of a value, -1 if there are others."""
        found = reading.get(v.name, [])
        return found[0] if len(found) == 1 and v.name not in returned else -1

    def inside(i: int, g: _Open) -> bool:
        """Whether all that a node makes is read in a group, and nowhere else."""
        made = graph.nodes[i].outs
        return not any(v.name in returned for v in made) and all(
            owner[r] is g for v in made for r in reading.get(v.name, [])
        )

    def take(i: int, into: _Open) -> None:
        owner[i].nodes.remove(i)
        into.nodes.append(i)
        owner[i] = into

    for g in [g for g in groups if g.kind in (GroupKind.ATTENTION, GroupKind.GEMM_ACTIVATION)]:
        centre = g.nodes[-1]
        waiting = [maker.get(v.name, -1) for v in _operands(graph, g)]
        while (ready := next((m for m in waiting if m >= 0 and _is_view(graph.nodes[m]) and inside(m, g)), -1)) >= 0:
            take(ready, g)
            waiting = [m for m in waiting if m != ready] + [maker.get(graph.nodes[ready].ins[0].name, -1)]
        last = centre if g.kind == GroupKind.ATTENTION else -1
        while last >= 0 and (after := alone(graph.nodes[last].outs[0])) >= 0 and _is_view(graph.nodes[after]) and (
            len(graph.nodes[after].outs) == 1
        ):
            take(after, g)
            last = after
        g.nodes.sort()


def _operands(graph: Graph, g: _Open) -> tuple[Value, ...]:
    """What a group reads: of an attention, queries, keys, values, mask; offsets of a packed one are read as they lie."""
    made = {v.name for i in g.nodes for v in graph.nodes[i].outs}
    packed = next((graph.nodes[i] for i in g.nodes if packet(graph.nodes[i].op) in (PACKED, BOUNDED)), None)
    if packed is not None:
        return tuple(v for v in packed.args[:3] if isinstance(v, Value))
    return tuple(v for i in g.nodes for v in graph.nodes[i].ins if v.name not in made)


def _absorb_constants(graph: Graph, groups: list[_Open], params: set[str]) -> None:
    """A recurrent layer takes in what only it reads: views of params that are its weights, and zeros to begin with."""
    owner = {i: g for g in groups for i in g.nodes}
    readers: dict[str, set[int]] = {v.name: {-1} for v in output_values(graph)}
    constant = set(params)
    for i, n in enumerate(graph.nodes):
        for v in n.ins:
            readers.setdefault(v.name, set()).add(i)
        moves = n.kind is Kind.OPERATOR and lookup(n.op).access is Access.MOVEMENT
        if moves and n.ins and all(v.name in constant for v in n.ins):
            constant |= {v.name for v in n.outs}
    for g in [g for g in groups if g.kind == GroupKind.RECURRENT]:
        (centre,) = g.nodes
        states = {v.name for v in values_in(graph.nodes[centre].args[1])}
        for i in range(centre - 1, -1, -1):
            node = graph.nodes[i]
            begins = any(v.name in states for v in node.outs)
            prepares = packet(node.op) in _ZEROS if begins else all(v.name in constant for v in node.outs)
            read = set[int]().union(*(readers.get(v.name, set()) for v in node.outs))
            if prepares and read and read <= set(g.nodes):
                owner[i].nodes.remove(i)
                g.nodes.append(i)
        g.nodes.sort()


def _absorb_padding(graph: Graph, groups: list[_Open]) -> None:
    """A convolution takes in the zeros that are put around its input: it reads as if they were there."""
    owner = {i: g for g in groups for i in g.nodes}
    number = makers(graph)
    for g in [g for g in groups if g.kind == GroupKind.CONVOLUTION]:
        conv = next(graph.nodes[i] for i in g.nodes if is_convolution(graph.nodes[i]))
        if (found := padding_in_front(graph, conv)) is not None:
            at = number[found[0].outs[0].name]
            if owner[at] is not g:
                owner[at].nodes.remove(at)
                g.nodes.insert(0, at)


def _is_view(node: Node) -> bool:
    """Whether a node moves one tensor's elements; what puts several together is none."""
    moves = node.kind is Kind.OPERATOR and lookup(node.op).access is Access.MOVEMENT
    return moves and sum(isinstance(v.type, TensorType) for v in node.ins) == 1


def _final_kind(graph: Graph, g: _Open) -> GroupKind:
    """A group that only moves data is left to torch, whose views cost nothing."""
    moves = all(lookup(graph.nodes[i].op).access is Access.MOVEMENT for i in g.nodes)
    return GroupKind.LIBRARY if g.kind == GroupKind.ROWS and moves else g.kind


def node_kind(node: Node, params: Container[str]) -> GroupKind:
    """The kind of kernel that a node begins; `library` where it may be in none."""
    if node.kind is not Kind.OPERATOR or any(isinstance(v.type, ScalarType) for v in node.outs) or not node.outs:
        return GroupKind.LIBRARY
    row = lookup(node.op)
    if packet(node.op) in WHOLE:
        return GroupKind.ATTENTION
    if node.op in _RECURRENT:
        return GroupKind.RECURRENT
    if packet(node.op) in EXPERT_OPS:
        return GroupKind.EXPERTS if has_kernel(node, params) else GroupKind.LIBRARY
    if packet(node.op) == NIBBLE_PRODUCT:
        return GroupKind.NIBBLES if nibble_product(node, params) else GroupKind.LIBRARY
    if packet(node.op) in _LINEAR:
        weight = node.args[2] if packet(node.op) == "aten.addmm" else node.args[1]
        return GroupKind.GEMM_WEIGHT if isinstance(weight, Value) and weight.name in params else GroupKind.GEMM_ACTIVATION
    if packet(node.op) in _BETWEEN:
        return GroupKind.GEMM_ACTIVATION
    if is_convolution(node):
        return GroupKind.CONVOLUTION if isinstance(node.args[1], Value) and node.args[1].name in params else GroupKind.LIBRARY
    return GroupKind.ROWS if row.access in _ROWS or reads_places(node) else GroupKind.LIBRARY


def _shape(node: Node) -> tuple[Dim, ...] | None:
    first = node.outs[0].type if node.outs else None
    return first.shape if isinstance(first, TensorType) else None


def _keeps_rows(node: Node) -> bool:
    """Whether a node only counts rows in another way: its last dim is its input's, the dims before it hold as many."""
    if packet(node.op) not in RESHAPES or not isinstance(node.args[0], Value):
        return False
    before, after = node.args[0].type, node.outs[0].type
    if not isinstance(before, TensorType) or not isinstance(after, TensorType) or before.dtype is not after.dtype:
        return False
    if len(before.shape) < 2 or len(after.shape) < 2 or before.shape[-1] != after.shape[-1]:
        return False
    return expr("*", 1, *before.shape[:-1]) == expr("*", 1, *after.shape[:-1])


def _joins(into: _Open, kind: GroupKind, node: Node, made: Node) -> bool:
    """Whether a node that reads the result of `made` fits the group that `made` is in."""
    if kind in ANCHORS or into.kind in WHOLE_GROUPS:
        return False
    if into.kind == GroupKind.GEMM_WEIGHT:
        return (lookup(node.op).access is Access.POINTWISE and _shape(node) == _shape(made)) or _keeps_rows(node)
    if into.kind == GroupKind.GEMM_ACTIVATION:
        return lookup(node.op).access is Access.POINTWISE and _shape(node) == _shape(made)
    if into.kind == GroupKind.CONVOLUTION:
        fits = lookup(node.op).access is Access.POINTWISE or packet(node.op) == _BATCH_NORM
        return fits and _shape(node) == _shape(made)
    return into.kind == GroupKind.ROWS


def _cycle(g: int, sources: set[int], needs: Sequence[set[int]]) -> bool:
    """Whether reading from `sources` would make group `g` wait for itself."""
    seen: set[int] = set()
    waiting = [s for s in sources if s != g]
    while waiting:
        at = waiting.pop()
        if at == g:
            return True
        if at not in seen:
            seen.add(at)
            waiting.extend(needs[at])
    return False


def _ordered(graph: Graph, groups: list[Group]) -> tuple[Group, ...]:
    """Groups so that each comes after those it reads from, otherwise in graph order."""
    home = {i: g for g, members in enumerate(groups) for i in members.nodes}
    maker = makers(graph)
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
