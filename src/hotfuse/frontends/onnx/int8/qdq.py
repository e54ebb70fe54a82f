"""Layers that a file spells out as DequantizeLinear, a float operator and QuantizeLinear become operators on bytes.

    DQ(x), DQ(w), DQ(b) -> Conv [-> Relu] -> Q     ->    QLinearConv(x, w, b)
    DQ(x), DQ(w) -> MatMul [-> Relu] -> Q          ->    QLinearMatMul(x, w)
    DQ(x), DQ(w), DQ(b) -> Gemm [-> Relu] -> Q     ->    QGemm(x, w, b)
    DQ(x) -> Reshape, Transpose, … -> Q, same scale ->   Reshape, Transpose, … of x

as ONNX Runtime does, and with its sums: integers, rounded once. Only what runs before compiled code is changed so; capture sees
the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotfuse.frontends.onnx import limits
from hotfuse.frontends.onnx.int8.byte_tables import POINTWISE, tables
from hotfuse.frontends.onnx.int8.float_ends import float_ends
from hotfuse.frontends.onnx.int8.pairs import rounded_floats
from hotfuse.frontends.onnx.int8.quantized_steps import (
    DEQUANTIZE,
    MS_DOMAIN,
    QUANTIZE,
    Scaled,
    StepIndex,
    is_op,
    without_unread,
)
from hotfuse.frontends.onnx.int8.storage import LIMITS, available
from hotfuse.frontends.onnx.int8.sums import sums_of_bytes
from hotfuse.frontends.onnx.onnx_program import NodeCtx, ProgramStep
from hotfuse.frontends.onnx.registry import VARIES, find
from hotfuse.frontends.onnx.values import Value

BIAS_SCALE = 1e-5
"""How far a bias's scale may lie from the product of the two scales, relatively."""
_MOVES = frozenset({"Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
_REMOVABLE = POINTWISE | {QUANTIZE, DEQUANTIZE}


def on_bytes(
    steps: Sequence[ProgramStep], constants: set[int], env: Sequence[Value], outputs: Sequence[int]
) -> tuple[ProgramStep, ...]:  # fmt: skip
    """The steps with operators on bytes in place of what spells them out; what nobody reads any more is left out."""
    if not available() or not any(is_op(s, QUANTIZE) for s in steps):
        return tuple(steps)
    left = _layers(StepIndex(steps, constants, env, outputs))
    for change in (tables, sums_of_bytes, float_ends, rounded_floats):
        left = change(StepIndex(left, constants, env, outputs))
    return without_unread(left, outputs, _REMOVABLE)


def _layers(index: StepIndex) -> tuple[ProgramStep, ...]:
    instead: dict[int, list[ProgramStep]] = {}
    gone: set[int] = set()
    for end in index.steps:
        if (y := index.scaled(end, QUANTIZE)) is None or not y.single:
            continue
        found = _moved(index, end, y) or _layer(index, end, y)
        if found is not None:
            made, between = found
            instead[id(end)] = made
            gone.update(id(s) for s in between)
    left = [m for s in index.steps if id(s) not in gone for m in instead.get(id(s), [s])]
    return without_unread(left, index.outputs, frozenset({DEQUANTIZE}))


def _moved(index: StepIndex, end: ProgramStep, y: Scaled) -> tuple[list[ProgramStep], list[ProgramStep]] | None:
    """Steps that only move numbers from one dequantization to the same quantization, on bytes instead."""
    path: list[ProgramStep] = []
    step = index.before(end)
    while step is not None and step.node.op in _MOVES and is_op(step, step.node.op) and len(step.outs) == 1:
        path.insert(0, step)
        step = index.before(step) if index.scaled(index.made_by.get(step.ins[0]), DEQUANTIZE) is None else None
    if not path:
        return None
    x = index.scaled(index.made_by.get(path[0].ins[0]), DEQUANTIZE)
    if x is None or not x.same(y):
        return None
    first = replace(path[0], ins=(x.slots[0], *path[0].ins[1:]))
    made = [first, *path[1:]]
    made[-1] = replace(made[-1], outs=end.outs)
    return made, path


def _layer(index: StepIndex, end: ProgramStep, y: Scaled) -> tuple[list[ProgramStep], list[ProgramStep]] | None:
    """What takes the place of a QuantizeLinear, and the steps before it that are gone then."""
    between: list[ProgramStep] = []
    step = index.before(end)
    if step is not None and is_op(step, "Relu") and int(y.zero) == LIMITS[y.zero.dtype][0]:  # saturation does the same
        between.append(step)
        step = index.before(step)
    if step is None or (form := _FORMS.get(step.node.op)) is None or not is_op(step, step.node.op) or len(step.ins) < 2:
        return None
    op, domain, keeps = form
    attrs = keeps(step.attrs)
    x, w = (index.scaled(index.made_by.get(i), DEQUANTIZE) for i in step.ins[:2])
    if attrs is None or x is None or w is None or not x.single or w.slots[0] not in index.constants:
        return None
    bias = _bias(index, step.ins[2], x, w) if len(step.ins) > 2 and step.ins[2] else ()
    if bias is None or not _weight_fits(index, step, w):
        return None
    ins = (*x.slots, *w.slots, *(bias or (0,)), *y.slots[1:]) if op == "QGemm" else (*x.slots, *w.slots, *y.slots[1:], *bias)
    made = _made(index, step, op, domain, attrs, ins, end.outs)
    return None if made is None else ([made], [*between, step])


def _made(
    index: StepIndex, step: ProgramStep, op: str, domain: str, attrs: Mapping[str, Any], ins: tuple[int, ...], outs: tuple[int, ...]
) -> ProgramStep | None:  # fmt: skip
    """The operator on bytes, where its constants can be prepared: its plain function would be slower than floats."""
    row = find(domain, op, 10)
    if row is None or row.prepare is None:
        return None
    ctx = NodeCtx(10, 1)
    prepared = row.prepare(ctx, [index.env[i] if i in index.constants else VARIES if i else None for i in ins], attrs)
    if prepared is None:
        return None
    node = replace(step.node, op=op, domain=domain)
    call = limits.guard(node, attrs, partial(row.fn, ctx, **attrs))
    return ProgramStep(node, 10, call, ins, outs, (), row.fn, attrs, "op", None, lambda *_: prepared)


def _weight_fits(index: StepIndex, step: ProgramStep, w: Scaled) -> bool:
    """One scale, or one for each output channel."""
    weight = index.env[w.slots[0]]
    if not isinstance(weight, Tensor) or weight.dtype is not w.zero.dtype or w.scale.shape != w.zero.shape:
        return False
    if w.single:
        return True
    rows = step.node.op == "Conv" or bool(step.attrs.get("transB"))
    channel = 0 if rows else weight.dim() - 1
    return w.axis % weight.dim() == channel and w.scale.numel() == weight.shape[channel]


def _bias(index: StepIndex, slot: int, x: Scaled, w: Scaled) -> tuple[int, ...] | None:
    """The slot of a bias that counts products' units; None for others."""
    step = index.made_by.get(slot)
    if step is None or not is_op(step, DEQUANTIZE) or not {*step.ins} <= {0, *index.constants}:
        return None
    given: list[Value] = [*(index.env[i] for i in step.ins), None]
    bias, scale, zero = given[:3]
    if not isinstance(bias, Tensor) or bias.dtype is not torch.int32 or bias.dim() != 1 or not isinstance(scale, Tensor):
        return None
    if (isinstance(zero, Tensor) and bool(zero.any())) or scale.numel() not in (1, bias.numel()):
        return None
    want = (x.scale.reshape(-1) * w.scale.reshape(-1)).expand(bias.numel())
    near = torch.allclose(scale.reshape(-1).expand(bias.numel()), want, rtol=BIAS_SCALE, atol=0.0)
    return (step.ins[0],) if near else None


def _gemm(attrs: Mapping[str, Any]) -> dict[str, Any] | None:
    if attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0 or attrs.get("transA"):
        return None
    return {"transB": int(attrs.get("transB", 0))}


_FORMS: dict[str, tuple[str, str, Callable[[Mapping[str, Any]], Mapping[str, Any] | None]]] = {
    "Conv": ("QLinearConv", "", dict),
    "MatMul": ("QLinearMatMul", "", dict),
    "Gemm": ("QGemm", MS_DOMAIN, _gemm),
}
"""Float operators, what they are on bytes, and the attributes that go with them."""
