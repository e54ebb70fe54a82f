"""Which values of a graph are wanted whole and of which live rows suffice, and how each node gives that.

Going backwards from the outputs: a value that is one number wherever the mask is dead (`analysis.mask_facts`) needs its live rows
only, and so do its operands as long as each row is made of that row of theirs (`analysis.row_axes`). An attention whose mask hides
dead keys reads live rows of keys and values. What somebody wants whole is made whole, and rows of it are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

from hotfuse.analysis.attention import FUSED, HIDES, written
from hotfuse.analysis.mask_facts import MaskFact, MaskInput, Number, OrderedFact, RowPlaces, lowered_for_softmax
from hotfuse.analysis.row_axes import AlignedAxes, AxisIndex, NotByRows, Relation, carries, quotient, shape_of, whole
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph, Node, Value, makers, output_values
from hotfuse.ir.types import TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.specialize.derived_masks import told_rows
from hotfuse.specialize.pooled_rows import PickedRow, picked_row, told_place, weighed_rows

EXPANDS = frozenset({"aten.expand", "aten.expand_as", "aten.broadcast_to"})
_WORK = (Access.CONTRACTION, Access.ATTENTION)

LOWEST = -1e30
"""A number that hides a key beside any bias: what weights make of finite numbers is above it."""
_COPIES = frozenset({"aten.contiguous", "aten.clone", "aten.alias", "aten.detach"})
_KEYS = RowPlaces(AxisIndex(0), AxisIndex(3))
"""Where sequences and rows lie in a mask of keys."""
_QUERIES = RowPlaces(AxisIndex(0), AxisIndex(2))


class CannotPack(Exception):
    """Why a graph stays padded."""

    def __init__(self, why: str, *, hides_keys: bool = True) -> None:
        super().__init__(why)
        self.hides_keys = hides_keys
        """Whether the mask hides keys of an attention at all."""


@dataclass(frozen=True, slots=True)
class MaskedAttention:
    """An attention whose mask hides dead keys."""

    q: Value
    k: Value
    v: Value
    turned: bool
    """Keys lie [.., element, key]."""
    scale: float | None
    absorbed: tuple[int, ...]
    """Nodes that are part of it, besides the one that gives the result."""
    causal: bool = False
    """Whether it hides keys ahead of a query as well. Live rows keep their order, so it is causal among them."""
    empty_is_nan: bool = False
    """Whether a query that sees no key gives NaN."""
    bias: Value | None = None
    """What is added to scores besides, alike for all sequences: [1, heads or 1, rows, rows]."""
    lowers: float = -LOWEST
    """How much lower scores of hidden keys are than those of others, at least, if scores without the mask are alike."""
    heads: Dim | None = None
    """How many heads share an axis with the sequences: operands are [sequences * heads, rows, element]. None: they have one."""

    @property
    def queries(self) -> RowPlaces:
        """Where sequences and rows lie in queries, values and the result."""
        return _QUERIES if self.heads is None else RowPlaces(AxisIndex(0, self.heads), AxisIndex(1))

    @property
    def keys(self) -> RowPlaces:
        """Where they lie in keys."""
        if not self.turned:
            return self.queries
        return _KEYS if self.heads is None else RowPlaces(AxisIndex(0, self.heads), AxisIndex(2))

    @property
    def asks(self) -> Dim:
        """How many queries a sequence has."""
        return shape_of(self.q)[2 if self.heads is None else 1]


class RowMode(StrEnum):
    """How a node gives what is wanted of it."""

    WHOLE = "whole"
    ROWS = "rows"
    """Live rows are made, and nobody wants others."""
    FILLED = "filled"
    """Live rows are made; others are one number."""
    ATTENDS = "attends"
    """An attention of live rows to live rows."""
    ASKED = "asked"
    """An attention of whole queries to live rows."""
    PICKS = "picks"
    """One row of each sequence: the first, the last, or as many rows on as live in it, less one."""
    WEIGHED = "weighed"
    """A sum over rows with weights that are 0 at dead ones."""


class RowDemands:
    """Which values are wanted whole, and of which live rows suffice; and how each node gives that."""

    def __init__(
        self, graph: Graph, mask: MaskInput, facts: Mapping[str, MaskFact], ordered: Mapping[str, OrderedFact], *,
        ignore_outputs: bool, front: bool = False,
    ) -> None:
        self.graph, self.mask, self.facts, self.ordered, self.ignore_outputs = graph, mask, facts, ordered, ignore_outputs
        self._maker = makers(graph)
        self.attends = self._attentions()
        self.hints = self._hints()
        self.whole: set[str] = set()
        self.rows: dict[str, RowPlaces] = {}
        self.modes: dict[int, RowMode] = {}
        self.outputs: dict[str, RowPlaces] = {}
        """Outputs of which padded rows do not matter."""
        self.products = 0
        self.first = self.last = self.counted = False
        self.told: Value | None = None
        """The place of each sequence's row that is read, where inputs tell it; that row has to live."""
        self.lowers = lowered_for_softmax(graph, facts)
        """How much lower masks make scores of what they hide, at least."""
        self._told = told_rows(graph)
        self.front = front
        """Whether facts are for live rows that lie in front of all others."""
        self.weighed: dict[int, Value] = {}
        """Of nodes that sum rows with weights: what they sum."""
        self._seen_rows = ""

    def run(self) -> None:
        """Go through the graph, backwards."""
        for v in output_values(self.graph):
            hint = self.hints.get(v.name)
            if hint is not None and v.name not in self.facts and self.unpackable(v, hint):
                if self.ignore_outputs:
                    self.outputs[v.name] = hint
                    self._want(v, hint)
                    continue
                self._seen_rows = v.name
            self.whole.add(v.name)
        absorbed: set[int] = set()
        for i in reversed(range(len(self.graph.nodes))):
            node = self.graph.nodes[i]
            asked = [v for v in node.outs if v.name in self.whole or v.name in self.rows]
            if i in absorbed or not asked:
                continue
            mode = self._mode(i, node)
            self.modes[i] = mode
            if mode in (RowMode.ATTENDS, RowMode.ASKED):
                absorbed.update(self.attends[i].absorbed)
            if mode is RowMode.WHOLE:
                self.whole.update(v.name for v in node.ins)
            elif lookup(node.op).access in _WORK and mode not in (RowMode.PICKS, RowMode.WEIGHED):
                self.products += 1

    def reason(self) -> str:
        """Why nothing is packed."""
        if not self.attends:
            return f"no attention's keys are hidden by {self.mask.name} alone"
        if self._seen_rows:
            use = "where nobody reads them, pool inside of the model or say Settings(padding='ignore')"
            return f"output {self._seen_rows} shows padded rows, which have to be right ({use})"
        return f"what is made of attention by {self.mask.name} is read at padded rows too"

    # What a node gives

    def _mode(self, i: int, node: Node) -> RowMode:
        asked = {self.rows[v.name] for v in node.outs if v.name in self.rows}
        wanted_whole = any(v.name in self.whole for v in node.outs)
        if i in self.attends and (mode := self._attending(self.attends[i], asked, wanted_whole=wanted_whole)) is not None:
            return mode
        if not wanted_whole and len(asked) == 1:
            return RowMode.ROWS if self._by_rows(node, next(iter(asked))) else RowMode.WHOLE
        if wanted_whole and len(node.outs) == 1:
            fact = self.facts.get(node.outs[0].name)
            if fact is not None and fact.live is None and fact.places is not None and self.unpackable(node.outs[0], fact.places):
                if self._makes_work(node) and self._by_rows(node, fact.places):
                    self.rows.setdefault(node.outs[0].name, fact.places)
                    return RowMode.FILLED
            elif self._picked(node) is not None:
                return RowMode.PICKS
            elif (summed := weighed_rows(node, self.facts, self.hints)) is not None:
                self._want(summed, self.hints[summed.name])
                self.whole.update(v.name for v in node.ins if v != summed)
                self.weighed[i] = summed
                return RowMode.WEIGHED
        return RowMode.WHOLE

    def _makes_work(self, node: Node) -> bool:
        """Whether any operand may vary by rows beyond what the mask says of it."""
        return any(v.name not in self.facts for v in node.ins)

    def _by_rows(self, node: Node, places: RowPlaces) -> bool:
        """Whether a node makes live rows of live rows; its operands are then wanted."""
        try:
            wanted = self.operand_places(node, places)
        except NotByRows:
            return False
        for v in node.ins:
            at = wanted.get(v.name)
            if at is not None:
                self._want(v, at)
            elif isinstance(v.type, TensorType) and not (packet(node.op) in EXPANDS and v != node.args[0]):
                self.whole.add(v.name)
        return True

    def operand_places(self, node: Node, places: RowPlaces) -> dict[str, RowPlaces]:
        """Where rows lie in the operands that have them; raises NotByRows where they are mixed."""
        found: dict[str, RowPlaces] = {}
        for name, relation in carries(node).operands.items():
            v = next(v for v in node.ins if v.name == name)
            x = shape_of(v)
            for out in node.outs:
                y = shape_of(out)
                sequence = None if places.sequence is None else relation.backward(places.sequence, self.mask.sequences, x, y)
                row = None if places.row is None else relation.backward(places.row, self.mask.rows, x, y)
                if row is None and sequence is not None:
                    self.spread_axes(relation, v, out, places, sequence)
                if row is not None and found.setdefault(name, RowPlaces(sequence, row)) != RowPlaces(sequence, row):
                    raise NotByRows("rows at several places")
        return found

    def spread_operands(self, node: Node, places: RowPlaces) -> dict[str, tuple[int, int]]:
        """Operands that vary by sequences only, which each live row reads its own of: their axes of sequences, and of rows."""
        found: dict[str, tuple[int, int]] = {}
        for name, relation in carries(node).operands.items():
            v = next(v for v in node.ins if v.name == name)
            x, y = shape_of(v), shape_of(node.outs[0])
            if places.sequence is None or places.row is None or relation.backward(places.row, self.mask.rows, x, y) is not None:
                continue
            sequence = relation.backward(places.sequence, self.mask.sequences, x, y)
            if sequence is not None:
                found[name] = self.spread_axes(relation, v, node.outs[0], places, sequence)
        return found

    def spread_axes(self, relation: Relation, x: Value, out: Value, places: RowPlaces, sequence: AxisIndex) -> tuple[int, int]:
        """Where an operand has sequences, and one row that stands for all of theirs; raises NotByRows where it has no such axis."""
        assert places.row is not None
        axis = len(shape_of(x)) + places.row.axis - len(shape_of(out))
        if not isinstance(relation, AlignedAxes) or axis < 0 or not whole(sequence, self.mask.sequences, shape_of(x)):
            raise NotByRows("an operand that varies by sequences only")
        return sequence.axis, axis

    def _want(self, v: Value, places: RowPlaces) -> None:
        if self.rows.setdefault(v.name, places) != places:
            raise CannotPack(f"rows of %{v.name} are wanted along several axes")

    def unpackable(self, v: Value, places: RowPlaces) -> bool:
        """Whether a packed value can be made whole again: both indices have an axis of their own, next to each other."""
        shape = shape_of(v)
        b, s = places.sequence, places.row
        if b is None or s is None or not whole(b, self.mask.sequences, shape) or not whole(s, self.mask.rows, shape):
            return False
        return abs(b.axis - s.axis) == 1

    def _picked(self, node: Node) -> RowPlaces | None:
        """The rows of what a node takes one row of each sequence from; they are then wanted."""
        x = node.args[0] if node.args else None
        hint = self.hints.get(x.name) if isinstance(x, Value) else None
        if not isinstance(x, Value) or hint is None or hint.sequence is None or hint.row is None:
            return None
        if not whole(hint.sequence, self.mask.sequences, shape_of(x)) or not whole(hint.row, self.mask.rows, shape_of(x)):
            return None
        match picked_row(node, hint, self.graph, self.facts, self._told):
            case PickedRow.FIRST:
                self.first = True
            case PickedRow.LAST:
                self.last = True
            case PickedRow.COUNTED:
                self.counted = True
            case PickedRow.TOLD:
                place = told_place(node, hint, self.graph)
                if self.told is not None and self.told != place:
                    return None
                self.told = place
            case None:
                return None
        self._want(x, hint)
        return hint

    # Attention

    def _attentions(self) -> dict[int, MaskedAttention]:
        found: dict[int, MaskedAttention] = {}
        for i, node in enumerate(self.graph.nodes):
            if packet(node.op) == FUSED:
                made = self._fused(node)
                if made is not None:
                    found[i] = made
        for w in written(self.graph, loosely=True):
            if w.mask is not None and w.bias is not None:
                added = next((b for b, m in ((w.bias, w.mask), (w.mask, w.bias)) if self._hides_only(m, w.q, w.v)), None)
                if not w.hides and added is not None and (bias := self._alike(added, w.q)) is not None:
                    found[w.nodes[-1]] = MaskedAttention(
                        w.q, w.k, w.v, turned=True, scale=w.scale, absorbed=w.nodes[:-1], bias=bias
                    )
                continue
            causal = self._hides(w.mask, inverted=w.hides, q=w.q, v=w.v)
            if causal is None and not w.hides and (bias := self._biased(w.mask, w.q, w.v)) is not None:
                found[w.nodes[-1]] = MaskedAttention(w.q, w.k, w.v, turned=True, scale=w.scale, absorbed=w.nodes[:-1], bias=bias)
            if causal is not None:
                heads = quotient(shape_of(w.v)[0], self.mask.sequences) if len(shape_of(w.q)) == 3 else None
                found[w.nodes[-1]] = MaskedAttention(
                    w.q, w.k, w.v, turned=True, scale=w.scale, absorbed=w.nodes[:-1], causal=causal, heads=heads,
                    empty_is_nan=w.empty_is_nan and self._blinds(w.mask, w.fill), lowers=self._lowers(w.mask, w.fill),
                )
        return found

    def _fused(self, node: Node) -> MaskedAttention | None:
        q, k, v = (argument(node, n) for n in ("query", "key", "value"))
        mask, scale = argument(node, "attn_mask"), argument(node, "scale")
        if not isinstance(q, Value) or not isinstance(k, Value) or not isinstance(v, Value) or not isinstance(mask, Value):
            return None
        if argument(node, "is_causal", default=False) is not False:
            return None
        if argument(node, "dropout_p", 0.0) not in (0, 0.0) or not (scale is None or isinstance(scale, int | float)):
            return None
        causal, factor = self._hides(mask, inverted=False, q=q, v=v), None if scale is None else float(scale)
        if causal is None:
            bias = self._biased(mask, q, v)
            return None if bias is None else MaskedAttention(q, k, v, turned=False, scale=factor, absorbed=(), bias=bias)
        lowers = self._lowers(mask, -math.inf)
        return MaskedAttention(q, k, v, turned=False, scale=factor, absorbed=(), causal=causal, lowers=lowers)

    def _hides(self, mask: Value | None, *, inverted: bool, q: Value, v: Value) -> bool | None:
        """Whether a mask hides keys ahead of a query besides dead ones; None where it does not hide these, or others too."""
        if mask is not None and len(shape_of(q)) == len(shape_of(mask)) == 3:
            return False if self._hides_by_heads(mask, inverted=inverted, v=v) else None
        if mask is None or len(shape_of(q)) != 4 or len(shape_of(mask)) != 4:
            return None
        if shape_of(v)[0] != self.mask.sequences or shape_of(v)[2] != self.mask.rows:
            return None
        fact, order = self.facts.get(mask.name), self.ordered.get(mask.name)
        if fact is not None and fact.live is not None and fact.places == _KEYS:
            return False if _hidden((fact.dead,), fact.live, inverted=inverted) else None
        if order is None or order.seen.live is None or order.seen.places != _KEYS or order.ahead.live is None:
            return None
        if order.axes != (2, 3) or shape_of(q)[2] != self.mask.rows:
            return None
        return True if _hidden((order.seen.dead, order.ahead.dead, order.ahead.live), order.seen.live, inverted=inverted) else None

    def _lowers(self, mask: Value | None, fill: float) -> float:
        """How much lower scores of keys are that a mask hides; `fill`: what they are where it is of bools."""
        hidden, live = self._adds(mask, fill)
        return min(live - x for x in hidden)

    def _blinds(self, mask: Value | None, fill: float) -> bool:
        """Whether a dead query before the first live row sees nothing. Where numbers are finite, it sees all of some keys alike."""
        return all(x == -math.inf for x in self._adds(mask, fill)[0][:2])

    def _adds(self, mask: Value | None, fill: float) -> tuple[tuple[float, ...], float]:
        """What a mask that hides keys adds to scores: those of dead keys, of those ahead of a query, of both; and of others."""
        fact, order = (None, None) if mask is None else (self.facts.get(mask.name), self.ordered.get(mask.name))
        if fact is not None and fact.live is not None:
            hidden, shown = (fact.dead,), fact.live
        elif order is not None and order.seen.live is not None and order.ahead.live is not None:
            hidden, shown = (order.seen.dead, order.ahead.live, order.ahead.dead), order.seen.live
        else:
            raise InternalError("a mask that hides keys has numbers", because="no fact tells them")
        if isinstance(live := shown.item(), bool):
            return (fill,) * len(hidden), 0.0
        return tuple(x.item() for x in hidden), live

    def _hides_by_heads(self, mask: Value, *, inverted: bool, v: Value) -> bool:
        """The same where sequences and heads share an axis, as in torch's own layers; on CPUs."""
        heads, fact = quotient(shape_of(v)[0], self.mask.sequences), self.facts.get(mask.name)
        if heads is None or fact is None or fact.live is None or shape_of(v)[1] != self.mask.rows or not _on_cpu(v):
            return False
        keys = RowPlaces(AxisIndex(0, heads), AxisIndex(2))
        return fact.places == keys and _hidden((fact.dead,), fact.live, inverted=inverted)

    def _biased(self, mask: Value | None, q: Value, v: Value) -> Value | None:
        """What a mask of floats adds to scores where it hides no dead key, if that is alike for all sequences; on CPUs."""
        if not _on_cpu(q) or len(shape_of(q)) != 4:
            return None
        at = None if mask is None else self._maker.get(mask.name)
        while at is not None and packet(self.graph.nodes[at].op) in _COPIES:
            x = self.graph.nodes[at].args[0]
            at = self._maker.get(x.name) if isinstance(x, Value) else None
        if at is None or shape_of(v)[2] != self.mask.rows or shape_of(q)[2] != self.mask.rows:
            return None
        node = self.graph.nodes[at]
        for bias, hidden in self._parts(node):
            if self._adds_nothing(hidden) and (alike := self._alike(bias, q)) is not None:
                return alike
        return None

    def _hides_only(self, mask: Value, q: Value, v: Value) -> bool:
        """Whether a value that is added to scores does nothing but hide dead keys; on CPUs, of queries and keys that are rows."""
        if not _on_cpu(q) or len(shape_of(q)) != 4 or len(shape_of(mask)) != 4:
            return False
        if shape_of(v)[2] != self.mask.rows or shape_of(q)[2] != self.mask.rows:
            return False
        fact = self.facts.get(mask.name)
        return fact is not None and self._adds_nothing(fact)

    def _alike(self, bias: Value, q: Value) -> Value | None:
        """A bias that is one for all sequences, [1, heads or 1, rows, rows], as it was before it was repeated for each of them."""
        while True:
            shape = shape_of(bias)
            if len(shape) != 4 or bias.name in self.facts or shape[1] not in (1, shape_of(q)[1]):
                return None
            if shape[0] == 1:
                return bias if shape[2:] == (self.mask.rows,) * 2 else None
            node = None if (at := self._maker.get(bias.name)) is None else self.graph.nodes[at]
            if node is None or packet(node.op) not in (*_COPIES, "aten.expand") or not isinstance(x := node.args[0], Value):
                return None
            bias = x

    def _parts(self, node: Node) -> list[tuple[Value, tuple[MaskFact, float] | MaskFact]]:
        """How a mask may be put together: a bias, and either a mask that is added, or a condition and the number behind it."""
        op, args = packet(node.op), node.args
        if op == "aten.add" and len(args) == 2 and not node.attrs:
            return [(b, self.facts[m.name]) for b, m in (args, args[::-1])
                    if isinstance(b, Value) and isinstance(m, Value) and m.name in self.facts]  # fmt: skip
        if op == "aten.where" and len(args) == 3 and isinstance(args[0], Value) and isinstance(args[1], Value):
            condition, other = self.facts.get(args[0].name), args[2]
            if isinstance(other, Value):
                fact = self.facts.get(other.name)
                other = fact.dead.item() if fact is not None and fact.places is None else None
            if condition is not None and isinstance(other, int | float):
                return [(args[1], (condition, other))]
        return []

    def _adds_nothing(self, hidden: tuple[MaskFact, float] | MaskFact) -> bool:
        """Whether a mask leaves scores of live keys as they are, and lowers others below all that a score can be."""
        if isinstance(hidden, tuple):
            fact, number = hidden
            return fact.places == _KEYS and fact.live is not None and bool(fact.live) and not bool(fact.dead) and number <= LOWEST
        return hidden.places == _KEYS and hidden.live is not None and hidden.live.item() == 0 and hidden.dead.item() <= LOWEST

    def _attending(self, how: MaskedAttention, asked: set[RowPlaces], *, wanted_whole: bool) -> RowMode | None:
        if not wanted_whole and asked == {how.queries} and how.asks == self.mask.rows:
            self._want(how.q, how.queries)
            mode = RowMode.ATTENDS
            if how.bias is not None:
                self.whole.add(how.bias.name)
            if how.causal and how.empty_is_nan:  # a dead row before the first live one would be NaN, and so would all of them
                self.first = True
        elif wanted_whole and self._may_ask(how):
            self.whole.add(how.q.name)
            mode = RowMode.ASKED
        else:
            return None
        self._want(how.k, how.keys)
        self._want(how.v, how.queries)
        self.lowers = min(self.lowers, how.lowers)
        return mode

    def _may_ask(self, how: MaskedAttention) -> bool:
        """Whether whole queries may see live keys alone: one of each sequence, or on CPUs as many as another sequence has (a
        decoder's, queries for boxes). Where these are the rows themselves, what is made of them would all be computed whole.
        """
        if how.asks == 1:
            return True
        return how.asks != self.mask.rows and how.bias is None and not how.causal and _on_cpu(how.q)

    def _hints(self) -> dict[str, RowPlaces]:
        """Where rows lie in what is made of attention: a guess at what is worth packing, which nothing else rests on."""
        found: dict[str, RowPlaces] = {}
        for i, node in enumerate(self.graph.nodes):
            if i in self.attends and self.attends[i].asks == self.mask.rows:
                found[node.outs[0].name] = self.attends[i].queries
                continue
            for v in node.ins:
                hint = found.get(v.name)
                if hint is None or hint.sequence is None or hint.row is None:
                    continue
                try:
                    relation = carries(node).operands.get(v.name)
                    if relation is None:
                        continue
                    for out in node.outs:
                        x, y = shape_of(v), shape_of(out)
                        found[out.name] = RowPlaces(relation.forward(hint.sequence, self.mask.sequences, x, y),
                                                    relation.forward(hint.row, self.mask.rows, x, y))  # fmt: skip
                except NotByRows:
                    continue
        return found


def _on_cpu(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.device == "cpu"


def _hidden(hidden: tuple[Number, ...], shown: Number, *, inverted: bool) -> bool:
    """Whether a mask of these numbers hides keys, beside others that it shows."""
    live = shown.item()
    if isinstance(live, bool):
        return live is not inverted and all(x.item() is inverted for x in hidden)
    return not inverted and math.isfinite(live) and all(x.item() <= live - HIDES for x in hidden)
