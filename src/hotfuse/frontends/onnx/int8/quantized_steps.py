"""What the rewriting of quantized programs asks: which steps make and read a value, and with which constants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.int8.storage import QUANTIZED
from hotfuse.frontends.onnx.onnx_program import ProgramStep
from hotfuse.frontends.onnx.values import Value

MS_DOMAIN = "com.microsoft"
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


@dataclass(frozen=True, slots=True)
class Scaled:
    """A value as bytes: slots of the bytes, the scale and the zero point, and those constants."""

    slots: tuple[int, int, int]
    scale: Tensor
    zero: Tensor
    axis: int

    @property
    def single(self) -> bool:
        """One scale for all."""
        return self.scale.numel() == 1 and self.zero.numel() == 1

    def same(self, other: Scaled) -> bool:
        """Whether bytes of the two stand for the same numbers."""
        both = self.single and other.single and self.zero.dtype is other.zero.dtype
        return both and float(self.scale) == float(other.scale) and int(self.zero) == int(other.zero)


class StepIndex:
    """Who makes and who reads each value, among steps in order."""

    def __init__(self, steps: Sequence[ProgramStep], constants: set[int], env: Sequence[Value], outputs: Sequence[int]) -> None:
        self.steps, self.constants, self.env, self.outputs = steps, constants, env, outputs
        self.made_by = {slot: s for s in steps for slot in s.outs}
        self.readers: dict[int, list[ProgramStep]] = {}
        for s in steps:
            for i in s.ins:
                self.readers.setdefault(i, []).append(s)

    def before(self, step: ProgramStep) -> ProgramStep | None:
        """Who made what a step reads, where nobody else reads it."""
        slot = step.ins[0]
        alone = len(self.readers.get(slot, ())) == 1 and slot not in self.outputs
        return self.made_by.get(slot) if alone else None

    def scaled(self, step: ProgramStep | None, op: str) -> Scaled | None:
        """What a step that quantizes into bytes or dequantizes them is told by constants; None for others."""
        if step is None or not is_op(step, op) or len(step.ins) != 3 or set(step.attrs) - {"axis", "saturate"}:
            return None
        if not {*step.ins[1:]} <= self.constants:
            return None
        scale, zero = self.env[step.ins[1]], self.env[step.ins[2]]
        if not isinstance(scale, Tensor) or not isinstance(zero, Tensor) or scale.dtype is not torch.float32:
            return None
        if zero.dtype not in QUANTIZED:
            return None
        return Scaled((step.ins[0], step.ins[1], step.ins[2]), scale, zero, int(step.attrs.get("axis", 1)))


def is_op(step: ProgramStep, op: str) -> bool:
    """Whether it is that operator of ONNX, or of the same name with ONNX Runtime."""
    return step.node.op == op and step.kind == "op" and step.node.domain in ("", "ai.onnx", MS_DOMAIN)


def without_unread(steps: Sequence[ProgramStep], outputs: Sequence[int], ops: frozenset[str]) -> tuple[ProgramStep, ...]:
    """Without steps of these operators that nobody reads."""
    read, kept = set(outputs), list[ProgramStep]()
    for s in reversed(steps):
        if s.kind == "op" and s.node.op in ops and not read.intersection(s.outs):
            continue
        read.update(s.ins)
        kept.append(s)
    return tuple(reversed(kept))
