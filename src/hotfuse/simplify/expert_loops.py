"""A loop over experts, as models spell it in Python, becomes products by expert: rows are picked by nobody, and no size is data's.

    for e in range(E):                                               order, rank, ends = expert_order(flatten(ids), E)
        rows, k = where(ids == e)                                    x1 = index(x, [order // K])
        y = linear(x[rows], W_e, b_e) * w[rows, k]             ->    y = grouped_mm(x1, stack(W), ends) + index(stack(b), [ids1])
        out = out.index_add(0, rows, y)                              y = y * index(flatten(w), [order])
                                                                     out = out + index(y, [rank]).view(T, K, N).sum(1)

Traced, each expert is a gather, a product and a scatter over as many rows as data say, and what the code asked of those sizes
interrupts a run (`hotfuse.sized`): tier 1 of a mixture of eight took three times as long as the model's own code. Behind this it is
the graph that mixtures of `transformers` have (`simplify.experts`), with a kernel for each part (decision 261).

What has to be so, or nothing is done:
- experts are chosen by `topk` among as many columns as the loop has turns: every pair of a row and a choice has one expert;
- turns differ in their weights alone, and work on picked rows one by one: gathers, linear layers, arithmetic;
- what the path assumes of a turn's rows is nothing, or that there are some: evaluated for every number that there can be, or, where
  the number of tokens is open, up to the largest number that it compares with. The second is one check in the new graph, since what
  the code does for an expert without rows is not in the graph.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, expr
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, makers, output_values, readers, sources, unused_name
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.own.assume import ASSERTIONS, ASSUME, SIZE_OF, SIZED
from hotfuse.ops.own.experts import ORDER, PRODUCT
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.simplify.expert_spellings import PAIRS, respelled

MIN_EXPERTS, MAX_EXPERTS = 2, 256
"""Experts of a loop."""
MAX_PAIRS = 1 << 14
"""Pairs of a row and a choice for which what the path assumes is evaluated, one number after the other."""
_ROWS, _PAIRS = "rows", "pairs"

_NUMBERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "logical_and": lambda a, b: bool(a) and bool(b), "logical_or": lambda a, b: bool(a) or bool(b),
}  # fmt: skip
_ARITHMETIC = frozenset({"add", "sub", "mul"})
_COMPARED: Mapping[str, Callable[[Any, Any], Any]] = {
    f"{of}.{name}": compare for of in ("aten", "sym") for name, compare in _NUMBERS.items()
}
"""What is asked of numbers, be they data or the host's."""
_SIZES = frozenset({SIZE_OF, "aten.sym_size.int"})


class _NotALoop(Exception):
    """What was found is something else."""


@dataclass(slots=True)
class _Turn:
    """What one expert's turn consists of."""

    expert: int
    rows: Value
    choices: Value
    where: int
    """The node that picks."""
    picked: dict[str, str] = field(default_factory=dict[str, str])
    """Names of which rows they hold, and what each value that is made of picked rows is in the first turn."""
    nodes: list[int] = field(default_factory=list[int])
    """Of what is computed of picked rows, in order, without the last."""
    added: int = -1
    """The node that adds to the rows of the result."""
    sized: list[int] = field(default_factory=list[int])
    asked: set[str] = field(default_factory=set[str])
    """Conditions on how many rows there are."""


def expert_loops(graph: Graph) -> tuple[Graph, int]:
    """The graph with products by expert in the place of loops over experts, and how many loops there were."""
    done = 0
    while (found := _loop(graph) or _loop(respelled(graph))) is not None:
        graph, done = found, done + 1
    return graph, done


def _loop(graph: Graph | None) -> Graph | None:
    """The graph with one loop less."""
    if graph is None:
        return None
    maker = makers(graph)
    by_ids: dict[str, dict[int, int]] = {}
    for i, node in enumerate(graph.nodes):
        if node.op in PAIRS and len(node.outs) == 2:
            compared = maker.get(node.ins[0].name)
            eq = graph.nodes[compared] if compared is not None else None
            if eq is not None and eq.op == "aten.eq.Scalar" and isinstance(eq.args[0], Value) and type(eq.args[1]) is int:
                by_ids.setdefault(eq.args[0].name, {})[eq.args[1]] = i
    for name, turns in by_ids.items():
        if MIN_EXPERTS <= len(turns) <= MAX_EXPERTS and sorted(turns) == list(range(len(turns))):
            try:
                return _Loop(graph, maker, name, [turns[e] for e in range(len(turns))]).rewritten()
            except _NotALoop:
                continue
    return None


class _Loop:
    """A loop while it is looked into."""

    def __init__(self, graph: Graph, maker: Mapping[str, int], ids: str, where: Sequence[int]) -> None:
        self.graph, self.maker, self.reading = graph, maker, readers(graph)
        self.returned = {v.name for v in output_values(graph)}
        self.params = {p.value.name for p in graph.params}
        self.experts = len(where)
        chosen = graph.nodes[maker[ids]] if ids in maker else None
        _require(chosen is not None and packet(chosen.op) == "aten.topk" and chosen.outs[1].name == ids)
        assert chosen is not None
        self.ids = chosen.outs[1]
        scores, dim = argument(chosen, "self"), argument(chosen, "dim", -1)
        _require(isinstance(scores, Value) and dim in (-1, 1))
        assert isinstance(scores, Value)
        shape = _shape(self.ids)
        _require(len(shape) == 2 and _shape(scores)[-1:] == (self.experts,) and isinstance(shape[1], int))
        self.tokens, self.choices = shape[0], int(str(shape[1]))
        self.pairs: Dim = expr("*", self.tokens, self.choices)
        _require(self.pairs != 0 and (not isinstance(self.pairs, int) or self.pairs <= MAX_PAIRS))
        self.turns = [self._turn(e, at) for e, at in enumerate(where)]

    # --- what there is ---------------------------------------------------------------------------

    def _turn(self, expert: int, where: int) -> _Turn:
        rows, choices = self.graph.nodes[where].outs
        turn = _Turn(expert, rows, choices, where, {rows.name: _ROWS, choices.name: _PAIRS})
        left, numbers = sorted({*self.reading.get(rows.name, ()), *self.reading.get(choices.name, ())}), set[str]()
        seen = set[int]()
        while left:
            at = left.pop(0)
            if at in seen:
                continue
            seen.add(at)
            node = self.graph.nodes[at]
            _require(len(node.outs) == 1)
            _require(not any(v.name in self.returned for v in node.outs) or packet(node.op) == "aten.index_add")
            if node.op in _SIZES:
                numbers.add(node.outs[0].name)
                continue
            if node.op == SIZED and node.ins[0].name in (rows.name, choices.name):
                turn.picked[node.outs[0].name] = turn.picked[node.ins[0].name]
                turn.sized.append(at)
                turn.asked.add(node.ins[1].name)
            elif packet(node.op) == "aten.index_add":
                _require(turn.added < 0)
                turn.added = at
                continue
            else:
                turn.nodes.append(at)
                turn.picked[node.outs[0].name] = f"{len(turn.nodes)}"
            left = sorted({*left, *(r for v in node.outs for r in self.reading.get(v.name, ()))})
        _require(turn.added >= 0 and bool(turn.nodes))
        turn.nodes.sort()
        for n, at in enumerate(turn.nodes):
            turn.picked[self.graph.nodes[at].outs[0].name] = f"{n}"
        for name in numbers:  # what is asked of how many rows there are is asked for the checks alone
            self._only_asked(name, turn)
        return turn

    def _only_asked(self, name: str, turn: _Turn) -> None:
        left, seen = [name], set[str]()
        while left:
            value = left.pop()
            if value in seen or value in turn.asked:
                continue
            seen.add(value)
            _require(value not in self.returned)
            for at in self.reading.get(value, ()):
                node = self.graph.nodes[at]
                if node.op in ASSERTIONS and [v.name for v in node.ins] == [value]:
                    turn.asked.add(value)
                    turn.sized.append(at)
                    continue
                _require(packet(node.op) in _COMPARED or packet(node.op) == "aten.logical_not")
                left.append(node.outs[0].name)

    def _needs_rows(self, turn: _Turn) -> bool:
        """Whether the path assumes that a turn has rows; raises where it assumes anything else."""
        most = self.pairs
        if not isinstance(most, int):
            most = 1 + max([0, *map(self._compared_with, turn.asked)])
        answers = [all(self._holds(name, turn, n) for name in turn.asked) for n in range(most + 1)]
        _require(all(answers[1:]))
        return not answers[0]

    def _compared_with(self, name: str) -> int:
        """The largest number that a condition compares with: it is the same for all behind it. Raises where it does more."""
        _require(name in self.maker)
        node = self.graph.nodes[self.maker[name]]
        if node.op in _SIZES or node.op == "aten.scalar_tensor.default":
            numbers = [] if node.op in _SIZES else [node.args[0]]
        else:
            _require(packet(node.op).rpartition(".")[2] not in _ARITHMETIC)
            numbers = [a if not isinstance(a, Value) else self._compared_with(a.name) for a in node.args]
        _require(all(isinstance(n, int) and n < MAX_PAIRS for n in numbers))
        return max((int(str(n)) for n in numbers if not isinstance(n, bool)), default=0)

    def _holds(self, name: str, turn: _Turn, rows: int) -> Any:
        """What a condition is where a turn has so many rows."""
        _require(name in self.maker)
        node = self.graph.nodes[self.maker[name]]
        if node.op in _SIZES:
            _require(turn.picked.get(node.ins[0].name) in (_ROWS, _PAIRS) and node.args[1] == 0)
            return rows
        if node.op == "aten.scalar_tensor.default":
            return node.args[0]
        sides: list[Any] = [self._holds(a.name, turn, rows) if isinstance(a, Value) else a for a in node.args]
        if packet(node.op) == "aten.logical_not":
            return not sides[0]
        compare = _COMPARED.get(packet(node.op))
        _require(compare is not None and len(sides) == 2 and not node.attrs)
        assert compare is not None
        return compare(*sides)

    # --- what is made ----------------------------------------------------------------------------

    def rewritten(self) -> Graph:
        """The graph with the loop as products by expert."""
        first, nodes = self.turns[0], self.graph.nodes
        shapes = [self._described(turn) for turn in self.turns]
        _require(all(s == shapes[0] for s in shapes[1:]))
        needs = [self._needs_rows(turn) for turn in self.turns]
        chain = sorted(self.turns, key=lambda t: t.added)
        for one, two in itertools.pairwise(chain):
            out = nodes[one.added].outs[0].name
            _require(argument(nodes[two.added], "self") == nodes[one.added].outs[0] and out not in self.returned)
            _require(self.reading.get(out) == [two.added])
        gone = {i for t in self.turns for i in (*t.nodes, *t.sized, t.added, t.where)}
        write = _Writer(self.graph)
        result = self._written(write, first, nodes[chain[0].added], nodes[chain[-1].added].outs[0], needs_rows=any(needs))
        last = chain[-1].added
        made: list[Node] = []
        for i, node in enumerate(nodes):
            if i == last:
                made += result
            elif i not in gone:
                made.append(node)
        return _without_unread(replace(self.graph, nodes=tuple(made)))

    def _described(self, turn: _Turn) -> list[Any]:
        """What a turn does, alike for turns that differ in weights alone."""
        symbol = _shape(turn.rows)
        _require(len(symbol) == 1)
        told: list[Any] = []
        for at in turn.nodes:
            node = self.graph.nodes[at]
            of = node.outs[0].type
            _require(len(node.outs) == 1 and isinstance(of, TensorType) and of.shape[:1] == symbol and node.kind is Kind.OPERATOR)
            assert isinstance(of, TensorType)
            _require(all(isinstance(n, int) for n in of.shape[1:]) and not node.graphs and of.device == "cpu")
            weights = self._weights(turn, node)
            args = tuple(_told(a, turn.picked, weights) for a in node.args)
            attrs = tuple((n, _told(a, turn.picked, weights)) for n, a in node.attrs)
            told.append((node.op, args, attrs, of.dtype, of.shape[1:]))
        added = self.graph.nodes[turn.added]
        _require(argument(added, "dim") == 0 and argument(added, "alpha", 1) == 1)
        where, what = argument(added, "index"), argument(added, "source")
        _require(isinstance(where, Value) and turn.picked.get(where.name) == _ROWS)
        _require(isinstance(what, Value) and what.name in turn.picked and _shape(added.outs[0])[:1] == (self.tokens,))
        base = argument(added, "self")
        _require(isinstance(base, Value) and base.name not in turn.picked and base.type == added.outs[0].type)
        assert isinstance(what, Value)
        _require(len(_shape(what)) == len(_shape(added.outs[0])) == 2 and _dtype(what) is DType.F32)
        told.append(turn.picked[what.name])
        return told

    def _weights(self, turn: _Turn, node: Node) -> frozenset[str]:
        """The weights of a turn's node, where it has some; raises where picked rows do not go through it one by one."""
        name = packet(node.op)
        if name == "aten.linear":
            x, rest = node.args[0], [a for a in node.args[1:] if isinstance(a, Value)]
            _require(isinstance(x, Value) and x.name in turn.picked and len(_shape(x)) == 2 and _dtype(x) is DType.F32)
            _require(all(w.name in self.params for w in rest) and not node.attrs)
            return frozenset(w.name for w in rest)
        if name == "aten.index":
            source, places = argument(node, "self"), argument(node, "indices")
            _require(isinstance(source, Value) and source.name not in turn.picked and isinstance(places, tuple))
            assert isinstance(source, Value) and isinstance(places, tuple)
            kinds = [turn.picked.get(p.name) if isinstance(p, Value) else None for p in places]
            _require(kinds in ([_ROWS], [_ROWS, _PAIRS]))
            _require(_shape(source)[: len(kinds)] == (self.tokens, self.choices)[: len(kinds)])
            return frozenset()
        one_by_one = lookup(node.op).access is Access.POINTWISE and name != "hotfuse.assume"
        _require(one_by_one or name == "aten.unsqueeze")
        if name == "aten.unsqueeze":
            _require(argument(node, "dim") in (-1, len(_shape(node.ins[0]))))
        rank = len(_shape(node.outs[0]))
        for v in node.ins:  # rows stay the first axis of all of them
            inside = v.name in turn.picked
            _require(turn.picked.get(v.name) not in (_ROWS, _PAIRS))
            _require(len(_shape(v)) == rank - (name == "aten.unsqueeze") if inside else len(_shape(v)) == 0)
        return frozenset()

    def _written(self, write: _Writer, turn: _Turn, first: Node, out: Value, *, needs_rows: bool) -> list[Node]:
        pairs, i64 = self.pairs, _typed(self.ids, (self.pairs,))
        flat = write("aten.reshape.default", (self.ids, (_known(pairs),)), i64)
        order, rank, ends = write.several(f"{ORDER}.default", (flat, self.experts),
                                          (i64, i64, TensorType(DType.I32, (self.experts,))))  # fmt: skip
        rows = write("aten.floor_divide.default", (order, self.choices), i64) if self.choices > 1 else order
        instead: dict[str, Arg] = {}
        for at in turn.nodes:
            node = self.graph.nodes[at]
            of = node.outs[0].type
            assert isinstance(of, TensorType)
            new = replace(of, shape=(pairs, *of.shape[1:]))
            if packet(node.op) == "aten.index":
                source, places = argument(node, "self"), argument(node, "indices")
                assert isinstance(source, Value) and isinstance(places, tuple)
                if len(places) == 2:
                    rest = _shape(source)[2:]
                    source = write("aten.reshape.default", (source, (_known(pairs), *rest)), _typed(source, (pairs, *rest)))
                instead[node.outs[0].name] = write("aten.index.Tensor", (source, ((order if len(places) == 2 else rows),)), new)
            elif packet(node.op) == "aten.linear":
                x = node.args[0]
                assert isinstance(x, Value)
                instead[node.outs[0].name] = self._product(write, turn, node, instead[x.name], flat, order, ends, new)
            else:
                args = tuple(_mapped(a, instead) for a in node.args)
                attrs = tuple((n, _mapped(a, instead)) for n, a in node.attrs)
                instead[node.outs[0].name] = write(node.op, args, new, attrs)
        what, base = argument(self.graph.nodes[turn.added], "source"), argument(first, "self")
        assert isinstance(what, Value) and isinstance(base, Value)
        width = _shape(what)[1]
        back = write("aten.index.Tensor", (instead[what.name], (rank,)), _typed(what, (pairs, width)))
        if self.choices > 1:
            apart = write("aten.reshape.default", (back, (_known(self.tokens), self.choices, width)),
                          _typed(what, (self.tokens, self.choices, width)))  # fmt: skip
            back = write("aten.sum.dim_IntList", (apart, (1,)), _typed(what, (self.tokens, width)))
        if needs_rows:
            back = write(ASSUME, (back, self._all_chosen(write, ends)), _typed(what, (self.tokens, width)))
        write.nodes.append(Node(Kind.OPERATOR, "aten.add.Tensor", (base, back), (out,), loc=first.loc))
        return write.nodes

    def _product(
        self, write: _Writer, turn: _Turn, node: Node, x: Arg, flat: Value, order: Value, ends: Value, new: TensorType
    ) -> Value:
        """One product for each expert that has rows, of the weights of all turns."""
        nth = turn.nodes.index(next(i for i in turn.nodes if self.graph.nodes[i] is node))
        alike = [self.graph.nodes[t.nodes[nth]] for t in self.turns]
        weights = tuple(argument(n, "weight") for n in alike)
        w = weights[0]
        assert isinstance(w, Value)
        n_out, n_in = _shape(w)
        stacked = write("aten.stack.default", (weights,), _typed(w, (self.experts, n_out, n_in)))
        turned = write("aten.transpose.int", (stacked, 1, 2), _typed(w, (self.experts, n_in, n_out)))
        plain = write("aten.contiguous.default", (turned,), _typed(w, (self.experts, n_in, n_out)))
        y = write(f"{PRODUCT}.default", (x, plain, ends), new)
        biases = tuple(argument(n, "bias") for n in alike)
        if biases[0] is None:
            return y
        b = biases[0]
        assert isinstance(b, Value)
        table = write("aten.stack.default", (biases,), _typed(b, (self.experts, n_out)))
        chosen = write("aten.index.Tensor", (flat, (order,)), _typed(flat, _shape(flat)))
        added = write("aten.index.Tensor", (table, (chosen,)), new)
        return write("aten.add.Tensor", (y, added), new)

    def _all_chosen(self, write: _Writer, ends: Value) -> Value:
        """Whether every expert has rows: ends ascend from one to the next, and the first is none."""
        i32, truth = TensorType(DType.I32, (self.experts - 1,)), TensorType(DType.BOOL)
        later = write("aten.slice.Tensor", (ends, 0, 1, self.experts), i32)
        sooner = write("aten.slice.Tensor", (ends, 0, 0, self.experts - 1), i32)
        ascend = write("aten.gt.Tensor", (later, sooner), TensorType(DType.BOOL, (self.experts - 1,)))
        first = write("aten.select.int", (ends, 0, 0), TensorType(DType.I32))
        some = write("aten.gt.Scalar", (first, 0), truth)
        return write("aten.logical_and.default", (write("aten.all.default", (ascend,), truth), some), truth)


class _Writer:
    """Nodes with names that nobody has."""

    def __init__(self, graph: Graph) -> None:
        self._taken = {v.name for v in sources(graph)} | {v.name for n in graph.nodes for v in n.outs}
        self.nodes: list[Node] = []

    def __call__(self, op: str, args: tuple[Arg, ...], of: TensorType, attrs: tuple[tuple[str, Arg], ...] = ()) -> Value:
        (out,) = self.several(op, args, (of,), attrs)
        return out

    def several(
        self, op: str, args: tuple[Arg, ...], of: tuple[TensorType, ...], attrs: tuple[tuple[str, Arg], ...] = ()
    ) -> tuple[Value, ...]:
        """A node with several results."""
        outs = tuple(Value(unused_name("expert.", self._taken), t) for t in of)
        self._taken |= {v.name for v in outs}
        self.nodes.append(Node(Kind.OPERATOR, op, args, outs, attrs))
        return outs


def _require(holds: bool) -> None:  # noqa: FBT001  (its name says what is required of it)
    if not holds:
        raise _NotALoop


def _known(size: Dim) -> int:
    """A size as an argument of a reshape, in which one may be left open."""
    return size if isinstance(size, int) else -1


def _shape(v: Value) -> tuple[Any, ...]:
    return v.type.shape if isinstance(v.type, TensorType) else ()


def _dtype(v: Value) -> DType | None:
    return v.type.dtype if isinstance(v.type, TensorType) else None


def _typed(v: Value, shape: tuple[Any, ...]) -> TensorType:
    """Row-major, of a value's kind."""
    assert isinstance(v.type, TensorType)
    return TensorType(v.type.dtype, shape, device=v.type.device)


def _told(arg: Arg, picked: Mapping[str, str], weights: frozenset[str]) -> Any:
    """An argument as turns that do the same have it; weights are told apart by their types alone."""
    if isinstance(arg, Value):
        return ("weight", arg.type) if arg.name in weights else ("picked", picked[arg.name]) if arg.name in picked else arg.name
    return tuple(_told(a, picked, weights) for a in arg) if isinstance(arg, tuple) else (type(arg).__name__, arg)


def _mapped(arg: Arg, instead: Mapping[str, Arg]) -> Arg:
    if isinstance(arg, Value):
        return instead.get(arg.name, arg)
    return tuple(_mapped(a, instead) for a in arg) if isinstance(arg, tuple) else arg


def _without_unread(graph: Graph) -> Graph:
    """Without nodes that nobody reads any more: comparisons, and what was asked of sizes."""
    nodes = list(graph.nodes)
    while True:
        read = {v.name for n in nodes for v in n.ins} | {v.name for v in output_values(graph)}
        kept = [n for n in nodes if n.kind is not Kind.OPERATOR or not n.outs or any(v.name in read for v in n.outs)
                or packet(n.op) not in _DROPPED]  # fmt: skip
        if len(kept) == len(nodes):
            return replace(graph, nodes=tuple(kept))
        nodes = kept


_DROPPED = frozenset({*_COMPARED, "aten.logical_not", "aten.scalar_tensor", "hotfuse.size_of", "aten.sym_size", "aten.unsqueeze"})
