"""What depends on repeated inputs alone is cut off, so that it can be kept from one call to the next.

    %t = encoder(%text)            kept(%text) -> %u
    %u = norm(%t)                  rest(%image, %text, %u):  %v = encoder(%image)  %s = matmul(%v, %u)  return %s
    %v = encoder(%image)
    %s = matmul(%v, %u)

The rest takes the graph's inputs and then what is kept. Views, and integers that describe sizes, are made again in the rest rather
than kept: they cost nothing, and a view of what is kept would be a second name for its memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from hotfuse.analysis.cost import node_cost
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Kind, Node, Value, makers, output_values
from hotfuse.ir.subgraph import extract
from hotfuse.ir.types import TensorType
from hotfuse.ir.verify import verify
from hotfuse.ops.schema import draws_random
from hotfuse.ops.table import is_mutating, lookup

BYTE_OPS = 8
"""Operations that take as long as moving a byte, about: what a core's peaks are to each other."""


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A graph cut in two."""

    kept: Graph
    """What depends on repeated inputs alone; its inputs are those of them that it reads."""
    rest: Graph
    """Everything else; its inputs are the graph's, then what `kept` gives."""


def kept_part(graph: Graph, repeated: Collection[str]) -> KeptPart | None:
    """The graph cut behind what depends on these inputs alone; None where there is nothing of that kind, or nothing else."""
    chosen = _chosen(graph, repeated)
    if not chosen:
        return None
    maker = makers(graph)
    again, border = set[int](), dict[str, Value]()
    reads = [v for i, n in enumerate(graph.nodes) if i not in chosen for v in n.ins]
    waiting = [*reads, *output_values(graph)]
    while waiting:
        v = waiting.pop()
        at = maker.get(v.name)
        if at is None or at not in chosen or v.name in border or at in again:
            continue
        if _free(graph.nodes[at]):
            again.add(at)
            waiting += graph.nodes[at].ins
        else:
            border[v.name] = v
    if not border:
        return None
    needed = _needed(graph, border.values())
    kept = extract(graph, needed, f"{graph.name}.kept")
    order = [v for i in needed for v in graph.nodes[i].outs if v.name in border]
    kept = replace(kept, outputs=tuple(order))
    nodes = tuple(n for i, n in enumerate(graph.nodes) if i not in chosen or i in again)
    if not any(i not in chosen for i in range(len(graph.nodes))):
        return None
    used = {v.name for n in nodes for v in n.ins} | {v.name for v in output_values(graph)}
    params = tuple(p for p in graph.params if p.value.name in used)
    rest = replace(graph, name=f"{graph.name}.rest", inputs=(*graph.inputs, *order), params=params, nodes=nodes)
    return KeptPart(verify(kept), verify(rest))


def _chosen(graph: Graph, repeated: Collection[str]) -> set[int]:
    """The nodes that depend on such inputs, and otherwise on weights alone."""
    constant = {p.value.name for p in graph.params}
    fixed = {v.name for v in graph.inputs if v.name in repeated}
    found = set[int]()
    for i, n in enumerate(graph.nodes):
        names = [v.name for v in n.ins]
        pure = n.kind is Kind.OPERATOR and not is_mutating(n.op) and not draws_random(n.op, n.args, dict(n.attrs))
        if not pure or any(name not in constant and name not in fixed for name in names):
            continue
        if any(name in fixed for name in names):
            fixed.update(v.name for v in n.outs)
            found.add(i)
        else:
            constant.update(v.name for v in n.outs)
    return found


def _free(node: Node) -> bool:
    """Whether making it again costs nothing."""
    return lookup(node.op).view or not all(isinstance(v.type, TensorType) for v in node.outs)


def _needed(graph: Graph, values: Collection[Value]) -> list[int]:
    maker, found = makers(graph), set[int]()
    waiting = [v.name for v in values]
    while waiting:
        if (i := maker.get(waiting.pop())) is not None and i not in found:
            found.add(i)
            waiting += [v.name for v in graph.nodes[i].ins]
    return sorted(found)


def work_saved(graph: Graph, repeated: Collection[str], sizes: Mapping[str, int]) -> float:
    """The part of a graph's work that depends on these inputs alone; 0 where nobody can tell."""
    chosen, total, saved = _chosen(graph, repeated), 0, 0
    for i, node in enumerate(graph.nodes):
        cost = node_cost(node, sizes)
        work = (cost.flops or 0) + BYTE_OPS * (cost.bytes or 0)
        total += work
        saved += work if i in chosen else 0
    return saved / total if total else 0.0
