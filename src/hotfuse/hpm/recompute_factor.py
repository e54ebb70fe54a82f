"""What a kernel computes more than once: fused, a value is computed wherever it is wanted, not where it is stored.

    %s: [1, C] = gelu(%r);  %y: [R, C] = mul(%x, %s)      one kernel: gelu once for every row
    %h = gelu(%x);  %y = linear(%h, %w)                   one kernel: gelu once for every panel of columns

What is the same along the innermost dim is computed once a row, in front of its loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from hotfuse.ir.graph import Graph

OTHER, POINTWISE, MOVED, PRODUCT = range(4)
"""Kinds of nodes: what is the same along its innermost dim is another one."""


def factors(graph: Graph, kinds: Sequence[float], elements: Sequence[float], panels: float) -> list[float]:
    """How often each node's elements are computed, in one kernel whose product has so many panels of columns."""
    wanted: dict[int, float] = {}
    in_front: set[int] = set()
    found: list[float] = []
    for node, kind, own in zip(reversed(graph.nodes), reversed(kinds), reversed(elements), strict=True):
        want = own
        if kind in (POINTWISE, MOVED):
            for v in node.outs:
                want = max(want, wanted.get(id(v), 0.0), own * panels if id(v) in in_front else 0.0)
            for v in node.ins:
                wanted[id(v)] = max(wanted.get(id(v), 0.0), want)
        elif kind == PRODUCT and node.ins:
            in_front.add(id(node.ins[0]))
        found.append(want / max(own, 1.0))
    return found[::-1]
