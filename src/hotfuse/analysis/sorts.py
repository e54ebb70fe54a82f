"""Sorting that is short enough to be done by counting: n * n comparisons for n elements.

Grouping asks, so that a long sort stays with the library and what is around it does not; lowering asks for the reason.
"""

from __future__ import annotations

from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet

MAX_SORTED = 64
"""Elements along the dim that is sorted, at most."""
_SORTS = frozenset({"aten.topk", "aten.sort", "aten.argsort"})


def is_sort(node: Node) -> bool:
    """Whether a node sorts."""
    return packet(node.op) in _SORTS


def refusal(node: Node) -> str | None:
    """Why a sort is not for counting; None where it is."""
    value, dim, k = argument(node, "self"), argument(node, "dim", -1), argument(node, "k", 1)
    shape = value.type.shape if isinstance(value, Value) and isinstance(value.type, TensorType) else ()
    if not shape or not isinstance(dim, int):
        return "sorting without dims"
    extent = shape[dim]
    if not isinstance(extent, int) or not isinstance(k, int):
        return f"how many are sorted is known only at run time: {k} of {extent}"
    return f"sorting {extent} elements for {k}" if extent > MAX_SORTED or extent < 1 or k < 1 else None
