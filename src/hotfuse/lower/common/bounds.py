"""What a group promises about its sizes: upper bounds among its guards.

A group in its normal form has no guards. One that carries some is meant for calls that fulfil them, and lowering may
choose loops that are good only there. They stay right everywhere: a bound is a promise about speed, never about results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hotfuse.ir.dims import Dim, Sym, expr
from hotfuse.ir.graph import Graph
from hotfuse.lower.common.algebra import same


def bounded(graph: Graph, size: Dim, most: int) -> Graph:
    """The group for calls of which a size is at most so much."""
    promise = expr("<=", size, most)
    return replace(graph, guards=(*graph.guards, promise)) if isinstance(promise, Sym) else graph


def at_most(guards: Sequence[Dim], size: Dim) -> int | None:
    """The most that a size can be, as far as guards say."""
    if isinstance(size, int):
        return size
    found: list[int] = []
    for guard in guards:
        if isinstance(guard, Sym) and guard.op == "<=" and len(guard.args) == 2:
            left, right = guard.args
            if isinstance(right, int) and not isinstance(left, str | int) and same(left, size):
                found.append(right)
    return min(found, default=None)
