"""Graphs whose caches are static: every size is a number, and how much of a buffer is filled is counted on the device.

    %y = cat((%past[s], %new[1]), 2)   ->   %y = index_copy_(%buffer[C], 2, %count + arange(1), %new)
    attention(q, %y, ...)              ->   attention(q, %y, ..., mask = ... & (arange(C) < %count + 1))
    arange(s + 1)                      ->   arange(C)
    add(%x, s)                         ->   add(%x, %count)

A step of a generation has another length every time, so nothing of it would ever be recorded. In a buffer all steps are the same
kernels on the same memory, and one recording is replayed for as long as the buffer lasts (decision 180).

Rows of a buffer behind the filled ones are zeros, or values computed from zeros, so no op that mixes rows may read them. A value
as long as the filled part may therefore be viewed, computed element by element, and read by attention, whose mask hides the rest.
Running sums from the first row on, rows picked by their numbers, and the last rows are right, too. If there is any other reader,
the graph is not rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hotfuse.analysis.attention import BOUNDED, FUSED
from hotfuse.analysis.growth import Growth, read_in_any_strides
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.device.counted_nodes import CountedNodes
from hotfuse.compile.device.length_bounds import TRUE, Bounds, KnownBounds, Linear
from hotfuse.ir.dims import Dim, Sym, evaluate, expr, substitute, sym, symbols
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, output_values, values_in
from hotfuse.ir.types import ROW_MAJOR, DType, ScalarType, TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet

_RESHAPES = frozenset(f"aten.{n}" for n in ("view", "reshape", "_unsafe_view"))
_VIEWS = frozenset(f"aten.{n}" for n in ("unsqueeze", "squeeze", "expand", "permute", "transpose", "clone", "contiguous", "alias",
                                         "detach", "expand_as"))  # fmt: skip
"""Each dim of what they give is one of their operand's, or new."""
_FILLS = frozenset(f"aten.{n}" for n in ("ones", "zeros", "full", "new_ones", "new_zeros", "new_full"))
_NUMBERED = frozenset(f"aten.{n}" for n in ("add", "sub", "mul", "le", "lt", "ge", "gt", "eq", "ne"))
"""Take a tensor of one number where they take a number."""
_FLASH, _EVEN, _MAX_WIDTH = (DType.F16, DType.BF16), 8, 256
"""What the library's flash kernels take."""
_LAST = (1 << 63) - 1
_WRITES = "aten.index_copy_.default"
_SHORT, _LONG = 64, 4096
"""Lengths at which an expression is evaluated to tell what it is."""


@dataclass(frozen=True, slots=True)
class StaticCacheGraph:
    """A graph on buffers. Its inputs are those of the call that do not grow, in their order, the buffers, and the count, which its
    caller raises behind it: nothing in a graph says that one node reads what another one writes."""

    graph: Graph
    capacity: int
    growths: tuple[Growth, ...]
    rows: int
    """That a call adds."""
    given: tuple[int, ...]
    """The inputs of a call that are handed on."""
    long: tuple[tuple[int, int], ...]
    """Those of them that are as long as the filled part behind the call, by their place in `given`, with the dim."""
    results: tuple[int | None, ...]
    """For every result of a call: the buffer that it lies in; None where it is the next result of this graph."""


def not_static(because: str) -> CaptureError:
    """Why a graph's caches cannot be static."""
    return CaptureError("caches cannot be static", because=because, why=Why.NOT_CAPTURABLE)


def with_static_caches(graph: Graph, capacity: int) -> StaticCacheGraph:
    """The graph with buffers of so many rows; raises CaptureError where something reads more than attention hides."""
    return _StaticCacheRewriter(graph, capacity).rewritten()


class _StaticCacheRewriter(CountedNodes):
    def __init__(self, graph: Graph, capacity: int) -> None:
        self.graph, self.capacity = graph, capacity
        self.growths = read_in_any_strides(graph)
        if not self.growths:
            raise not_static("nothing grows")
        grown = graph.inputs[self.growths[0].input].type
        assert isinstance(grown, TensorType)
        super().__init__(graph, grown.device)
        self.symbol, self.rows = self._one_length()
        self.others = self._as_long()
        self.counts: dict[str, int | Dim] = {}
        """Numbers of the host: what they are, with the length as a symbol."""
        self.hidden: dict[str, Value] = {}
        self.positions: set[str] = set()
        """Values whose every element is the number of its own row."""
        self._filled: Value | None = None
        self._bounds = KnownBounds()
        self._ends: tuple[Value, Value] | None = None
        self._repeated: dict[str, Value] = {}
        """Values that repeat each head of another one several times."""

    def rewritten(self) -> StaticCacheGraph:
        grown = {g.input: k for k, g in enumerate(self.growths)}
        given = tuple(i for i in range(len(self.graph.inputs)) if i not in grown)
        inputs = [self._retyped(self.graph.inputs[i]) for i in given]
        long = tuple((k, d) for k, i in enumerate(given) if (d := self._long(self.graph.inputs[i])) is not None)
        buffers = [self._buffer(g) for g in self.growths]
        places = self._new("places", "aten.add.Tensor", (self._arange(self.rows), self.count), DType.I64, (self.rows,))
        by_node = {g.node: k for k, g in enumerate(self.growths)}
        for i, node in enumerate(self.graph.nodes):
            if i in by_node:
                g, (_, new) = self.growths[by_node[i]], _joined(node)
                made = Value(node.outs[0].name, buffers[by_node[i]].type)
                self._emit(replace(node, op=_WRITES, attrs=(), outs=(made,),
                                   args=(buffers[by_node[i]], g.dim, places, self._value(new))))  # fmt: skip
            else:
                self._node(node)
        names = {self.graph.nodes[g.node].outs[0].name: k for k, g in enumerate(self.growths)}
        outputs = output_values(self.graph)
        if len(outputs) != len(self.graph.outputs):
            raise not_static("results are nested")
        results = tuple(names.get(v.name) for v in outputs)
        kept = tuple(self._value(v) for v in outputs if v.name not in names)
        for v in outputs:
            if v.name not in names and self._long(v) is not None:
                raise not_static(f"the result %{v.name} is as long as what grows")
        nodes = _read(self.nodes, {v.name for v in kept})
        made = Graph(f"{self.graph.name}_static_caches", (*inputs, *buffers, self.count), self.graph.params, nodes, kept)
        return StaticCacheGraph(made, self.capacity, self.growths, self.rows, given, long, results)

    # --- sizes -----------------------------------------------------------------------------------

    def _one_length(self) -> tuple[str, int]:
        lengths, rows = set[str](), set[Dim]()
        for g in self.growths:
            past, new = _joined(self.graph.nodes[g.node])
            assert isinstance(past.type, TensorType) and isinstance(new.type, TensorType)
            lengths.add(str(past.type.shape[g.dim]))
            rows.add(new.type.shape[g.dim])
        name = next(iter(lengths))
        (added,) = rows if len(rows) == 1 else (0,)
        if len(lengths) != 1 or not isinstance(added, int) or added < 1:
            raise not_static("caches grow by different numbers of rows, or by a number that only a call tells")
        past, _ = _joined(self.graph.nodes[self.growths[0].node])
        assert isinstance(past.type, TensorType)
        if len(symbols(past.type.shape[self.growths[0].dim])) != 1 or name not in symbols(past.type.shape[self.growths[0].dim]):
            raise not_static("the length of what grows is no size of its own")
        return name, added

    def _as_long(self) -> dict[str, Dim]:
        """Other sizes that the guards hold to be the past's and a number: that of a mask, of the past and the new rows."""
        named = {s for v in self.graph.inputs for d in _dims(v) for s in symbols(d)} - {self.symbol}
        found: dict[str, Dim] = {}
        for name in sorted(named):
            asked = [g for g in self.graph.guards if name in symbols(g) and symbols(g) <= {name, self.symbol}]

            def may(past: int, size: int, name: str = name, asked: Sequence[Sym] = asked) -> bool:
                return all(evaluate(g, {name: size, self.symbol: past}) for g in asked)

            for more in (self.rows, 0):
                if all(may(n, n + k) == (k == more) for n in (_SHORT, _LONG) for k in range(more - 2, more + 3)):
                    found[name] = expr("+", sym(self.symbol), more)
        return found

    def _offset(self, d: Dim) -> int | None:
        """By how much a size is above the length of the past; None where it is a number."""
        d = substitute(d, self.others)
        if isinstance(d, int):
            return None
        if symbols(d) - {self.symbol}:
            raise not_static(f"another size changes, too: {d}")
        few, many = (evaluate(d, {self.symbol: n}) for n in (_SHORT, _LONG))
        if many - few != _LONG - _SHORT:
            raise not_static(f"a size is neither a number nor a length: {d}")
        return few - _SHORT

    def _size(self, d: Dim) -> int:
        offset = self._offset(d)
        if offset is None:
            assert isinstance(d, int)
            return d
        if offset != self.rows:
            raise not_static(f"something is as long as {d}")
        return self.capacity

    def _retyped(self, v: Value) -> Value:
        if not isinstance(v.type, TensorType):
            raise not_static(f"%{v.name} is no tensor")
        made = Value(v.name, replace(v.type, shape=tuple(self._size(d) for d in v.type.shape)))
        self.values[v.name] = made
        return made

    def _buffer(self, g: Growth) -> Value:
        v = self.graph.inputs[g.input]
        assert isinstance(v.type, TensorType)
        shape = tuple(self.capacity if d == g.dim else n for d, n in enumerate(v.type.shape))
        if any(not isinstance(n, int) for n in shape):
            raise not_static(f"another size changes, too: that of %{v.name}")
        return Value(v.name, TensorType(v.type.dtype, shape, ROW_MAJOR, v.type.device))

    def _long(self, v: Value) -> int | None:
        """The dim in which a value is as long as the filled part; None where it is not."""
        if not isinstance(v.type, TensorType):
            return None
        found = [d for d, n in enumerate(v.type.shape) if not isinstance(n, int)]
        if len(found) > 1:
            raise not_static(f"%{v.name} is long in two dims")
        return found[0] if found else None

    # --- nodes -----------------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        if node.graphs or node.kind is not Kind.OPERATOR:
            raise not_static(f"{node.op} runs other graphs, or moves data")
        if node.outs and all(isinstance(v.type, ScalarType) for v in node.outs):
            for v in node.outs:
                assert isinstance(v.type, ScalarType)
                if v.type.expr is None:
                    raise not_static(f"{node.op} gives a number that is no size")
                self.counts[v.name] = v.type.expr
            return
        self._note(node)
        long = [self._long(v) for v in node.ins]
        made = [self._long(v) for v in node.outs]
        counted = any(v.name in self.counts for v in node.ins)
        if not counted and all(d is None for d in (*long, *made)):
            self._same(node, tuple(map(self._retyped, node.outs)))
            return
        if len(node.outs) != 1:
            raise not_static(f"{node.op} reads what grows")
        op = packet(node.op)
        if op == "aten.arange":
            self._arange_of(node)
        elif op == FUSED:
            self._attention(node)
        elif op == "aten.slice":
            self._slice(node)
        elif op == "aten.index":
            self._index(node)
        elif self._row_by_row(node, long[0] if long else None, made[0]):
            self._same(node, (self._retyped(node.outs[0]),))
        elif op in _VIEWS or op in _RESHAPES:
            self._view(node, long[0], made[0])
        elif lookup(node.op).access is Access.POINTWISE:
            self._pointwise(node, made[0])
        else:
            raise not_static(f"{node.op} reads what grows")

    def _row_by_row(self, node: Node, was: int | None, now: int | None) -> bool:
        """Whether it fills rows with a number, repeats all of each, or sums those up to each."""
        rank = len(_dims(node.outs[0]))
        dim, times = argument(node, "dim"), argument(node, "repeats")
        match packet(node.op):
            case op if op in _FILLS:
                return not isinstance(argument(node, "fill_value"), Value) and was is None
            case "aten.cumsum":
                return isinstance(dim, int) and dim % rank == now
            case "aten.repeat_interleave":
                return isinstance(times, int) and isinstance(dim, int) and dim % rank != was
            case _:
                return False

    def _index(self, node: Node) -> None:
        """Rows by their own numbers."""
        source, places = node.args[0], node.args[1]
        assert isinstance(source, Value) and isinstance(places, tuple)
        dim = self._long(source)
        if dim is None or dim >= len(places) or not isinstance(at := places[dim], Value) or at.name not in self.positions:
            raise not_static("rows are picked by other numbers than their own")
        if any(isinstance(p, Value) and self._long(p) is not None for k, p in enumerate(places) if k != dim):
            raise not_static("rows are picked by other numbers than their own")
        self._same(node, (self._retyped(node.outs[0]),))

    def _view(self, node: Node, was: int | None, now: int | None) -> None:
        if (was is None) != (now is None) and packet(node.op) != "aten.expand":
            raise not_static(f"{node.op} takes away the dim that grows")
        out = self._retyped(node.outs[0])
        source = self._value(node.ins[0])
        assert isinstance(source.type, TensorType) and isinstance(out.type, TensorType)
        if packet(node.op) in _RESHAPES and was is not None and now is not None:
            before, behind = _around(source.type.shape, was), _around(out.type.shape, now)
            if before != behind:
                raise not_static(f"{node.op} joins the dim that grows with others")
        self._same(node, (out,))
        if source.name in self.positions:
            self.positions.add(out.name)
        self._repeats_heads(node, source, out)

    def _repeats_heads(self, node: Node, source: Value, out: Value) -> None:
        """reshape(expand(unsqueeze(x, 2))) of [texts, heads, rows, width]: every head several times, one behind the other."""
        was, now = _dims(source), _dims(out)
        match packet(node.op):
            case "aten.unsqueeze" if len(was) == 4 and now[:2] == was[:2] and now[2] == 1 and now[3:] == was[2:]:
                self._repeated[out.name] = source
            case "aten.expand" if len(was) == 5 and was[2] == 1 and (*now[:2], *now[3:]) == (*was[:2], *was[3:]):
                self._repeats(source, out)
            case "aten.reshape" | "aten.view" if len(was) == 5 and now == (was[0], _product(was[1:3]), *was[3:]):
                self._repeats(source, out)
            case _:
                pass

    def _repeats(self, source: Value, out: Value) -> None:
        if source.name in self._repeated:
            self._repeated[out.name] = self._repeated[source.name]

    def _slice(self, node: Node) -> None:
        source, dim = node.ins[0], argument(node, "dim", 0)
        begin, end, step = argument(node, "start", 0), argument(node, "end", _LAST), argument(node, "step", 1)
        assert isinstance(source.type, TensorType)
        if not isinstance(dim, int) or step not in (None, 1):
            raise not_static(f"{node.op} by what is no number")
        if dim % len(source.type.shape) != self._long(source):
            if any(isinstance(a, Value) for a in (begin, end)):
                raise not_static(f"{node.op} up to the length of what grows")
        elif isinstance(begin, Value) and (n := _dims(node.outs[0])[dim]) and isinstance(n, int) and begin.name in self.counts:
            offset = self._offset(self.counts[begin.name])
            if offset is None or offset < 0 or offset + n > self.rows:
                raise not_static(f"{node.op} of rows that are not the last")
            at = self._new("places", "aten.add.Tensor", (self._arange(n), self._counted(offset)), DType.I64, (n,))
            out = self._retyped(node.outs[0])
            self._emit(Node(Kind.OPERATOR, "aten.index_select.default", (self._value(source), dim, at), (out,), loc=node.loc))
            return
        elif begin not in (None, 0) or not (end is None or end == _LAST or (isinstance(end, Value) and self._whole(end))):
            raise not_static(f"{node.op} of a part of what grows")
        else:
            begin, end = 0, _LAST
        out = self._retyped(node.outs[0])
        self._emit(replace(node, outs=(out,), args=(self._value(source), dim, begin, end), attrs=()))

    def _whole(self, v: Value) -> bool:
        return v.name in self.counts and self._offset(self.counts[v.name]) == self.rows

    def _pointwise(self, node: Node, now: int | None) -> None:
        out = self._retyped(node.outs[0])
        assert isinstance(out.type, TensorType)
        for v in node.ins:
            d, rank = self._long(v), len(v.type.shape) if isinstance(v.type, TensorType) else 0
            if d is not None and (now is None or rank - d != len(out.type.shape) - now):
                raise not_static(f"{node.op} reads what grows across another dim")
        if not any(v.name in self.counts for v in node.ins):
            self._same(node, (out,))
            return
        if packet(node.op) not in _NUMBERED or any(True for _, a in node.attrs for _ in values_in(a)):
            raise not_static(f"{node.op} computes with the length")
        args = tuple(self._number(a.name) if isinstance(a, Value) and a.name in self.counts else self._arg(a) for a in node.args)
        self._emit(replace(node, op=f"{packet(node.op)}.Tensor", outs=(out,), args=args))

    def _arange_of(self, node: Node) -> None:
        begin, end, step = argument(node, "start", 0), argument(node, "end"), argument(node, "step", 1)
        first, last = self._expr(begin), self._expr(end)
        if step != 1 or first is None or last is None:
            raise not_static("positions in other steps than one")
        out = self._retyped(node.outs[0])
        assert isinstance(out.type, TensorType)
        if first == 0:
            self._emit(self._arange_node(self._size(last), out))
            if not isinstance(last, int):
                self.positions.add(out.name)
            return
        offset, until = self._offset(first), self._offset(last)
        if offset is None or until is None or out.type.dtype is not DType.I64:
            raise not_static("positions that begin and end elsewhere")
        self._emit(Node(Kind.OPERATOR, "aten.add.Tensor", (self._arange(until - offset), self._counted(offset)), (out,)))

    def _attention(self, node: Node) -> None:
        query, key, value, mask = (argument(node, name) for name in ("query", "key", "value", "attn_mask"))
        if not all(isinstance(v, Value) and isinstance(v.type, TensorType) for v in (query, key, value)):
            raise not_static("attention of what are no tensors")
        assert isinstance(query, Value) and isinstance(key, Value) and isinstance(value, Value)
        ranks = [len(v.type.shape) if isinstance(v.type, TensorType) else 0 for v in (query, key, value)]
        if self._long(query) is not None or self._long(key) != ranks[1] - 2 or self._long(value) != ranks[2] - 2:
            raise not_static("attention across another dim than that of keys")
        if argument(node, "is_causal", default=False) is not False or argument(node, "dropout_p", 0.0) != 0.0:
            raise not_static("attention that is causal by itself, or drops")
        if mask is not None and not (isinstance(mask, Value) and isinstance(mask.type, TensorType)):
            raise not_static("attention with a mask that is no tensor")
        if mask is not None and self._long(mask) != len(mask.type.shape) - 1:  # pyright: ignore - a tensor, as seen above
            raise not_static("attention with a mask that is not as long as its keys")
        seen = (self._value(query), self._value(key), self._value(value))
        if (mask is None or self._bounds.of(mask) == TRUE) and self._unmasked(node, *seen):
            return
        shown = self._shown(mask, ranks[1])
        rest: tuple[tuple[str, Arg], ...] = (("scale", argument(node, "scale")),)
        rest += (("enable_gqa", True),) if argument(node, "enable_gqa", default=False) is True else ()
        out = self._retyped(node.outs[0])
        self._emit(replace(node, outs=(out,), args=(*seen, shown), attrs=rest))

    def _unmasked(self, node: Node, query: Value, key: Value, value: Value) -> bool:
        """Attention of one text that looks at all that is filled, in the library's flash kernels: they take lengths as they lie on
        the device, and each head of keys for several of queries. False where they do not have it."""
        key, value = self._repeated.get(key.name, key), self._repeated.get(value.name, value)
        types = [v.type for v in (query, key, value) if isinstance(v.type, TensorType) and len(v.type.shape) == 4]
        if len(types) != 3 or {t.dtype for t in types} - set(_FLASH) or len({t.dtype for t in types}) != 1:
            return False
        (texts, heads, rows, width), (_, kv, _, _), (_, _, _, wide) = (_dims(v) for v in (query, key, value))
        if texts != 1 or wide != width or not isinstance(width, int) or width % _EVEN or width > _MAX_WIDTH:
            return False
        if not isinstance(heads, int) or not isinstance(kv, int) or not isinstance(rows, int) or heads % kv:
            return False
        dtype = types[0].dtype
        flat: list[Value] = []
        for v, n, h in ((query, rows, heads), (key, self.capacity, kv), (value, self.capacity, kv)):
            one = self._new("one", "aten.select.int", (v, 0, 0), dtype, (h, n, width))
            flat.append(self._new("flat", "aten.transpose.int", (one, 0, 1), dtype, (n, h, width)))
        args = (*flat, *self._lengths(rows), argument(node, "scale"), self.capacity, False)
        seen = self._new("seen", BOUNDED, args, dtype, (rows, heads, width))
        text = self._new("text", "aten.unsqueeze.default", (seen, 0), dtype, (1, rows, heads, width))
        self._emit(replace(node, op="aten.transpose.int", args=(text, 1, 2), attrs=(), outs=(self._retyped(node.outs[0]),)))
        return True

    def _lengths(self, rows: int) -> tuple[Value, Value]:
        """Where the queries of one text begin and end, and its keys."""
        if self._ends is None:
            ends: list[Value] = []
            for last in (rows, self._counted(self.rows)):
                places = self._new("ends", "aten.mul.Tensor", (self._arange(2), last), DType.I64, (2,))
                ends.append(self._new("ends", "aten.to.dtype", (places, DType.I32), DType.I32, (2,)))
            self._ends = ends[0], ends[1]
        return self._ends

    def _note(self, node: Node) -> None:
        """What is known of a node before it is rewritten."""
        if len(node.outs) != 1:
            return
        if packet(node.op) == "aten.arange" and argument(node, "step", 1) == 1:
            first, last = (self._linear(argument(node, name, 0)) for name in ("start", "end"))
            if first is not None and last is not None:
                self._bounds.note(node, Bounds(first, (last[0], last[1] - 1)))
            return
        self._bounds.note(node, added=self._linear(argument(node, "other")) if packet(node.op) == "aten.add" else None)

    def _linear(self, a: Arg) -> Linear | None:
        d = self._expr(a)
        if d is None:
            return None
        offset = self._offset(d)
        return (1, offset) if offset is not None else (0, d) if isinstance(d, int) else None

    def _shown(self, mask: Value | None, rank: int) -> Value:
        """A mask that hides what is not filled as well."""
        known = f"{rank}" if mask is None else f"%{mask.name}"
        if known in self.hidden:
            return self.hidden[known]
        filled = self._filled or self._new("filled", "aten.lt.Tensor", (self._arange(self.capacity), self._counted(self.rows)),
                                           DType.BOOL, (self.capacity,))  # fmt: skip
        self._filled = filled
        if mask is None:
            shape = (*[1] * (rank - 1), self.capacity)
            made = self._new("shown", "aten.view.default", (filled, shape), DType.BOOL, shape)
        else:
            own = self._value(mask)
            assert isinstance(own.type, TensorType)
            shape = tuple(n for n in own.type.shape if isinstance(n, int))
            if own.type.dtype is DType.BOOL:
                made = self._new("shown", "aten.logical_and.default", (own, filled), DType.BOOL, shape)
            else:
                made = self._new("shown", "aten.where.ScalarOther", (filled, own, -math.inf), own.type.dtype, shape)
        self.hidden[known] = made
        return made

    # --- pieces ----------------------------------------------------------------------------------

    def _number(self, name: str) -> Arg:
        d = self.counts[name]
        offset = self._offset(d)
        return d if offset is None and isinstance(d, int) else self._counted(offset or 0)

    def _expr(self, a: Arg) -> Dim | None:
        if isinstance(a, Value):
            return self.counts.get(a.name)
        return a if isinstance(a, int) else None

    def _value(self, v: Value) -> Value:
        if v.name not in self.values:
            raise not_static(f"%{v.name} is read, which grows")
        return self.values[v.name]

    def _arg(self, a: Arg) -> Arg:
        if isinstance(a, Value):
            return self._size(self.counts[a.name]) if a.name in self.counts else self._value(a)
        return tuple(map(self._arg, a)) if isinstance(a, tuple) else a

    def _same(self, node: Node, outs: tuple[Value, ...]) -> None:
        """The node on what its operands have become."""
        attrs = tuple((k, self._arg(a)) for k, a in node.attrs)
        self._emit(replace(node, outs=outs, args=tuple(map(self._arg, node.args)), attrs=attrs))


def _read(nodes: Sequence[Node], wanted: set[str]) -> tuple[Node, ...]:
    """Those that write buffers, or that somebody reads: masks that hide nothing and repeated heads are not."""
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.op == _WRITES or any(v.name in wanted for v in node.outs):
            wanted |= {v.name for v in node.ins}
            kept.append(node)
    return tuple(reversed(kept))


def _product(dims: Sequence[Dim]) -> int:
    return math.prod(n for n in dims if isinstance(n, int))


def _dims(v: Value) -> tuple[Dim, ...]:
    return v.type.shape if isinstance(v.type, TensorType) else ()


def _joined(node: Node) -> tuple[Value, Value]:
    """What a node that grows joins."""
    pair = node.args[0]
    assert isinstance(pair, tuple) and len(pair) == 2
    past, new = pair
    assert isinstance(past, Value) and isinstance(new, Value)
    return past, new


def _around(shape: Sequence[Dim], dim: int) -> tuple[int, int]:
    """How many elements there are before a dim, and behind."""
    numbers = [n for n in shape if isinstance(n, int)]
    return math.prod(numbers[:dim]), math.prod(numbers[dim + 1 :])
