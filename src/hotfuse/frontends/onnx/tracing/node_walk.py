# pyright: reportPrivateUsage=false
# torch keeps the list of a graph's nodes private.
"""The walk over a program's nodes: each is folded, traced as sizes, traced as ATen operators, or kept whole."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode

from hotfuse.base.faults import error_text
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.leaf import UNKNOWN, Leaf
from hotfuse.frontends.onnx import leaves
from hotfuse.frontends.onnx.constant_folding import RANDOM
from hotfuse.frontends.onnx.model_file import PortType
from hotfuse.frontends.onnx.onnx_program import Program, ProgramStep
from hotfuse.frontends.onnx.registry import DataDependent
from hotfuse.frontends.onnx.tracing import shape_algebra
from hotfuse.frontends.onnx.tracing.level import Opaque, TracedLevel, is_opaque, plainly
from hotfuse.frontends.onnx.tracing.shape_algebra import LIMIT
from hotfuse.frontends.onnx.values import Value, is_tensor

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_STRUCTURAL = frozenset(
    {"SequenceConstruct", "SequenceAt", "SequenceInsert", "SequenceErase", "SequenceLength", "SequenceEmpty"}
)
"""Operators that only handle lists of values, whatever those are."""


class TraceCtx:
    """The context an operator's function sees while tracing."""

    def __init__(self, level: TracedLevel, opset: int, n_outputs: int) -> None:
        self.level, self.opset, self.n_outputs = level, opset, n_outputs

    @property
    def traced(self) -> bool:
        """Numbers may be known at run time only."""
        return True

    def ints(self, t: Any) -> list[Any]:
        """The numbers in a tensor, flat, as far as they are known."""
        if isinstance(t, np.ndarray):
            return t.reshape(-1).tolist()
        known = self.level.numbers(t)
        if known is None:
            raise DataDependent("the numbers are in the data")
        return list(known.flat)

    def tensor(self, numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A 1-d tensor of numbers that may be symbolic, or a 0-d one of a number."""
        several = isinstance(numbers, Sequence)
        known = shape_algebra.array(numbers) if several else shape_algebra.array([numbers], ())
        return self.level.materialize(known, dtype)

    def known(self, t: Any) -> bool:
        """Whether `ints` would succeed."""
        return isinstance(t, np.ndarray) or self.level.numbers(t) is not None


def run(level: TracedLevel, program: Program, args: Sequence[Value]) -> list[Value]:
    """Trace a program on values of this graph."""
    env: list[Value] = list(program.template)
    for slot in program.consts:
        env[slot] = _Const(env[slot])
    for slot, value in zip(program.in_slots, args, strict=True):
        env[slot] = value

    def read(slot: int) -> Value:
        if isinstance(env[slot], _Const):
            env[slot] = level.const(env[slot].value)
        return env[slot]

    for step in program.steps:
        level.where = f"graph {program.name!r}, node {step.node.title!r} ({step.node.op})"
        last = level.tracer.graph._root._prev
        results = _step(level, step, [read(i) for i in step.ins])
        node = last.next
        while node.op != "root":
            node.meta.setdefault("hotfuse_name", step.node.title)
            node = node.next
        for slot, value in zip(step.outs, results, strict=False):
            env[slot] = value
    return [read(i) for i in program.out_slots]


def _step(level: TracedLevel, step: ProgramStep, args: list[Value]) -> Sequence[Value]:
    """Trace one node: folded, as sizes, as ATen operators, or whole."""
    match step.kind:
        case "control":
            return level.session.control(level, step, args)
        case "function":
            return run(level, step.programs[0], args)
        case _:
            pass
    if (folded := _fold(level, step, args)) is not None:
        return folded
    if (sizes := _sizes(level, step, args)) is not None:
        return sizes
    if step.kind == "fallback":
        return _expanded(level, step, args)
    if any(is_opaque(a) for a in args) and not _handles_lists(step, args):
        return _leaf(level, step, args, "an input's type is unknown")
    assert step.fn is not None
    try:
        attrs = {k: _attr(level, v) for k, v in step.attrs.items()}
        with _WholeRecurrent(level) if step.node.op in _RECURRENT else nullcontext():
            out = step.fn(TraceCtx(level, step.opset, len(step.node.outputs)), *args, **attrs)
    except Exception as e:  # whatever keeps a function from tracing, the operator itself can still run whole
        level.session.forget_pending()
        return _leaf(level, step, args, error_text(e))
    results = list(out) if isinstance(out, tuple) else [out]
    if any(not level.owns(r) for r in results):
        return _leaf(level, step, args, "its result does not follow from its inputs' types")
    return results


def _attr(level: TracedLevel, v: Any) -> Any:
    return level.const(v) if is_tensor(v) else v


def _fold(level: TracedLevel, step: ProgramStep, args: list[Value]) -> list[Value] | None:
    """Run a node on constants at once; None unless every input is a small one."""
    if not args or step.node.op in RANDOM or step.kind == "fallback":
        return None
    real: list[Any] = []
    for a in args:
        if isinstance(a, Opaque) and a.const is not None and a.const.size <= LIMIT:
            real.append(a.const)
        elif a is None:
            real.append(None)
        elif isinstance(a, torch.Tensor) and (n := level.numbers(a)) is not None and shape_algebra.is_static(n):
            with plainly():
                real.append(torch.tensor(n.tolist(), dtype=a.dtype).reshape(n.shape))
        else:
            return None
    try:
        with plainly():
            out = step.call(*real)
    except Exception:
        return None  # the same error, with its place, comes from running the node whole
    results = list(out) if isinstance(out, tuple) else [out]
    if not all(r is None or (is_tensor(r) and _count(r) <= LIMIT) for r in results):
        return None
    return [level.const(r) for r in results]


def _sizes(level: TracedLevel, step: ProgramStep, args: list[Value]) -> list[Value] | None:
    """A node of shape arithmetic."""
    if step.node.domain or step.node.op not in shape_algebra.ROWS or not args:
        return None
    operands = [None if a is None else level.numbers(a) for a in args]
    if any(o is None and a is not None for o, a in zip(operands, args, strict=True)):
        return None
    dtypes = [a.dtype for a in args if a is not None]
    dtype = dtypes[1] if step.node.op == "Where" else dtypes[0]
    found = shape_algebra.evaluate(step.node.op, operands, dict(step.attrs), dtype)
    return None if found is None else [level.materialize(n, d) for n, d in found]


def _expanded(level: TracedLevel, step: ProgramStep, args: list[Value]) -> Sequence[Value]:
    definition = step.definition
    assert definition is not None
    body = None
    if not any(is_opaque(a) for a in args):
        with plainly():
            body = definition.expand(tuple(args))
    if not isinstance(body, Program):
        return _leaf(level, step, args, "the operator has no mapping of its own")
    return run(level, body, args)


def _leaf(level: TracedLevel, step: ProgramStep, args: Sequence[Value], why: str) -> list[Value]:
    """Keep a node whole."""
    node, n_out = step.node, len(step.node.outputs)
    level.session.leaves.setdefault(node.op, why)
    with disable_proxy_modes_tracing():
        types = leaves.result_types(node, step.opset, args, step.attrs, level.session.fresh)
        vals = [UNKNOWN if t is None else torch.empty(t[1], dtype=t[0]) for t in types]
    attrs = {k: str(v) if isinstance(v, PortType) else _attr(level, v) for k, v in step.attrs.items()}
    target = Leaf(leaves.leaf_name(node.op, node.domain, step.opset, n_out))
    return level.emit(target, args, attrs, vals, tupled=n_out > 1)


class _WholeRecurrent(TorchFunctionMode):
    """Keeps recurrent operators whole with types of our own: torch's fake kernels would fix batch and length to numbers."""

    _OPS: ClassVar[dict[Any, Any]] = {
        torch.lstm: torch.ops.aten.lstm.input,
        torch.gru: torch.ops.aten.gru.input,
        torch.rnn_tanh: torch.ops.aten.rnn_tanh.input,
        torch.rnn_relu: torch.ops.aten.rnn_relu.input,
    }

    def __init__(self, level: TracedLevel) -> None:
        super().__init__()
        self.level = level

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op = self._OPS.get(func)
        if op is None or kwargs or len(args) != 9:
            return func(*args, **(kwargs or {}))
        x, start, bidirectional = args[0], args[1], args[7]
        states = list(start) if isinstance(start, (list, tuple)) else [start]
        with disable_proxy_modes_tracing():
            y = x.new_empty((*x.shape[:-1], states[0].shape[-1] * (2 if bidirectional else 1)))
            vals = [y, *(torch.empty_like(s) for s in states)]
        return tuple(self.level.emit(op, args, {}, vals, tupled=True))


@dataclass(frozen=True, slots=True)
class _Const:
    """A constant not yet asked for."""

    value: Value


def _handles_lists(step: ProgramStep, args: Sequence[Value]) -> bool:
    """Whether a node only puts values into a known list or takes them out."""
    op = step.node.op
    return op in _STRUCTURAL and (op == "SequenceConstruct" or isinstance(args[0], list))


def _count(v: Any) -> int:
    return v.numel() if isinstance(v, torch.Tensor) else v.size
