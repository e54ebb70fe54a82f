"""Graphs that rest on data (`ops.own.assume`), on a device: what they rest on comes out as one more result, and is read behind.

    z = assume(y, c);  return z     ->     return y, c        c is read on the host when everything was launched

A recording cannot hold an operator that reads the device's data on the host. A call's path was traced without branches, and its
check is its last node, so nothing is lost by looking later: a call on another path is answered by the model's own code, as ever. A
program that reads data waits for the device in every call anyway.

Kernels that read at indices they are given (an embedding, an index) stop the whole process on a device if an index is out of
bounds. On another path the model's own code may check the indices first. So graphs with such an operator behind the first value
that is read are not for devices (`unsafe_behind_reads`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, makers, map_node, map_values, unused_name
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.own.assume import ASSERTIONS, ASSUME, OtherPath, made_up_calls
from hotfuse.ops.table import packet

Run = Callable[..., tuple[Any, ...]]
_BY_NUMBERS = ("aten.embedding", "aten.index", "aten.gather", "aten.scatter", "aten.take", "aten.one_hot", "aten.multinomial",
               "aten.masked_scatter", "aten.put", "aten.nll_loss", "aten.cross_entropy")  # fmt: skip
"""How names of operators begin that stop a device where a number is out of bounds."""


def checked_late(graph: Graph) -> Graph:
    """The graph with what it rests on as its last result; the same graph where it rests on nothing, or on a number of the host."""
    checks = [n for n in graph.nodes if n.op == ASSUME or n.op in ASSERTIONS]
    holds = [_condition(n) for n in checks]
    found = [v for v in holds if v is not None]
    if not checks or len(found) < len(holds):
        return graph
    taken = {v.name for v in graph.inputs} | {p.value.name for p in graph.params} | {v.name for n in graph.nodes for v in n.outs}
    given: dict[str, Arg] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == ASSUME:
            given[node.outs[0].name] = map_values(node.args[0], given)
        elif node.op not in ASSERTIONS:
            nodes.append(map_node(node, given))
    last = found[0]
    for more in dict.fromkeys(found[1:]):
        both = Value(unused_name("holds.", taken), TensorType(DType.BOOL, (), device=_device(last, more)))
        nodes.append(Node(Kind.OPERATOR, "aten.logical_and.default", (last, more), (both,), loc=checks[0].loc))
        last = both
    outputs = tuple(map_values(o, given) for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=(*outputs, last))


def _device(*conditions: Value) -> str:
    """Where the truth of several is: on the device, if one of them is."""
    found = [v.type.device for v in conditions if isinstance(v.type, TensorType)]
    return next((d for d in found if d != "cpu"), "cpu")


def _condition(node: Node) -> Value | None:
    """The truth value that a node rests on; None where it is a number of the host."""
    v = node.args[1] if node.op == ASSUME else node.args[0]
    return v if isinstance(v, Value) and isinstance(v.type, TensorType) and not v.type.shape else None


class LateChecks:
    """A run whose last result says whether the others are the call's."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """The other results; raises OtherPath."""
        *outs, holds = self._run(*inputs)
        if not bool(holds) and not made_up_calls:
            raise OtherPath("the call takes another path through the model's code")
        return tuple(outs)


def unsafe_behind_reads(graph: Graph) -> str:
    """The first operator that may stop a device on data of another way; empty where there is none, or it rests on no data."""
    maker = makers(graph)
    conditions = [v for n in graph.nodes if n.op == ASSUME or n.op in ASSERTIONS if (v := _condition(n)) is not None]
    read = [at for v in conditions if (at := _first_read(graph, v, maker)) is not None]
    if not read:
        return ""
    behind = graph.nodes[min(read) :]
    return next((packet(n.op) for n in behind if packet(n.op).startswith(_BY_NUMBERS)), "")


def _first_read(graph: Graph, condition: Value, maker: dict[str, int]) -> int | None:
    """The number of the first node from which on a truth value is made of single numbers: where the model's code looked."""
    first: int | None = None
    left, seen = [condition], set[str]()
    while left:
        v = left.pop()
        if v.name in seen or v.name not in maker:
            continue
        seen.add(v.name)
        node = graph.nodes[maker[v.name]]
        if all(isinstance(i.type, TensorType) and not i.type.shape for i in node.ins):
            left += node.ins
        at = maker[v.name]
        first = at if first is None else min(first, at)
    return first
