"""Where a graph is watched: the values whose contents could pay for a specialization, within a budget.

| point | what it may show |
| --- | --- |
| inputs | shapes, ranges, padding |
| masks | how much of the work is for nothing |
| what relu and its like give | zeros, dead rows, dead columns |
| conditions of branches | which way they go (their outcomes are records of their own) |
| partition boundaries, outputs | ranges and constant rows, where the graph may be cut |
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, output_values, values_in
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.partition.cut import Partitioning
from hotfuse.profile.records import Flag
from hotfuse.specialize.masks import all_alike
from hotfuse.tile.probe_kernels import DTYPES

BUDGET = 24
"""Points of one graph."""
_RELU = {
    "aten.relu", "aten.relu6", "aten.clamp_min", "aten.clamp", "aten.hardtanh", "aten.threshold", "aten.hardsigmoid",
    "aten.hardswish", "aten._add_relu", "aten.hardshrink", "aten.softshrink",
}  # fmt: skip
_MASK_ARGUMENT = {
    "aten.scaled_dot_product_attention": (3, "attn_mask"), "aten.masked_fill": (1, "mask"), "aten.where": (0, "condition"),
}  # fmt: skip


_WHOLE = (DType.I64, DType.I32, DType.U8, DType.I8)


class WatchReason(StrEnum):
    """Why a value is watched."""

    INPUT = "input"
    MASK = "mask"
    CONDITION = "condition"
    RELU = "zeros expected"
    BOUNDARY = "partition boundary"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Point:
    """A value to look at."""

    value: str
    place: WatchReason
    flags: int
    keep: int
    """How many of its last dims make a row."""


def masks(graph: Graph) -> set[str]:
    """Values that say which others count."""
    found = {v.name for v in graph.inputs if _bool(v) or "mask" in v.name.lower()}
    for node in graph.nodes:
        if (place := _MASK_ARGUMENT.get(packet(node.op))) is not None:
            at, name = place
            arg: Arg = node.args[at] if len(node.args) > at else node.attr(name)
            found |= {v.name for v in values_in(arg)}
    whole = [v for v in graph.inputs if isinstance(v.type, TensorType) and v.type.dtype in _WHOLE and v.name not in found]
    return found | {v.name for v in whole if all_alike(graph, v.name, 1) is not None}  # masks are made of these


def choose(parts: Partitioning, budget: int = BUDGET, visible: Collection[str] | None = None) -> tuple[Point, ...]:
    """The points of a partitioned graph, at most `budget`, of the values that can be seen at all (None: every one)."""
    graph = parts.graph
    made = {v.name: n for n in graph.nodes for v in n.outs}
    masking = masks(graph)
    params = {p.value.name for p in graph.params}
    edges = [v for p in parts.parts for v in _leaving(graph, p.first, p.last)] if len(parts.parts) > 1 else []
    ranked: list[tuple[WatchReason, Sequence[Value]]] = [
        (WatchReason.MASK, [v for v in _values(graph) if v.name in masking]),
        (WatchReason.INPUT, graph.inputs),
        (WatchReason.CONDITION, [v for n in graph.nodes if n.kind is Kind.CONTROL for v in values_in(n.args[:1])]),
        (WatchReason.RELU, [v for n in graph.nodes if packet(n.op) in _RELU for v in n.outs]),
        (WatchReason.OUTPUT, output_values(graph)),
        (WatchReason.BOUNDARY, edges),
    ]
    inputs = {v.name for v in graph.inputs}
    chosen: dict[str, Point] = {}
    for place, values in ranked:
        open_ = [
            v for v in dict.fromkeys(values)
            if v.name not in chosen and v.name not in params and _probed(v)
            and (visible is None or v.name in visible or v.name in inputs)
        ]  # fmt: skip
        for v in _spread(open_, budget - len(chosen)):
            flags = (Flag.MASK if v.name in masking else 0) | (Flag.INPUT if v.name in inputs else 0)
            chosen[v.name] = Point(v.name, place, flags, _row_dims(v, made))
    return tuple(chosen.values())


def _values(graph: Graph) -> Iterable[Value]:
    yield from graph.inputs
    for n in graph.nodes:
        yield from n.outs


def _bool(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype.value == "bool"


def _probed(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype in DTYPES and v.type.device == "cpu"


def _spread(values: Sequence[Value], room: int) -> Sequence[Value]:
    """All of them, or as many as there is room for, evenly over the graph."""
    if len(values) <= room:
        return values
    return [values[i * len(values) // room] for i in range(room)] if room > 0 else []


def _leaving(graph: Graph, first: int, last: int) -> list[Value]:
    """What a run of nodes makes and later ones read."""
    made = {v.name for n in graph.nodes[first:last] for v in n.outs}
    return [v for n in graph.nodes[last:] for v in n.ins if v.name in made]


def _row_dims(v: Value, made: dict[str, Node]) -> int:
    """What a convolution gives is rows of whole planes, so that a dead channel is a row of zeros; all else rows of the last dim."""
    if not isinstance(v.type, TensorType) or len(v.type.shape) < 3:
        return 1
    at: Value | None = v
    for _ in range(8):
        node = made.get(at.name) if at is not None else None
        if node is None:
            return 1
        access = lookup(node.op).access
        if access is Access.CONVOLUTION:
            return len(v.type.shape) - 2
        if access is not Access.POINTWISE and "norm" not in node.op:
            return 1
        at = next((i for i in node.ins if isinstance(i.type, TensorType)), None)
    return 1
