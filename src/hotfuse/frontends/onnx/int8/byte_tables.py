"""A function of one byte has 256 results: whatever lies between a dequantization and a quantization is looked up.

    DQ(x) -> HardSigmoid -> Q -> DQ -> Mul(DQ(x)) -> Q     ->    table[x]

The table is what the steps themselves give for every byte, so results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotfuse.frontends.onnx.int8.quantized_steps import DEQUANTIZE, QUANTIZE, Scaled, StepIndex, is_op
from hotfuse.frontends.onnx.int8.storage import LIMITS, dense, passes
from hotfuse.frontends.onnx.onnx_program import ABSENT, ProgramStep
from hotfuse.frontends.onnx.registry import Prepared
from hotfuse.native.byte_kernels import background

POINTWISE = frozenset({
    "Abs", "Add", "Celu", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu",
    "Log", "Max", "Min", "Mish", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt",
    "Sub", "Swish", "Tanh", "ThresholdedRelu",
})  # fmt: skip
MAX_STEPS = 32
"""Of one table."""


def tables(index: StepIndex) -> tuple[ProgramStep, ...]:
    """The steps with look-ups in place of quantizations that end functions of one byte."""
    found = {id(s): made for s in index.steps if (made := _table(index, s)) is not None}
    return tuple(found.get(id(s), s) for s in index.steps)


def _table(index: StepIndex, end: ProgramStep) -> ProgramStep | None:
    y = index.scaled(end, QUANTIZE)
    inner = index.made_by.get(end.ins[0])
    if y is None or not y.single or inner is None or inner.node.op not in POINTWISE:
        return None
    members: dict[int, ProgramStep] = {id(end): end}
    x = _source(index, inner, members)
    if x is None or x.slots[0] in index.constants:
        return None
    low, high = LIMITS[x.zero.dtype]
    values: dict[int, Any] = {x.slots[0]: torch.arange(low, high + 1).to(x.zero.dtype)}
    for step in index.steps:
        if id(step) in members:
            values[step.outs[0]] = step.call(*[values[i] if i in values else index.env[i] for i in step.ins])
    table = values[end.outs[0]]
    if not isinstance(table, Tensor) or table.shape != (256,) or table.dtype is not y.zero.dtype:
        return None
    reads = x.zero.dtype
    look = lookup(table, reads)

    def call(x: Tensor, *_: Any) -> Tensor:
        if x.dtype is not reads:
            raise TypeError(f"bytes of {reads} are looked up, {x.dtype} were given")
        return look(x)

    return replace(end, call=call, ins=(x.slots[0],), prepare=lambda *_: Prepared(call, 256), attrs={})


def _source(index: StepIndex, step: ProgramStep, members: dict[int, ProgramStep]) -> Scaled | None:
    """The only value that varies behind a step, as bytes; the steps from there on become members."""
    if id(step) in members:
        return None
    if len(members) >= MAX_STEPS or len(step.outs) != 1:
        return None
    if (x := index.scaled(step, DEQUANTIZE)) is not None:
        if not x.single:
            return None
        members[id(step)] = step
        deeper = dict(members)
        maker = index.made_by.get(x.slots[0])
        if maker is not None and (told := index.scaled(maker, QUANTIZE)) is not None and told.same(x):
            inner = index.made_by.get(maker.ins[0])
            deeper[id(maker)] = maker
            found = _source(index, inner, deeper) if inner is not None and inner.node.op in POINTWISE else None
            if found is not None:
                members.update(deeper)
                return found
        return x
    if step.node.op not in POINTWISE or not is_op(step, step.node.op):
        return None
    members[id(step)] = step
    sources: list[Scaled] = []
    for slot in step.ins:
        if slot == ABSENT:
            continue
        if slot in index.constants:
            value = index.env[slot]
            if not isinstance(value, Tensor) or value.numel() != 1 or value.dim() > 1:
                return None
            continue
        maker = index.made_by.get(slot)
        found = _again(index, maker, members)
        if found is None:
            return None
        sources.append(found)
    return sources[0] if sources and all(s.slots == sources[0].slots for s in sources) else None


def _again(index: StepIndex, step: ProgramStep | None, members: dict[int, ProgramStep]) -> Scaled | None:
    """As `_source`; a step that was seen on another way is asked without what it added."""
    if step is None:
        return None
    if id(step) not in members:
        return _source(index, step, members)
    fresh: dict[int, ProgramStep] = {}
    return _source(index, step, fresh)


def lookup(table: Tensor, reads: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What a table of 256 bytes has for each byte of a tensor. Until there is compiled code, Python's own translation of bytes is
    the fastest that is at hand."""
    makes = table.dtype
    by_bits = table if reads is torch.uint8 else table.roll(-128)
    by_bits = by_bits.view(torch.uint8).contiguous()
    text = bytes(by_bits.tolist())
    background.begin()

    def run(x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(x.shape, dtype=makes)
        if (native := passes(x.numel())) is not None:
            x = dense(x)
            y = torch.empty_like(x, dtype=makes)
            native.looked_up(x.data_ptr(), y.data_ptr(), by_bits.data_ptr(), x.numel())
            return y
        inner = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        rows = x.permute(0, 2, 3, 1) if inner else x.contiguous()
        made = torch.frombuffer(bytearray(rows.view(torch.uint8).numpy()).translate(text), dtype=makes).view(rows.shape)
        return made.permute(0, 3, 1, 2) if inner else made

    return run
