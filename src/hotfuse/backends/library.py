"""The library back end: each node is a call of its torch operator. Coverage is total."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from hotfuse.backends.conv_folding import folded
from hotfuse.backends.protocol import Artifact, Run
from hotfuse.backends.pycode import flat_function
from hotfuse.backends.step_attention import is_step, step_attention
from hotfuse.backends.torchscript import scripted
from hotfuse.base.errors import InternalError
from hotfuse.ir.graph import Graph, Kind, Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.ops import control, one_step
from hotfuse.ops.control import ScanAxes, Stacked
from hotfuse.ops.own.assume import ASSERTIONS, ASSUME, SIZED, asserted, assumed
from hotfuse.ops.table import resolve
from hotfuse.ops.torch_args import to_torch
from hotfuse.ops.torch_dtypes import torch_dtype

FASTER: dict[str, Callable[..., Any]] = {
    "aten.lstm.input": one_step.lstm, ASSUME: assumed, SIZED: assumed, **dict.fromkeys(ASSERTIONS, asserted)
}  # fmt: skip
"""Operators that are called in another way, which gives the same to the last few bits, and those whose faults are the call's."""


class LibraryBackend:
    """Compiles any graph into calls of torch operators; `constant` where nobody can change the weights, and they may be copied."""

    name = "library"

    def __init__(self, *, constant: bool = False) -> None:
        self._constant = constant

    def compile(self, graph: Graph, weights: Mapping[str, Any]) -> Artifact:
        """The graph as calls of torch operators on these weights."""
        nodes, calls, size = graph, meaning, 0
        if self._constant and (found := folded(graph, meaning, weights)) is not None:
            nodes, calls, size = found
        if (regions := scripted(nodes, calls)) is None:
            run, source = flat_function(nodes, calls, weights)
            return Artifact(graph, run, self.name, source, bytes=size)
        run, source = flat_function(regions.graph, regions.meaning, weights)
        return Artifact(graph, run, self.name, f"{source}\n{regions.text}", bytes=size, failures=regions.failures)


def meaning(node: Node) -> tuple[Callable[..., Any], bool]:
    """A node's callable, and whether it returns a sequence even for one result."""
    if node.kind is Kind.CONTROL:
        return control_meaning(node, [flat_function(g, meaning, {})[0] for g in node.graphs]), True
    fn = resolve(node.op)
    schema = getattr(fn, "_schema", None)
    if schema is None:
        return fn, False
    if (faster := FASTER.get(node.op)) is not None:
        return faster, len(schema.returns) > 1
    if is_step(node):
        return step_attention, False
    several = len(schema.returns) > 1 or any("List" in str(r.type) for r in schema.returns)
    return getattr(fn, "_op", fn), several  # `_op` is the operator without its Python wrapper


def control_meaning(node: Node, bodies: Sequence[Run]) -> Callable[..., tuple[Any, ...]]:
    """The reference meaning of a control node whose nested graphs are these functions."""
    if node.op == "control.map" or any(name == "dtypes" for name, _ in node.attrs):
        kind = cast(control.Kind, node.op.removeprefix("control."))
        return lambda *args, **attrs: control.run(kind, bodies, args, attrs)  # the node says all that its outs may not
    match node.op:
        case "control.if":
            then, other = bodies
            return lambda cond, captures: control.run_if(cond, then, other, captures)
        case "control.loop":
            carried = _length(node, 2)
            stacked = tuple(_one_step(v, 0) for v in node.outs[carried:])
            return lambda trip, cond, state, captures: control.run_loop(
                trip, cond, state, bodies[0], captures, stacked
            )
        case "control.scan":
            axes = ScanAxes(**{k: tuple(to_torch(v)) for k, v in node.attrs})
            steps = zip(node.outs[_length(node, 0) :], axes.out_axes, strict=True)
            stacked = tuple(_one_step(v, axis) for v, axis in steps)

            def scan(states: Any, scanned: Any, captures: Any, **_axes: Any) -> tuple[Any, ...]:
                return control.run_scan(states, scanned, bodies[0], axes, captures, stacked)

            return scan
        case _:
            raise InternalError(f"no meaning for {node.op}")


def _length(node: Node, at: int) -> int:
    group = node.args[at]
    if not isinstance(group, tuple):
        raise InternalError(f"argument {at} of {node.op} is not a group of values")
    return len(group)


def _one_step(v: Value, axis: int) -> Stacked:
    """One step of a stacked output: its type without the stacking axis."""
    if not isinstance(v.type, TensorType):
        return Stacked(None, None)
    shape: list[int | None] = [d if isinstance(d, int) else None for d in v.type.shape]
    if shape:
        del shape[axis]
    return Stacked(torch_dtype(v.type.dtype), tuple(shape))
