"""A quantization whose only readers dequantize it again: floats that are rounded, without bytes between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotfuse.frontends.onnx.int8.quantized_steps import DEQUANTIZE, QUANTIZE, Scaled, StepIndex
from hotfuse.frontends.onnx.int8.storage import LIMITS, dense, passes
from hotfuse.frontends.onnx.onnx_program import ProgramStep
from hotfuse.frontends.onnx.registry import Prepared
from hotfuse.native.byte_kernels import background


def rounded_floats(index: StepIndex) -> tuple[ProgramStep, ...]:
    """The steps with such pairs as one; readers of further dequantizations read the first one's result."""
    renamed: dict[int, int] = {}
    instead: dict[int, ProgramStep] = {}
    gone: set[int] = set()
    for step in index.steps:
        y = index.scaled(step, QUANTIZE)
        readers = index.readers.get(step.outs[0], [])
        if y is None or not y.single or not readers or step.outs[0] in index.outputs:
            continue
        told = [index.scaled(r, DEQUANTIZE) for r in readers]
        if any(t is None or not t.same(y) for t in told) or any(r.outs[0] in index.outputs for r in readers[1:]):
            continue
        instead[id(step)] = _rounding(step, y, readers[0].outs)
        renamed.update({r.outs[0]: readers[0].outs[0] for r in readers[1:]})
        gone.update(id(r) for r in readers)
    left = [instead.get(id(s), s) for s in index.steps if id(s) not in gone]
    return tuple(replace(s, ins=tuple(renamed.get(i, i) for i in s.ins)) for s in left)


def _rounding(step: ProgramStep, y: Scaled, outs: tuple[int, ...]) -> ProgramStep:
    low, high = (float(limit - int(y.zero)) for limit in LIMITS[y.zero.dtype])
    unit = float(y.scale)
    background.begin()

    def call(x: Tensor, scale: Tensor, zero: Tensor) -> Any:
        if x.dtype is not torch.float32:  # the operator's own error, or its conversion
            return (step.call(x, scale, zero).float() - zero.float()) * scale
        if (native := passes(x.numel())) is None:
            return (x / unit).round_().nan_to_num_(nan=low).clamp_(low, high).mul_(unit)
        x = dense(x)
        y = torch.empty_like(x)
        native.rounded(x.data_ptr(), y.data_ptr(), unit, low, high, x.numel())
        return y

    return replace(step, call=call, outs=outs, prepare=lambda *_: Prepared(call, 0))
