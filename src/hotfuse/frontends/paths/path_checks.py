"""What a traced path assumes becomes one check of the graph.

    _assert_async(a, "a call read true")           y = linear(x, w)
    y = linear(x, w)                     ->        c = logical_and(a, n == 3)
    _assert_async(n, "a call read 3")              z = hotfuse.assume(y, c)
    return y                                       return z

An assertion of its own would interrupt a native run. `assume` is an identity that kernels take in with what makes `y`, so a check
costs the truth values it is made of and nothing else. A call that takes another path computes a result that nobody sees. What is
assumed of sizes that data decide is checked before that (`frontends.paths.size_checks`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hotfuse.frontends.paths.follow import MARK
from hotfuse.frontends.paths.size_checks import sizes_checked
from hotfuse.ir.dims import symbols
from hotfuse.ir.graph import Arg, Graph, Kind, Loc, Node, Value, map_values, sources, unused_name
from hotfuse.ir.types import DType, TensorType
from hotfuse.ops.own.assume import ASSUME

_MARKS = "aten._assert_async.msg"
NOWHERE = Loc()


def read_value(node: Node) -> Any:
    """What a mark says was read; None for other nodes."""
    text = node.args[1] if node.op == _MARKS and len(node.args) > 1 else None
    return json.loads(text.removeprefix(MARK)) if isinstance(text, str) and text.startswith(MARK) else None


class ConditionWriter:
    """Adds nodes that compare what is read with what was."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken
        self.nodes: list[Node] = []

    def add(self, op: str, *args: Arg, dtype: DType = DType.BOOL, loc: Loc = NOWHERE) -> Value:
        """A node that gives one number."""
        out = Value(unused_name("read.", self.taken), TensorType(dtype, ()))
        self.nodes.append(Node(Kind.OPERATOR, f"aten.{op}", args, (out,), loc=loc))
        return out

    def same(self, mark: Node) -> Value:
        """Whether a mark reads the same as before."""
        t, value = mark.args[0], read_value(mark)
        assert isinstance(t, Value) and isinstance(t.type, TensorType)
        floats = t.type.dtype in (DType.F64, DType.F32, DType.F16, DType.BF16)
        if isinstance(value, bool):
            truth = t if t.type.dtype is DType.BOOL else self.add("ne.Scalar", t, 0, loc=mark.loc)  # NaN is true
            return truth if value else self.add("logical_not.default", truth, loc=mark.loc)
        if isinstance(value, int):
            whole = self.add("trunc.default", t, dtype=t.type.dtype, loc=mark.loc) if floats else t
            return self.add("eq.Scalar", whole, value, loc=mark.loc)
        if math.isnan(value):
            return self.add("isnan.default", t, loc=mark.loc)
        same = self.add("eq.Scalar", t, value, loc=mark.loc)
        if value:
            return same
        minus = self.add("signbit.default", t, loc=mark.loc)
        sign = minus if math.copysign(1.0, value) < 0 else self.add("logical_not.default", minus, loc=mark.loc)
        return self.add("logical_and.default", same, sign, loc=mark.loc)


def checked(graph: Graph, captures: Sequence[Value] = ()) -> Graph:
    """The graph with one check instead of marks, and those of sizes; the same graph where there are none.

    `captures`: what a branch has from the graph around it.
    """
    marks = [n for n in graph.nodes if read_value(n) is not None]
    if not marks:
        return graph
    taken = {v.name for v in sources(graph)} | {v.name for n in graph.nodes for v in n.outs}
    nodes = [n for n in graph.nodes if read_value(n) is None]
    writer = ConditionWriter(taken)
    conditions = list(dict.fromkeys(map(writer.same, {(m.args[0], m.args[1]): m for m in marks}.values())))
    nodes, sized, conditions = sizes_checked(
        [*nodes, *writer.nodes], conditions, taken, graph.inputs, graph.outputs, captures
    )
    graph = replace(graph, outputs=tuple(map_values(o, sized) for o in graph.outputs))
    if not conditions:
        return replace(graph, nodes=tuple(nodes))
    writer.nodes, holds = [], conditions[0]
    for more in conditions[1:]:
        holds = writer.add("logical_and.default", holds, more, loc=marks[0].loc)
    nodes += writer.nodes
    if (place := _place(graph, nodes)) is None:
        nodes.append(Node(Kind.OPERATOR, _MARKS, (holds, "a call took another path"), (), loc=marks[0].loc))
        return replace(graph, nodes=tuple(nodes))
    y = graph.outputs[place]
    assert isinstance(y, Value)
    out = Value(unused_name("assumed.", taken), y.type)
    nodes.append(Node(Kind.OPERATOR, ASSUME, (y, holds), (out,), loc=marks[0].loc))
    outputs: tuple[Arg, ...] = (*graph.outputs[:place], out, *graph.outputs[place + 1 :])
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def lines(graph: Graph) -> tuple[str, ...]:
    """The lines of the model's code whose outcome is assumed."""
    return tuple(dict.fromkeys(f"{n.loc.file}:{n.loc.line}" for n in graph.nodes if read_value(n) is not None))


def _place(graph: Graph, nodes: Sequence[Node]) -> int | None:
    """An output that a kernel makes in every call, so that the check is never left out: one that the graph computes, returns once,
    and of which there are elements whatever data decide."""
    shown = {s for v in graph.inputs if isinstance(v.type, TensorType) for d in v.type.shape for s in symbols(d)}
    made = {v.name for n in nodes for v in n.outs}
    outputs = [o for o in graph.outputs if isinstance(o, Value)]
    for i, y in enumerate(graph.outputs):
        if not isinstance(y, Value) or not isinstance(y.type, TensorType) or y.name not in made or outputs.count(y) > 1:
            continue
        if all(bool(d) if isinstance(d, int) else symbols(d) <= shown for d in y.type.shape) and y.type.dtype is DType.F32:
            return i
    return None
