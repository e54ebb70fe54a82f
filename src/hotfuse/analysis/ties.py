"""Rounded numbers: how far two right answers may lie apart.

    q = clamp(round(x / s) + z)         y = (q - z) * s            a quantum of y is s, of q it is 1

Two programs that add in another order differ in the last digit of x. Where x / s lies on a half, one rounds up and the other
down, and both are right: they differ by one quantum, here and there. Behind further layers that becomes a difference of no fixed
size, which is held against one of 255 steps of the result's range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hotfuse.ir.graph import Graph, Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.ops.table import Access, lookup, packet

MAX_TIE_SHARE = 0.01
"""Most results, as a share of all, that may be a quantum apart; one in any case."""
STEPS = 255
"""Steps of the range of a result that is computed from rounded numbers."""
_BEHIND = 0.1
"""Most that such results may be apart on average, in steps."""
_SLACK = 1e-3
_KEEPS = frozenset(
    {"aten.to", "aten._to_copy", "aten.sub", "aten.add", "aten.clamp", "aten.relu", "aten.contiguous", "aten.clone"}
)

Quantum = float | None
"""The size of a step; 0 for what is computed from rounded numbers, None where nothing is rounded."""


def quanta(graph: Graph, number: Callable[[Value], float | None] = lambda _v: None) -> tuple[Quantum, ...]:
    """Per output of a graph; `number` tells the value of a constant of one element."""
    maker = {v.name: n for n in graph.nodes for v in n.outs}
    rounded: set[str] = set()
    for n in graph.nodes:
        if packet(n.op) == "aten.round" or any(v.name in rounded for v in n.ins):
            rounded.update(v.name for v in n.outs)
    return tuple(
        _quantum(out, maker, number) if isinstance(out, Value) and out.name in rounded else None
        for out in graph.outputs
    )


def quanta_of(graph: Graph, weights: Mapping[str, torch.Tensor]) -> tuple[Quantum, ...]:
    """Like `quanta`, with constants looked up among the weights by the keys of the graph's params."""
    keys = {p.value.name: p.key for p in graph.params}

    def number(v: Value) -> float | None:
        tensor = weights.get(keys.get(v.name, ""))
        return float(tensor) if tensor is not None and tensor.numel() == 1 else None

    return quanta(graph, number)


def _quantum(value: Value, maker: dict[str, Node], number: Callable[[Value], float | None]) -> float:
    scale = 1.0
    while (node := maker.get(value.name)) is not None:
        kind = packet(node.op)
        if kind == "aten.round":
            return abs(scale)
        if kind == "aten.mul":
            factor = node.args[1]
            known = number(factor) if isinstance(factor, Value) else factor
            if not isinstance(known, int | float):
                return 0.0
            scale *= known
        elif kind not in _KEEPS and not _moves(node):
            return 0.0
        before = node.args[0]
        if not isinstance(before, Value):
            return 0.0
        value = before
    return 0.0


def _moves(node: Node) -> bool:
    return lookup(node.op).access is Access.MOVEMENT and sum(isinstance(v.type, TensorType) for v in node.ins) == 1


def tied(got: torch.Tensor, want: torch.Tensor, quantum: Quantum) -> bool:
    """Whether two tensors differ by no more than rounding to either side of a half explains."""
    if quantum is None or got.dtype != want.dtype or got.shape != want.shape or not want.numel():
        return False
    g, w = got.detach().double(), want.detach().double()
    if not (torch.isfinite(g).all() and torch.isfinite(w).all()):
        return False
    apart = (g - w).abs()
    if not want.dtype.is_floating_point:
        return quantum == 1 and float(apart.max()) <= 1 and _few(apart > 0)
    step = quantum or float(w.abs().max()) / STEPS
    if float(apart.max()) > step * (1 + _SLACK):
        return False
    if quantum == 0:
        return float(apart.mean()) <= _BEHIND * step
    return _few(apart > step * _SLACK)


def _few(places: torch.Tensor) -> bool:
    """Whether a share of all places that ties may have; of a few places, one."""
    return int(places.sum()) <= max(1.0, MAX_TIE_SHARE * places.numel())


def all_tied(
    got: Sequence[object], want: Sequence[object], steps: Sequence[Quantum], agree: Callable[[object, object], bool]
) -> bool:
    """Whether every output agrees, or differs by ties alone."""
    return len(got) == len(want) == len(steps) and all(
        agree(g, w) or (isinstance(g, torch.Tensor) and isinstance(w, torch.Tensor) and tied(g, w, s))
        for g, w, s in zip(got, want, steps, strict=True)
    )
