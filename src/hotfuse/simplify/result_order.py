"""Results lie in memory as the model's own code has them, where a trace goes another way than a call.

    %y = transpose(%x, 0, 1)   return %y      ->      %y = transpose(%x, 0, 1)   %z = contiguous(%y)   return %z

Some layers of torch have a path for calls without gradients that no trace takes (`nn.MultiheadAttention`), and its results are the
same numbers in another order. A program that takes a `view` of such a result gets an error from the graph's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, unused_name
from hotfuse.ir.types import ROW_MAJOR, TensorType


def in_rows(results: Sequence[Any]) -> frozenset[int]:
    """Results that lie row by row."""
    return frozenset(i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and _row_major(r))


def ordered_otherwise(results: Sequence[Any], rows: Collection[int]) -> frozenset[int]:
    """Results that do in the model's own code, and not in a plan."""
    return frozenset(i for i in rows if isinstance(results[i], torch.Tensor) and not _row_major(results[i]))


def _row_major(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and t.is_contiguous()


def row_by_row(graph: Graph, results: Collection[int]) -> Graph:
    """The graph with these results row by row; what it was given it returns as it is."""
    taken = {v.name for v in graph.inputs} | {p.value.name for p in graph.params} | {v.name for n in graph.nodes for v in n.outs}
    made = {v.name for n in graph.nodes for v in n.outs}
    copies: dict[str, Node] = {}
    outputs: list[Arg] = list(graph.outputs)
    for i in sorted(results):
        value = graph.outputs[i]
        if isinstance(value, Value) and isinstance(value.type, TensorType) and value.name in made:
            if value.name not in copies:
                new = Value(unused_name(f"{value.name}_rows", taken), replace(value.type, layout=ROW_MAJOR))
                taken.add(new.name)
                copies[value.name] = Node(Kind.OPERATOR, "aten.contiguous.default", (value,), (new,))
            outputs[i] = copies[value.name].outs[0]
    return replace(graph, nodes=(*graph.nodes, *copies.values()), outputs=tuple(outputs)) if copies else graph
