"""A graph whose batch may have any number of rows, of one that has a fixed number: so that rows which come twice are computed once.

    graph g(%ids: i64[16, 128])                     graph g.rows(%ids: i64[rows, 128])
      %x: f32[16, 128, 64] = embedding(.., %ids)      %x: f32[rows, 128, 64] = embedding(.., %ids)
      %v = view(%x, [16, 128, 4, 16])                 %v = reshape(%x, [-1, 128, 4, 16])

Each row of every output has to be made of that row of the inputs and of what all rows share (`analysis.row_axes`): then equal rows
give equal results, and those of distinct ones are all there is to compute. A norm over the batch, a random number or a weight for
each row keeps a graph as it is. Ops keep their meaning; sizes that say the number of rows are read from the input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from hotfuse.analysis.index_sums import without_identity_reads
from hotfuse.analysis.mask_facts import MaskInput, RowPlaces
from hotfuse.analysis.row_axes import AxisIndex, NotByRows, carries, shape_of, whole
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, expr
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_values, output_values
from hotfuse.ir.types import ScalarKind, ScalarType, TensorType
from hotfuse.ops.schema import draws_random
from hotfuse.ops.table import Access, is_mutating, lookup, packet
from hotfuse.specialize.row_demands import CannotPack, RowDemands
from hotfuse.specialize.rows_writer import RowsWriter

_FILLED = frozenset({"aten.zeros", "aten.ones", "aten.full"})
"""Ops whose rows are all alike, and whose first argument says their sizes."""
_WORK = (Access.CONTRACTION, Access.ATTENTION)


@dataclass(frozen=True, slots=True)
class RowwiseGraph:
    """A graph that computes every row by itself."""

    graph: Graph
    """For any number of rows."""
    batch: Dim
    """How many the original has."""
    inputs: tuple[int, ...]
    """Those that have the rows, along their first axis; the others are shared."""
    outputs: tuple[int, ...]
    """Along which axis each output has them."""


def batch_of(graph: Graph) -> Dim | None:
    """The size that most inputs begin with, if that is a batch of several rows."""
    first = Counter(v.type.shape[0] for v in graph.inputs if isinstance(v.type, TensorType) and v.type.shape)
    found = max(first, key=lambda d: first[d], default=None)
    return None if found is None or (isinstance(found, int) and found < 2) else found


def rowwise(graph: Graph, weights: Mapping[str, torch.Tensor]) -> RowwiseGraph:
    """The graph for any number of rows; raises CannotPack where rows are not computed each by itself."""
    graph, batch = without_identity_reads(graph, weights), batch_of(graph)
    if batch is None:
        raise CannotPack("no input has a batch of rows")
    if any(n.kind is not Kind.OPERATOR or is_mutating(n.op) or draws_random(n.op, n.args, dict(n.attrs)) for n in graph.nodes):
        raise CannotPack("it has branches, loops or ops that are not pure")
    demands = _BatchDemands(graph, batch)
    demands.run()
    inputs = tuple(i for i, v in enumerate(graph.inputs) if v.name in demands.rows)
    outputs = tuple(demands.axis(v) for v in output_values(graph))
    made = graph if isinstance(batch, Sym) else _DistinctWriter(demands).run()
    return RowwiseGraph(made, batch, inputs, outputs)


class _BatchDemands(RowDemands):
    """Every output is wanted by rows of the batch, and so is all that they are made of."""

    def __init__(self, graph: Graph, batch: Dim) -> None:
        super().__init__(graph, MaskInput("", dead=False, live=True, sequences=1, rows=batch), {}, {}, ignore_outputs=False)

    def run(self) -> None:
        """Go through the graph, backwards."""
        places = self._forward()
        if any(not isinstance(o, Value) for o in self.graph.outputs):
            raise CannotPack("an output is no tensor")
        for v in output_values(self.graph):
            at = places.get(v.name)
            if at is None or not whole(at, self.mask.rows, shape_of(v)):
                raise CannotPack(f"output {v.name} has no rows of the batch")
            self._want(v, RowPlaces(None, at))
        for node in reversed(self.graph.nodes):
            if any(v.name in self.whole for v in node.outs):
                self.whole.update(v.name for v in node.ins)
            elif any(v.name in self.rows for v in node.outs):
                self._by_row(node)
        for v in self.graph.inputs:
            if v.name in self.whole and v.name in places:
                raise CannotPack(f"rows of {v.name} are read together")
        if missing := next((p for p in self.graph.params if p.value.name in self.rows), None):
            raise CannotPack(f"{missing.key} has rows of its own for each row of the batch")
        if not self.products:
            raise CannotPack("there is no product to save")

    def axis(self, v: Value) -> int:
        """Where the rows of an output lie."""
        at = self.rows[v.name].row
        assert at is not None
        return at.axis

    def _by_row(self, node: Node) -> None:
        asked = {self.rows[v.name] for v in node.outs if v.name in self.rows}
        if packet(node.op) in _FILLED:
            return
        if len(asked) != 1 or not self._by_rows(node, next(iter(asked))):
            raise CannotPack(f"{packet(node.op)} may mix rows of the batch")
        self.products += lookup(node.op).access in _WORK

    def _forward(self) -> dict[str, AxisIndex]:
        """Where rows of inputs lie in what is made of them, as far as that is known: where to begin, and nothing else."""
        found = {v.name: AxisIndex(0) for v in self.graph.inputs if isinstance(v.type, TensorType)
                 and v.type.shape[:1] == (self.mask.rows,)}  # fmt: skip
        for node in self.graph.nodes:
            for v in node.ins:
                at = found.get(v.name)
                if at is None:
                    continue
                try:
                    relation = carries(node).operands.get(v.name)
                    if relation is None:
                        continue
                    for out in node.outs:
                        found[out.name] = relation.forward(at, self.mask.rows, shape_of(v), shape_of(out))
                except NotByRows:
                    continue
        return found


class _DistinctWriter(RowsWriter):
    """The graph for any number of rows."""

    def __init__(self, demands: RowDemands) -> None:
        super().__init__(demands, "rows")
        self.count: Value | None = None

    def run(self) -> Graph:
        for v in self.graph.inputs:
            if (places := self.demands.rows.get(v.name)) is not None:
                assert isinstance(v.type, TensorType)
                self.packed[v.name] = Value(v.name, replace(v.type, shape=self.shape(v, places)))
                self.changed.add(v.name)
        for node in self.graph.nodes:
            self.note_sizes(node)
            if not any(v.name in self.demands.rows for v in node.outs):
                self.nodes.append(node)
            elif packet(node.op) in _FILLED:
                self._filled(node)
            else:
                self.rows_of(node)
        new: dict[str, Arg] = dict(self.packed.items())
        rows = self.live_rows
        return self.checked(replace(
            self.graph, name=f"{self.graph.name}.rows", inputs=tuple(self.packed.get(v.name, v) for v in self.graph.inputs),
            nodes=tuple(self.nodes), outputs=tuple(map_values(o, new) for o in self.graph.outputs),
            guards=(*self.graph.guards, *(g for g in (expr("<=", 1, rows),) if isinstance(g, Sym))),
        ))  # fmt: skip

    def gathered(self, v: Value, places: RowPlaces) -> Value:
        """Inputs come with their rows, and nothing else is read of."""
        raise CannotPack(f"rows of %{v.name} have to be picked")

    def spread(self, v: Value, axes: tuple[int, int]) -> Value:
        """A batch has one axis of rows, and no other that they belong to."""
        raise CannotPack(f"%{v.name} varies along a dim that a batch does not have")

    def live_count(self) -> Value:
        """The number of rows."""
        if self.count is None:
            given = next(v for v in self.graph.inputs if v.name in self.packed)
            self.count = self._value("rows", ScalarType(ScalarKind.INT, self.live_rows))
            self.nodes.append(Node(Kind.OPERATOR, "aten.sym_size.int", (self.packed[given.name], 0), (self.count,)))
        return self.count

    def note_lookup(self, node: Node, wanted: Mapping[str, RowPlaces]) -> None:
        """Every row is looked up, by one that is equal to it."""

    def _filled(self, node: Node) -> None:
        out = node.outs[0]
        places = self.demands.rows[out.name]
        assert places.row is not None
        sizes = tuple(self.live_count() if i == places.row.axis else self._known(d) for i, d in enumerate(shape_of(out)))
        made = self._value(out.name, replace(self._type(out), shape=self.shape(out, places)))
        self.packed[out.name] = made
        self.nodes.append(replace(node, args=(sizes, *node.args[1:]), outs=(made,)))
