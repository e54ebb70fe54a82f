"""Pieces of one graph, cheaply: closed graphs of node sets, and keys that are equal for pieces that look alike.

`ir.subgraph.extract` proves that a set is convex and looks at the whole graph for it. The engine asks for thousands of pieces of
one graph and proves convexity on groups, so what a piece costs here depends on the piece alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hotfuse.analysis.cost import value_bytes
from hotfuse.ir.dims import substitute
from hotfuse.ir.graph import Arg, Graph, Value, makers, output_values, readers
from hotfuse.ir.types import ScalarType, Type, dims_of, with_dims

Key = tuple[object, ...]


class UseIndex:
    """Who makes and who reads each value of a graph."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int]) -> None:
        self.graph, self.sizes = graph, sizes
        self.maker, self.readers = makers(graph), readers(graph)
        self.returned = {v.name for v in output_values(graph)}
        self.params = {p.value.name: p for p in graph.params}
        self._bytes: dict[str, int | None] = {}

    def size(self, value: Value) -> int | None:
        """Bytes of a value; None where they depend on data."""
        if value.name not in self._bytes:
            self._bytes[value.name] = value_bytes(value, self.sizes)
        return self._bytes[value.name]

    def leaving(self, nodes: Sequence[int]) -> list[Value]:
        """Values made by nodes and used by others or returned."""
        inside = set(nodes)
        return [
            v
            for i in sorted(inside)
            for v in self.graph.nodes[i].outs
            if v.name in self.returned or any(r not in inside for r in self.readers.get(v.name, ()))
        ]

    def entering(self, nodes: Sequence[int]) -> list[Value]:
        """Values, other than params, that nodes read and do not make."""
        inside = set(nodes)
        found: dict[str, Value] = {}
        for i in sorted(inside):
            for v in self.graph.nodes[i].ins:
                if v.name not in self.params and self.maker.get(v.name, -1) not in inside:
                    found.setdefault(v.name, v)
        return list(found.values())

    def stored(self, nodes: Sequence[int]) -> int | None:
        """Bytes that nodes leave for others of the graph to read."""
        sizes = [self.size(v) for v in self.leaving(nodes) if v.name not in self.returned]
        return None if None in sizes else sum(s for s in sizes if s is not None)

    def between(self, first: Sequence[int], second: Sequence[int]) -> int | None:
        """Bytes that pass from some nodes to others."""
        read = {v.name for i in second for v in self.graph.nodes[i].ins}
        sizes = [self.size(v) for i in first for v in self.graph.nodes[i].outs if v.name in read]
        return None if None in sizes else sum(s for s in sizes if s is not None)

    def closed(self, nodes: Sequence[int]) -> Graph:
        """Nodes as a graph of their own; the caller answers for their being convex."""
        chosen = sorted(nodes)
        used = {v.name for i in chosen for v in self.graph.nodes[i].ins}
        params = tuple(p for name, p in self.params.items() if name in used)
        inside = tuple(self.graph.nodes[i] for i in chosen)
        return Graph("piece", tuple(self.entering(chosen)), params, inside, tuple(self.leaving(chosen)))

    def key(self, nodes: Sequence[int]) -> Key:
        """Equal for pieces that compute the same from tensors of the same types, whatever their names."""
        return self._key(nodes, lambda t: t)

    def sized_key(self, nodes: Sequence[int]) -> Key:
        """The same at the sizes of the call, whatever symbols they were made of: pieces of different graphs have it in common."""
        return self._key(nodes, lambda t: with_dims(t, tuple(substitute(d, self.sizes) for d in dims_of(t))))

    def _key(self, nodes: Sequence[int], sized: Callable[[Type], Type]) -> Key:
        numbers: dict[str, int] = {}
        leaving = {v.name for v in self.leaving(nodes)}

        def shown(arg: Arg) -> object:
            if isinstance(arg, Value):
                if isinstance(t := sized(arg.type), ScalarType) and isinstance(t.expr, int):
                    return ("int", t.expr)
                known = arg.name in numbers
                number = numbers.setdefault(arg.name, len(numbers))
                return number if known else (number, t, arg.name in self.params)
            if isinstance(arg, tuple):
                return tuple(shown(a) for a in arg)
            return (type(arg).__name__, arg)

        parts: list[object] = []
        for i in sorted(nodes):
            n = self.graph.nodes[i]
            parts.append((n.op, tuple(shown(a) for a in n.args), tuple((k, shown(a)) for k, a in n.attrs), len(n.graphs)))
            for v in n.outs:
                numbers.setdefault(v.name, len(numbers))
                parts.append((sized(v.type), v.name in leaving))
        return tuple(parts)
