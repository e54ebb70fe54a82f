"""What follows from weights alone is computed once, when a plan with copies of weights is made.

    %a = slice(%w, 0, 0, 128)   %b = cat([%a, %c])   %y = linear(%x, %b)     ->     param %b   %y = linear(%x, %b)

Exporters write down how weights are put together (the gates of an LSTM, positions, masks), and every call would do it again. Only
for tiers that are withdrawn when a weight changes, and for models whose weights nobody can reach (ONNX).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from hotfuse.analysis.quantized import weight_nodes
from hotfuse.backends.library import LibraryBackend
from hotfuse.ir.branches import CAPTURES, branches
from hotfuse.ir.graph import Graph, Kind, Node, Param, Value, output_values, values_in
from hotfuse.ir.subgraph import extract
from hotfuse.ir.types import TensorType
from hotfuse.ops.table import is_mutating, is_random, packet

EXTRA_BYTES = 1 << 20
"""How much larger than the weights it is made of a plan's constants may be."""
_UNDEFINED = frozenset({"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.empty_permuted"})


Weights = Mapping[str, torch.Tensor]


def frozen(graph: Graph, weights: Weights, prefix: str = "frozen:") -> tuple[Graph, Weights]:
    """The graph without nodes that depend on weights only, and the weights with what those nodes give, under `prefix`."""
    graph, weights = _inside_branches(graph, weights, prefix)
    chosen = _constant(graph)
    if not chosen:
        return graph, weights
    piece = extract(graph, chosen, f"{graph.name}.constants")
    with torch.no_grad():
        made = LibraryBackend().compile(piece, weights).run()
    read = {p.key: weights[p.key] for p in piece.params}
    if _bytes(made) > _bytes(tuple(read.values())) + EXTRA_BYTES:
        return graph, weights
    keys = {v.name: f"{prefix}{v.name}" for v in output_values(piece)}
    params = (*graph.params, *(Param(v, keys[v.name]) for v in output_values(piece)))
    nodes = tuple(n for i, n in enumerate(graph.nodes) if i not in chosen)
    used = {v.name for n in nodes for v in n.ins} | {v.name for v in output_values(graph)}
    kept = tuple(p for p in params if p.value.name in used)
    return replace(graph, params=kept, nodes=nodes), {**weights, **dict(zip(keys.values(), made, strict=True))}


def unfolded(before: Graph, after: Graph) -> frozenset[str]:
    """Keys of weights that a graph reads as often after folding as before: nothing was computed of them ahead.

    None where bodies of branches or loops read weights too: what was folded there does not show outside.
    """
    if any(n.op in CAPTURES for n in before.nodes):
        return frozenset()
    uses = [Counter(v.name for v in (*(v for n in g.nodes for v in n.ins), *output_values(g))) for g in (before, after)]
    return frozenset(p.key for p in before.params if uses[0][p.value.name] == uses[1][p.value.name])


def _inside_branches(graph: Graph, weights: Weights, prefix: str) -> tuple[Graph, Weights]:
    """Branches and loops with their constants computed outside: each comes in as one more capture of all bodies."""
    found = dict(weights)
    params, nodes = list(graph.params), list[Node]()
    for i, node in enumerate(graph.nodes):
        if node.op in CAPTURES and isinstance(captures := node.args[at := CAPTURES[node.op]], tuple):
            made = [frozen(b.graph, weights, f"{prefix}{i}.{k}.") for k, b in enumerate(branches(graph, node))]
            added = [(k, p) for k, (g, _) in enumerate(made) for p in g.params if p.key not in weights]
            outer = tuple(Value(p.key, p.value.type) for _, p in added)
            graphs = list[Graph]()
            for k, (old, (g, _)) in enumerate(zip(node.graphs, made, strict=True)):
                inner = [p.value if k == b else v for (b, p), v in zip(added, outer, strict=True)]
                graphs.append(replace(old, nodes=g.nodes, inputs=(*old.inputs, *inner)))
            args = (*node.args[:at], (*captures, *outer), *node.args[at + 1 :])
            node = replace(node, args=args, graphs=tuple(graphs))
            params += [Param(v, p.key) for v, (_, p) in zip(outer, added, strict=True)]
            for _, more in made:
                found.update(more)
        nodes.append(node)
    return replace(graph, params=tuple(params), nodes=tuple(nodes)), found


def _constant(graph: Graph) -> set[int]:
    """Nodes that give the same tensors in every call, except those that give one of the graph's outputs."""
    returned = {v.name for out in graph.outputs for v in values_in(out)}
    known = {p.value.name for p in graph.params}
    bytewise = weight_nodes(graph)
    chosen: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if i in bytewise:  # weights of bytes stay bytes: a kernel multiplies them as they are
            continue
        if all(v.name in known for v in node.ins) and _computable(node) and not any(v.name in returned for v in node.outs):
            chosen.add(i)
            known.update(v.name for v in node.outs)
    return chosen


def _computable(node: Node) -> bool:
    return (
        node.kind is Kind.OPERATOR
        and bool(node.outs)
        and all(_static(v) for v in node.outs)
        and packet(node.op) not in _UNDEFINED
        and not is_random(node.op)
        and not is_mutating(node.op)
    )


def _static(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.device == "cpu" and all(isinstance(d, int) for d in v.type.shape)


def _bytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
