"""Ops that read their operand at several places, or at places that data say: the operand has to lie in memory.

Fused with what makes it, a window's operand would be computed once per place of the window, and an indexed one at places that
nobody has computed. So such a node never joins the group that makes its operand; what follows it may join its own.
"""

from __future__ import annotations

from hotfuse.analysis.sorts import is_sort, refusal
from hotfuse.ir.graph import Node, Value
from hotfuse.ops.table import packet

_WINDOWS = frozenset({
    "aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d", "aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d",
    "aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d",
    "aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d", "aten._upsample_nearest_exact1d",
    "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact3d", "aten.upsample_linear1d",
    "aten.upsample_bilinear2d", "aten.upsample_trilinear3d",
})  # fmt: skip
_INDEXED = frozenset({
    "aten.embedding", "aten.index_select", "aten.gather", "aten.index", "aten.one_hot", "aten.scatter", "aten.scatter_add",
    "aten.index_put", "aten.index_add",
})  # fmt: skip


def reads_places(node: Node) -> bool:
    """Whether a node is one of these."""
    return packet(node.op) in _WINDOWS or packet(node.op) in _INDEXED or (is_sort(node) and refusal(node) is None)


def from_memory(node: Node) -> str:
    """The name of the operand that must lie in memory; empty where there is none."""
    first = node.args[0] if reads_places(node) and node.args else None
    return first.name if isinstance(first, Value) else ""
