"""The bodies of a control node as graphs of their own: branches, or what a loop repeats.

    control.if(%c, [%x, %w]) { graph then(%a, %b) {...} ... }       %w is a param of the graph around
    branch(graph, node, 0)  ->  graph then(%a) { param %b ... }     which takes the capture at place 0

A nested graph takes everything from outside as inputs, so nothing in it shows which of them never change.
"""

from __future__ import annotations

from dataclasses import replace

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph, Node, Param, Value

IF, LOOP, SCAN = "control.if", "control.loop", "control.scan"
CAPTURES = {IF: 1, LOOP: 3, SCAN: 2}
"""Which argument of a control node with bodies holds what they capture."""


def control_name(node: Node, inside: str = "") -> str:
    """A name that a control node keeps through every tier: that of what it gives; inside others, theirs come first."""
    return f"{inside}{node.op.removeprefix('control.')} {node.outs[0].name if node.outs else node.loc}"


def inside(name: str, body: int) -> str:
    """What the names of control nodes inside the body of another one begin with."""
    return f"{name}, {body}: "


@dataclass(frozen=True, slots=True)
class Branch:
    """A nested graph whose captured params are params again."""

    graph: Graph
    takes: tuple[int, ...]
    """Which of the node's captures the graph's last inputs are; before them a loop's body has inputs of its own."""


def branches(graph: Graph, node: Node) -> tuple[Branch, ...]:
    """Both branches of an `if` in a graph, or the body of a loop."""
    captures = node.args[CAPTURES[node.op]] if node.op in CAPTURES and len(node.args) > CAPTURES[node.op] else None
    if not isinstance(captures, tuple):
        raise InternalError(f"{node.op} has no branches", where=str(node.loc))
    keys = {p.value.name: p.key for p in graph.params}
    found: list[Branch] = []
    for nested in node.graphs:
        takes: list[int] = []
        params: list[Param] = []
        own = len(nested.inputs) - len(captures)
        for i, (inner, outer) in enumerate(zip(nested.inputs[own:], captures, strict=True)):
            if isinstance(outer, Value) and outer.name in keys:
                params.append(Param(inner, keys[outer.name]))
            else:
                takes.append(i)
        inputs = (*nested.inputs[:own], *(nested.inputs[own + i] for i in takes))
        found.append(Branch(replace(nested, inputs=inputs, params=(*nested.params, *params)), tuple(takes)))
    return tuple(found)
