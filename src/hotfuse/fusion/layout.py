"""Which values of a graph lie with their channels innermost: the results of convolutions and what is computed between them.

    %a = conv2d(%x, ...)   f32[1, 64, 56, 56]{0,2,3,1}      channels of a pixel are one run of memory
    %b = relu(%a)          the same
    %c = view(%b, ...)     reads a row-major copy

Only types change, and copies are put where they matter: torch's own operators accept any strides and give back the order that
they were given, but a view needs the strides that the capture saw, and so do readers of the graph's outputs.
A convolution reads row-major images where they lie, plane by plane; where that is asked for, a copy with channels innermost.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.analysis.convolution import is_convolution, windows_overlap
from hotfuse.analysis.quantized import byte_products
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Token, Value, map_node, map_values, output_values
from hotfuse.ir.types import Layout, TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import Access, lookup, packet

_SPATIAL = frozenset({
    "aten.batch_norm", "aten.cat", "aten.pad", "aten.constant_pad_nd", "aten.pixel_shuffle", "aten.pixel_unshuffle",
    *(f"aten.{kind}_pool{rank}d" for kind in ("max", "avg", "adaptive_avg") for rank in (2, 3)),
    *(f"aten.upsample_{kind}" for kind in ("nearest2d", "bilinear2d", "bicubic2d", "nearest3d", "trilinear3d")),
    "aten._upsample_nearest_exact2d", "aten.reflection_pad2d", "aten.replication_pad2d", "aten.group_norm",
})  # fmt: skip
"""Ops that are not pointwise and give back the order they were given."""
_COPIES = frozenset(["aten.clone", "aten.contiguous", "aten.to", "aten._to_copy", "aten.copy"])
"""Pointwise ops that may choose an order themselves."""
_CASTS = frozenset(["aten.to", "aten._to_copy"])
"""Those of them that keep the order unless they are told one."""
_PRESERVE = Token("memory_format", "preserve_format")
_LAST = Token("memory_format", "channels_last")
CONVERTS = "aten.contiguous.default"
"""What changes the order of a value."""
_REDUCTIONS = frozenset(["aten.mean", "aten.sum", "aten.amax", "aten.amin"])
"""Ops that read any order, and whose results are too small to matter."""
_POOLS = frozenset(f"aten.{kind}_pool{rank}d" for kind in ("max", "avg", "adaptive_avg") for rank in (2, 3))
"""The same where one pixel is left."""


def channels_last(graph: Graph, only: frozenset[int] | None = None, converted: frozenset[int] = frozenset()) -> Graph:
    """The graph with convolutions and what lies between them in channels-last order; the same graph without convolutions.

    `only` are the convolutions to begin with, by number; None for all of them. Those `converted` read a copy of a row-major image.
    """
    if not any(is_convolution(n) and (only is None or i in only) for i, n in enumerate(graph.nodes)):
        return graph
    return _Change(graph, only, converted).changed()


def entered(graph: Graph, only: frozenset[int], channels: int) -> frozenset[int]:
    """Convolutions, by number, that would read row-major images of at least so many channels with windows that overlap."""
    change = _Change(graph, only)
    change.changed()
    nodes = [(i, graph.nodes[i]) for i in change.plane_by_plane if windows_overlap(graph.nodes[i])]
    return frozenset(i for i, n in nodes if isinstance(c := (_shape(n.ins[0]) or (0, 0))[1], int) and c >= channels)


def regions(graph: Graph) -> list[frozenset[int]]:
    """Convolutions that would hand channels-last values to each other, by number: each set is one decision about a layout."""
    change = _Change(graph)
    change.changed()
    found: dict[int, set[int]] = {}
    for number in change.convolutions:
        found.setdefault(change.root(number), set()).add(number)
    return [frozenset(r) for r in found.values()]


class _Change:
    def __init__(
        self, graph: Graph, only: frozenset[int] | None = None, converted: frozenset[int] = frozenset()
    ) -> None:
        self.graph, self.only, self.converted = graph, only, converted
        self.plane_by_plane: list[int] = []
        """Convolutions that were retyped and read row-major images, by number."""
        self.forth: dict[str, Value] = {}
        """Channels-last copies of row-major images, by the image's name."""
        self.convolutions: list[int] = []
        """Those whose results were retyped, by number."""
        self.region: dict[int, int] = {}
        """Retyped nodes by number: another one of the same region, itself for the one that stands for it."""
        self.maker: dict[str, int] = {}
        self.params = {p.value.name for p in graph.params}
        self.new: dict[str, Arg] = {}
        """Values that were retyped, by name."""
        self.back: dict[str, Value] = {}
        """Their row-major copies, where one was wanted."""
        self.nodes: list[Node] = []
        self.bytewise = frozenset(byte_products(graph))
        """Convolutions of bytes, by number: their weights are made from params."""
        self.returned = {v.name for v in output_values(graph)}
        self.taken = {v.name for n in graph.nodes for v in n.outs} | {v.name for v in graph.inputs} | self.params

    def changed(self) -> Graph:
        for i, node in enumerate(self.graph.nodes):
            self.nodes.append(self._node(i, node))
        outputs: list[Arg] = []
        copies = {v.name: self._copy(v) for v in dict.fromkeys(output_values(self.graph)) if v.name in self.new}
        for out in self.graph.outputs:
            outputs.append(map_values(out, dict(copies)))
        return replace(self.graph, nodes=tuple(self.nodes), outputs=tuple(outputs))

    def _node(self, number: int, node: Node) -> Node:
        changed = [v for v in node.ins if v.name in self.new]
        if self._follows(number, node, changed):
            node = map_node(node, self.new)
            if is_convolution(node):
                node = self._entered(number, node)
            (out,) = node.outs
            moved = replace(out, type=_last(out))
            self.new[out.name] = moved
            self._joins(number, node, changed)
            return replace(node, outs=(moved,))
        if not changed:
            return node
        if self._reads_any(node):
            return map_node(node, self.new)
        return map_node(node, {v.name: self._copy(v) for v in changed})

    def _entered(self, number: int, node: Node) -> Node:
        """A convolution with the image that it reads, or a copy of it."""
        x = node.args[0]
        if not isinstance(x, Value) or _rank(x) != 4 or not _can_move(x):
            return node
        self.plane_by_plane.append(number)
        if number not in self.converted:
            return node
        if x.name not in self.forth:
            made = Value(self._named(f"{x.name}_last"), _last(x))
            self.nodes.append(Node(Kind.OPERATOR, CONVERTS, (x,), (made,), (("memory_format", _LAST),)))
            self.forth[x.name] = made
        return map_node(node, {x.name: self.forth[x.name]})

    def _named(self, name: str) -> str:
        """A name that nobody has."""
        found, n = name, 0
        while found in self.taken:
            n += 1
            found = f"{name}{n}"
        self.taken.add(found)
        return found

    def _joins(self, number: int, node: Node, changed: list[Value]) -> None:
        """A node is of the region of what it reads; it may be what joins two of them."""
        self.region[number] = number
        self.maker[node.outs[0].name] = number
        if is_convolution(node):
            self.convolutions.append(number)
        for v in changed:
            self.region[self.root(self.maker[v.name])] = self.root(number)

    def root(self, number: int) -> int:
        """The node that stands for a region."""
        while self.region[number] != number:
            number = self.region[number]
        return number

    def _reads_any(self, node: Node) -> bool:
        """Whether a node may read channels-last values without anyone noticing it in the result."""
        if len(node.outs) != 1:
            return False
        left = _shape(node.outs[0]) or ()
        if is_convolution(node) and len(left) > 1 and left[1] == 1:
            return True  # one channel lies the same either way
        if node.outs[0].name in self.returned:
            return False
        name = packet(node.op)
        return name in _REDUCTIONS or (name in _POOLS and all(n == 1 for n in left[2:]))

    def _follows(self, number: int, node: Node, changed: list[Value]) -> bool:
        """Whether a node's result is to lie channels last."""
        if node.kind is not Kind.OPERATOR or len(node.outs) != 1 or not _can_move(node.outs[0]):
            return False
        name = packet(node.op)
        if is_convolution(node):
            weight = node.args[1]
            if self.only is not None and number not in self.only:
                return False
            return isinstance(weight, Value) and (weight.name in self.params or number in self.bytewise)
        rank = _rank(node.outs[0])
        if not any(_rank(v) == rank for v in changed):
            return False
        if name in _SPATIAL:
            return True
        same = any(_shape(v) == _shape(node.outs[0]) for v in changed)
        return lookup(node.op).access is Access.POINTWISE and (name not in _COPIES or _only_casts(node)) and same

    def _copy(self, v: Value) -> Value:
        """A value in the order the capture saw."""
        if v.name not in self.back:
            source = self.new[v.name]
            self.back[v.name] = Value(self._named(f"{v.name}_rows"), v.type)
            self.nodes.append(Node(Kind.OPERATOR, CONVERTS, (source,), (self.back[v.name],)))
        return self.back[v.name]


def _only_casts(node: Node) -> bool:
    """Whether a node changes the element type and leaves the order as it is, as torch does unless it is told one."""
    kept = argument(node, "memory_format") in (None, _PRESERVE)
    return packet(node.op) in _CASTS and kept and all(isinstance(v.type, TensorType) for v in node.ins)


def _shape(v: Value) -> tuple[object, ...] | None:
    return v.type.shape if isinstance(v.type, TensorType) else None


def _rank(v: Value) -> int:
    return len(v.type.shape) if isinstance(v.type, TensorType) else -1


def _can_move(v: Value) -> bool:
    """Row-major images; those of one pixel lie the same either way."""
    t = v.type
    if not isinstance(t, TensorType) or t.layout != Layout() or len(t.shape) not in (3, 4, 5):
        return False
    return any(n != 1 for n in t.shape[2:]) and t.shape[1] != 1


def _last(v: Value) -> TensorType:
    assert isinstance(v.type, TensorType)
    return replace(v.type, layout=Layout((0, *range(2, len(v.type.shape)), 1)))
