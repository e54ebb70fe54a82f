"""Tensors that a program fills piece by piece are put together once.

    out = zeros(B, T, C)                              o0 = zeros(B, T, C)
    for t in range(T):                     is         o1 = select_scatter(o0, h0, 1, 0)
        h = step(x[:, t], h)             captured     o2 = select_scatter(o1, h1, 1, 1)          ->    stack((h0, h1, …), 1)
        out[:, t] = h                       as        …

A graph has no tensor that is written in place, so each step copies the whole of it: T steps move T² pieces. Two rules undo
that, for places and sizes that are numbers:

- what reads a part reads the piece that lies there, or the tensor as it was before pieces that lie elsewhere;
- a row of pieces along one dim, of which nobody reads a stage in between, is a `stack` or a `cat` of what is left of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hotfuse.analysis.inferred_types import lies_as_before, possible_sizes, relaid
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_node, output_values, readers, sources, unused_name
from hotfuse.ir.rewrite import Context
from hotfuse.ir.types import DType, TensorType
from hotfuse.ir.verify import verify
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.simplify.facts import escapes, mutates

MIN_PIECES = 2
"""Pieces of a row: one is a copy either way."""
_PICK, _PART, _COPY = "aten.select", "aten.slice", "aten.copy"
_SCATTERS = {"aten.select_scatter": _PICK, "aten.slice_scatter": _PART}


@dataclass(frozen=True, slots=True)
class _Part:
    """Places of one dim of a tensor, all of the others; `single` where the dim is dropped."""

    of: Value
    dim: int
    start: int
    stop: int
    single: bool


def filled_at_once(graph: Graph) -> tuple[Graph, int]:
    """The graph with tensors put together once, and how many; as it is where there is none."""
    if not any(packet(n.op) in _SCATTERS for n in graph.nodes):
        return graph, 0
    if any(n.kind is Kind.CONTROL for n in graph.nodes) or mutates(graph):
        return graph, 0
    sizes = possible_sizes(graph)
    if sizes is None:
        return graph, 0
    read = _PieceReader(graph)
    put = _PieceWriter(read.graph, read.new)
    if not put.filled:
        return graph, 0
    try:
        made = verify(relaid(put.graph, put.new, sizes))
    except InternalError:  # a piece whose sizes do not fit: torch has its own word for that
        return graph, 0
    return (made, len(put.filled)) if lies_as_before(made, graph, put.filled) else (graph, 0)


@dataclass(frozen=True, slots=True)
class _Scatter:
    """A node that gives a tensor with a piece in the place of one of its parts."""

    node: Node
    part: _Part
    piece: Value

    @property
    def made(self) -> Value:
        """The tensor with the piece."""
        return self.node.outs[0]

    @property
    def fits(self) -> bool:
        """Whether the piece has the sizes of its place and the type of the tensor, which torch asks of it."""
        shape, dim = _shape(self.part.of), self.part.dim
        middle = () if self.part.single else (self.part.stop - self.part.start,)
        return _kind(self.piece) == _kind(self.made) and _shape(self.piece) == (*shape[:dim], *middle, *shape[dim + 1:])


class _PieceReader:
    """What reads a part of a filled tensor reads the piece that lies there."""

    def __init__(self, graph: Graph) -> None:
        self.new: set[str] = set()
        self._context = Context(graph)
        self._read, self._all = readers(graph), graph.nodes
        self._scatters: dict[str, _Scatter] = {}
        """By what they give."""
        now: dict[str, Arg] = {}
        nodes: list[Node] = []
        for node in graph.nodes:
            changed = map_node(node, now)
            found = self._instead(changed)
            if isinstance(found, Value):
                now[node.outs[0].name] = found
                continue
            if found is not None:
                self.new.add(node.outs[0].name)
            nodes.append(found or changed)
            if (scatter := _scatter(nodes[-1])) is not None:
                self._scatters[scatter.made.name] = scatter
        self.graph = _without_unread(replace(graph, nodes=tuple(nodes)))

    def _instead(self, node: Node) -> Value | Node | None:
        """A value to read instead of the node's, the node on another tensor, or None."""
        if packet(node.op) == _COPY:
            onto, piece = argument(node, "self"), argument(node, "src")
            if not isinstance(onto, Value) or not isinstance(piece, Value) or _shape(onto) != _shape(piece):
                return None
            return piece if _kind(node.outs[0]) == _kind(piece) and self._put_alone(node.outs[0]) else None
        part = _part(node)
        if part is None or packet(node.op) in _SCATTERS or part.of.name not in self._scatters:
            return None
        if escapes(node.outs[0], self._context):  # the caller would get memory of an argument, or of another result
            return None
        base = part.of
        while (known := self._scatters.get(base.name)) is not None and known.part.dim == part.dim:
            there = known.part
            if (part.start, part.stop, part.single) == (there.start, there.stop, there.single):
                return known.piece if known.fits else None  # one of another type is rounded where it is put
            if part.start < there.stop and there.start < part.stop:
                break
            base = there.of
        return None if base is part.of else map_node(node, {part.of.name: base})

    def _put_alone(self, v: Value) -> bool:
        """Whether nothing reads a value but what puts it into another tensor."""
        nodes = [self._all[i] for i in self._read.get(v.name, ())]
        return bool(nodes) and all(packet(n.op) in _SCATTERS and n.ins.count(v) == 1 and _is(argument(n, "src"), v) for n in nodes)


class _PieceWriter:
    """Rows of pieces along one dim as one node."""

    def __init__(self, graph: Graph, new: set[str]) -> None:
        self.new, self.filled = set(new), set[str]()
        self._nodes = list[Node]()
        self._taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in sources(graph)}
        read, outputs = readers(graph), {v.name for v in output_values(graph)}
        found = [scatter for n in graph.nodes if (scatter := _scatter(n)) is not None and scatter.fits]
        made = {scatter.made.name: scatter for scatter in found}
        inside = set[str]()
        rows: dict[str, list[_Scatter]] = {}
        for last in reversed(found):
            row = [last]
            while (earlier := made.get(row[-1].part.of.name)) is not None and last.made.name not in inside:
                alone = len(read[earlier.made.name]) == 1 and earlier.made.name not in outputs
                if not alone or earlier.part.dim != last.part.dim or row[-1].node.ins.count(earlier.made) != 1:
                    break
                row.append(earlier)
            if len(row) >= MIN_PIECES:
                inside |= {scatter.made.name for scatter in row}
                rows[last.made.name] = row
        for node in graph.nodes:
            name = node.outs[0].name if node.outs else ""
            if name in rows:
                self._put(rows[name])
            elif name not in inside:
                self._nodes.append(node)
        self.graph = replace(graph, nodes=tuple(self._nodes))

    def _put(self, row: Sequence[_Scatter]) -> None:
        """The last of a row first: it wins where pieces overlap."""
        last, base, dim = row[0], row[-1].part.of, row[0].part.dim
        whole = _shape(base)[dim]
        assert isinstance(whole, int)
        owner: list[_Scatter | None] = [None] * whole
        for scatter in reversed(row):
            owner[scatter.part.start:scatter.part.stop] = [scatter] * (scatter.part.stop - scatter.part.start)
        cuts = [i for i in range(whole) if i == 0 or owner[i] is not owner[i - 1]]
        runs = [(owner[i], i, j) for i, j in zip(cuts, [*cuts[1:], whole], strict=True)]
        self.filled.add(last.made.name)
        self.new.add(last.made.name)
        picked = [scatter.piece for scatter, _, _ in runs if scatter is not None and scatter.part.single]
        if len(picked) == len(runs):
            op, pieces = "aten.stack.default", picked
        else:
            op = "aten.cat.default"
            pieces = [self._left(last.node, scatter or base, dim, start, stop) for scatter, start, stop in runs]
        self._nodes.append(Node(Kind.OPERATOR, op, (tuple(pieces), dim), last.node.outs, loc=last.node.loc))

    def _left(self, at: Node, of: _Scatter | Value, dim: int, start: int, stop: int) -> Value:
        """What is left of a piece, or of the tensor behind all of them."""
        if isinstance(of, _Scatter) and of.part.single:
            shape = _shape(of.piece)
            return self._add(at, "aten.unsqueeze.default", (of.piece, dim), (*shape[:dim], 1, *shape[dim:]))
        piece, begin = (of.piece, of.part.start) if isinstance(of, _Scatter) else (of, 0)
        shape = _shape(piece)
        if shape[dim] == stop - start:
            return piece
        left = (*shape[:dim], stop - start, *shape[dim + 1:])
        return self._add(at, "aten.slice.Tensor", (piece, dim, start - begin, stop - begin), left)

    def _add(self, at: Node, op: str, args: tuple[Arg, ...], shape: tuple[Dim, ...]) -> Value:
        like = at.outs[0].type
        assert isinstance(like, TensorType)
        out = Value(unused_name(f"{at.outs[0].name}_", self._taken), TensorType(like.dtype, shape, device=like.device))
        self.new.add(out.name)
        self._nodes.append(Node(Kind.OPERATOR, op, args, (out,), loc=at.loc))
        return out


def _part(node: Node) -> _Part | None:
    """The part that a select, a slice or a scatter of one names; None where its places are no numbers, or not side by side."""
    op = _SCATTERS.get(packet(node.op), packet(node.op))
    of = argument(node, "self") if op in (_PICK, _PART) else None
    if not isinstance(of, Value) or not isinstance(of.type, TensorType):
        return None
    dim = argument(node, "dim", 0)
    if type(dim) is not int or not -len(_shape(of)) <= dim < len(_shape(of)):
        return None
    size = _shape(of)[dim]
    if not isinstance(size, int):
        return None
    dim %= len(_shape(of))
    if op == _PICK:
        index = argument(node, "index")
        if type(index) is not int or not -size <= index < size:
            return None
        return _Part(of, dim, index % size, index % size + 1, single=True)
    given = (argument(node, "start"), argument(node, "end"), argument(node, "step", 1))
    if given[2] != 1 or any(g is not None and type(g) is not int for g in given):
        return None
    start, stop, _ = slice(given[0], given[1]).indices(size)
    return _Part(of, dim, start, stop, single=False) if start < stop else None


def _scatter(node: Node) -> _Scatter | None:
    """None where a node is none, or its part or piece is not known."""
    part, piece = _part(node), argument(node, "src") if packet(node.op) in _SCATTERS else None
    return _Scatter(node, part, piece) if part is not None and isinstance(piece, Value) else None


def _without_unread(graph: Graph) -> Graph:
    """Views and copies that nobody reads any more count as no readers."""
    read = {v.name for v in output_values(graph)}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if packet(node.op) in (_PICK, _PART, _COPY) and not read & {v.name for v in node.outs}:
            continue
        read |= {v.name for v in node.ins}
        nodes.append(node)
    return replace(graph, nodes=tuple(reversed(nodes)))


def _is(a: Arg, v: Value) -> bool:
    return isinstance(a, Value) and a.name == v.name


def _shape(v: Value) -> tuple[Dim, ...]:
    return v.type.shape if isinstance(v.type, TensorType) else ()


def _kind(v: Value) -> tuple[DType, str] | None:
    return (v.type.dtype, v.type.device) if isinstance(v.type, TensorType) else None
