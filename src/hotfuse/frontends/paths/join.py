"""Several paths through a model's code become one graph: they share what they have in common, and part where data decide.

    path 1:  c = f(x)   c read true    a = g(x)   return a                c = f(x)
    path 2:  c = f(x)   c read false   b = h(x)   return b        ->      y = control.if(c, [x]) { a = g(x) } { b = h(x) }
                                                                          return y

The same code that reads the same values does the same, so paths agree node by node until a mark says otherwise; where they do not,
there is no such graph, and one path alone is followed. A branch that is the last of several keeps its own check: values that
nobody has seen are answered by the model's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.structure import Spec
from hotfuse.frontends.captured import Captured
from hotfuse.frontends.paths.path_checks import ConditionWriter, checked, lines, read_value
from hotfuse.frontends.ship import TensorInfo
from hotfuse.ir.control_bodies import IF
from hotfuse.ir.dims import Sym
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Param, Value, makers, map_node, map_values, unused_name, values_in
from hotfuse.ir.types import TensorType, Type
from hotfuse.ops.table import packet


def joined(paths: Sequence[tuple[Captured, Spec]]) -> Captured:
    """One capture of all paths; raises CaptureError where they cannot be one graph."""
    first, gives = paths[0]
    text = f"follows {len(paths)} path{'s' * (len(paths) > 1)} through code that reads its data, at"
    notes = (*first.notes, f"{text} {', '.join(dict.fromkeys(at for p, _ in paths for at in lines(p.graph)))[:300]}")
    if len(paths) == 1:
        assumed = bool(lines(first.graph))
        return replace(first, graph=checked(first.graph), paths=1, notes=notes if assumed else first.notes)
    for other, nested in paths[1:]:
        if nested != gives:
            raise _apart("they return other structures")
        if _besides(other) != _besides(first):
            raise _apart("they do different things besides computing")
    constants: dict[str, TensorInfo] = {}
    shared: dict[str, int] = {}
    tracks = [_Track(_sizes_open(_marks_first(_renamed(p, number, constants, shared)))) for number, (p, _) in enumerate(paths)]
    params: dict[str, Param] = {}
    joiner = _Joiner({v.name for t in tracks for v in t.graph.inputs})
    for track in tracks:
        for param in track.graph.params:
            if param.key not in params:  # tracing numbers constants on each path: another one has the same name there
                params[param.key] = replace(param, value=joiner.fresh(param.value))
            track.names[param.value.name] = params[param.key].value
        for mine, theirs in zip(track.graph.inputs, tracks[0].graph.inputs, strict=True):
            track.names[mine.name] = theirs
    nodes, outputs = joiner.part(tracks)
    graph = replace(tracks[0].graph, params=tuple(params.values()), nodes=tuple(nodes), outputs=tuple(outputs),
                    guards=tuple(dict.fromkeys(g for t in tracks for g in t.graph.guards)))  # fmt: skip
    asked = tuple(dict.fromkeys(a for p, _ in paths for a in p.asked))
    return replace(first, graph=checked(graph), shared=shared, constants=constants, paths=len(paths), notes=notes, asked=asked)


@dataclass(slots=True)
class _Track:
    """One path, as far as it has been joined."""

    graph: Graph
    names: dict[str, Arg]
    """Its values as those of the joined graph."""
    at: int = 0

    def __init__(self, graph: Graph) -> None:
        self.graph, self.names, self.at = graph, {}, 0

    def node(self) -> Node | None:
        """The next one, on values of the joined graph; None behind the last."""
        return map_node(self.graph.nodes[self.at], self.names) if self.at < len(self.graph.nodes) else None

    def outputs(self) -> list[Arg]:
        return [map_values(o, self.names) for o in self.graph.outputs]


class _Joiner:
    """Names of a joined graph; each value has one of its own, in nested graphs, too."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken

    def part(self, tracks: Sequence[_Track]) -> tuple[list[Node], list[Arg]]:
        """What tracks have in common, and then the branches that they go on in."""
        nodes: list[Node] = []
        while True:
            found = [t.node() for t in tracks]
            head = found[0]
            if head is None:
                if any(n is not None for n in found):
                    raise _apart("one of them goes on where the other ends")
                outputs = [t.outputs() for t in tracks]
                if any(o != outputs[0] for o in outputs):
                    raise _apart("they return other values without a reason in the data")
                return nodes, outputs[0]
            if any(n is None or not _alike(n, head) for n in found):
                if (value := read_value(head)) is not None and all(_reads_the_same(n, head) for n in found):
                    return self._branch(nodes, tracks, head, [read_value(n) == value for n in found if n is not None])
                raise _apart(f"they differ at {head.op} ({head.loc}) without a reason that is marked")
            outs = tuple(self.fresh(v) for v in head.outs)
            for track, node in zip(tracks, found, strict=True):
                assert node is not None
                track.names.update({mine.name: v for mine, v in zip(node.outs, outs, strict=True)})
                track.at += 1
            nodes.append(replace(head, outs=outs))

    def _branch(
        self, nodes: list[Node], tracks: Sequence[_Track], mark: Node, same: Sequence[bool]
    ) -> tuple[list[Node], list[Arg]]:  # fmt: skip
        """Tracks that read what the first did take one branch, the others the other one, where they may part again."""
        writer = ConditionWriter(self.taken)
        condition = writer.same(mark)
        yes = [t for t, s in zip(tracks, same, strict=True) if s]
        no = [t for t, s in zip(tracks, same, strict=True) if not s]
        for t in yes:
            t.at += 1  # the condition says what the mark did
        sides = [self.part(yes), self.part(no)]
        outputs = [list(o) for _, o in sides]
        made = [i for i in range(len(outputs[0])) if outputs[0][i] != outputs[1][i] or isinstance(outputs[0][i], Value)]
        outs: list[Value] = []
        for i in made:
            a, b = outputs[0][i], outputs[1][i]
            if not (isinstance(a, Value) and isinstance(b, Value) and (common := self._common(a.type, b.type)) is not None):
                raise _apart("their results have other types")
            outs.append(self.fresh(Value(a.name, common)))
        used = [[*(v for n in body for v in n.ins), *(v for i in made for v in values_in(outputs[k][i]))]
                for k, (body, _) in enumerate(sides)]  # fmt: skip
        inner = {v.name for body, _ in sides for n in body for v in n.outs}
        captures = tuple({v.name: v for side in used for v in side if v.name not in inner}.values())
        graphs = tuple(
            checked(Graph(name, captures, (), tuple(body), tuple(outputs[k][i] for i in made)), captures)
            for k, (name, (body, _)) in enumerate(zip(("then", "else"), sides, strict=True))
        )
        nodes += writer.nodes
        nodes.append(Node(Kind.CONTROL, IF, (condition, captures), tuple(outs), (), graphs, mark.loc))
        results = list(outputs[0])
        for i, v in zip(made, outs, strict=True):
            results[i] = v
        return nodes, results

    def _common(self, a: Type, b: Type) -> Type | None:
        """The type of a value that is one or the other: sizes that differ are known when it is there. None where there is none."""
        if a == b or not (isinstance(a, TensorType) and isinstance(b, TensorType)):
            return a if a == b else None
        if (a.dtype, a.device, a.layout, len(a.shape)) != (b.dtype, b.device, b.layout, len(b.shape)):
            return None
        shape = [x if x == y else Sym("sym", (unused_name("w", self.taken),)) for x, y in zip(a.shape, b.shape, strict=True)]
        return replace(a, shape=tuple(shape))

    def fresh(self, v: Value) -> Value:
        """A value under its name, or a further one where another value has that."""
        name, number = v.name, 1
        while name in self.taken:
            name, number = f"{v.name}.{number}", number + 1
        self.taken.add(name)
        return Value(name, v.type)


def _marks_first(graph: Graph) -> Graph:
    """The same graph with each mark as early as what it reads allows: what else code computes before it asks may be for one path
    alone, and belongs there."""
    made, order, done = makers(graph), list[int](), set[int]()
    for mark in (i for i, n in enumerate(graph.nodes) if not n.outs):
        needed, at = set[int](), [mark]
        while at:
            if (i := at.pop()) not in done and i not in needed:
                needed.add(i)
                at += [made[v.name] for v in graph.nodes[i].ins if v.name in made]
        order += sorted(needed)
        done |= needed
    order += [i for i in range(len(graph.nodes)) if i not in done]
    return replace(graph, nodes=tuple(graph.nodes[i] for i in order))


def _sizes_open(graph: Graph) -> Graph:
    """The same graph whose sizes that data decide are symbols where they arise: behind a mark torch takes such a size for the
    number that it was, and another path has another one there."""
    opened: dict[str, Arg] = {}
    nodes: list[Node] = []
    for number, node in enumerate(graph.nodes):
        node = map_node(node, opened)
        if packet(node.op) in _DATA_SIZED:
            outs = tuple(_open(v, f"w{number}") for v in node.outs)
            opened.update({v.name: v for v in outs})
            node = replace(node, outs=outs)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(map_values(o, opened) for o in graph.outputs))


def _open(v: Value, symbol: str) -> Value:
    if not isinstance(v.type, TensorType) or not v.type.shape or not isinstance(v.type.shape[0], int):
        return v
    return Value(v.name, replace(v.type, shape=(Sym("sym", (symbol,)), *v.type.shape[1:])))


_DATA_SIZED = frozenset(f"aten.{name}" for name in ("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"))
"""Operators whose results have as many rows as data decide."""


def _alike(a: Node, b: Node) -> bool:
    """Whether two nodes do the same, whatever their results are called."""
    return (
        (a.kind, a.op, a.args, a.attrs, a.graphs) == (b.kind, b.op, b.args, b.attrs, b.graphs)
        and [v.type for v in a.outs] == [v.type for v in b.outs]
    )  # fmt: skip


def _reads_the_same(node: Node | None, mark: Node) -> bool:
    return node is not None and read_value(node) is not None and node.args[0] == mark.args[0]


def _besides(p: Captured) -> tuple[object, ...]:
    """What a call does besides computing."""
    return p.written, p.returned, p.draws, p.warned, p.logged, p.asks_grad_mode


def _renamed(p: Captured, number: int, constants: dict[str, TensorInfo], shared: dict[str, int]) -> Graph:
    """A path's graph whose constants have names of their own: tracing gives them numbers, another one on each path."""
    keys = {k: k for k in p.shared}
    for key, info in p.constants.items():
        same = constants.get(key) == info and key not in p.shared
        keys[key] = key if same or (key not in constants and key not in shared) else f"{key}@{number}"
        constants.setdefault(keys[key], info)
    shared.update(p.shared)
    return replace(p.graph, params=tuple(replace(q, key=keys[q.key]) for q in p.graph.params))


def _apart(because: str) -> CaptureError:
    return CaptureError("paths through the model's code cannot be one graph", because=because, why=Why.OTHER_PATH,
                        hint="calls that take another path are answered by the model's own code")  # fmt: skip
