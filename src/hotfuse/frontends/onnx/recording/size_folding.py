"""What a program computes from sizes alone is computed once for each kind of sizes that calls have.

Exported files carry the arithmetic of shapes with them: sizes are read, gathered, compared, put together again, and branches are
chosen by them. In the interpreter each such node costs as much as a small layer; a speech model of 16 layers ran 75 of them. When
arguments of the same sizes and types come the second time, the call is recorded:

    Shape -> Gather -> Equal -> If        gone: the branch is part of the calls, its condition is the same for these sizes
    Reshape(x, Concat(...))               `x.reshape((1, 4, 129))`: what its numbers were

A value is *fixed* where it follows from constants and sizes, and *sized* where its own sizes and type do. Only operators of which
that is known make such values (`BY_SIZES`, `BY_NUMBERS`); behind all others (data decide how many rows there are, a loop, a branch
that data choose) nothing is, and the recorded calls do what the program does. Nested programs record their own runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotfuse.frontends.onnx.constant_folding import RANDOM
from hotfuse.frontends.onnx.int8.quantized_steps import MS_DOMAIN
from hotfuse.frontends.onnx.model_file import OnnxNode
from hotfuse.frontends.onnx.native_floats.native_recurrent import NativeRecurrent
from hotfuse.frontends.onnx.onnx_program import ABSENT, CallSource, Program, ProgramStep
from hotfuse.frontends.onnx.recording.bound_calls import FirstInput, bound, reshapes
from hotfuse.frontends.onnx.recording.recorded_runs import Call, ProgramRecording
from hotfuse.frontends.onnx.values import Value
from hotfuse.ops.control import truth

MAX_FIXED_BYTES = 1 << 16
"""Memory of fixed values in one recording: what takes more is computed in every call, as before."""
MAX_DEPTH = 32
"""Nested programs that are recorded as part of the one around them."""

BY_SIZES = frozenset({
    "Abs", "Acos", "Acosh", "Add", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "AveragePool",
    "BatchNormalization", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Celu", "Clip",
    "Concat", "Conv", "ConvInteger", "Cos", "Cosh", "CumSum", "DepthToSpace", "DequantizeLinear", "Div", "Elu", "Equal", "Erf",
    "Exp", "Flatten", "Floor", "GRU", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "GlobalAveragePool",
    "GlobalLpPool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax",
    "Identity", "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LSTM", "LayerNormalization", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "LogSoftmax", "LpNormalization", "MatMul", "MatMulInteger", "Max", "MaxPool", "Mean",
    "MeanVarianceNormalization", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "QLinearConv",
    "QLinearMatMul", "QuantizeLinear", "RMSNormalization", "RNN", "Reciprocal", "Relu", "Round", "ScatterElements", "ScatterND",
    "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "SpaceToDepth", "Sqrt", "Sub", "Sum", "Tan",
    "Tanh", "ThresholdedRelu", "Transpose", "Trilu", "Where", "Xor",
})  # fmt: skip
"""Operators the sizes and types of whose results follow from those of what they are given, and from attributes."""
BY_NUMBERS = frozenset({
    "CenterCropPad", "Expand", "Pad", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Tile", "TopK",
    "Unsqueeze", "Upsample",
})  # fmt: skip
"""Those where they follow from the first input's and the numbers in the others."""
MICROSOFT_BY_SIZES = frozenset({
    "BiasGelu", "DequantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "FastGelu", "FusedConv", "FusedGemm",
    "FusedMatMul", "Gelu", "MatMulIntegerToFloat", "MatMulNBits", "QGemm", "QLinearAdd", "QLinearAveragePool",
    "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax", "QuantizeLinear",
    "QuickGelu", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
})  # fmt: skip
"""Of ONNX Runtime's own operators, what `BY_SIZES` is of ONNX's."""


def record(program: Program, args: Sequence[Value]) -> tuple[ProgramRecording, tuple[Value, ...]]:
    """Run a program once, and keep the calls that runs of the same kind need. Raises what its operators raise."""
    recorder = _Recorder()
    where = [recorder.slot() for _ in args]
    for slot, value in zip(where, args, strict=True):
        if value is None:
            recorder.fixed.add(slot)
        recorder.sized.add(slot)
    values, outs = recorder.walk(program, args, where, 0)
    kept = [slot in recorder.fixed for slot in outs]  # what a caller gets is the call's own
    values = tuple(v.clone() if k and isinstance(v, torch.Tensor) else v for k, v in zip(kept, values, strict=True))
    calls = program.ready().calls
    return recorder.recorded(where, outs, calls[-1][-1] if calls else None), values


class _Recorder:
    """Slots are written once: those of nested programs stand beside the others."""

    def __init__(self) -> None:
        self.template: list[Value] = []
        self.fixed: set[int] = set()
        self.sized: set[int] = set()
        self.calls: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], OnnxNode]] = []
        self.bytes = 0
        self.reshaped: dict[int, tuple[int, torch.Size]] = {}
        """Slots that hold another one's elements in another shape: that one, and its shape."""

    def slot(self, constant: Value = None) -> int:
        self.template.append(constant)
        return len(self.template) - 1

    def constant(self, value: Value) -> int:
        slot = self.slot(value)
        self.fixed.add(slot)
        self.sized.add(slot)
        return slot

    def walk(
        self, program: Program, args: Sequence[Value], where: Sequence[int], depth: int
    ) -> tuple[tuple[Value, ...], list[int]]:  # fmt: skip
        """Run a program on values in given slots; its results, and theirs."""
        ready = program.ready()
        env = ready.template.copy()
        at = [self.constant(v) if v is not None or i == ABSENT else -1 for i, v in enumerate(env)]
        for slot, value, given in zip(program.in_slots, args, where, strict=True):
            if slot not in program.consts:  # a constant is there already
                env[slot], at[slot] = value, given
        for (call, ins, outs, frees, node), source in zip(ready.calls, ready.sources, strict=True):
            xs, slots = [env[i] for i in ins], [at[i] for i in ins]
            inner = self._inlined(source, xs, slots) if depth < MAX_DEPTH else None
            if inner is not None:
                body, first = inner
                results, made = self.walk(body, xs[first:], slots[first:], depth + 1)
            else:
                result = call(*xs)
                results = result if isinstance(result, tuple) else (result,)
                made = self._noted(call, node, source, xs, slots, results, len(outs))
            for slot, value, place in zip(outs, results, made):  # noqa: B905  an operator may return outputs nobody declared
                env[slot], at[slot] = value, place
            for slot in frees:
                env[slot] = None
        return tuple([env[i] for i in program.out_slots]), [at[i] for i in program.out_slots]

    def _inlined(self, source: CallSource, xs: Sequence[Value], slots: Sequence[int]) -> tuple[Program, int] | None:
        """The program that a call always runs, and which of its inputs is that one's first."""
        step = source.step
        if step is None or not source.nested:
            return None
        if step.kind == "function":
            return source.nested[0], 0
        if step.node.op == "If" and slots[0] in self.fixed:
            return source.nested[0 if truth(xs[0]) else 1], 1
        return None

    def _noted(
        self, call: Callable[..., Any], node: OnnxNode, source: CallSource, xs: Sequence[Value], slots: Sequence[int],
        results: Sequence[Value], wanted: int,
    ) -> list[int]:  # fmt: skip
        """Keep a call, unless its results are fixed; the slots of its results."""
        fixed, sized = self._known(source.step, slots)
        tensors = all(isinstance(v, torch.Tensor) for v in results) and len(results) >= wanted
        if fixed and tensors:
            size = sum(v.untyped_storage().nbytes() for v in results if isinstance(v, torch.Tensor))
            if self.bytes + size <= MAX_FIXED_BYTES:
                self.bytes += size
                return [self.constant(v) for v in results]
        ins = tuple(slots)
        if sized and tensors:
            found = bound(source.step, call, xs, results[0], [s in self.fixed for s in slots])
            if isinstance(found, FirstInput):
                return [slots[0]]
            if found is not None:
                in_order = isinstance(call, NativeRecurrent)  # elements are all it reads: what only reshapes them is left out
                call, taken = found
                ins = tuple([self.reshaped[slots[k]][0] if in_order and slots[k] in self.reshaped else slots[k] for k in taken])
                if source.step is not None and reshapes(source.step, xs[0], results[0]):
                    return [self._reshaped(call, node, slots[0], xs[0], results[0])]
        outs = [self.slot() for _ in results]
        if sized and tensors:
            self.sized.update(outs)
        self.calls.append((call, ins, tuple(outs), node))
        return outs

    def _reshaped(self, call: Callable[..., Any], node: OnnxNode, slot: int, x: Any, result: Any) -> int:
        """Keep a reshape, as one of what it reads was itself reshaped from; its result's slot."""
        first, shape = self.reshaped.get(slot, (slot, x.shape))
        if result.shape == shape:
            return first
        out = self.slot()
        self.sized.add(out)
        self.reshaped[out] = (first, shape)
        self.calls.append((call, (first,), (out,), node))
        return out

    def _known(self, step: ProgramStep | None, slots: Sequence[int]) -> tuple[bool, bool]:
        """Whether results are fixed, and whether they are sized."""
        sized = all(s in self.sized for s in slots)
        if step is None:
            return False, sized
        op = step.node.op
        if step.kind != "op" or op in RANDOM or not slots:
            return False, False
        if step.node.domain == MS_DOMAIN:
            known = op in MICROSOFT_BY_SIZES
            return known and all(s in self.fixed for s in slots), known and sized
        if step.node.domain not in ("", "ai.onnx"):
            return False, False
        if all(s in self.fixed for s in slots) or (op in ("Shape", "Size") and slots[0] in self.sized):
            return True, True
        by_numbers = op in BY_NUMBERS and all(s in self.fixed for s in slots[1:])
        return False, sized and (op in BY_SIZES or by_numbers)

    def recorded(self, where: Sequence[int], outs: list[int], node: OnnxNode | None) -> ProgramRecording:
        """The calls in order, each with what nobody reads behind it; fixed results are copied, in the name of a node."""
        for k, slot in enumerate(outs):
            if slot in self.fixed and isinstance(self.template[slot], torch.Tensor) and node is not None:
                outs[k] = self.slot()
                self.calls.append((torch.clone, (slot,), (outs[k],), node))
        needed = {*outs, *self.fixed}
        calls: list[Call] = []
        for call, ins, made, of in reversed(self.calls):
            if made[0] in self.reshaped and made[0] not in needed:
                continue  # what was reshaped again
            last = tuple(i for i in dict.fromkeys((*ins, *made)) if i not in needed)
            needed.update(last)
            calls.append((call, ins, made, last, of))
        read = {i for _, ins, _, _, _ in calls for i in ins} | set(outs)
        template = [v if i in read else None for i, v in enumerate(self.template)]
        return ProgramRecording(template, tuple(where), tuple(reversed(calls)), tuple(outs), self.bytes)


