"""A hash that is equal for equal graphs, whatever their parts are called.

`canonical` gives a graph's one representative: values, symbols, params and graphs under numbered names, nodes and
params in an order told by structure alone, no locations. The hash is SHA-256 of that representative's text, so it is
the same in every process and on every machine, and only graphs with the same representative share it.

Nodes are ordered by colours, as in colour refinement: a node's colour first says what it computes from (forward),
then also how its results are used (backward), then what it computes from in those terms (forward again). Ready nodes
are taken by (colour, numbers already given to what they read), so nodes that still tie are interchangeable.

Inputs and outputs keep their order: it is how the graph is called. Guards are a set. Params are told apart by use.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Mapping
from dataclasses import replace

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir import dims
from hotfuse.ir.graph import Arg, Graph, Loc, Node, Param, Value, map_values, output_values, sources, values_in
from hotfuse.ir.text import show, show_arg, show_type
from hotfuse.ir.types import Type, dims_of, with_dims


@dataclass(frozen=True, slots=True)
class Canonical:
    """A graph's representative, and the way back to the graph's own parts."""

    graph: Graph
    nodes: tuple[int, ...]
    """For each node of the representative, its index in the graph."""
    keys: tuple[str, ...]
    """For each param of the representative, its key in the graph."""
    symbols: Mapping[str, str]
    """The graph's symbols and their canonical names."""


def structural_hash(graph: Graph) -> str:
    """64 hex digits, equal exactly for graphs with the same representative."""
    return _digest(show(canonical(graph).graph))


def canonical(graph: Graph) -> Canonical:
    """The graph's one representative."""
    return _CanonicalNames({}).graph(graph)


def _digest(*parts: str) -> str:
    h = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        h.update(len(data).to_bytes(8, "big"))
        h.update(data)
    return h.hexdigest()


def _shown(arg: Arg, value: Callable[[Value], str]) -> str:
    """An argument's text with values named by `value`."""
    if isinstance(arg, Value):
        return value(arg)
    if isinstance(arg, tuple):
        return "[" + ",".join(_shown(a, value) for a in arg) + "]"
    return show_arg(arg)


def _type(t: Type, names: Callable[[str], str]) -> Type:
    ds = dims_of(t)
    if all(isinstance(d, int) for d in ds):
        return t
    return with_dims(t, tuple(dims.rename(d, {s: names(s) for s in _symbols(d)}) for d in ds))


def _symbols(d: dims.Dim) -> list[str]:
    """Symbols in order of appearance, which unlike a set's order is the same everywhere."""
    if isinstance(d, int):
        return []
    if d.op == "sym":
        return [str(d.args[0])]
    return [s for a in dims.dims_in(d) for s in _symbols(a)]


def _number(types: tuple[Type, ...], known: dict[str, str]) -> None:
    """Number the symbols of some types in the order they can be solved for.

    Mere order of appearance will not do: the operands of a sum are sorted by their names.
    """
    todo = [d for t in types for d in dims_of(t) if not isinstance(d, int)]
    before = -1
    while before != len(known):
        before = len(known)
        for d in todo:
            if name := dims.solvable(d, known.keys()):
                known[name] = f"s{len(known)}"


def _number_rest(types: tuple[Type, ...], known: dict[str, str]) -> None:
    """Number the symbols that cannot be solved for by where they stand, which says nothing of their names."""
    todo = [d for t in types for d in dims_of(t) if not isinstance(d, int)]
    marks: dict[str, list[str]] = {}
    for i, d in enumerate(todo):
        for s in dims.symbols(d) - known.keys():
            marks.setdefault(s, []).append(f"{i:06d} {_marked(d, s, known)}")
    for s in sorted(marks, key=lambda s: marks[s]):
        known[s] = f"s{len(known)}"


_COMMUTES = frozenset({"+", "*", "max", "min", "and", "or", "==", "!="})


def _marked(d: dims.Dim, name: str, known: dict[str, str]) -> str:
    """An expression with one symbol pointed at, and those that have no number yet all alike."""
    if isinstance(d, int):
        return str(d)
    if d.op == "sym":
        symbol = str(d.args[0])
        return "@" if symbol == name else known.get(symbol, "?")
    parts = [_marked(a, name, known) for a in dims.dims_in(d)]
    return f"{d.op}({', '.join(sorted(parts) if d.op in _COMMUTES else parts)})"


class _CanonicalNames:
    """Gives canonical names; nested graphs share the symbols of the graph around them."""

    def __init__(self, known: dict[str, str]) -> None:
        self.symbols = known
        self.orders: dict[int, tuple[int, ...]] = {}
        self.hashes: dict[int, str] = {}

    def graph(self, graph: Graph) -> Canonical:
        values: dict[str, Arg] = {}
        order = self.order(graph)
        _number(tuple(v.type for v in graph.inputs), self.symbols)
        made = tuple(v.type for i in order for v in graph.nodes[i].outs)
        _number(made, self.symbols)
        _number_rest((*(v.type for v in graph.inputs), *made), self.symbols)

        def define(v: Value) -> Value:
            new = Value(f"v{len(values)}", _type(v.type, self.symbol))
            values[v.name] = new
            return new

        inputs = tuple(define(v) for v in graph.inputs)
        waiting = {p.value.name: p for p in graph.params}
        params: list[Param] = []
        keys: list[str] = []

        def take_params(names: list[str]) -> None:
            for name in names:
                if name in waiting:
                    p = waiting.pop(name)
                    params.append(Param(define(p.value), f"p{len(params)}"))
                    keys.append(p.key)

        nodes: list[Node] = []
        for i in order:
            node = graph.nodes[i]
            take_params([v.name for v in node.ins])
            args = tuple(map_values(a, values) for a in node.args)
            attrs = tuple((n, map_values(a, values)) for n, a in node.attrs)
            outs = tuple(define(v) for v in node.outs)
            graphs = tuple(replace(self.graph(g).graph, name=f"g{k}") for k, g in enumerate(node.graphs))
            nodes.append(Node(node.kind, node.op, args, outs, attrs, graphs, Loc()))
        take_params([v.name for v in output_values(graph)])
        types = {k: _type(p.value.type, lambda s: self.symbols.get(s, "_")) for k, p in waiting.items()}
        take_params(sorted(types, key=lambda k: show_type(types[k])))
        outputs = tuple(map_values(a, values) for a in graph.outputs)
        guards = sorted((dims.rename(g, {s: self.symbol(s) for s in _symbols(g)}) for g in graph.guards), key=str)
        canon = Graph(
            "g", inputs, tuple(params), tuple(nodes), outputs, tuple(g for g in guards if isinstance(g, dims.Sym))
        )
        return Canonical(canon, order, tuple(keys), dict(self.symbols))

    def symbol(self, name: str) -> str:
        return self.symbols.setdefault(name, f"s{len(self.symbols)}")

    def hash(self, graph: Graph) -> str:
        """A nested graph's own hash, worked out once however often it is asked for."""
        if id(graph) not in self.hashes:
            namer = _CanonicalNames({})
            namer.orders, namer.hashes = self.orders, self.hashes
            self.hashes[id(graph)] = _digest(show(namer.graph(graph).graph))
        return self.hashes[id(graph)]

    def order(self, graph: Graph) -> tuple[int, ...]:
        """Node indexes in canonical topological order."""
        if id(graph) in self.orders:
            return self.orders[id(graph)]
        colors = _colors(graph, [[self.hash(g) for g in n.graphs] for n in graph.nodes])
        producer = {v.name: i for i, n in enumerate(graph.nodes) for v in n.outs}
        users: list[list[int]] = [[] for _ in graph.nodes]
        missing = [0] * len(graph.nodes)
        for i, node in enumerate(graph.nodes):
            for p in {producer[v.name] for v in node.ins if v.name in producer}:
                users[p].append(i)
                missing[i] += 1
        numbers = {v.name: i for i, v in enumerate(graph.inputs)}
        ready: list[tuple[str, list[int], int]] = []

        def push(i: int) -> None:
            # A param has no number before its first use; all such are alike here and told apart by the colour.
            heapq.heappush(ready, (colors[i], [numbers.get(v.name, -1) for v in graph.nodes[i].ins], i))

        for i, count in enumerate(missing):
            if not count:
                push(i)
        order: list[int] = []
        while ready:
            i = heapq.heappop(ready)[2]
            order.append(i)
            for v in (*graph.nodes[i].ins, *graph.nodes[i].outs):
                numbers.setdefault(v.name, len(numbers))
            for u in users[i]:
                missing[u] -= 1
                if not missing[u]:
                    push(u)
        self.orders[id(graph)] = tuple(order)
        return self.orders[id(graph)]


def _colors(graph: Graph, nested: list[list[str]]) -> list[str]:
    """One colour per node: what it computes and how that is used, in terms of structure only."""
    known: dict[str, str] = {}
    _number(tuple(v.type for v in graph.inputs), known)

    def type_of(v: Value) -> str:
        return show_type(_type(v.type, lambda s: known.get(s, "_")))

    own = [
        _digest(n.kind.value, n.op, *hashes, *(type_of(v) for v in n.outs))
        for n, hashes in zip(graph.nodes, nested, strict=True)
    ]
    values = {v.name: _digest("param", type_of(v)) for v in sources(graph)}
    values.update((v.name, _digest("input", str(i), type_of(v))) for i, v in enumerate(graph.inputs))
    nodes = _forward(graph, own, values)
    uses = _backward(graph, nodes)
    values = {v.name: _digest(values[v.name], uses[v.name]) for v in sources(graph)}
    own = [_digest(color, *(uses[v.name] for v in n.outs)) for n, color in zip(graph.nodes, nodes, strict=True)]
    return _forward(graph, own, values)


def _forward(graph: Graph, own: list[str], values: dict[str, str]) -> list[str]:
    """A node's colour from its own and those of what it reads, in order; fills in the values' colours."""
    nodes: list[str] = []
    for node, color in zip(graph.nodes, own, strict=True):
        args = [_shown(a, lambda v: values[v.name]) for a in node.args]
        attrs = [f"{n}={_shown(a, lambda v: values[v.name])}" for n, a in node.attrs]
        nodes.append(_digest(color, *args, "|", *attrs))
        for k, v in enumerate(node.outs):
            values[v.name] = _digest(nodes[-1], str(k))
    return nodes


def _backward(graph: Graph, nodes: list[str]) -> dict[str, str]:
    """For each value, a colour of all its uses: which nodes read it, at which places, and what becomes of that."""
    places: dict[str, list[str]] = {v.name: [] for v in sources(graph)}
    places.update((v.name, []) for n in graph.nodes for v in n.outs)
    for i, v in enumerate(output_values(graph)):
        places[v.name].append(f"out{i}")
    uses: dict[str, str] = {}
    for node, color in zip(reversed(graph.nodes), reversed(nodes), strict=True):
        for v in node.outs:
            uses[v.name] = _digest(*sorted(places[v.name]))
        mine = _digest(color, *(uses[v.name] for v in node.outs))
        read = [*node.args, *(a for _, a in node.attrs)]
        for i, v in enumerate(v for a in read for v in values_in(a)):
            places[v.name].append(f"{mine}.{i}")
    for v in sources(graph):
        uses[v.name] = _digest(*sorted(places[v.name]))
    return uses
