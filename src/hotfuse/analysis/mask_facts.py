"""What a mask of two numbers says of the values that are made from it.

    %m: i64[B, S]            0 where a row is dead, 1 where it lives
    %k = to(%m, f32)[:, None, None, :]                     0.0 or 1.0, sequence along axis 0, row along axis 3
    %a = (1.0 - %k) * -3.4e38                              -3.4e38 or 0.0
    %p = %x * %m[:, :, None]                               0.0 where a row is dead; elsewhere nobody knows

A fact is carried through the graph by evaluating each op on the two numbers (`analysis.uniform`), and by carrying the places of the
two indices through views (`analysis.row_axes`). Ints that are sums of indices are followed as well, since libraries read masks
at `[arange(B)[:, None], arange(S)]`.

Zero times anything is zero here: a user of these facts must make sure that dead rows are finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hotfuse.analysis.attention import HIDES
from hotfuse.analysis.front_masks import front_tests
from hotfuse.analysis.index_sums import IndexSums
from hotfuse.analysis.row_axes import AxisIndex, NotByRows, carries, shape_of
from hotfuse.analysis.uniform import SPREAD, evaluated, number_of
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, output_values, readers
from hotfuse.ir.types import ScalarType, TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

Number = torch.Tensor
"""A tensor of no dims."""


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where the two indices of a row lie in a value: which sequence, and which row of it. None where the value does not vary."""

    sequence: AxisIndex | None
    row: AxisIndex | None


@dataclass(frozen=True, slots=True)
class MaskFact:
    """What a value is where the mask is dead, and where it lives; None where only a run tells that."""

    dead: Number
    live: Number | None
    places: RowPlaces | None
    """None: the value is one number."""


@dataclass(frozen=True, slots=True)
class MaskInput:
    """A mask that a graph is given: [sequences, rows]."""

    name: str
    dead: float | bool
    live: float | bool
    sequences: Dim
    rows: Dim


_ABSORBING: dict[str, float | bool] = {
    "aten.mul": 0, "aten.logical_and": False, "aten.bitwise_and": False, "aten.__and__": False, "aten.logical_or": True,
}  # fmt: skip
"""Numbers that decide a result, whatever the other operand is."""
_FILLED: dict[str, float | str] = {
    "aten.zeros": 0, "aten.zeros_like": 0, "aten.new_zeros": 0, "aten.ones": 1, "aten.ones_like": 1, "aten.new_ones": 1,
    "aten.full": "fill_value", "aten.full_like": "fill_value", "aten.new_full": "fill_value", "aten.scalar_tensor": "s",
}  # fmt: skip
_POSITIONAL = frozenset({"aten.tril", "aten.triu", "aten.eye", "aten.arange"})
_SOFTMAX = frozenset({"aten.softmax", "aten._softmax"})
_MAX_ELEMENTS = 1 << 16
"""Elements of the largest weight that is looked through."""


@dataclass(frozen=True, slots=True)
class OrderedFact:
    """What a value is by the order of two rows (`analysis.ordered_masks`)."""

    seen: MaskFact
    """Where the key is the query's own row, or before it."""
    ahead: MaskFact
    axes: tuple[int, int]
    """Of queries, and of keys."""


def mask_facts(
    graph: Graph, mask: MaskInput, weights: Mapping[str, torch.Tensor], *, front: bool = False,
    ordered: Mapping[str, OrderedFact] | None = None,
) -> dict[str, MaskFact]:  # fmt: skip
    """Facts of every value that a mask decides, or that is one number; `front`: live rows lie in front of all others.

    `ordered`: values that the order of two rows decides as well. What is cut from them for the last query, which no key is ahead
    of, is decided by the mask alone.
    """
    return MaskFactPass(graph, mask, weights, front=front, ordered=ordered).run()


def lowered_for_softmax(graph: Graph, facts: Mapping[str, MaskFact]) -> float:
    """How low a mask makes what a softmax then makes 0 of, at least."""
    least = math.inf
    for node in graph.nodes:
        if packet(node.op) in _SOFTMAX and (f := facts.get(node.outs[0].name)) is not None and f.live is None:
            least = min(least, *(-facts[v.name].dead.item() for v in node.ins if v.name in facts))
    return least


class MaskFactPass:
    """One pass over a graph; `analysis.ordered_masks` makes it under an assumption."""

    def __init__(
        self, graph: Graph, mask: MaskInput, weights: Mapping[str, torch.Tensor], *, front: bool = False,
        ordered: Mapping[str, OrderedFact] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.mask = graph, mask
        self.known: dict[str, MaskFact] = {}
        self._indices = IndexSums(graph, weights)
        self.sums = self._indices.found
        self._fronts = front_tests(graph) if front else {}
        self._readers, self._returned = readers(graph), {v.name for v in output_values(graph)}
        self._ordered = ordered or {}
        for p in graph.params:
            w = weights.get(p.key)
            if w is None or not isinstance(p.value.type, TensorType) or not 0 < w.numel() <= _MAX_ELEMENTS or w.is_meta:
                continue
            w = w.detach().cpu()
            first = w.reshape(-1)[0]
            if bool((w == first).all()):
                self.known[p.value.name] = constant_fact(number_of(p.value, first.item()))
        given = next(v for v in graph.inputs if v.name == mask.name)
        places = RowPlaces(*(AxisIndex(axis) for axis in mask_axes(given)))
        self.known[given.name] = MaskFact(number_of(given, mask.dead), number_of(given, mask.live), places)

    def run(self) -> dict[str, MaskFact]:
        """The facts."""
        for node in self.graph.nodes:
            if node.kind is not Kind.OPERATOR or len(node.outs) != 1 or not isinstance(node.outs[0].type, TensorType):
                continue
            found = self.fact(node)
            if found is not None:
                self.known[node.outs[0].name] = found
            else:
                self._indices.note(node)
        return self.known

    def fact(self, node: Node) -> MaskFact | None:
        """What is known of a node's result."""
        op = packet(node.op)
        if op in _FILLED:
            return self._filled(node, _FILLED[op])
        if op in _POSITIONAL:
            return None
        if op in ("aten.slice", "aten.select") and (last := self._of_last_query(node)) is not None:
            return last
        if op == "aten.index":
            return self._indexed(node)
        if node.outs[0].name in self._fronts:
            return self._in_front(self._fronts[node.outs[0].name])
        if (compared := self._compared(node)) is not None:
            return constant_fact(torch.tensor(compared))
        tensors = [v for v in node.ins if isinstance(v.type, TensorType)]
        if not any(v.name in self.known for v in tensors):
            return None
        try:
            if op in SPREAD:
                x = node.args[0]
                fact = self.known.get(x.name) if isinstance(x, Value) else None
                if fact is None or not isinstance(x, Value):
                    return None
                return MaskFact(fact.dead, fact.live, self._places(node, [x]))
            found = self._evaluated(node, tensors) if all(v.name in self.known for v in tensors) else None
            return self._absorbed(node) if found is None else found
        except NotByRows:
            return None

    def _of_last_query(self, node: Node) -> MaskFact | None:
        """What an ordered mask is for the last query: no key is ahead of it."""
        x = node.args[0]
        order = self._ordered.get(x.name) if isinstance(x, Value) else None
        if order is None or order.seen.live is None or not isinstance(x, Value):
            return None
        queries, rank, axis = order.axes[0], len(shape_of(x)), argument(node, "dim", 0)
        if not isinstance(axis, int) or axis % rank != queries:
            return None
        rows = shape_of(x)[queries]
        first = argument(node, "index") if packet(node.op) == "aten.select" else argument(node, "start", 0)
        if first != -1 and not (isinstance(rows, int) and first == rows - 1):
            return None
        if packet(node.op) == "aten.slice" and (shape_of(node.outs[0])[queries] != 1 or argument(node, "step", 1) != 1):
            return None
        try:
            return MaskFact(order.seen.dead, order.seen.live, self._moved(node, x, order.seen.places))
        except NotByRows:
            return None

    def _in_front(self, real: Value) -> MaskFact | None:
        """Whether live rows lie in front: taken for granted here, and asked of every call (`runtime.serve.packing`)."""
        fact = self.known.get(real.name)
        if fact is None or fact.live is None or fact.places != RowPlaces(AxisIndex(0), AxisIndex(1)):
            return None
        return constant_fact(torch.tensor(data=True)) if bool(fact.live) and not bool(fact.dead) else None

    def _filled(self, node: Node, by: float | str) -> MaskFact | None:
        number = argument(node, by) if isinstance(by, str) else by
        if isinstance(number, Value):
            number = number.type.expr if isinstance(number.type, ScalarType) else None
        if isinstance(number, bool | int | float):
            return constant_fact(number_of(node.outs[0], number))
        return None

    def _evaluated(self, node: Node, tensors: list[Value]) -> MaskFact | None:
        facts = {v.name: self.known[v.name] for v in tensors}
        dead = evaluated(node, {n: f.dead for n, f in facts.items()})
        if dead is None:
            return None
        alive = {n: f.live for n, f in facts.items() if f.live is not None}
        live = evaluated(node, alive) if len(alive) == len(facts) else None
        return MaskFact(dead, live, self._places(node, tensors))

    def _absorbed(self, node: Node) -> MaskFact | None:
        """A result that the mask decides where it is dead, whatever else goes into it."""
        op, (x, *more) = packet(node.op), node.args
        dead: Arg = None
        by: Value | None = None
        if op in _ABSORBING:
            for v in node.ins:
                if (f := self.known.get(v.name)) is not None and f.places is not None and bool(f.dead == _ABSORBING[op]):
                    dead, by = _ABSORBING[op], v
        elif op == "aten.masked_fill" and isinstance(more[0], Value) and (f := self.known.get(more[0].name)) is not None:
            dead, by = (more[1], more[0]) if bool(f.dead) else (None, None)
        elif op == "aten.where" and len(node.args) == 3 and isinstance(x, Value) and (f := self.known.get(x.name)) is not None:
            dead, by = more[0] if bool(f.dead) else more[1], x
        elif op == "aten.add" and (lowered := self._lowered(node)) is not None:
            dead, by = lowered
        elif op in _SOFTMAX and isinstance(x, Value) and (f := self.known.get(x.name)) is not None and f.places is not None:
            along = argument(node, "dim")
            row = f.places.row
            if row is not None and along in (row.axis, row.axis - len(shape_of(x))) and bool(f.dead <= -HIDES):
                return MaskFact(number_of(node.outs[0], 0), None, f.places)
        if isinstance(dead, Value):
            of = self.known.get(dead.name)
            dead = of.dead.item() if of is not None and (of.places is None or by is None) else None
        if by is None or not isinstance(dead, bool | int | float) or self.known[by.name].places is None:
            return None
        return MaskFact(number_of(node.outs[0], dead), None, self._places(node, [by]))

    def _lowered(self, node: Node) -> tuple[float, Value] | None:
        """What lowers scores so far that a softmax, which alone reads them, makes 0 of them: the number, and what adds it."""
        if len(node.args) != 2 or node.attrs or not self._for_softmax(node.outs[0]):
            return None
        for v in node.ins:
            f = self.known.get(v.name)
            if f is not None and f.places is not None and f.live is not None and bool(f.live == 0) and bool(f.dead <= -HIDES):
                return f.dead.item(), v
        return None

    def _for_softmax(self, v: Value) -> bool:
        reading = (packet(self.graph.nodes[i].op) for i in self._readers.get(v.name, ()))
        return v.name not in self._returned and all(op in _SOFTMAX for op in reading)

    def _places(self, node: Node, operands: list[Value]) -> RowPlaces | None:
        """The places in a result, which all operands that have any agree on; raises NotByRows where they do not."""
        found: dict[RowPlaces | None, None] = {}
        for v in operands:
            if (places := self.known[v.name].places) is not None:
                found[self._moved(node, v, places)] = None
        if len(found) > 1:
            raise NotByRows("two masks of different layouts")
        return next(iter(found), None)

    def _moved(self, node: Node, v: Value, places: RowPlaces | None) -> RowPlaces | None:
        """Places in an operand, as they are in the node's result."""
        if places is None:
            return None
        relation, x, out = carries(node).operands[v.name], shape_of(v), shape_of(node.outs[0])
        sequence, row = places.sequence, places.row
        return RowPlaces(
            None if sequence is None else relation.forward(sequence, self.mask.sequences, x, out),
            None if row is None else relation.forward(row, self.mask.rows, x, out),
        )

    def _indexed(self, node: Node) -> MaskFact | None:
        """A mask read at sums of indices: the axes along which these count are the result's places."""
        x, at = node.args[0], node.args[1]
        fact = self.known.get(x.name) if isinstance(x, Value) else None
        if fact is None or fact.places is None or not isinstance(x, Value) or not isinstance(at, tuple):
            return None if fact is None else fact
        shape, out = shape_of(x), shape_of(node.outs[0])
        rest = len(shape) - len(at)
        ranks = [len(shape_of(i)) for i in at if isinstance(i, Value)]
        if rest < 0 or len(ranks) != len(at) or any(s.axis >= len(at) for s in _both(fact.places)):
            return None
        wide = max(ranks)
        places: list[AxisIndex | None] = []
        wanted = {axis: {s.span for s in _both(fact.places) if s.axis == axis} for axis in range(len(at))}
        for axis, i in enumerate(at):
            total = self.sums.get(i.name) if isinstance(i, Value) else None
            if total is None or total.offset != 0 or set(total.steps.values()) != wanted[axis]:
                return None
        for place, size in ((fact.places.sequence, self.mask.sequences), (fact.places.row, self.mask.rows)):
            i = at[place.axis] if place is not None else None
            if place is None or not isinstance(i, Value):
                places.append(None)
                continue
            along = [a for a, step in self.sums[i.name].steps.items() if step == place.span]
            here = along[0] + wide - len(shape_of(i))
            if len(along) != 1 or out[here] != size:
                return None
            places.append(AxisIndex(here))
        return MaskFact(fact.dead, fact.live, RowPlaces(places[0], places[1]))

    def _compared(self, node: Node) -> bool | None:
        """Whether an index is at least, or is below, a number: some are for certain."""
        op = packet(node.op)
        if op not in ("aten.ge", "aten.lt") or len(node.args) != 2:
            return None
        left, right = self._indices.as_sum(node.args[0]), self._indices.as_sum(node.args[1])
        if left is None or right is None or right.steps or not isinstance(right.offset, int) or not isinstance(left.offset, int):
            return None
        rising = left.steps and all(not isinstance(s, int) or s >= 0 for s in left.steps.values())
        return (op == "aten.ge") if rising and left.offset >= right.offset else None


def mask_axes(v: Value) -> tuple[int, ...]:
    """The axes of a mask that are more than one long: its sequences, and their rows."""
    return tuple(i for i, d in enumerate(v.type.shape) if d != 1) if isinstance(v.type, TensorType) else ()


def constant_fact(number: Number) -> MaskFact:
    """The fact of a value that is one number."""
    return MaskFact(number, number, None)


def _both(places: RowPlaces) -> list[AxisIndex]:
    return [p for p in (places.sequence, places.row) if p is not None]
