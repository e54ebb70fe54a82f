"""Sums and products of two tensors of bytes become one step.

    DQ(a), DQ(b) -> Add or Mul [-> Relu] -> Q     ->    bytes of a and b, in one pass

The same float operations in the same order, one after another for each element: residual connections and gates of quantized files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.int8.quantized_steps import DEQUANTIZE, QUANTIZE, Scaled, StepIndex, is_op
from hotfuse.frontends.onnx.int8.storage import LIMITS, dense, dequantized, passes, quantized
from hotfuse.frontends.onnx.onnx_program import ProgramStep
from hotfuse.frontends.onnx.registry import Prepared
from hotfuse.native.byte_kernels import background

_OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"Add": torch.add, "Mul": torch.mul}


@dataclass(frozen=True, slots=True)
class ByteScale:
    """What bytes stand for: one scale and one zero point."""

    scale: float
    zero: int
    dtype: torch.dtype


class BytesOfTwo:
    """Bytes of the sum or the product of what two tensors of bytes stand for."""

    def __init__(self, op: str, a: ByteScale, b: ByteScale, y: ByteScale, *, relu: bool = False) -> None:
        self._op, self._a, self._b, self._y, self._relu = op, a, b, y, relu
        flips = [128 if side.dtype is torch.int8 else 0 for side in (a, b)]
        low, high = LIMITS[y.dtype]
        self._arguments = (
            flips[0], a.zero + flips[0], a.scale, flips[1], b.zero + flips[1], b.scale,
            0.0 if relu else float("-inf"), y.scale, y.zero, low, high,
        )  # fmt: skip
        background.begin()

    def fits(self, a: Tensor, b: Tensor) -> bool:
        """Whether the tensors are of the types it was made for."""
        return a.dtype is self._a.dtype and b.dtype is self._b.dtype

    def reads(self, *, first: bool) -> torch.dtype:
        """The type of one of the two tensors."""
        return (self._a if first else self._b).dtype

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """For tensors that broadcast with each other; in one pass where they lie the same way."""
        native = passes(a.numel()) if a.shape == b.shape else None
        if native is not None:
            a, b = dense(a), dense(b)
            if a.stride() == b.stride():
                y = torch.empty_like(a, dtype=self._y.dtype)
                run = native.added if self._op == "Add" else native.multiplied
                run(a.data_ptr(), b.data_ptr(), y.data_ptr(), *self._arguments, a.numel())
                return y
        whole = _OPERATORS[self._op](dequantized(a, self._a.scale, self._a.zero), dequantized(b, self._b.scale, self._b.zero))
        return quantized(whole.relu_() if self._relu else whole, self._y.scale, self._y.zero, self._y.dtype)


def _byte_scale(of: Scaled) -> ByteScale:
    return ByteScale(float(of.scale), int(of.zero), of.zero.dtype)


def sums_of_bytes(index: StepIndex) -> tuple[ProgramStep, ...]:
    """The steps with such sums as one each; dequantizations that others read as well stay."""
    instead: dict[int, ProgramStep] = {}
    gone: set[int] = set()
    for end in index.steps:
        y = index.scaled(end, QUANTIZE)
        inner = None if y is None or not y.single else index.before(end)
        between: list[ProgramStep] = []
        if inner is not None and is_op(inner, "Relu"):
            between.append(inner)
            inner = index.before(inner)
        if y is None or inner is None or inner.node.op not in _OPERATORS or not is_op(inner, inner.node.op) or len(inner.ins) != 2:
            continue
        a, b = (index.scaled(index.made_by.get(slot), DEQUANTIZE) for slot in inner.ins)
        if a is None or b is None or not a.single or not b.single or {a.slots[0], b.slots[0]} & index.constants:
            continue
        scales = (_byte_scale(a), _byte_scale(b), _byte_scale(y))
        instead[id(end)] = _step(end, inner, BytesOfTwo(inner.node.op, *scales, relu=bool(between)), (a, b))
        gone.update(id(s) for s in (*between, inner))
    return tuple(instead.get(id(s), s) for s in index.steps if id(s) not in gone)


def _step(end: ProgramStep, inner: ProgramStep, run: BytesOfTwo, of: tuple[Scaled, Scaled]) -> ProgramStep:
    scales = [(s.scale, s.zero) for s in of]

    def call(a: Tensor, b: Tensor) -> Tensor:
        if not run.fits(a, b):
            raise TypeError(f"bytes of {scales[0][1].dtype} and {scales[1][1].dtype} are added, {a.dtype} and {b.dtype} were given")
        return run(a, b)

    ins = (of[0].slots[0], of[1].slots[0])
    return replace(end, node=inner.node, call=call, ins=ins, prepare=lambda *_: Prepared(call, 0), attrs={})
