"""Nodes of a file in an order in which each comes behind what it reads.

The format asks for such an order. Tools that write files do not all keep it (ONNX Runtime's own conversion to float16 puts the
casts that it adds at the end), and ONNX Runtime sorts what it loads: so is it done here. Nodes in order stay as they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from onnx import AttributeProto, GraphProto, NodeProto


def in_order(protos: Sequence[NodeProto]) -> Sequence[NodeProto]:
    """The nodes, each behind those whose results it or a graph in its attributes reads, else in the file's order.

    Nodes of a circle, and what reads them, come last as they stood: loading names the input that is missing there.
    """
    made: dict[str, int] = {}
    for at, n in enumerate(protos):
        for name in n.output:
            if name:
                made.setdefault(name, at)
    before = [{made[name] for name in _reads(n) if name in made} for n in protos]
    if all(b < at for at, found in enumerate(before) for b in found):
        return protos
    behind: list[list[int]] = [[] for _ in protos]
    for at, found in enumerate(before):
        for b in found:
            behind[b].append(at)
    waits = [len(found) for found in before]
    free = [at for at, count in enumerate(waits) if not count]
    order: list[int] = []
    while free:
        at = heapq.heappop(free)
        order.append(at)
        for next_one in behind[at]:
            waits[next_one] -= 1
            if not waits[next_one]:
                heapq.heappush(free, next_one)
    placed = set(order)
    return [protos[at] for at in (*order, *(at for at in range(len(protos)) if at not in placed))]


def _reads(n: NodeProto) -> Iterator[str]:
    """Names that a node reads; of graphs in its attributes, those that they do not define themselves."""
    yield from (name for name in n.input if name)
    for a in n.attribute:
        if a.type == AttributeProto.GRAPH:
            yield from _free_names(a.g)
        elif a.type == AttributeProto.GRAPHS:
            for g in a.graphs:
                yield from _free_names(g)


def _free_names(g: GraphProto) -> Iterable[str]:
    own = {v.name for v in g.input} | {t.name for t in g.initializer} | {name for n in g.node for name in n.output}
    own |= {s.values.name for s in g.sparse_initializer}
    return ({name for n in g.node for name in _reads(n)} | {v.name for v in g.output}) - own
