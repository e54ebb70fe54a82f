"""A mask that lets everything through is no mask.

    %b = eq(%keep, 0)      where %keep is all ones: %b is all false
    %m = masked_fill(%s, %b, -inf)      ->      %s
    %a = sdpa(%q, %k, %v, %keep4d)      ->      sdpa(%q, %k, %v)

What is known of an input, that all its elements are one number, is carried through the graph: an op of numbers alone gives a
number. Where such a value decides what another becomes, the decision is made once. Added zeros and multiplied ones are equal in
real arithmetic. The guard is that the input is that number, all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hotfuse.analysis.uniform import evaluated, number_of
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, map_node, map_values, output_values, values_in
from hotfuse.ir.verify import verify
from hotfuse.ops.table import is_mutating, is_random, packet

_SDPA = "aten.scaled_dot_product_attention"


def all_alike(graph: Graph, name: str, number: float | bool) -> Graph | None:
    """The graph for calls in which every element of an input is a number; None where that saves nothing."""
    known: dict[str, torch.Tensor] = {}
    same: dict[str, Arg] = {}
    nodes: list[Node] = []
    given = next(v for v in graph.inputs if v.name == name)
    known[name] = number_of(given, number)
    saved = 0
    for node in graph.nodes:
        n = map_node(node, same) if same else node
        if (found := evaluated(n, known)) is not None:
            known[n.outs[0].name] = found
        elif (by := _decided(n, known)) is not None:
            same[n.outs[0].name] = by
            saved += 1
            continue
        elif (attended := _attended(n, known)) is not None:
            n = attended
            saved += 1
        nodes.append(n)
    if not saved:
        return None
    outputs = tuple(map_values(o, same) for o in graph.outputs)
    return verify(without_unread(replace(graph, name=f"{graph.name}.unmasked", nodes=tuple(nodes), outputs=outputs)))


def _decided(node: Node, known: Mapping[str, torch.Tensor]) -> Value | None:
    """The value that a node gives unchanged, if it does."""
    if node.kind is not Kind.OPERATOR or len(node.outs) != 1 or len(node.args) < 2:
        return None

    def number(at: int) -> float | None:
        a = node.args[at] if at < len(node.args) else None
        return float(known[a.name]) if isinstance(a, Value) and a.name in known else None

    kept: Arg = None
    match packet(node.op):
        case "aten.masked_fill":
            kept = node.args[0] if number(1) == 0 else None
        case "aten.where" if len(node.args) == 3 and number(0) is not None:
            kept = node.args[1] if number(0) else node.args[2]
        case "aten.add" if len(node.args) == 2 and not node.attrs:
            kept = node.args[0] if number(1) == 0 else node.args[1] if number(0) == 0 else None
        case "aten.mul" if len(node.args) == 2:
            kept = node.args[0] if number(1) == 1 else node.args[1] if number(0) == 1 else None
        case _:
            pass
    return kept if isinstance(kept, Value) and kept.type == node.outs[0].type else None


def _attended(node: Node, known: Mapping[str, torch.Tensor]) -> Node | None:
    """Attention without a mask that hides nothing."""
    if packet(node.op) != _SDPA:
        return None
    mask = node.args[3] if len(node.args) > 3 else node.attr("attn_mask")
    if not isinstance(mask, Value) or mask.name not in known:
        return None
    number = known[mask.name]
    if not (bool(number) if number.dtype is torch.bool else float(number) == 0):
        return None
    args = tuple(None if i == 3 else a for i, a in enumerate(node.args))
    return replace(node, args=args, attrs=tuple((k, a) for k, a in node.attrs if k != "attn_mask"))


def without_unread(graph: Graph) -> Graph:
    """Without what nobody reads any more."""
    live = {v.name for v in output_values(graph)}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if any(v.name in live for v in node.outs) or not node.outs or is_random(node.op) or is_mutating(node.op):
            nodes.append(node)
            live |= {v.name for a in (*node.args, *(a for _, a in node.attrs)) for v in values_in(a)}
    params = tuple(p for p in graph.params if p.value.name in live)
    return replace(graph, params=params, nodes=tuple(reversed(nodes)))
