"""Cutting a graph into partitions, conservatively: at control nodes, opaque ops, device changes, and by size.

A partition is a run of neighbouring nodes in the graph's topological order, so partitions never form a cycle and run in
order. Each cut carries its reason; later tiers adjust the partitioning, and every adjustment makes a new value.
"""

from __future__ import annotations

from enum import StrEnum

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Kind, Node
from hotfuse.ir.types import TensorType
from hotfuse.ops.table import Access, lookup


class CutReason(StrEnum):
    """Why a partition begins where it does."""

    START = "start of the graph"
    CONTROL = "control node"
    OPAQUE = "opaque op"
    TRANSFER = "transfer node"
    DEVICE = "device change"
    SIZE = "size limit"
    KERNEL = "kernel of its own"
    REST = "end of a kernel"


@dataclass(frozen=True, slots=True)
class Partition:
    """Nodes `first` up to `last` (exclusive) of the graph, and why they begin a partition of their own."""

    index: int
    first: int
    last: int
    cut: CutReason
    device: str

    def __len__(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Partitioning:
    """A graph and how it is cut; the partitions cover its nodes in order."""

    graph: Graph
    parts: tuple[Partition, ...]


def device_of(node: Node) -> str:
    """The device a node computes on: its first result's, or its first argument's."""
    for v in (*node.outs, *node.ins):
        if isinstance(v.type, TensorType):
            return v.type.device
    return ""


def _alone(node: Node) -> CutReason | None:
    """Nodes that form a partition by themselves."""
    if node.kind is Kind.CONTROL:
        return CutReason.CONTROL
    if node.kind is Kind.TRANSFER:
        return CutReason.TRANSFER
    if lookup(node.op).access is Access.OPAQUE:
        return CutReason.OPAQUE
    return None


def cut(graph: Graph, max_nodes: int = 256) -> Partitioning:
    """The first partitioning of a graph."""
    parts: list[Partition] = []
    first, why, device = 0, CutReason.START, ""

    def close(end: int, next_why: CutReason) -> None:
        nonlocal first, why, device
        if end > first:
            parts.append(Partition(len(parts), first, end, why, device))
            first, device = end, ""
        why = next_why

    alone: CutReason | None = None
    for i, node in enumerate(graph.nodes):
        here = device_of(node)
        if (mine := _alone(node)) is not None:
            if not (mine is CutReason.OPAQUE and alone is CutReason.OPAQUE):  # neighbouring opaque ops share a partition
                close(i, mine)
        elif alone is not None:
            close(i, alone)
        elif here and device and here != device:
            close(i, CutReason.DEVICE)
        elif i - first >= max_nodes:
            close(i, CutReason.SIZE)
        device = device or here
        alone = mine
    close(len(graph.nodes), CutReason.START)
    return Partitioning(graph, tuple(parts))
