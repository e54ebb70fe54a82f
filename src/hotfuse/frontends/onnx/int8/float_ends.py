"""Layers of bytes take the quantization before them and the dequantization behind them in.

    Q(x) -> QLinearMatMul or QGemm -> DQ     ->    one step, floats to floats

Where only one layer reads the bytes, or everybody who reads its result dequantizes it: the same bytes are made on the way, in
memory that stays in the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotfuse.frontends.onnx.int8.layers import ByteLayer, LayerScales, layer_scales, library_linear, native_linear
from hotfuse.frontends.onnx.int8.native_layers import NativeProduct
from hotfuse.frontends.onnx.int8.quantized_steps import DEQUANTIZE, QUANTIZE, StepIndex, is_op
from hotfuse.frontends.onnx.onnx_program import ProgramStep
from hotfuse.frontends.onnx.registry import VARIES, Prepared
from hotfuse.native.byte_products import AS_BYTES, AS_ROUNDED

Call = Callable[..., Any]


def float_ends(index: StepIndex) -> tuple[ProgramStep, ...]:
    """The steps with such layers as one each."""
    renamed: dict[int, int] = {}
    instead: dict[int, ProgramStep] = {}
    gone: set[int] = set()
    for step in index.steps:
        if (told := _layer_of(index, step)) is None:
            continue
        scales, weight, bias = told
        before, behind = _before(index, step), _behind(index, step)
        if before is None and not behind:
            continue
        native = native_linear(scales, weight, bias, floats=before is not None, result=AS_ROUNDED if behind else AS_BYTES)
        library = library_linear(scales, weight, bias)
        if native is None or library is None:
            continue
        instead[id(step)] = _joined(index, before, step, behind, native, library, scales)
        gone.update(id(s) for s in (*([] if before is None else [before]), *behind))
        renamed.update({r.outs[0]: behind[0].outs[0] for r in behind[1:]})
    left = [instead.get(id(s), s) for s in index.steps if id(s) not in gone]
    return tuple(replace(s, ins=tuple(renamed.get(i, i) for i in s.ins)) for s in left)


def _layer_of(index: StepIndex, step: ProgramStep) -> tuple[LayerScales, Tensor, Tensor | None] | None:
    """Scales, weights (outputs, inputs) and bias of a layer of bytes with constant weights; None for other steps."""
    matmul = is_op(step, "QLinearMatMul")
    if not (matmul or is_op(step, "QGemm")) or len(step.ins) != (8 if matmul else 9) or len(step.outs) != 1:
        return None
    if not {i for i in step.ins[1:] if i} <= index.constants or step.ins[0] in index.constants:
        return None
    values: list[Any] = [None, *(index.env[i] if i else None for i in step.ins[1:])]
    weight, bias, ends = values[3], None if matmul else values[6], values[6:] if matmul else values[7:]
    if any(not isinstance(t, Tensor) for t in (*values[1:6], *ends)) or weight.dim() != 2 or weight.dtype is not values[5].dtype:
        return None
    if not matmul and (step.attrs.get("alpha", 1.0) != 1.0 or step.attrs.get("transA")):
        return None
    scales = layer_scales(values[1:3], values[4:6], ends)
    outputs_first = weight if step.attrs.get("transB") else weight.t()
    if scales is None or not (bias is None or bias.numel() == outputs_first.shape[0]):
        return None
    return scales, outputs_first, None if bias is None else bias.reshape(-1)


def _before(index: StepIndex, step: ProgramStep) -> ProgramStep | None:
    """The quantization whose bytes this layer alone reads."""
    maker = index.before(step)
    found = index.scaled(maker, QUANTIZE)
    if maker is None or found is None or not found.single or step.ins.count(maker.outs[0]) != 1:
        return None
    scale, zero = (index.env[i] for i in step.ins[1:3])
    same = isinstance(scale, Tensor) and isinstance(zero, Tensor) and zero.dtype is found.zero.dtype
    return maker if same and float(scale) == float(found.scale) and int(zero) == int(found.zero) else None


def _behind(index: StepIndex, step: ProgramStep) -> Sequence[ProgramStep]:
    """All readers, where each dequantizes the result by its own scale."""
    slot, (scale, zero) = step.outs[0], (index.env[i] for i in step.ins[-2:])
    readers = index.readers.get(slot, [])
    if slot in index.outputs or any(r.outs[0] in index.outputs for r in readers[1:]):
        return ()
    assert isinstance(scale, Tensor) and isinstance(zero, Tensor)
    for reader in readers:
        found = index.scaled(reader, DEQUANTIZE)
        if found is None or not found.single or found.zero.dtype is not zero.dtype:
            return ()
        if float(found.scale) != float(scale) or int(found.zero) != int(zero):
            return ()
    return readers


def _prepared(index: StepIndex, step: ProgramStep) -> Call:
    """A step with its constants, as a function of what varies."""
    given = [index.env[i] for i in step.ins[1:]]
    known = [VARIES, *(value if i in index.constants else None for i, value in zip(step.ins[1:], given, strict=True))]
    made = None if step.prepare is None else step.prepare(step.ctx, known, step.attrs)
    call = step.call if made is None else made.call
    return lambda x: call(x, *given)


def _joined(
    index: StepIndex, before: ProgramStep | None, step: ProgramStep, behind: Sequence[ProgramStep], native: NativeProduct,
    library: tuple[ByteLayer, int], scales: LayerScales,
) -> ProgramStep:  # fmt: skip
    layer, size = library
    given, whole = [index.env[i] for i in step.ins[1:]], step.call

    def by_library(q: Tensor) -> Tensor:
        return layer(q) if q.dtype is scales.x_dtype and q.dim() > 1 and q.numel() else whole(q, *given)

    ends = [[_prepared(index, s) for s in some] for some in ([] if before is None else [before], behind[:1])]
    parts = [*ends[0], by_library, *ends[1]]
    reads = torch.float32 if before is not None else scales.x_dtype
    makes = torch.float32 if behind else scales.y_dtype
    flat = step.node.op == "QGemm"

    def call(x: Tensor) -> Tensor:
        made = native.run(x, makes) if x.dtype is reads and x.dim() and (x.dim() == 2 or not flat) else None
        if made is None:
            made = x
            for part in parts:
                made = part(made)
        return made

    ins = step.ins[:1] if before is None else before.ins[:1]
    outs = behind[0].outs if behind else step.outs
    total = native.bytes + size
    return replace(step, call=call, ins=ins, outs=outs, prepare=lambda *_: Prepared(call, total), attrs={})
