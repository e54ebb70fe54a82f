"""The branches of a control node as graphs of their own.

    control.if(%c, [%x, %w]) { graph then(%a, %b) {...} ... }       %w is a param of the graph around
    branch(graph, node, 0)  ->  graph then(%a) { param %b ... }     which takes the capture at place 0

A nested graph takes everything from outside as inputs, so nothing in it shows which of them never change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hotfuse.base.errors import InternalError
from hotfuse.ir.graph import Graph, Node, Param, Value

IF = "control.if"


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
    """Which of the node's captures the graph's inputs are."""


def branches(graph: Graph, node: Node) -> tuple[Branch, ...]:
    """Both branches of an `if` in a graph."""
    captures = node.args[1] if node.op == IF and len(node.args) == 2 else None
    if not isinstance(captures, tuple):
        raise InternalError(f"{node.op} has no branches", where=str(node.loc))
    keys = {p.value.name: p.key for p in graph.params}
    found: list[Branch] = []
    for nested in node.graphs:
        takes: list[int] = []
        params: list[Param] = []
        for i, (inner, outer) in enumerate(zip(nested.inputs, captures, strict=True)):
            if isinstance(outer, Value) and outer.name in keys:
                params.append(Param(inner, keys[outer.name]))
            else:
                takes.append(i)
        inputs = tuple(nested.inputs[i] for i in takes)
        found.append(Branch(replace(nested, inputs=inputs, params=(*nested.params, *params)), tuple(takes)))
    return tuple(found)
