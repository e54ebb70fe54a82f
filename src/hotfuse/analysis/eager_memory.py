"""How much memory a graph's intermediates take at most when every op makes its own result, as eager execution does."""

from __future__ import annotations

from collections.abc import Mapping

from hotfuse.analysis.cost import value_bytes
from hotfuse.analysis.liveness import last_uses
from hotfuse.ir.graph import Graph, Kind, Node, sources
from hotfuse.ops.table import Access, lookup, packet

_COPIES = frozenset({"aten.cat", "aten.concat", "aten.stack", "aten.constant_pad_nd", "aten.repeat", "aten.flip", "aten.roll",
                     "aten.tile", "aten.repeat_interleave"})  # fmt: skip
"""Ops that move data and cannot give a view."""


def eager_peak(graph: Graph, sizes: Mapping[str, int]) -> int | None:
    """Bytes of intermediates and results that are alive at the worst moment; inputs and params do not count.

    A view keeps what it looks at alive and takes nothing itself. None where some size depends on data.
    """
    owner = {v.name: "" for v in sources(graph)}  # whose memory a value is; "" is the caller's
    held: dict[str, set[str]] = {}
    sizes_of: dict[str, int] = {}
    now = most = 0
    for node, dying in zip(graph.nodes, last_uses(graph), strict=True):
        views = _is_view(node)
        for v in node.outs:
            if views:
                owner[v.name] = owner.get(node.ins[0].name, "")
            else:
                need = value_bytes(v, sizes)
                if need is None:
                    return None
                owner[v.name], sizes_of[v.name] = v.name, need
                now += need
            if owner[v.name]:
                held.setdefault(owner[v.name], set()).add(v.name)
        inside = [eager_peak(g, sizes) for g in node.graphs]
        if None in inside:
            return None
        most = max(most, now + max((n for n in inside if n is not None), default=0))
        for v in dying:
            mine = owner.get(v.name, "")
            if mine and v.name in held[mine]:
                held[mine].remove(v.name)
                if not held[mine]:
                    now -= sizes_of[mine]
    return most


def _is_view(node: Node) -> bool:
    if node.kind is not Kind.OPERATOR or not node.ins:
        return False
    return lookup(node.op).access is Access.MOVEMENT and packet(node.op) not in _COPIES
