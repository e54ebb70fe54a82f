"""Rows that data do not pick are not computed: work in front of a filter runs on what survives it.

    %h: f32[B, S, 64] = linear(%x, %w, %b)                     %r: f32[B, 64] = index(%x, [%every, %at])
    %g: f32[B, S, 64] = gelu(%h)                         ->    %h: f32[B, 1, 64] = linear(unsqueeze(%r, 1), %w, %b)
    %y: f32[B, 64] = index(%g, [%every, %at])                  %g: f32[B, 1, 64] = gelu(%h)
                                                               %y: f32[B, 64] = select(%g, 1, 0)

A text encoder reads the row of its end token, a classifier that of the last token, a detector the boxes of its best scores
(`gather` at what `topk` found). Only a run tells which rows these are; how many is a fact of the graph. So, as in
`simplify.dead_rows`, a value that only such picks read, all of the same rows, is made for these rows, and its operands are picked.
Rows may lie flat, [B * S, 64], in between. It ends at attention, whose result is picked. No guard is needed: an index out of range
is out of range for the operands as well. It is done only where a product gets smaller.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.analysis.inferred_types import possible_sizes, relaid
from hotfuse.analysis.row_axes import AxisIndex, NotByRows, carries, product, shape_of, whole
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, makers, map_node, output_values, unused_name
from hotfuse.ir.types import DType, TensorType
from hotfuse.ir.verify import verify
from hotfuse.ops.movement import RESHAPES
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet

_RESHAPED = frozenset({"aten.view", "aten.reshape", "aten._unsafe_view"})
_EXPANDED = frozenset({"aten.expand", "aten.broadcast_to"})
_REPEATS = frozenset({*_EXPANDED, "aten.repeat"})
_INDICES = frozenset({DType.I64, DType.I32})


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Rows of each sequence that somebody reads."""

    at: Value
    """Which: i64[B], or i64[B, K, 1] for `gather`."""
    every: Value | None
    """i64[B]: all sequences, in order, for `index`; None: `gather`."""
    sequences: Dim
    rows: Dim
    """How many each has."""
    count: int
    """How many of them are read."""


@dataclass(frozen=True, slots=True)
class PickedForm:
    """What is made of a value: [B, K, ..] instead of [B, S, ..], or [B * K, ..] instead of [B * S, ..]."""

    rows: PickedRows
    flat: bool = False

    def fits(self, v: Value) -> bool:
        """Whether a value has the rows."""
        shape = shape_of(v)
        if self.flat:
            return len(shape) >= 2 and shape[0] == product((self.rows.sequences, self.rows.rows))
        if shape[:2] != (self.rows.sequences, self.rows.rows):
            return False
        return self.rows.every is not None or (len(shape) == 3 and isinstance(shape[2], int))

    def small(self, v: Value) -> TensorType:
        """The type of what is made."""
        of, shape = v.type, shape_of(v)
        assert isinstance(of, TensorType)
        if self.flat:
            return replace(of, shape=(product((self.rows.sequences, self.rows.count)), *shape[1:]))
        return replace(of, shape=(shape[0], self.rows.count, *shape[2:]))


_PLACES = "places"
"""Said of an operand that is alike for all sequences: rows of it are looked up."""
Operands = dict[str, PickedForm | str | None]


def without_unpicked_rows(graph: Graph) -> tuple[Graph, int]:
    """The graph with such values made for picked rows, and how many products got smaller; the graph itself where none does."""
    if any(n.kind is Kind.CONTROL for n in graph.nodes):
        return graph, 0
    picks = _picks(graph)
    if not picks:
        return graph, 0
    wanted = _wanted(graph, picks)
    smaller = [n for n in graph.nodes if lookup(n.op).access is Access.CONTRACTION and any(v.name in wanted for v in n.outs)]
    sizes = possible_sizes(graph) if smaller else None
    if sizes is None:
        return graph, 0
    made, changed = _PickedWriter(graph, picks, wanted).run()
    try:
        return verify(relaid(made, changed, sizes)), len(smaller)
    except InternalError:  # an op whose sizes follow another rule than was thought: the graph stays as it is
        return graph, 0


def _picks(graph: Graph) -> dict[int, tuple[Value, PickedRows]]:
    """By node: what it takes rows of, and which."""
    maker, found = makers(graph), dict[int, tuple[Value, PickedRows]]()

    def made(v: object) -> Node | None:
        return graph.nodes[maker[v.name]] if isinstance(v, Value) and v.name in maker else None

    for i, node in enumerate(graph.nodes):
        x = node.args[0] if node.args else None
        if packet(node.op) not in ("aten.index", "aten.gather") or not isinstance(x, Value) or not isinstance(x.type, TensorType):
            continue
        rows = _indexed(node, x.type, made(_first(node.args[1]))) if packet(node.op) == "aten.index" else None
        if packet(node.op) == "aten.gather" and len(x.type.shape) == 3:
            rows = _gathered(node, x.type, made(argument(node, "index")))
        if rows is not None and _fewer(rows):
            found[i] = x, rows
    return found


def _first(places: Arg) -> Arg:
    return places[0] if isinstance(places, tuple) and len(places) == 2 else None


def _fewer(rows: PickedRows) -> bool:
    if rows.count == 1:
        return rows.rows != 1
    return isinstance(rows.rows, int) and 2 * rows.count <= rows.rows


def _indexed(node: Node, x: TensorType, first: Node | None) -> PickedRows | None:
    """`x[arange(B), at]`."""
    if first is None or packet(first.op) != "aten.arange" or argument(first, "start", 0) != 0 or argument(first, "step", 1) != 1:
        return None
    (every, at) = node.args[1] if isinstance(node.args[1], tuple) else (None, None)
    if not isinstance(every, Value) or not isinstance(at, Value) or len(x.shape) < 2:
        return None
    if any(not isinstance(v.type, TensorType) or v.type.dtype not in _INDICES or v.type.shape != x.shape[:1] for v in (every, at)):
        return None
    return PickedRows(at, every, x.shape[0], x.shape[1], 1)


def _gathered(node: Node, x: TensorType, spread: Node | None) -> PickedRows | None:
    """`gather(x, 1, at[:, :, None].expand(..))`: whole rows."""
    if spread is None or packet(spread.op) not in _REPEATS or argument(node, "dim") not in (1, -2):
        return None
    at, index = spread.args[0], spread.outs[0].type
    if not isinstance(at, Value) or not isinstance(at.type, TensorType) or not isinstance(index, TensorType):
        return None
    count = index.shape[1] if len(index.shape) == 3 else None
    if not isinstance(count, int) or index.shape != (x.shape[0], count, x.shape[2]) or at.type.shape != (x.shape[0], count, 1):
        return None
    return PickedRows(at, None, x.shape[0], x.shape[1], count)


def _wanted(graph: Graph, picks: dict[int, tuple[Value, PickedRows]]) -> dict[str, PickedForm]:
    """The values that are made for picked rows alone."""
    made = {v.name for n in graph.nodes for v in n.outs}
    kept: set[str] = set()
    while True:
        found = _demanded(graph, picks, kept)
        small = {name: w for name, w in found.items() if name in made}
        lacking = {
            v.name for n in graph.nodes if n.outs and (w := small.get(n.outs[0].name)) is not None for v in n.outs
            if any(isinstance(o, PickedForm) and o.flat and name not in small for name, o in (_operands(n, w) or {}).items())
        }  # fmt: skip
        if not lacking:
            return small
        kept |= lacking  # rows of what lies flat and is made whole are not picked


def _demanded(graph: Graph, picks: dict[int, tuple[Value, PickedRows]], kept: set[str]) -> dict[str, PickedForm]:
    wanted: dict[str, PickedForm] = {}
    whole_of = kept | {v.name for v in output_values(graph)}
    for i, node in reversed([*enumerate(graph.nodes)]):
        asked = {wanted.get(v.name) for v in node.outs if v.name in wanted or v.name in whole_of}
        only = asked.pop() if len(asked) == 1 and not any(v.name in whole_of for v in node.outs) else None
        operands = _operands(node, only) if only is not None else None
        if operands is None:
            whole_of.update(v.name for v in node.outs)
            operands = dict.fromkeys((v.name for v in node.ins), None)
            if i in picks:
                x, rows = picks[i]
                others = [v for v in node.ins if v == x and node.args[1] != x]
                operands[x.name] = PickedForm(rows) if others and PickedForm(rows).fits(x) else None
        for name, what in operands.items():
            if not isinstance(what, PickedForm) or wanted.setdefault(name, what) != what:
                whole_of.add(name)
    return {name: w for name, w in wanted.items() if name not in whole_of}


def _operands(node: Node, wanted: PickedForm) -> Operands | None:
    """What a node that makes picked rows takes of its operands; None where it has to make all rows."""
    op, rows = packet(node.op), wanted.rows
    if not all(wanted.fits(v) for v in node.outs):
        return None
    found: Operands = dict.fromkeys((v.name for v in node.ins), None)
    if op in RESHAPES:
        return _reshaped(node, wanted, found)
    if wanted.flat and op in _EXPANDED:
        return None
    try:
        relations = carries(node).operands
        for name, relation in relations.items():
            v = next(v for v in node.ins if v.name == name)
            x = shape_of(v)
            for out in node.outs:
                y = shape_of(out)
                if wanted.flat:
                    size = y[0]
                    at = relation.backward(AxisIndex(0), size, x, y)
                    if at is not None and (at != AxisIndex(0) or not whole(at, size, x)):
                        return None
                    found[name] = None if at is None else wanted
                    continue
                sequence, row = (relation.backward(AxisIndex(a), n, x, y) for a, n in ((0, rows.sequences), (1, rows.rows)))
                if row is None:
                    continue
                if not whole(row, rows.rows, x) or (sequence is not None and not (sequence.axis == 0 and row.axis == 1)):
                    return None
                if sequence is None and any(d != 1 for d in x[: row.axis]):
                    return None
                found[name] = _PLACES if sequence is None else wanted
                if sequence is not None and not wanted.fits(v):
                    return None
    except NotByRows:
        return None
    return found if any(isinstance(o, PickedForm) for o in found.values()) else None


def _reshaped(node: Node, wanted: PickedForm, found: Operands) -> Operands | None:
    """Rows stay rows: in front of whatever else the shapes have, in two axes or in one."""
    x, sizes = node.args[0], node.args[1] if len(node.args) > 1 else None
    if packet(node.op) not in _RESHAPED or not isinstance(x, Value) or not isinstance(sizes, tuple):
        return None
    y = shape_of(node.outs[0])
    for flat in (wanted.flat, not wanted.flat):
        of = replace(wanted, flat=flat)
        if not of.fits(x) or product(shape_of(x)[1 if flat else 2 :]) != product(y[1 if wanted.flat else 2 :]):
            continue
        if wanted.flat and any(s == -1 for s in sizes[1:]):
            return None
        found[x.name] = of
        return found
    return None


class _PickedWriter:
    """Nodes of picked rows stand where the first pick behind them does: only there it is known which rows these are."""

    def __init__(self, graph: Graph, picks: dict[int, tuple[Value, PickedRows]], wanted: dict[str, PickedForm]) -> None:
        self.graph, self.picks, self.wanted = graph, picks, wanted
        self.nodes: list[Node] = []
        self.small: dict[tuple[str, PickedRows], Value] = {}
        self.waiting: dict[PickedRows, list[Node]] = {}
        self.renamed: dict[str, Arg] = {}
        self.taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs}
        self.taken |= {p.value.name for p in graph.params}
        self.changed: set[str] = set()

    def run(self) -> tuple[Graph, set[str]]:
        """The graph, and the values in it that are new."""
        for i, node in enumerate(self.graph.nodes):
            wanted = self.wanted.get(node.outs[0].name) if node.outs else None
            if wanted is not None:
                self.waiting.setdefault(wanted.rows, []).append(node)
            elif i in self.picks and self.picks[i][0].name in self.wanted:
                self._pick(node, *self.picks[i])
            else:
                self.nodes.append(map_node(node, self.renamed))
        outputs = tuple(self.renamed.get(o.name, o) if isinstance(o, Value) else o for o in self.graph.outputs)
        return replace(self.graph, nodes=tuple(self.nodes), outputs=outputs), self.changed

    def _pick(self, node: Node, x: Value, rows: PickedRows) -> None:
        for waiting in self.waiting.pop(rows, []):
            self._make(waiting, self.wanted[waiting.outs[0].name])
        small = self.small[x.name, rows]
        if rows.every is None:
            self.renamed[node.outs[0].name] = small
        else:
            self.nodes.append(replace(node, op="aten.select.int", args=(small, 1, 0), attrs=()))
            self.changed.add(node.outs[0].name)

    def _make(self, node: Node, wanted: PickedForm) -> None:
        operands = _operands(node, wanted)
        if operands is None:
            raise InternalError(f"{node.op} was to make picked rows", where=str(node.loc))
        given: dict[str, Arg] = dict(self.renamed)
        for v in node.ins:
            if isinstance(operands[v.name], PickedForm):
                given[v.name] = self._rows(v, wanted.rows)
            elif operands[v.name] == _PLACES:
                given[v.name] = self._looked_up(v, wanted.rows)
        outs = tuple(Value(v.name, wanted.small(v)) for v in node.outs)
        made = map_node(node, given, outs)
        if packet(node.op) in _RESHAPED | _EXPANDED and isinstance(sizes := made.args[1], tuple):
            sizes = (-1, *sizes[1:]) if wanted.flat else (sizes[0], wanted.rows.count, *sizes[2:])
            op = "aten.reshape.default" if packet(node.op) in _RESHAPED else node.op
            made = replace(made, op=op, args=(made.args[0], sizes, *made.args[2:]))
        self.nodes.append(made)
        for v in outs:
            self.small[v.name, wanted.rows] = v
            self.changed.add(v.name)

    def _rows(self, v: Value, rows: PickedRows) -> Value:
        """The picked rows of a value that is made whole, or the value that was made of them."""
        if (v.name, rows) not in self.small:
            shape = shape_of(v)
            if rows.every is None:
                some, width = (shape[0], rows.count, shape[2]), shape[2]
                assert isinstance(width, int)  # as `PickedForm.fits` saw
                spread = self._node("aten.expand.default", (rows.at, (-1, -1, width)), v, some, rows.at)
                found = self._node("aten.gather.default", (v, 1, spread), v, some, v)
            else:
                one = self._node("aten.index.Tensor", (v, (rows.every, rows.at)), v, (shape[0], *shape[2:]), v)
                found = self._node("aten.unsqueeze.default", (one, 1), v, (shape[0], 1, *shape[2:]), v)
            self.small[v.name, rows] = found
        return self.small[v.name, rows]

    def _looked_up(self, v: Value, rows: PickedRows) -> Value:
        """Rows of a value that is alike for all sequences, [S, ..] with axes of 1 in front, as [B, K, ..]."""
        table, key = v, (f"{v.name} by place", rows)
        if key in self.small:
            return self.small[key]
        while shape_of(table)[0] != rows.rows:
            table = self._node("aten.select.int", (table, 0, 0), v, shape_of(table)[1:], v)
        rest = shape_of(table)[1:]
        if rows.every is None:
            at = self._node("aten.select.int", (rows.at, 2, 0), v, shape_of(rows.at)[:2], rows.at)
            found = self._node("aten.index.Tensor", (table, (at,)), v, (rows.sequences, rows.count, *rest), v)
        else:
            one = self._node("aten.index.Tensor", (table, (rows.at,)), v, (rows.sequences, *rest), v)
            found = self._node("aten.unsqueeze.default", (one, 1), v, (rows.sequences, 1, *rest), v)
        self.small[key] = found
        return found

    def _node(self, op: str, args: tuple[Arg, ...], stem: Value, shape: tuple[Dim, ...], like: Value) -> Value:
        assert isinstance(like.type, TensorType)
        out = Value(unused_name(f"{stem.name}.picked", self.taken), TensorType(like.type.dtype, shape, device=like.type.device))
        self.nodes.append(Node(Kind.OPERATOR, op, args, (out,)))
        self.changed.add(out.name)
        return out
