"""Sizes that only a call's data tell, and whether code may be made for them.

    %y: f32[u0, 64] = index(%x, %mask)      %z: f32[u0, 64] = layer_norm(%y)          any u0 will do, none too
                                            %m: f32[64] = max(%y, 0)                  torch refuses where nothing is left

Guards hold what a graph assumes of its inputs' sizes. Of these nothing is known before they are there, and torch assumes that they
are neither 0 nor 1 when it traces. Operators raise by themselves then; kernels would not. So kernels are made for such a size only
where every operator that meets it means something at any extent.
"""

from __future__ import annotations

from collections.abc import Iterator

from hotfuse.ir.dims import Dim, dims_in, symbols
from hotfuse.ir.graph import Graph, Kind, Node, Value, sources
from hotfuse.ir.types import dims_of
from hotfuse.ops.table import Access, lookup, packet

TOTAL = frozenset({
    "aten.linear", "aten.addmm", "aten.mm", "aten.matmul", "aten.layer_norm", "aten.native_layer_norm", "aten.rms_norm",
    "aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten.sum", "aten.mean", "aten.transpose", "aten.t",
    "aten.numpy_T", "aten.mT", "aten.permute", "aten.unsqueeze", "aten.expand", "aten.view", "aten.reshape", "aten.flatten",
    "aten.contiguous", "aten.clone",
    "aten.cat", "aten.embedding", "aten.sym_size", "aten._assert_scalar", "aten._assert_tensor_metadata",
})  # fmt: skip
"""Operators besides arithmetic on elements that mean something at any extent, one of none included."""


def data_symbols(graph: Graph) -> frozenset[str]:
    """Symbols that no input's shape tells."""
    told = frozenset[str]().union(*(symbols(d) for v in sources(graph) for d in dims_of(v.type)))
    return frozenset[str]().union(*(_mentioned(v) for n in _nodes(graph) for v in n.outs)) - told


def unsuited(graph: Graph) -> dict[str, str]:
    """Those symbols whose extents some operator may refuse, with the operator."""
    wanted = data_symbols(graph)
    found: dict[str, str] = {}
    for node in _nodes(graph) if wanted else ():
        read = frozenset[str]().union(*(_mentioned(v) for v in node.ins)) & wanted
        if read and not _total(node):
            found |= {s: packet(node.op).removeprefix("aten.") for s in read if s not in found}
    return found


def _total(node: Node) -> bool:
    if node.kind is not Kind.OPERATOR:
        return False
    if not all(_plain(d) for v in node.outs for d in dims_of(v.type)):
        return False
    return node.op.startswith("sym.") or lookup(node.op).access is Access.POINTWISE or packet(node.op) in TOTAL


def _plain(d: Dim) -> bool:
    """Whether a size grows with those it is made of: parts of one (quotients, what is left after a cut) need not be there."""
    return isinstance(d, int) or (d.op in ("sym", "+", "*") and all(_plain(part) for part in dims_in(d)) and not _less(d))


def _less(d: Dim) -> bool:
    return not isinstance(d, int) and any(isinstance(part, int) and part < 0 for part in d.args)


def _mentioned(v: Value) -> frozenset[str]:
    return frozenset[str]().union(*(symbols(d) for d in dims_of(v.type)))


def _nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for body in node.graphs:
            yield from _nodes(body)
