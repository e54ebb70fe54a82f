# pyright: reportPrivateUsage=false
# What an operator's arguments are has no public name.
"""Which copies of whole tensors a sequence of library calls can leave out: nobody reads the old tensor any more.

    a1 = select_scatter(a0, row1, 0, 1)            a0[1].copy_(row1)
    a2 = select_scatter(a1, row2, 0, 2)     ->     a0[2].copy_(row2)

A captured graph has no tensor that is written in place, so a program that fills a matrix row by row, and reads it meanwhile, copies
the matrix for every row (decision 550).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from hotfuse.ir.graph import Graph, Kind, Node, Value, output_values, values_in
from hotfuse.ops.table import packet, resolve
from hotfuse.simplify.facts import may_alias

VIEWS: dict[str, Any] = {
    "aten.select_scatter": torch.ops.aten.select.int, "aten.slice_scatter": torch.ops.aten.slice.Tensor
}  # fmt: skip
"""The views that pieces are copied into, by the operators that put a piece into a copy of the whole."""
_BY_INDEX = frozenset({"aten.index_put", "aten.index_add", "aten.index_copy", "aten.scatter", "aten.scatter_add"})
"""Operators that have a variant that writes into the tensor itself."""
_MADE = frozenset({
    "aten.clone", "aten.zeros", "aten.zeros_like", "aten.ones", "aten.ones_like", "aten.full", "aten.full_like", "aten.new_zeros",
    "aten.new_ones", "aten.new_full", "aten.empty", "aten.empty_like", "aten.new_empty",
})  # fmt: skip
"""Operators whose result is new memory, each element of it once."""


def overwritable(graph: Graph) -> frozenset[int]:
    """The numbers of nodes that may write into their first argument: it is new memory, and neither it nor a view of it is read
    behind them, by them in another argument, or by the caller."""
    if not any(map(writes, graph.nodes)):
        return frozenset()
    end = len(graph.nodes)
    last = {v.name: i for i, n in enumerate(graph.nodes) for v in n.ins} | {v.name: end for v in output_values(graph)}
    shared: dict[str, set[str]] = {}
    """By value, the names of all values in the same memory, where that is new."""
    found: set[int] = set()
    for i, node in enumerate(graph.nodes):
        made = {v.name for v in node.outs}
        if node.kind is Kind.OPERATOR and not node.graphs and len(made) == 1 and (writes(node) or packet(node.op) in _MADE):
            memory = _only_here(node, shared) if writes(node) else None
            if memory is None or any(last.get(name, -1) > i for name in memory):
                memory = set[str]()
            else:
                found.add(i)
        elif may_alias(node) and (read := [shared[v.name] for v in node.ins if v.name in shared]):
            memory = set[str]().union(*read)
        else:
            continue
        memory |= made
        shared |= dict.fromkeys(memory, memory)
    return frozenset(found)


def writes(node: Node) -> bool:
    """Whether a node gives a copy of a tensor with a piece in it."""
    return packet(node.op) in VIEWS or packet(node.op) in _BY_INDEX


def _only_here(node: Node, shared: Mapping[str, set[str]]) -> set[str] | None:
    """What lies in the memory that a node gives a copy of; None where that is not new, or where the piece lies there, too."""
    whole, *others = node.args
    memory = shared.get(whole.name) if isinstance(whole, Value) else None
    attrs = [a for _, a in node.attrs]
    return None if memory is None or any(v.name in memory for a in (*others, *attrs) for v in values_in(a)) else memory


def writing(node: Node) -> Any:
    """The operator that writes by index into the tensor itself; None where torch has none of the same arguments."""
    functional = resolve(node.op)
    if packet(node.op) not in _BY_INDEX or not isinstance(functional, OpOverload):
        return None
    name, overload = functional._schema.name.removeprefix("aten::"), functional._schema.overload_name or "default"
    found = getattr(getattr(torch.ops.aten, f"{name}_", None), overload, None)
    same = found is not None and [a.name for a in found._schema.arguments] == [a.name for a in functional._schema.arguments]
    return found if same else None
