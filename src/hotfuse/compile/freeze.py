"""What follows from weights alone is computed once, when a plan with copies of weights is made.

    %a = slice(%w, 0, 0, 128)   %b = cat([%a, %c])   %y = linear(%x, %b)     ->     param %b   %y = linear(%x, %b)

Exporters write down how weights are put together (the gates of an LSTM, positions, masks), and every call would do it again. Only
for tiers that are withdrawn when a weight changes, and for models whose weights nobody can reach (ONNX).

Which constant parts are worth their memory is weighed over the whole graph, and they are run once; then `rules` put params in the
place of the nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from hotfuse.analysis.quantized import weight_nodes
from hotfuse.backends.library import LibraryBackend
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.ir.control_bodies import CAPTURES, branches
from hotfuse.ir.graph import Graph, Kind, Node, Param, Value, output_values, values_in
from hotfuse.ir.rewrite import Context, Replacement, Rule, apply, without_unused_params
from hotfuse.ir.subgraph import extract
from hotfuse.ir.types import TensorType, size_of
from hotfuse.ops.table import is_mutating, is_random, packet

EXTRA_BYTES = 1 << 20
"""How much larger than the weights it is made of a plan's constants may be."""
WIDENED_BYTES = 64 << 20
"""The same of weights that are only widened (bytes or half floats to floats) where no kernel takes them as they are: every call
would do that again. What is repeated, so that it has more elements than it is made of, stays within `EXTRA_BYTES`."""
PACKED_ELEMENTS = 4
"""Most elements that a widened weight may have for one of those it is made of: numbers of two bits in bytes."""
_UNDEFINED = frozenset({"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.empty_permuted"})


Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class WeightedGraph:
    """A graph, and the tensors that its params are."""

    graph: Graph
    weights: Weights


def may_copy(settings: Settings) -> bool:
    """Whether weights may be kept in another form too: not where memory is what counts."""
    return settings.objective != "memory" and not settings.release_weights


def frozen(graph: Graph, weights: Weights, prefix: str = "frozen:", *, widen: bool = True) -> tuple[Graph, Weights]:
    """The graph without nodes that depend on weights only, and the weights with what those nodes give, under `prefix`.

    `widen`: weights may be widened once, where every call would do it (`WIDENED_BYTES`).
    """
    graph, weights = _inside_branches(graph, weights, prefix, widen=widen)
    chosen = _within_budget(graph, _constant(graph), WIDENED_BYTES if widen else 0)
    if not chosen:
        return graph, weights
    piece = extract(graph, chosen, f"{graph.name}.constants")
    with torch.no_grad():
        made = LibraryBackend().compile(piece, weights).run()
    keys = {v.name: f"{prefix}{v.name}" for v in output_values(piece)}
    known = replace(graph, params=(*graph.params, *(Param(v, keys[v.name]) for v in output_values(piece))))
    folded, _ = apply(known, rules(output_values(piece), {v.name for i in chosen for v in graph.nodes[i].outs}))
    return without_unused_params(folded), {**weights, **dict(zip(keys.values(), made, strict=True))}


def rules(results: Sequence[Value], constant: Collection[str]) -> tuple[Rule, ...]:
    """One rule: of nodes that make constants, by name, those go whose results are params of that name by now, or are not read."""
    made = {v.name: v for v in results}

    def fold(node: Node, context: Context) -> Replacement | None:
        if not node.outs or any(v.name not in constant for v in node.outs) or not context.is_param(results[0]):
            return None  # inside branches, which have no params, the same name may be another value
        if any(v.name not in made and context.is_used(v) for v in node.outs):
            return None
        return Replacement(values={v.name: made[v.name] for v in node.outs if v.name in made})

    return (Rule("fold-constant", fold, "one node less"),) if results else ()


def unfolded(before: Graph, after: Graph) -> frozenset[str]:
    """Keys of weights that a graph reads as often after folding as before: nothing was computed of them ahead.

    None where bodies of branches or loops read weights too: what was folded there does not show outside.
    """
    if any(n.op in CAPTURES for n in before.nodes):
        return frozenset()
    uses = [Counter(v.name for v in (*(v for n in g.nodes for v in n.ins), *output_values(g))) for g in (before, after)]
    return frozenset(p.key for p in before.params if uses[0][p.value.name] == uses[1][p.value.name])


def _inside_branches(graph: Graph, weights: Weights, prefix: str, *, widen: bool) -> tuple[Graph, Weights]:
    """Branches and loops with their constants computed outside: each comes in as one more capture of all bodies."""
    found = dict(weights)
    params, nodes = list(graph.params), list[Node]()
    for i, node in enumerate(graph.nodes):
        if node.op in CAPTURES and isinstance(captures := node.args[at := CAPTURES[node.op]], tuple):
            made = [frozen(b.graph, weights, f"{prefix}{i}.{k}.", widen=widen) for k, b in enumerate(branches(graph, node))]
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


def _within_budget(graph: Graph, constant: set[int], widened_bytes: int) -> set[int]:
    """The constant nodes that are worth their memory: parts that share no value are judged one by one, the least growth first."""
    chosen: set[int] = set()
    extra = widened = 0
    for part in sorted((_ConstantPart.of(graph, nodes) for nodes in _parts(graph, constant)), key=lambda p: p.growth):
        if extra + part.growth <= EXTRA_BYTES:
            extra += part.growth
        elif part.widens and widened + part.growth <= widened_bytes:
            widened += part.growth
        else:
            continue
        chosen |= part.nodes
    return chosen


@dataclass(frozen=True, slots=True)
class _ConstantPart:
    """Constant nodes that hang together."""

    nodes: frozenset[int]
    growth: int
    """Bytes of what they give beyond those of the weights they read."""
    widens: bool
    """Whether they give weights of about as many elements as they read."""

    @classmethod
    def of(cls, graph: Graph, nodes: frozenset[int]) -> _ConstantPart:
        inside = {v.name for i in nodes for v in graph.nodes[i].outs}
        read = {v.name: v for i in nodes for v in graph.nodes[i].ins if v.name not in inside}
        outside = {v.name for i, n in enumerate(graph.nodes) if i not in nodes for v in n.ins}
        given = [v for i in nodes for v in graph.nodes[i].outs if v.name in outside]
        most = max((_elements(v) for v in read.values()), default=0)
        wide = all(_elements(v) <= PACKED_ELEMENTS * most for v in given)
        return cls(nodes, sum(map(_size, given)) - sum(map(_size, read.values())), wide)


def _parts(graph: Graph, chosen: set[int]) -> list[frozenset[int]]:
    """The chosen nodes by what they share: values that one gives and another reads."""
    makers = {v.name: i for i in chosen for v in graph.nodes[i].outs}
    part = {i: {i} for i in chosen}
    for i in sorted(chosen):
        for v in graph.nodes[i].ins:
            if v.name in makers and part[makers[v.name]] is not part[i]:
                mine, other = sorted((part[i], part[makers[v.name]]), key=len)
                other |= mine
                for k in mine:
                    part[k] = other
    return [frozenset(p) for p in {id(p): p for p in part.values()}.values()]


def _elements(v: Value) -> int:
    shape = v.type.shape if isinstance(v.type, TensorType) else ()
    return math.prod(d for d in shape if isinstance(d, int))


def _size(v: Value) -> int:
    return _elements(v) * size_of(v.type.dtype) if isinstance(v.type, TensorType) else 0


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
