"""Masks that hide nothing, whatever a call brings: made of positions alone, and true everywhere.

    m = arange(128) >= 0;  y = attention(q, k, v, mask=expand(m))   ->   y = attention(q, k, v)

Some exporters write such a mask for calls without padding, and torch's attention on a device pays for it dearly: with any mask it
leaves the flash kernels, at some sizes for plain products. What the elements of a mask are at least follows from the graph for
every size; where that is not enough and sizes are numbers, the mask is computed once, here.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import torch

from hotfuse.analysis.attention import FUSED
from hotfuse.analysis.uniform import SPREAD
from hotfuse.backends.library import meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.ir.graph import Graph, Kind, Node, Value
from hotfuse.ir.rewrite import READS, Context, Replacement, Rule, apply
from hotfuse.ir.types import DType, TensorType
from hotfuse.lower.ops import expand
from hotfuse.lower.ops.views import is_move
from hotfuse.ops.schema import argument
from hotfuse.ops.table import packet
from hotfuse.simplify import simplify

_MASK = "attn_mask"
_PLACE = 3
"""Of the mask among the operator's arguments."""
MAX_ELEMENTS = 1 << 28


def without_idle_masks(graph: Graph) -> Graph:
    """The graph without masks that hide nothing."""
    masks = {v.name: v for n in graph.nodes if (v := _mask(n)) is not None}
    if not masks:
        return graph
    constant, least = _constant(graph), _least(graph)
    idle = {
        name for name, v in masks.items()
        if least.get(name, 0) >= 1 or (name in constant and _hides_nothing(graph, v, constant))
    }  # fmt: skip
    if not idle:
        return graph
    return simplify(apply(graph, rules(idle))[0])[0]


def rules(idle: Container[str]) -> tuple[Rule, ...]:
    """One rule for masks that are known to hide nothing."""

    def drop(node: Node, _context: Context) -> Replacement | None:
        mask = _mask(node)
        return Replacement((_unmasked(node),)) if mask is not None and mask.name in idle else None

    return (Rule("drop-idle-mask", drop, "one value less is read", READS, frozenset({FUSED})),)


def _mask(node: Node) -> Value | None:
    if packet(node.op) != FUSED:
        return None
    mask = argument(node, _MASK)
    return mask if isinstance(mask, Value) and isinstance(mask.type, TensorType) and mask.type.dtype is DType.BOOL else None


def _least(graph: Graph) -> dict[str, float]:
    """What every element of a value is at least, whatever the sizes are; a bool that is at least 1 is true everywhere."""
    found: dict[str, float] = {}
    for node in graph.nodes:
        bound = _bound(node, found)
        if bound is not None and len(node.outs) == 1:
            found[node.outs[0].name] = bound
    return found


def _bound(node: Node, known: dict[str, float]) -> float | None:
    of = [known.get(v.name) for v in node.ins if isinstance(v.type, TensorType)]
    match packet(node.op):
        case "aten.arange":
            start, step = _number(argument(node, "start", 0)), _number(argument(node, "step", 1))
            return start if step is not None and step > 0 else None
        case "aten.ones" | "aten.new_ones" | "aten.ones_like":
            return 1
        case "aten.full" | "aten.new_full" | "aten.full_like":
            return _number(argument(node, "fill_value"))
        case "aten.add" if len(of) == 1 and of[0] is not None and not node.attrs:
            added = _number(argument(node, "other"))
            return None if added is None else of[0] + added
        case "aten.ge" | "aten.gt" as op if of and of[0] is not None:
            other = _number(argument(node, "other"))
            holds = other is not None and (of[0] >= other if op == "aten.ge" else of[0] > other)
            return 1 if holds else None
        case "aten.bitwise_and" | "aten.logical_and" | "aten.__and__" if len(of) == 2 and _is_bool(node):
            return 1 if all(n is not None and n >= 1 for n in of) else None
        case "aten.bitwise_or" | "aten.logical_or" | "aten.__or__" if len(of) == 2 and _is_bool(node):
            return 1 if any(n is not None and n >= 1 for n in of) else None
        case op if op in SPREAD and of:
            return of[0]
        case _:
            return None


def _number(a: object) -> float | None:
    return a if isinstance(a, int | float) else None


def _is_bool(node: Node) -> bool:
    return all(isinstance(v.type, TensorType) and v.type.dtype is DType.BOOL for v in (*node.ins, *node.outs))


def _constant(graph: Graph) -> dict[str, int]:
    """Values that follow from the graph alone, with the numbers of the nodes that make them."""
    found: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        plain = node.kind is Kind.OPERATOR and not node.graphs and (expand.known(node.op) or is_move(node.op))
        if plain and all(v.name in found for v in node.ins):
            found |= {v.name: i for v in node.outs}
    return found


def _hides_nothing(graph: Graph, mask: Value, constant: dict[str, int]) -> bool:
    if not isinstance(mask.type, TensorType) or any(not isinstance(n, int) for n in mask.type.shape):
        return False
    needed: set[int] = set()
    waiting = [mask.name]
    while waiting:
        i = constant[waiting.pop()]
        if i not in needed:
            needed.add(i)
            waiting.extend(v.name for v in graph.nodes[i].ins)
    alone = Graph("mask", (), (), tuple(graph.nodes[i] for i in sorted(needed)), (mask,))
    run, _ = flat_function(alone, meaning, {})
    with torch.no_grad():
        (value,) = run()
    return value.numel() <= MAX_ELEMENTS and bool(value.all())


def _unmasked(node: Node) -> Node:
    attrs = tuple((k, None if k == _MASK else a) for k, a in node.attrs)
    args = tuple(None if i == _PLACE else a for i, a in enumerate(node.args))
    return replace(node, args=args, attrs=attrs)
