"""Layers whose activations are quantized in every call become one step; two, the bytes and the layer, where several read the bytes.

    DynamicQuantizeLinear(x) -> MatMulInteger(w) -> Cast -> Mul(x's scale * w's scale) [-> Add(bias)] [-> Relu]

ONNX's quantizer writes them so, in six to eight operators. The sums are the same integers, and what is done with them the same
float operations in the same order. Only what runs before compiled code is changed; capture sees the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.int8.layers import SignedProduct, exact_weights, signed_product, signed_weights
from hotfuse.frontends.onnx.int8.native_layers import NativeProduct, supported
from hotfuse.frontends.onnx.int8.quantized_steps import StepIndex, is_op
from hotfuse.frontends.onnx.int8.storage import QUANTIZED, available, dense, passes
from hotfuse.frontends.onnx.onnx_program import ABSENT, ProgramStep
from hotfuse.frontends.onnx.registry import Prepared
from hotfuse.frontends.onnx.values import Value
from hotfuse.native.byte_kernels import background
from hotfuse.native.byte_products import AS_FLOATS, TOLD
from hotfuse.native.byte_products import DYNAMIC as DYNAMIC_SCALE

DYNAMIC = "DynamicQuantizeLinear"
_FLOAT = 1
"""ONNX's number of float32."""
_LARGEST = 128
"""Of signed bytes."""
Quantized = tuple[Tensor, float, int]
"""Signed bytes, their scale and zero point."""


@dataclass(frozen=True, slots=True)
class _DynamicLayer:
    """What becomes one step."""

    begin: ProgramStep
    end: ProgramStep
    inner: tuple[ProgramStep, ...]
    """All steps but the last."""
    product: Callable[[Tensor], Tensor]
    sums: Tensor
    factor: Tensor
    bias: Tensor
    relu: bool
    bytes: int
    signed: Tensor | None
    """Weights as signed bytes less their zero points, where they are that: (outputs, inputs)."""


def dynamic_layers(
    steps: Sequence[ProgramStep], constants: set[int], env: Sequence[Value], outputs: Sequence[int]
) -> tuple[ProgramStep, ...]:  # fmt: skip
    """The steps with such layers as one each; where something else reads the bytes or their scale, everything stays."""
    if not available() or not any(is_op(s, DYNAMIC) for s in steps):
        return tuple(steps)
    index = StepIndex(steps, constants, env, outputs)
    instead: dict[int, ProgramStep] = {}
    gone: set[int] = set()
    for step in (s for s in steps if is_op(s, DYNAMIC)):
        if (layers := _layers(index, step)) is not None:
            if len(layers) == 1 and layers[0].signed is not None:
                instead[id(layers[0].end)] = _whole_step(step, layers[0], layers[0].signed)
                gone.update(id(s) for s in (step, *layers[0].inner))
                continue
            instead[id(step)] = _bytes_step(step)
            for layer in layers:
                instead[id(layer.end)] = _layer_step(step, layer)
                gone.update(id(s) for s in layer.inner)
    return tuple(instead.get(id(s), s) for s in steps if id(s) not in gone)


def _layers(index: StepIndex, source: ProgramStep) -> list[_DynamicLayer] | None:
    """All that reads the bytes of a quantization."""
    if len(source.outs) != 3 or any(o in index.outputs for o in source.outs):
        return None
    q, scale, zero = source.outs
    readers = index.readers.get(q, [])
    found = [_layer(index, reader, (q, scale, zero)) for reader in readers]
    if not found or any(layer is None for layer in found):
        return None
    layers = [layer for layer in found if layer is not None]
    inside = {id(s) for layer in layers for s in (*layer.inner, layer.end)}
    others = [s for slot in (scale, zero) for s in index.readers.get(slot, [])]
    return layers if all(id(s) in inside for s in others) else None


def _layer(index: StepIndex, step: ProgramStep, of: tuple[int, int, int]) -> _DynamicLayer | None:
    q, scale, zero = of
    given = (*step.ins, ABSENT, ABSENT)[:4]
    if not is_op(step, "MatMulInteger") or given[0] != q or given[2] != zero or given[1] not in index.constants:
        return None
    weight, at = index.env[given[1]], None if given[3] == ABSENT else index.env[given[3]]
    if given[3] != ABSENT and given[3] not in index.constants:
        return None
    cast = _only_reader(index, step)
    scaled = (
        None if cast is None or not is_op(cast, "Cast") or cast.attrs.get("to") != _FLOAT else _only_reader(index, cast)
    )
    if cast is None or scaled is None or not is_op(scaled, "Mul"):
        return None
    unit = index.made_by.get(_other(scaled, cast.outs[0]))
    if unit is None or not is_op(unit, "Mul") or scale not in unit.ins or _other(unit, scale) not in index.constants:
        return None
    if unit.outs[0] in index.outputs or len(index.readers[unit.outs[0]]) != 1:
        return None
    factor = index.env[_other(unit, scale)]
    if (
        not isinstance(weight, Tensor)
        or not isinstance(factor, Tensor)
        or weight.dim() != 2
        or weight.dtype not in QUANTIZED
    ):
        return None
    columns = weight.shape[1]
    if factor.dtype is not torch.float32 or factor.dim() > 1 or factor.numel() not in (1, columns):
        return None
    if at is not None and (not isinstance(at, Tensor) or at.dim() > 1 or at.numel() not in (1, columns)):
        return None
    product = signed_product(weight.t(), at) or _float_product(weight.t(), at)
    if product is None:
        return None
    steps, bias, relu = [step, cast, unit, scaled], factor.new_zeros(columns), False
    if (
        (then := _only_reader(index, scaled)) is not None
        and is_op(then, "Add")
        and _other(then, scaled.outs[0]) in index.constants
    ):
        more = index.env[_other(then, scaled.outs[0])]
        if isinstance(more, Tensor) and more.dtype is torch.float32 and more.shape == (columns,):
            bias = more.contiguous()
            steps.append(then)
            then = _only_reader(index, then)
        else:
            then = None
    if then is not None and is_op(then, "Relu"):
        steps.append(then)
        relu = True
    spread = factor.reshape(-1).expand(columns).contiguous()
    run, sums, size = (product, product.sums, product.bytes) if isinstance(product, SignedProduct) else product
    signed = signed_weights(weight.t(), at) if supported() else None
    return _DynamicLayer(step, steps[-1], tuple(steps[:-1]), run, sums, spread, bias, relu, size, signed)


def _float_product(weight: Tensor, zero: Tensor | None) -> tuple[Callable[[Tensor], Tensor], Tensor, int] | None:
    """The same integers by products of floats, where these are exact."""
    at = None if zero is None else zero.to(torch.int64).reshape(-1)
    wide = exact_weights(weight.contiguous(), at, _LARGEST)
    if wide is None:
        return None
    return (
        (lambda x: F.linear(x.float(), wide).to(torch.int32)),
        wide.sum(1, dtype=torch.float64).to(torch.int32),
        wide.nbytes,
    )


def _only_reader(index: StepIndex, step: ProgramStep) -> ProgramStep | None:
    slot = step.outs[0]
    readers = index.readers.get(slot, [])
    return readers[0] if len(readers) == 1 and slot not in index.outputs else None


def _other(step: ProgramStep, slot: int) -> int:
    """The other one of two inputs; absent where both are the same."""
    left = [i for i in step.ins if i != slot]
    return left[0] if len(step.ins) == 2 and len(left) == 1 else ABSENT


def _bytes_step(step: ProgramStep) -> ProgramStep:
    """Signed bytes, and scale and zero point as numbers."""
    background.begin()

    def call(x: Tensor) -> Quantized:
        if x.dtype is torch.float32 and x.numel() and (native := passes(x.numel())) is not None:
            x = x.contiguous()
            y, found = torch.empty_like(x, dtype=torch.int8), x.new_empty(2)
            if native.dynamic(x.data_ptr(), y.data_ptr(), found.data_ptr(), float(_LARGEST), x.numel()):
                scale, zero = found.tolist()
                return y, scale, int(zero) - _LARGEST
        q, unit, at = step.call(dense(x))
        return (q.contiguous() ^ _LARGEST).view(torch.int8), float(unit), int(at) - _LARGEST

    return replace(step, call=call, prepare=lambda *_: Prepared(call, 0))


def _floor(layer: _DynamicLayer) -> float:
    return 0.0 if layer.relu else float("-inf")


def _layer_call(layer: _DynamicLayer) -> Callable[[Tensor, float, int], Tensor]:
    """The layer of bytes, by the library's product and one pass over its sums."""
    product, sums, factor, bias, relu = layer.product, layer.sums, layer.factor, layer.bias, layer.relu
    columns, floor = len(factor), _floor(layer)
    addresses = sums.data_ptr(), factor.data_ptr(), bias.data_ptr()

    def call(q: Tensor, scale: float, zero: int) -> Tensor:
        total = product(q if q.dim() == 2 else q.reshape(-1, q.shape[-1]))
        if (native := passes(total.numel())) is None:
            y = (total - zero * sums).float().mul_(torch.tensor(scale, dtype=torch.float32, device="cpu") * factor).add_(bias)
            return (y.relu_() if relu else y).view(*q.shape[:-1], columns)
        y = factor.new_empty((*q.shape[:-1], columns))
        native.to_floats(
            total.data_ptr(), y.data_ptr(), len(total), addresses[0], zero, scale, *addresses[1:], floor, columns
        )
        return y

    return call


def _native(layer: _DynamicLayer, signed: Tensor, source: int) -> NativeProduct:
    return NativeProduct(
        signed, layer.factor, bias=layer.bias, source=source, result=AS_FLOATS, floor=_floor(layer)
    )


def _layer_step(source: ProgramStep, layer: _DynamicLayer) -> ProgramStep:
    """A step for a layer whose bytes other layers read, too."""
    otherwise = _layer_call(layer)
    native = None if layer.signed is None else _native(layer, layer.signed, TOLD)

    def call(q: Tensor, scale: float, zero: int) -> Tensor:
        made = None if native is None else native.run(q, torch.float32, scale, zero)
        return otherwise(q, scale, zero) if made is None else made

    size = layer.bytes + 4 * len(layer.factor) + (0 if native is None else native.bytes)
    return _instead(layer, call, source.outs, size)


def _whole_step(source: ProgramStep, layer: _DynamicLayer, signed: Tensor) -> ProgramStep:
    """A step from floats to the layer's result, for a layer that alone reads their bytes."""
    otherwise, first = _layer_call(layer), _bytes_step(source).call
    native = _native(layer, signed, DYNAMIC_SCALE)

    def call(x: Tensor) -> Tensor:
        made = native.run(x, torch.float32) if x.dtype is torch.float32 and x.numel() and x.shape[-1:] == (native.inputs,) else None
        return otherwise(*first(x)) if made is None else made

    return _instead(layer, call, source.ins, layer.bytes + 4 * len(layer.factor) + native.bytes)


def _instead(layer: _DynamicLayer, call: Callable[..., Tensor], ins: tuple[int, ...], size: int) -> ProgramStep:
    ready = lambda *_: Prepared(call, size)  # noqa: E731
    return replace(layer.begin, call=call, ins=ins, outs=layer.end.outs, prepare=ready, attrs={})
