"""Rows that a mask hides are not computed: sequences lie one behind the other, without padding between them.

    %h: f32[B, S, 64] = linear(%x, ..)                       %x': f32[1, T, 64] = rows of %x that live
    %a = sdpa(%q, %k, %v, %hidden)                    ->     %h': f32[1, T, 64] = linear(%x', ..)
    %y = sum(%h * %m[:, :, None], 1)                         %a' = packed_attention(%q', %k', %v', %offsets)
                                                             %y = sum(where(%live, %h'[%inverse], 0), 1)

Which rows suffice is worked out backwards from the outputs (`specialize.row_demands`). What has to be whole stays as it is, and
rows of it are gathered where they are needed. So a graph whose outputs show padded rows is not packed, unless somebody says that
these do not matter.

In the packed graph the batch is one long sequence: ops keep their axes, the axis of sequences is 1 and that of rows is T, a number
that only the call tells. Which rows live comes in with the call (`PackedInput`), so one graph serves every mask with at least
one live row in each sequence. Equal in real arithmetic as long as what dead rows hold is finite, and no larger than what a mask
of finite numbers hides: then they count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

import torch

from hotfuse.analysis.front_masks import front_tests
from hotfuse.analysis.mask_facts import MaskInput, RowPlaces, mask_facts
from hotfuse.analysis.ordered_masks import ordered_facts
from hotfuse.analysis.row_axes import shape_of, whole
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, expr
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_node, map_values, output_values, unused_name
from hotfuse.ir.types import DType, ScalarKind, ScalarType, TensorType
from hotfuse.ops import bounded_attention, packed
from hotfuse.ops.schema import argument, draws_random
from hotfuse.ops.table import is_mutating, packet
from hotfuse.specialize.derived_masks import made_of_inputs, told_rows
from hotfuse.specialize.pooled_rows import PickedRow, picked_row
from hotfuse.specialize.row_demands import CannotPack, MaskedAttention, RowDemands, RowMode
from hotfuse.specialize.rows_writer import RowsWriter


class PackedInput(StrEnum):
    """What a packed graph is given of the mask, behind its other inputs."""

    ROWS = "rows"
    """i64[T]: which rows of all sequences live, in order."""
    POSITIONS = "positions"
    """i64[T]: where each lies in its sequence."""
    SEQUENCES = "sequences"
    """i64[T]: of which sequence each is."""
    OFFSETS = "offsets"
    """i64[B + 1]: where each sequence begins among the live rows, and where the last one ends."""
    INVERSE = "inverse"
    """i64[B, S]: which of the live rows each one is; any for a dead one."""
    LIVE = "live"
    """bool[B, S]."""
    FIRST = "first"
    """i64[B]: the first live row of each sequence."""
    LAST = "last"
    """i64[B]: the last."""
    COUNTED = "counted"
    """i64[B]: which of the live rows lies at the place that their number in the sequence says, less one."""
    TOLD = "told"
    """i64[B]: which of the live rows lies at the place that the call's inputs tell."""
    KEY_PLACES = "key places"
    """i64[T, S]: of each live row, where the live rows of its sequence lie, in order; any behind them."""
    QUERIES = "queries"
    """i64[B + 1]: one row of each sequence; times how many queries a sequence has, where its queries begin."""


_PICKED = {PickedRow.FIRST: PackedInput.FIRST, PickedRow.LAST: PackedInput.LAST, PickedRow.COUNTED: PackedInput.COUNTED,
           PickedRow.TOLD: PackedInput.TOLD}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packing:
    """A graph for live rows, and what a call must bring for it."""

    mask: MaskInput
    graph: Graph
    inputs: tuple[PackedInput, ...]
    """The graph's further inputs, in order."""
    products: int
    """Products and attentions on live rows alone."""
    first: bool
    """The first row of every sequence has to live: it is read by its place."""
    last: bool
    counted: bool
    """The row at the place that the number of live rows says, less one, has to live."""
    told: Graph | None
    """Makes the place of a row that has to live, of inputs of the graph; None where none is read by such a place."""
    front: bool
    """Live rows have to lie in front of all others."""
    ignored: tuple[tuple[int, RowPlaces], ...]
    """Outputs that are 0 at dead rows, whatever the graph makes of them, and where rows lie in them."""
    indices: tuple[tuple[str, int], ...]
    """Inputs that are looked up in tables of so many rows: dead rows are not, and what is no index has to be said all the same."""
    lowers: float
    """How much lower masks make the scores of what they hide, at least: -10,000 hides no key whose score is that much higher."""


def packed_graph(graph: Graph, mask: MaskInput, weights: Mapping[str, torch.Tensor], *, ignore_outputs: bool = False) -> Packing:
    """The graph on live rows; raises CannotPack where no product gets smaller. With `ignore_outputs`, those are 0 at dead rows."""
    if not _is_pure(graph):
        raise CannotPack("it has ops that are not pure")
    ordered = ordered_facts(graph, mask, weights)

    def demanded(*, front: bool) -> RowDemands:
        facts = mask_facts(graph, mask, weights, front=front, ordered=ordered)
        found = RowDemands(graph, mask, facts, ordered, ignore_outputs=ignore_outputs, front=front)
        found.run()
        return found

    demands = demanded(front=False)
    if front_tests(graph) and (more := demanded(front=True)).products > demands.products:
        demands = more
    if not demands.products:
        raise CannotPack(demands.reason(), hides_keys=bool(demands.attends))
    return _PackedWriter(demands).run()


def _is_pure(graph: Graph) -> bool:
    """Whether a graph only computes; branches and loops do where their bodies do, and read whole values."""
    operators = (n for n in graph.nodes if n.kind is Kind.OPERATOR)
    bodies = (g for n in graph.nodes if n.kind is Kind.CONTROL for g in n.graphs)
    known = all(n.kind in (Kind.OPERATOR, Kind.CONTROL) for n in graph.nodes)
    pure = all(not is_mutating(n.op) and not draws_random(n.op, n.args, dict(n.attrs)) for n in operators)
    return known and pure and all(map(_is_pure, bodies))


class _PackedWriter(RowsWriter):
    """The packed graph."""

    def __init__(self, demands: RowDemands) -> None:
        super().__init__(demands, "live")
        self.inputs: dict[PackedInput, Value] = {}
        self.count: Value | None = None
        self.longest: Value | None = None
        self.indices: dict[tuple[str, int], None] = {}

    def run(self) -> Packing:
        for i, node in enumerate(self.graph.nodes):
            self.note_sizes(node)
            match self.demands.modes.get(i):
                case RowMode.WHOLE:
                    self.nodes.append(node)
                case RowMode.ROWS:
                    self.rows_of(node)
                case RowMode.FILLED:
                    fact = self.demands.facts[node.outs[0].name]
                    self.rows_of(node)
                    self._unpack(node.outs[0], self.demands.rows[node.outs[0].name], fact.dead.item(), node.outs[0])
                case RowMode.ATTENDS | RowMode.ASKED as mode:
                    self._attend(node, self.demands.attends[i], asked=mode is RowMode.ASKED)
                case RowMode.PICKS:
                    self._pick(node)
                case RowMode.WEIGHED:
                    x = self.demands.weighed[i]
                    spread = self._value(x.name, x.type)
                    self._unpack(x, self.demands.rows[x.name], 0, spread)
                    self.nodes.append(map_node(node, {x.name: spread}, node.outs))
                case None:  # nobody reads it, or it is a size
                    if any(isinstance(v.type, ScalarType) for v in node.outs):
                        self.nodes.append(node)
        new: dict[str, Arg] = {}
        for v in output_values(self.graph):
            if v.name in self.demands.outputs and v.name not in new:
                out = self._value(v.name, v.type)
                self._unpack(v, self.demands.outputs[v.name], 0, out)
                new[v.name] = out
        return self._finished(new)

    def _finished(self, new: dict[str, Arg]) -> Packing:
        order = tuple(self.inputs)
        graph = replace(
            self.graph, name=f"{self.graph.name}.packed", inputs=(*self.graph.inputs, *self.inputs.values()),
            nodes=tuple(self.nodes), outputs=tuple(map_values(o, new) for o in self.graph.outputs),
            guards=(*self.graph.guards, *(g for g in (expr("<=", 1, self.live_rows),) if isinstance(g, Sym))),
        )  # fmt: skip
        graph = self.checked(graph)
        d = self.demands
        ignored = ((i, d.outputs[v.name]) for i, v in enumerate(self.graph.outputs) if isinstance(v, Value) and v.name in d.outputs)
        return Packing(
            self.mask, graph, order, d.products, d.first, d.last, d.counted,
            None if d.told is None else made_of_inputs(self.graph, d.told), d.front, tuple(ignored), tuple(self.indices), d.lowers,
        )

    # Parts

    def _given(self, what: PackedInput) -> Value:
        if what not in self.inputs:
            b, s, t = self.mask.sequences, self.mask.rows, self.live_rows
            shapes: dict[PackedInput, tuple[Dim, ...]] = {
                PackedInput.ROWS: (t,), PackedInput.POSITIONS: (t,), PackedInput.SEQUENCES: (t,),
                PackedInput.OFFSETS: (expr("+", b, 1),),
                PackedInput.INVERSE: (b, s), PackedInput.LIVE: (b, s), PackedInput.FIRST: (b,), PackedInput.LAST: (b,),
                PackedInput.COUNTED: (b,), PackedInput.TOLD: (b,),
                PackedInput.QUERIES: (expr("+", b, 1),), PackedInput.KEY_PLACES: (t, s),
            }  # fmt: skip
            dtype = DType.BOOL if what is PackedInput.LIVE else DType.I64
            given = TensorType(dtype, shapes[what], device=self.device)
            self.inputs[what] = Value(unused_name(f"packing.{what.name.lower()}", self.taken), given)
        return self.inputs[what]

    def live_count(self) -> Value:
        """T as a number of the host."""
        if self.count is None:
            self.count = self._value("live", ScalarType(ScalarKind.INT, self.live_rows))
            self.nodes.append(Node(Kind.OPERATOR, "aten.sym_size.int", (self._given(PackedInput.ROWS), 0), (self.count,)))
        return self.count

    # Rows of a value

    def gathered(self, v: Value, places: RowPlaces) -> Value:
        shape, dtype = shape_of(v), self._type(v).dtype
        b, s = places.sequence, places.row
        if s is None or not whole(s, self.mask.rows, shape):
            raise CannotPack(f"rows of %{v.name} have no axis of their own")
        if b is None:
            out = (*shape[: s.axis], self.live_rows, *shape[s.axis + 1 :])
            return self._node("aten.index_select.default", (v, s.axis, self._given(PackedInput.POSITIONS)), v.name, dtype, out)
        if not whole(b, self.mask.sequences, shape):
            raise CannotPack(f"sequences of %{v.name} have no axis of their own")
        front = self._permuted(v, self._front(b.axis, s.axis, len(shape)))
        rest = shape_of(front)[2:]
        flat = self._node("aten.flatten.using_ints", (front, 0, 1), v.name, dtype,
                          (expr("*", self.mask.sequences, self.mask.rows), *rest))  # fmt: skip
        t = self.live_rows
        some = self._node("aten.index_select.default", (flat, 0, self._given(PackedInput.ROWS)), v.name, dtype, (t, *rest))
        one = self._node("aten.unsqueeze.default", (some, 0), v.name, dtype, (1, t, *rest))
        return self._permuted(one, self._back(b.axis, s.axis, len(shape)))

    def spread(self, v: Value, axes: tuple[int, int]) -> Value:
        """[B, 1, ..] as [1, T, ..]: each live row has its sequence's."""
        (b, s), shape, t = axes, shape_of(v), self.live_rows
        if (name := f"{v.name}.by sequence at {b}, {s}") not in self.packed:
            long = tuple(t if i == b else d for i, d in enumerate(shape))
            dtype = self._type(v).dtype
            each = self._node("aten.index_select.default", (v, b, self._given(PackedInput.SEQUENCES)), v.name, dtype, long)
            order = [*range(len(shape))]
            order[b], order[s] = s, b
            self.packed[name] = self._permuted(each, tuple(order))
        return self.packed[name]

    def _permuted(self, v: Value, order: tuple[int, ...]) -> Value:
        if order == tuple(range(len(order))):
            return v
        shape = shape_of(v)
        return self._node("aten.permute.default", (v, order), v.name, self._type(v).dtype, tuple(shape[i] for i in order))

    @staticmethod
    def _front(b: int, s: int, rank: int) -> tuple[int, ...]:
        return (b, s, *(i for i in range(rank) if i not in (b, s)))

    @classmethod
    def _back(cls, b: int, s: int, rank: int) -> tuple[int, ...]:
        order = cls._front(b, s, rank)
        return tuple(order.index(i) for i in range(rank))

    def note_lookup(self, node: Node, wanted: Mapping[str, RowPlaces]) -> None:
        """Inputs that only live rows are looked up of."""
        inputs = {v.name for v in self.graph.inputs}
        table = argument(node, "weight") if packet(node.op) == "aten.embedding" else node.args[0] if node.args else None
        if packet(node.op) in ("aten.embedding", "aten.index") and isinstance(table, Value) and isinstance(table.type, TensorType):
            size = table.type.shape[0]
            for name in wanted:
                if name in inputs and isinstance(size, int):
                    self.indices[name, size] = None

    # Attention, and the way back

    def _attend(self, node: Node, how: MaskedAttention, *, asked: bool) -> None:
        dtype = self._type(how.q).dtype
        heads = shape_of(how.q)[1] if how.heads is None else how.heads
        width = shape_of(how.v)[-1]
        t: Dim = expr("*", self.mask.sequences, how.asks) if asked else self.live_rows
        q = self._queries(how, heads) if asked else self._by_token(self.rows(how.q), turned=False)
        k = self._by_token(self.rows(how.k), turned=how.turned)
        v = self._by_token(self.rows(how.v), turned=False)
        offsets = self._given(PackedInput.OFFSETS)
        where = (self._offsets_of_queries(how), offsets) if asked else (offsets, None)
        args: tuple[Arg, ...]
        if self.device == "cpu":
            bias = None if how.bias is None else self._bias(how.bias, heads)
            op, args = packed.NAME, (q, k, v, *where, how.scale, -1, 0 if how.causal else -1, bias)
        else:  # which must not look at offsets on the host
            op, args = bounded_attention.NAME, (q, k, v, *where, how.scale, self._length(), how.causal)
        made = self._node(f"{op}.default", args, node.outs[0].name, dtype, (t, heads, width))
        if asked:
            self._answers(made, how, heads, node.outs[0])
            return
        if how.heads is not None:
            self.packed[node.outs[0].name] = self._permuted(made, (1, 0, 2))
            return
        one = self._node("aten.unsqueeze.default", (made, 0), node.outs[0].name, dtype, (1, t, heads, width))
        self.packed[node.outs[0].name] = self._permuted(one, (0, 2, 1, 3))

    def _queries(self, how: MaskedAttention, heads: Dim) -> Value:
        """Whole queries, [B, heads, n, width] or [B * heads, n, width], as [B * n, heads, width]."""
        b, dtype, width = self.mask.sequences, self._type(how.q).dtype, shape_of(how.q)[-1]
        by_head = how.q
        if how.asks == 1 and how.heads is None:
            return self._node("aten.select.int", (how.q, 2, 0), how.q.name, dtype, (b, heads, width))
        if how.asks == 1:
            sizes = (self._known(b), self._known(heads), self._known(width))
            return self._node("aten.reshape.default", (how.q, sizes), how.q.name, dtype, (b, heads, width))
        if how.heads is not None:
            sizes = (-1, self._known(heads), self._asks(how), self._known(width))
            by_head = self._node("aten.reshape.default", (how.q, sizes), how.q.name, dtype, (b, heads, how.asks, width))
        by_query = self._permuted(by_head, (0, 2, 1, 3))
        return self._node("aten.flatten.using_ints", (by_query, 0, 1), how.q.name, dtype, (expr("*", b, how.asks), heads, width))

    def _offsets_of_queries(self, how: MaskedAttention) -> Value:
        """Where each sequence's whole queries begin."""
        one = self._given(PackedInput.QUERIES)
        if how.asks == 1:
            return one
        return self._node("aten.mul.Tensor", (one, self._asks(how)), "queries", DType.I64, shape_of(one))

    def _answers(self, made: Value, how: MaskedAttention, heads: Dim, out: Value) -> None:
        """What an attention of whole queries gave, [B * n, heads, width], as the graph has it."""
        b, n, width, dtype = self.mask.sequences, how.asks, shape_of(made)[-1], self._type(how.q).dtype
        self.changed.add(out.name)
        if n == 1 and how.heads is None:
            self.nodes.append(Node(Kind.OPERATOR, "aten.unsqueeze.default", (made, 2), (out,)))
        elif n == 1:
            flat = self._node("aten.flatten.using_ints", (made, 0, 1), out.name, dtype, (expr("*", b, heads), width))
            self.nodes.append(Node(Kind.OPERATOR, "aten.unsqueeze.default", (flat, 1), (out,)))
        else:
            sizes = (-1, self._asks(how), self._known(heads), self._known(width))
            apart = self._node("aten.reshape.default", (made, sizes), out.name, dtype, (b, n, heads, width))
            if how.heads is None:
                self.nodes.append(Node(Kind.OPERATOR, "aten.permute.default", (apart, (0, 2, 1, 3)), (out,)))
                return
            by_head = self._permuted(apart, (0, 2, 1, 3))
            self.nodes.append(Node(Kind.OPERATOR, "aten.flatten.using_ints", (by_head, 0, 1), (out,)))

    def _asks(self, how: MaskedAttention) -> Arg:
        """How many queries a sequence has, as a number."""
        if isinstance(how.asks, int):
            return how.asks
        if how.asks not in self.sizes:
            made = self._value("queries", ScalarType(ScalarKind.INT, how.asks))
            axis = 2 if how.heads is None else 1
            self.nodes.append(Node(Kind.OPERATOR, "aten.sym_size.int", (how.q, axis), (made,)))
            self.sizes[how.asks] = made
        return self.sizes[how.asks]

    def _length(self) -> Arg:
        """How many rows a sequence has at most."""
        if isinstance(self.mask.rows, int):
            return self.mask.rows
        if self.longest is None:
            self.longest = self._value("longest", ScalarType(ScalarKind.INT, self.mask.rows))
            self.nodes.append(Node(Kind.OPERATOR, "aten.sym_size.int", (self._given(PackedInput.LIVE), 1), (self.longest,)))
        return self.longest

    def _bias(self, v: Value, heads: Dim) -> Value:
        """[1, heads or 1, S, S] as [T, heads, S]: a live row's, for the live rows of its sequence; once for all layers."""
        if (name := f"{v.name}.bias") not in self.packed:
            (_, alike, s, _), dtype, t = shape_of(v), self._type(v).dtype, self.live_rows
            rows = self._node("aten.unsqueeze.default", (self._given(PackedInput.POSITIONS), 1), "rows", DType.I64, (t, 1))
            by_rows = self._permuted(v, (2, 3, 1, 0))
            one = self._node("aten.select.int", (by_rows, 3, 0), v.name, dtype, (s, s, alike))
            at = (rows, self._given(PackedInput.KEY_PLACES))
            read = self._node("aten.index.Tensor", (one, at), v.name, dtype, (t, s, alike))
            turned = self._permuted(read, (0, 2, 1))
            if alike != heads:
                sizes = (self.live_count(), self._known(heads), self._known(s))
                turned = self._node("aten.expand.default", (turned, sizes), v.name, dtype, (t, heads, s))
            self.packed[name] = self._node("aten.contiguous.default", (turned,), v.name, dtype, (t, heads, s))
        return self.packed[name]

    def _by_token(self, v: Value, *, turned: bool) -> Value:
        """[1, heads, T, width] as [T, heads, width], or [heads, T, width]; turned, T and width stand the other way round."""
        if len(shape_of(v)) == 3:
            return self._permuted(v, (2, 0, 1) if turned else (1, 0, 2))
        by_token = self._permuted(v, (0, 3, 1, 2) if turned else (0, 2, 1, 3))
        return self._node("aten.select.int", (by_token, 0, 0), v.name, self._type(v).dtype, shape_of(by_token)[1:])

    def _tokens(self, v: Value, places: RowPlaces) -> tuple[Value, int, int]:
        """The live rows of a value with rows in front, [T, ..], and which axes of the value sequences and rows are."""
        b, s = places.sequence, places.row
        assert b is not None and s is not None
        front = self._permuted(self.rows(v), self._front(b.axis, s.axis, len(shape_of(v))))
        some = self._node("aten.select.int", (front, 0, 0), v.name, self._type(v).dtype, shape_of(front)[1:])
        return some, b.axis, s.axis

    def _unpack(self, v: Value, places: RowPlaces, dead: float, out: Value) -> None:
        """A value of its live rows; dead ones are a number."""
        tokens, b, s = self._tokens(v, places)
        rest, dtype = shape_of(tokens)[1:], self._type(v).dtype
        sizes = (self.mask.sequences, self.mask.rows)
        spread = self._node("aten.index.Tensor", (tokens, (self._given(PackedInput.INVERSE),)), v.name, dtype, (*sizes, *rest))
        live = self._given(PackedInput.LIVE)
        for i in range(len(rest)):
            live = self._node("aten.unsqueeze.default", (live, 2 + i), "live", DType.BOOL, (*sizes, *(1,) * (i + 1)))
        args = (live, spread, dead)
        self.changed.add(out.name)
        if (b, s) == (0, 1):
            self.nodes.append(Node(Kind.OPERATOR, "aten.where.ScalarOther", args, (out,)))
            return
        filled = self._node("aten.where.ScalarOther", args, v.name, dtype, (*sizes, *rest))
        order = self._back(b, s, len(sizes) + len(rest))
        self.nodes.append(Node(Kind.OPERATOR, "aten.permute.default", (filled, order), (out,)))

    def _pick(self, node: Node) -> None:
        """One row of each sequence."""
        x, out = node.args[0], node.outs[0]
        assert isinstance(x, Value)
        places = self.demands.rows[x.name]
        row = picked_row(node, places, self.graph, self.demands.facts, told_rows(self.graph))
        assert row is not None
        tokens, b, s = self._tokens(x, places)
        rest, dtype = shape_of(tokens)[1:], self._type(x).dtype
        which = self._given(_PICKED[row])
        picked = self._node("aten.index_select.default", (tokens, 0, which), x.name, dtype, (self.mask.sequences, *rest))
        one = self._node("aten.unsqueeze.default", (picked, 1), x.name, dtype, (self.mask.sequences, 1, *rest))
        back = self._permuted(one, self._back(b, s, 2 + len(rest)))
        self.changed.add(out.name)
        one_left = packet(node.op) in ("aten.slice", "aten.gather")
        args: tuple[Arg, ...] = (back, s, 0, 1) if one_left else (back, s, 0)
        self.nodes.append(Node(Kind.OPERATOR, "aten.slice.Tensor" if one_left else "aten.select.int", args, (out,)))
