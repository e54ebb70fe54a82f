"""A way to write a graph node by node without minding names.

    b = GraphBuilder("main")
    x = b.input("x", TensorType(DType.F32, (sym("n"), 64)))
    w = b.param("w", TensorType(DType.F32, (64, 64)), key="fc.weight")
    y = b.add("aten.linear.default", (x, w, None), TensorType(DType.F32, (sym("n"), 64)))
    graph = b.finish(y)
"""

from __future__ import annotations

from hotfuse.ir.dims import Sym
from hotfuse.ir.graph import Arg, Graph, Kind, Loc, Node, Param, Value
from hotfuse.ir.text import implied_kind
from hotfuse.ir.types import Type
from hotfuse.ir.verify import verify


class GraphBuilder:
    """Collects the parts of one graph; every name asked for is made unique."""

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.params: list[Param] = []
        self.nodes: list[Node] = []
        self.guards: list[Sym] = []
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        """The name, with a number behind it when it is taken."""
        name = base = name or "v"
        while name in self._taken:
            number = self._next.get(base, 0) + 1
            self._next[base] = number
            name = f"{base}_{number}"
        self._taken.add(name)
        return name

    def input(self, name: str, type: Type) -> Value:
        """Add an input."""
        self.inputs.append(Value(self.fresh(name), type))
        return self.inputs[-1]

    def param(self, name: str, type: Type, key: str) -> Value:
        """Add a param; one key gives one param, so tied weights are one value."""
        for p in self.params:
            if p.key == key:
                return p.value
        self.params.append(Param(Value(self.fresh(name), type), key))
        return self.params[-1].value

    def guard(self, predicate: Sym) -> None:
        """Add a guard, once."""
        if predicate not in self.guards:
            self.guards.append(predicate)

    def add_many(
        self,
        op: str,
        args: tuple[Arg, ...],
        types: tuple[Type, ...],
        *,
        attrs: dict[str, Arg] | None = None,
        graphs: tuple[Graph, ...] = (),
        kind: Kind | None = None,
        loc: Loc | None = None,
        name: str = "",
    ) -> tuple[Value, ...]:
        """Add a node with any number of outputs."""
        base = name or op.split(".")[1 if "." in op else 0]
        outs = tuple(Value(self.fresh(base), t) for t in types)
        self.nodes.append(
            Node(kind or implied_kind(op), op, args, outs, tuple((attrs or {}).items()), graphs, loc or Loc())
        )
        return outs

    def add(
        self,
        op: str,
        args: tuple[Arg, ...],
        type: Type,
        *,
        attrs: dict[str, Arg] | None = None,
        graphs: tuple[Graph, ...] = (),
        kind: Kind | None = None,
        loc: Loc | None = None,
        name: str = "",
    ) -> Value:
        """Add a node with one output."""
        return self.add_many(op, args, (type,), attrs=attrs, graphs=graphs, kind=kind, loc=loc, name=name)[0]

    def finish(self, *outputs: Arg) -> Graph:
        """The verified graph."""
        return verify(self.draft(*outputs))

    def draft(self, *outputs: Arg) -> Graph:
        """The graph as it stands, for a nested graph that its outer one will verify."""
        return Graph(
            self.name, tuple(self.inputs), tuple(self.params), tuple(self.nodes), outputs, tuple(self.guards)
        )
