"""Graphs written anew for some rows of what they are given: values keep their axes, and the axis of rows has another size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from hotfuse.analysis.inferred_types import possible_sizes, relaid
from hotfuse.analysis.liveness import without_unread
from hotfuse.analysis.mask_facts import RowPlaces
from hotfuse.analysis.row_axes import quotient, shape_of
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Dim, Sym, expr, sym, symbols
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_node, sources, unused_name
from hotfuse.ir.types import DType, ScalarType, TensorType, Type, dims_of
from hotfuse.ir.verify import verify
from hotfuse.ops.movement import RESHAPES
from hotfuse.ops.table import packet
from hotfuse.specialize.row_demands import EXPANDS, CannotPack, RowDemands


class RowsWriter(ABC):
    """Writes nodes on rows; a subclass says where rows of a value come from that no node makes."""

    def __init__(self, demands: RowDemands, size: str) -> None:
        """`size`: what the number of rows is called."""
        self.demands, self.graph, self.mask = demands, demands.graph, demands.mask
        self.nodes: list[Node] = []
        self.taken = {v.name for n in self.graph.nodes for v in n.outs} | {v.name for v in sources(self.graph)}
        names = frozenset[str]().union(*(symbols(d) for v in sources(self.graph) for d in dims_of(v.type)))
        self.live_rows = sym(unused_name(size, set(names)))
        self.device = next((v.type.device for v in self.graph.inputs if isinstance(v.type, TensorType)), "cpu")
        self.packed: dict[str, Value] = {}
        self.changed: set[str] = set()
        self.sizes: dict[Dim, Value] = {}

    @abstractmethod
    def gathered(self, v: Value, places: RowPlaces) -> Value:
        """The rows of a value that is there as a whole."""

    @abstractmethod
    def spread(self, v: Value, axes: tuple[int, int]) -> Value:
        """What each row reads of a value that is the same for all rows of a sequence; `axes`: of sequences, and of rows."""

    @abstractmethod
    def live_count(self) -> Value:
        """The number of rows, as a number of the host."""

    @abstractmethod
    def note_lookup(self, node: Node, wanted: Mapping[str, RowPlaces]) -> None:
        """A node is written that reads rows of these values."""

    def note_sizes(self, node: Node) -> None:
        """Sizes that a node says, as arguments for others."""
        for v in node.outs:
            if isinstance(v.type, ScalarType) and isinstance(v.type.expr, Sym):
                self.sizes.setdefault(v.type.expr, v)

    def checked(self, graph: Graph) -> Graph:
        """The graph with the layouts that its ops give; raises CannotPack where their sizes are not those that were said."""
        sizes = possible_sizes(graph)
        if sizes is None:
            raise CannotPack("no sizes come to mind that it could be tried with")
        try:
            return verify(relaid(without_unread(graph), self.changed, sizes))
        except InternalError as e:  # an op whose sizes follow another rule than was thought: the graph stays as it is
            raise CannotPack(f"{e.what}: {e.because}") from e

    def _value(self, stem: str, t: Type) -> Value:
        out = Value(unused_name(f"{stem.partition('.packed')[0]}.packed", self.taken), t)
        self.changed.add(out.name)
        return out

    def _node(self, op: str, args: tuple[Arg, ...], stem: str, dtype: DType, shape: tuple[Dim, ...]) -> Value:
        out = self._value(stem, TensorType(dtype, shape, device=self.device))
        self.nodes.append(Node(Kind.OPERATOR, op, args, (out,)))
        return out

    def _type(self, v: Value) -> TensorType:
        if not isinstance(v.type, TensorType):
            raise CannotPack(f"%{v.name} is no tensor")
        return v.type

    def shape(self, v: Value, places: RowPlaces) -> tuple[Dim, ...]:
        """The shape of a value's live rows."""
        shape = list(shape_of(v))
        for place, size, now in ((places.sequence, self.mask.sequences, 1), (places.row, self.mask.rows, self.live_rows)):
            if place is not None:
                rest = quotient(shape[place.axis], size)
                if rest is None:
                    raise CannotPack(f"rows of %{v.name} share an axis with more than was thought")
                shape[place.axis] = expr("*", rest, now)
        return tuple(shape)

    def rows(self, v: Value) -> Value:
        """The live rows of a value: made that way, or gathered."""
        if v.name not in self.packed:
            self.packed[v.name] = self.gathered(v, self.demands.rows[v.name])
        return self.packed[v.name]

    def rows_of(self, node: Node) -> None:
        """A node on live rows."""
        places = next(self.demands.rows[v.name] for v in node.outs if v.name in self.demands.rows)
        wanted = self.demands.operand_places(node, places)
        alike = self.demands.spread_operands(node, places)
        given: dict[str, Arg] = {name: self.rows(v) for v in node.ins if (name := v.name) in wanted}
        given |= {name: self.spread(v, alike[name]) for v in node.ins if (name := v.name) in alike}
        self.note_lookup(node, wanted)
        outs: list[Value] = []
        for v in node.outs:
            out = self._value(v.name, replace(self._type(v), shape=self.shape(v, places)))
            self.packed[v.name] = out
            outs.append(out)
        op = packet(node.op)
        if op in RESHAPES:
            sizes = tuple(self._size(d, places, i) for i, d in enumerate(shape_of(node.outs[0])))
            args = (next(iter(given.values())), sizes)
            self.nodes.append(replace(node, op="aten.reshape.default", args=args, attrs=(), outs=tuple(outs)))
        elif op in EXPANDS:
            first = node.args[0]
            x = given.get(first.name, first) if isinstance(first, Value) else first
            expanded = tuple(
                self.live_count() if places.row is not None and i == places.row.axis else
                1 if places.sequence is not None and i == places.sequence.axis else self._known(d)
                for i, d in enumerate(shape_of(node.outs[0]))
            )  # fmt: skip
            if not all(p is None or p.span == 1 for p in (places.sequence, places.row)):
                raise CannotPack("an expanded axis that holds several indices")
            self.nodes.append(replace(node, op="aten.expand.default", args=(x, expanded), attrs=(), outs=tuple(outs)))
        else:
            self.nodes.append(map_node(node, given, tuple(outs)))

    def _size(self, d: Dim, places: RowPlaces, axis: int) -> Arg:
        """What a reshape says of an axis of live rows."""
        if places.row is not None and places.row.axis == axis:
            return -1
        if places.sequence is not None and places.sequence.axis == axis:
            rest = quotient(d, self.mask.sequences)
            if rest is None:
                raise CannotPack("sequences share an axis with more than was thought")
            return self._known(rest)
        return self._known(d)

    def _known(self, d: Dim) -> Arg:
        """A size as an argument."""
        if isinstance(d, int):
            return d
        if d not in self.sizes:
            raise CannotPack("a size that no number of the graph says")
        return self.sizes[d]
