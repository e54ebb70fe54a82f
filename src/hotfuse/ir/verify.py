"""What makes a graph well formed. Passes promise these, and `verify` holds them to it.

 1. Names are not empty: of graphs, values, ops, attributes and param keys.
 2. A value has one producer: no two inputs, params or node outputs of a graph share a name.
 3. A value is defined before it is used, by a node or by the outputs.
 4. A value has the same type where it is used as where it is defined.
 5. Param keys are unique in a graph.
 6. An op is named `namespace.name`, with any further parts behind more dots.
 7. A node's arguments are plain data: values, numbers, strings, None, dtypes, tokens and tuples of these.
 8. A node's attribute names are unique.
 9. A dimension is in the normal form that `dims.expr` builds, and a number among them is not negative.
10. A layout's order is a permutation of the tensor's dimensions.
11. A symbol in a type is bound: it can be solved for from an input's or param's type, or from the type of the first
    node output that mentions it (a size that depends on data). A nested graph also sees the symbols around it.
12. Guards are predicates over the symbols that inputs and params bind.
13. Exactly the ops named `control.…` are control nodes, and only these have nested graphs.
14. A transfer node reads one value and makes one.
15. Nested graphs are closed: they have no params and no guards, and nest at most 64 deep.
16. `control.if(cond, [captures])` has two graphs; each takes the captures and gives the node's outputs.
17. `control.loop(trip, cond, [carried], [captures])` has one graph; it takes (iteration, cond, carried, captures) and
    gives (cond, carried, one element of each scan output); the node gives (carried, scan outputs).
18. `control.scan([states], [scanned], [captures])` has one graph; it takes (states, a slice of each scanned, captures)
    and gives (states, one element of each scan output); the node gives the same number.
19. `control.map([sequences], [captures])` has one graph; it takes (an element of each sequence, captures) and gives an
    element of each of the node's outputs.
20. What passes into or out of a nested graph keeps its dtype, where both sides are tensors.
21. In the body of a loop or scan, a number that changes (the iteration, what is carried) is typed without its value.

Symbols are facts about sizes, shared by a graph and the graphs nested in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NoReturn

from hotfuse.base.errors import InternalError, ModelError
from hotfuse.ir.dims import MAX_DEPTH, Dim, Sym, normal, solvable, symbols
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Token, Value, sources, values_in
from hotfuse.ir.text import show_node, show_type, show_value
from hotfuse.ir.types import DType, OptionalType, ScalarType, SequenceType, TensorType, Type, dims_of

_OP = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[^\s.()]+)+")
_PREDICATES = {"==", "!=", "<", "<=", "and", "or", "not"}


def verify(graph: Graph, told: Iterable[str] = ()) -> Graph:
    """The graph itself, when it is well formed; otherwise an InternalError that shows the faulty place.

    `told` are symbols that are known around the graph: a call's sizes to its groups, those of a graph to what is nested in it.
    """
    _GraphVerifier(graph, f"graph {graph.name!r}", 0).run(set(told))
    return graph


def invariants() -> dict[int, str]:
    """The numbered promises above, for messages and tests."""
    found = re.findall(r"^ ?(\d+)\. (.*(?:\n    \S.*)*)", __doc__ or "", re.MULTILINE)
    return {int(number): " ".join(text.split()) for number, text in found}


class _GraphVerifier:
    """Checks one graph; `at` is the node being looked at, None for the graph's head."""

    def __init__(self, graph: Graph, path: str, depth: int) -> None:
        self.graph, self.path, self.depth = graph, path, depth
        self.at: int | None = None
        self.defined: dict[str, Value] = {}
        self.checked: set[Type] = set()
        self.bound: set[str] = set()

    def fail(self, invariant: int, because: str) -> NoReturn:
        where = self.path
        if self.at is not None:
            nodes = self.graph.nodes
            where += f", node {self.at + 1} of {len(nodes)}" if self.at < len(nodes) else ", outputs"
            where += "".join(f" at {n.loc}" for n in nodes[self.at:self.at + 1] if str(n.loc))
            for i in range(max(self.at - 2, 0), min(self.at + 3, len(nodes))):
                where += f"\n    {'->' if i == self.at else '  '} {_head(nodes[i])}"
            if self.at >= len(nodes):
                where += f"\n    -> return {self.graph.outputs!r}"
        raise InternalError(
            f"the graph breaks invariant {invariant}: {invariants().get(invariant, '')}", where=where, because=because
        )

    def run(self, outer: set[str]) -> None:
        graph = self.graph
        self.bound = set(outer)
        if not graph.name:
            self.fail(1, "the graph has no name")
        for value in sources(graph):
            self.define(value)
        keys: set[str] = set()
        for param in graph.params:
            if not param.key:
                self.fail(1, f"param {show_value(param.value)} has an empty key")
            if param.key in keys:
                self.fail(5, f"two params have the key {param.key!r}")
            keys.add(param.key)
        self.bind(tuple(v.type for v in sources(graph)))
        self.guards(outer)
        for self.at, node in enumerate(graph.nodes):
            self.node(node)
        self.at = len(graph.nodes)
        for out in graph.outputs:
            self.plain(out, 0)
            for value in values_in(out):
                self.use(value)

    def guards(self, outer: set[str]) -> None:
        guards = self.graph.guards
        if self.depth and (guards or self.graph.params):
            self.fail(15, "a nested graph has params or guards of its own")
        for guard in guards:
            if not isinstance(guard, Sym) or guard.op not in _PREDICATES:  # pyright: ignore[reportUnnecessaryIsInstance]
                self.fail(12, f"{guard} is not a predicate")
            self.normal(guard)
            if free := symbols(guard) - self.bound - outer:
                self.fail(12, f"guard {guard} mentions {', '.join(sorted(free))}, which no input binds")

    # -- values and types

    def define(self, value: Value) -> None:
        if not value.name:
            self.fail(1, "a value has no name")
        if value.name in self.defined:
            self.fail(2, f"{show_value(value)} is defined a second time")
        self.defined[value.name] = value
        if value.type not in self.checked:
            self.type(value.type)
            self.checked.add(value.type)

    def use(self, value: Value) -> None:
        defined = self.defined.get(value.name)
        if defined is None:
            self.fail(3, f"%{value.name} is not defined here")
        if defined is not value and defined.type != value.type:
            self.fail(4, f"%{value.name} is used as {show_type(value.type)}, defined as {show_type(defined.type)}")

    def type(self, t: Type) -> None:
        for dim in dims_of(t):
            self.normal(dim)
            if isinstance(dim, int) and dim < 0 and isinstance(t, TensorType):
                self.fail(9, f"{show_type(t)} has a negative dimension")
        while isinstance(t, SequenceType | OptionalType):
            t = t.elem
        if (
            isinstance(t, TensorType)
            and t.layout.order is not None
            and sorted(t.layout.order) != list(range(len(t.shape)))
        ):
            self.fail(10, f"{show_type(t)} has {len(t.shape)} dimensions")

    def normal(self, dim: Dim) -> None:
        if isinstance(dim, int):
            return
        try:
            wanted = normal(dim)
        except ModelError as e:
            self.fail(9, e.what)
        if wanted != dim:
            self.fail(9, f"{dim} should be {wanted}")

    def bind(self, types: Sequence[Type]) -> None:
        """Solve for as many new symbols as can be; what then is left is bound by nothing."""
        todo = [d for t in types for d in dims_of(t) if not isinstance(d, int) and symbols(d) - self.bound]
        while todo:
            found = {name for d in todo if (name := solvable(d, self.bound))}
            if not found:
                self.fail(11, f"nothing tells {', '.join(sorted(symbols(todo[0]) - self.bound))} from {todo[0]}")
            self.bound |= found
            todo = [d for d in todo if symbols(d) - self.bound]

    # -- nodes

    def node(self, node: Node) -> None:
        if not node.op:
            self.fail(1, "the node has no op")
        if not _OP.fullmatch(node.op):
            self.fail(6, f"op {node.op!r}")
        for arg in node.args:
            self.plain(arg, 0)
        names = [name for name, _ in node.attrs]
        for name, arg in node.attrs:
            if not name:
                self.fail(1, "an attribute has no name")
            self.plain(arg, 0)
        if len(set(names)) != len(names):
            self.fail(8, f"attributes {', '.join(names)}")
        for value in (*(v for a in node.args for v in values_in(a)), *(v for _, a in node.attrs for v in values_in(a))):
            self.use(value)
        for value in node.outs:
            self.define(value)
        self.bind(tuple(v.type for v in node.outs))
        control = node.kind is Kind.CONTROL
        if control != node.op.startswith("control.") or (node.graphs and not control):
            self.fail(13, f"{node.op} is a node of kind {node.kind.value} with {len(node.graphs)} nested graphs")
        if node.kind is Kind.TRANSFER and (len(node.ins), len(node.outs)) != (1, 1):
            self.fail(14, f"it reads {len(node.ins)} and makes {len(node.outs)}")
        if control:
            self.control(node)

    def plain(self, arg: object, depth: int) -> None:
        if isinstance(arg, tuple):
            if depth > MAX_DEPTH:
                self.fail(7, "tuples nested too deeply")
            for a in arg:
                self.plain(a, depth + 1)
        elif not isinstance(arg, Value | bool | int | float | complex | str | DType | Token | None):
            self.fail(7, f"a {type(arg).__name__} is an argument")

    def control(self, node: Node) -> None:
        if self.depth >= MAX_DEPTH:
            self.fail(15, f"nested more than {MAX_DEPTH} deep")
        match node.op:
            case "control.if":
                self.branch(node)
            case "control.loop":
                self.loop(node)
            case "control.scan":
                self.scan(node)
            case "control.map":
                self.map(node)
            case _:
                self.fail(13, f"there is no control node {node.op}")
        for i, graph in enumerate(node.graphs):
            label = f"{self.path}, node {(self.at or 0) + 1}, nested graph {i + 1} {graph.name!r}"
            _GraphVerifier(graph, label, self.depth + 1).run(self.bound)

    def branch(self, node: Node) -> None:
        if len(node.args) != 2 or len(node.graphs) != 2 or not isinstance(node.args[0], Value | bool):
            self.fail(16, f"{len(node.args)} arguments and {len(node.graphs)} graphs")
        captures = self.group(16, node.args[1])
        for graph in node.graphs:
            self.arity(16, graph, len(captures), len(node.outs))
            self.agree(zip(captures, graph.inputs, strict=True))
            self.agree(zip(graph.outputs, node.outs, strict=True))

    def loop(self, node: Node) -> None:
        if len(node.args) != 4 or len(node.graphs) != 1:
            self.fail(17, f"{len(node.args)} arguments and {len(node.graphs)} graphs")
        carried, captures = self.group(17, node.args[2]), self.group(17, node.args[3])
        for arg in node.args[:2]:
            if isinstance(arg, str | tuple | Token | float | complex) and not isinstance(arg, Value):
                self.fail(17, f"trip count or condition is {arg!r}")
        body = node.graphs[0]
        self.arity(17, body, 2 + len(carried) + len(captures), len(node.outs) + 1)
        if len(node.outs) < len(carried):
            self.fail(17, f"{len(carried)} values are carried, {len(node.outs)} come out")
        self.changing((body.inputs[0], *body.inputs[2:2 + len(carried)]))
        self.agree(zip((*carried, *captures), body.inputs[2:], strict=True))
        self.agree(zip(body.outputs[1:], node.outs, strict=True))

    def scan(self, node: Node) -> None:
        if len(node.args) != 3 or len(node.graphs) != 1:
            self.fail(18, f"{len(node.args)} arguments and {len(node.graphs)} graphs")
        states, scanned, captures = (self.group(18, a) for a in node.args)
        body = node.graphs[0]
        self.arity(18, body, len(states) + len(scanned) + len(captures), len(node.outs))
        if len(node.outs) < len(states):
            self.fail(18, f"{len(states)} states, {len(node.outs)} outputs")
        self.changing(body.inputs[:len(states)])
        self.agree(zip((*states, *scanned, *captures), body.inputs, strict=True))
        self.agree(zip(body.outputs, node.outs, strict=True))

    def map(self, node: Node) -> None:
        if len(node.args) != 2 or len(node.graphs) != 1:
            self.fail(19, f"{len(node.args)} arguments and {len(node.graphs)} graphs")
        sequences, captures = (self.group(19, a) for a in node.args)
        body = node.graphs[0]
        self.arity(19, body, len(sequences) + len(captures), len(node.outs))
        self.agree(zip(captures, body.inputs[len(sequences):], strict=True))

    def group(self, invariant: int, arg: Arg) -> tuple[Arg, ...]:
        if not isinstance(arg, tuple):
            self.fail(invariant, f"a tuple of values is expected, not {arg!r}")
        return arg

    def arity(self, invariant: int, graph: Graph, takes: int, gives: int) -> None:
        if (len(graph.inputs), len(graph.outputs)) != (takes, gives):
            found = f"takes {len(graph.inputs)} and gives {len(graph.outputs)}"
            self.fail(invariant, f"graph {graph.name!r} {found}; expected {takes} and {gives}")

    def changing(self, values: Sequence[Value]) -> None:
        for v in values:
            if isinstance(v.type, ScalarType) and v.type.expr is not None:
                self.fail(21, f"{show_value(v)} is another number in the next iteration")

    def agree(self, pairs: Iterable[tuple[Arg, Arg]]) -> None:
        for one, other in pairs:
            if not (isinstance(one, Value) and isinstance(other, Value)):
                continue
            a, b = one.type, other.type
            if isinstance(a, TensorType) and isinstance(b, TensorType) and a.dtype != b.dtype:
                self.fail(20, f"%{one.name} is {show_type(a)}, %{other.name} is {show_type(b)}")


def _head(node: Node) -> str:
    """The node's first line; a broken node may not print, and the message must not fail over that."""
    try:
        return next(show_node(node))
    except (InternalError, AttributeError, TypeError):
        return repr(node)
