"""Values that would be computed again and again for one element of a result, and had better be computed once, before.

    max_pool2d(max_pool2d(x, 5), 5)   ->   an element of the outer pool reads 25 of the inner one, each of which reads 25 of x

A value that is read at P places, and takes F loads to compute, costs P * F where it is computed at each place, and about P + F
where it is stored once. Places are told apart by the moves on the way to them: many pointwise ops may read one place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from hotfuse.ir.graph import Graph, Node, Value, output_values, sources
from hotfuse.ir.types import TensorType
from hotfuse.lower.ops.views import is_move

Path = tuple[object, ...]
Paths = frozenset[Path]
"""Ways to an element, by the moves on them."""

MAX_PATHS = 256
"""Paths that are told apart; what has more is read often in any case."""
MIN_LOADS = 64
"""A value is computed again without a second thought where that makes so many loads in all."""
MIN_GAIN = 4
"""How many times as many loads computing again must take as storing."""
MAX_STORED = 16
"""Values that one kernel stores."""


def read_often(graph: Graph) -> list[Value]:
    """The values of a group of primitive ops that pay to be stored first, in the order in which the group makes them."""
    stored: dict[str, Value] = {}
    if not any(_moves(n) for n in graph.nodes):
        return []
    while len(stored) < MAX_STORED:
        worst = _worst(graph, stored)
        if worst is None:
            break
        stored[worst.name] = worst
    return [v for n in graph.nodes for v in n.outs if v.name in stored]


def _worst(graph: Graph, stored: Collection[str]) -> Value | None:
    """The value whose storing leaves the fewest loads, of those that cost many times that."""
    read, needed = _places(graph, stored), _loads(graph, stored)
    found: list[tuple[int, int, Value]] = []
    for i, node in enumerate(graph.nodes):
        for v in node.outs:
            places, loads = len(read.get(v.name, ())), len(needed.get(v.name, ()))
            if v.name not in stored and not _moves(node) and places * loads > max(MIN_LOADS, MIN_GAIN * (places + loads)):
                found.append((places + loads, i, v))
    return min(found, key=lambda f: f[:2])[2] if found else None


def _moves(node: Node) -> bool:
    return is_move(node.op) and node.op != "lower.alias"


def _tensors(node: Node) -> Iterator[Value]:
    return (v for v in dict.fromkeys(node.ins) if isinstance(v.type, TensorType))


def _places(graph: Graph, stored: Collection[str]) -> dict[str, Paths]:
    """Per value, the places it is read at for one element of each result, or of what is stored."""
    found: dict[str, Paths] = {v.name: frozenset({(v.name,)}) for v in output_values(graph)}
    for node in reversed(graph.nodes):
        for out in node.outs:
            if out.name not in found:
                continue
            at = frozenset({(out.name,)}) if out.name in stored else found[out.name]
            through = _further(out.name, at) if _moves(node) else at
            for v in _tensors(node):
                found[v.name] = _bounded((*found.get(v.name, ()), *through))
    return found


def _loads(graph: Graph, stored: Collection[str]) -> dict[str, Paths]:
    """Per value, what is loaded to compute one element of it."""
    found: dict[str, Paths] = {v.name: frozenset({(v.name,)}) for v in sources(graph)}
    for node in graph.nodes:
        below = _bounded(p for v in _tensors(node) for p in
                         (((v.name,),) if v.name in stored else found.get(v.name, ())))  # fmt: skip
        for out in node.outs:
            found[out.name] = _further(out.name, below) if _moves(node) else below
    return found


def _further(name: str, paths: Paths) -> Paths:
    """Hashes stand for what is behind, so that a path costs the same however long it is."""
    return frozenset((name, hash(p)) for p in paths)


def _bounded(paths: Iterable[Path]) -> Paths:
    return frozenset(islice(dict.fromkeys(paths), MAX_PATHS))
