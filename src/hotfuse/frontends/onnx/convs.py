"""Convolutions of a file become one with what follows them when its constants are folded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.onnx_program import ProgramStep
from hotfuse.frontends.onnx.values import Value
from hotfuse.frontends.onnx.windows import conv_window
from hotfuse.ops.conv_chain import Chain, ChainLink, ChainRole, chains, to_rows
from hotfuse.ops.folded_conv import Affine, FoldedConv, Window, affine, is_floats, of_arithmetic, of_norm

_ANY_ORDER = frozenset({
    "Abs", "Add", "AveragePool", "BatchNormalization", "Ceil", "Clip", "Concat", "Conv", "ConvTranspose", "DequantizeLinear",
    "Div", "Elu", "Erf", "Exp", "Floor", "Gelu", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Identity",
    "LeakyRelu", "Log", "Max", "MaxPool", "Min", "Mul", "Neg", "PRelu", "Pow", "QLinearAdd", "QLinearGlobalAveragePool",
    "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QuantizeLinear", "ReduceMean", "Relu", "Resize", "Sigmoid", "Softplus",
    "Sqrt", "Sub", "Swish", "Tanh",
})  # fmt: skip
"""Operators whose functions take images in any order of memory without copying them."""


@dataclass(frozen=True, slots=True)
class Folded:
    """What takes the place of some steps."""

    instead: dict[int, tuple[FoldedConv, Chain]]
    """By the place of the convolution."""
    gone: frozenset[int]
    rows: dict[int, tuple[int, ...]]
    """Slots to put into rows before a step."""
    rows_last: tuple[int, ...]
    """Slots to put into rows at the end."""


def folded(steps: Sequence[ProgramStep], known: set[int], env: Sequence[Value], outputs: Sequence[int]) -> Folded | None:
    """Convolutions with constant weights among the steps; None where there are none."""
    ranks = _ranks(steps, known, env)
    links = [_link(s, known, env, ranks) for s in steps]
    found = chains(links, outputs)
    if not found and not any(link.role is ChainRole.INNERMOST for link in links):
        return None
    instead = {c.places[0]: (_conv(c, steps, known, env), c) for c in found}
    gone = frozenset(p for c in found for p in c.places[1:])
    rows, last = to_rows(links, {p: c for p, (_, c) in instead.items()}, gone, outputs)
    return Folded(instead, gone, {p: _slots(v) for p, v in rows.items()}, _slots(last))


def _slots(values: Sequence[Hashable]) -> tuple[int, ...]:
    return tuple(v for v in values if isinstance(v, int))


def _ranks(steps: Sequence[ProgramStep], known: set[int], env: Sequence[Value]) -> dict[int, int]:
    """Dims of what convolutions make, and of what only operators in any order of memory make of it."""
    found: dict[int, int] = {}
    for step in steps:
        if step.node.op in ("Conv", "QLinearConv"):
            weight = env[step.ins[1 if step.node.op == "Conv" else 3]]
            if isinstance(weight, Tensor):
                found[step.outs[0]] = weight.dim()
        elif step.node.op in _ANY_ORDER and (read := [found[i] for i in step.ins if i in found and i not in known]):
            found.update(dict.fromkeys(step.outs, read[0]))
    return found


def _link(step: ProgramStep, known: set[int], env: Sequence[Value], ranks: Mapping[int, int]) -> ChainLink:
    reads = tuple(i for i in step.ins if i not in known)
    role, numbers, channels = ChainRole.OTHER, None, 0
    if step.kind == "op" and step.node.domain in ("", "ai.onnx", "com.microsoft") and reads and len(step.outs) == 1:
        constants = [env[i] if i in known else None for i in step.ins]
        role, numbers, channels = _role(step, reads, constants, ranks.get(reads[0], 4))
    return ChainLink(role, reads, step.outs, numbers, channels)


def _role(
    step: ProgramStep, reads: tuple[int, ...], constants: list[Any], dims: int
) -> tuple[ChainRole, Affine | None, int]:  # fmt: skip
    op = step.node.op
    if op == "Conv" and len(reads) == 1 and _window(step, constants) is not None:
        return ChainRole.CONV, None, int(constants[1].shape[0])
    if op == "QLinearConv":
        return ChainRole.INNERMOST, None, 0
    if op == "Relu":
        return ChainRole.RELU, None, 0
    if op == "HardSwish":
        return ChainRole.HARDSWISH, None, 0
    if op == "Mul" and len(reads) == 2 and not step.attrs:
        return ChainRole.TIMES, None, 0
    if op == "Clip" and not step.attrs and len(constants) == 3 and [_number(c) for c in constants[1:]] == [0.0, 6.0]:
        return ChainRole.CLIP, None, 0
    if len(reads) == 1 and (numbers := _affine(step, reads[0], constants, dims)) is not None:
        return ChainRole.AFFINE, numbers, 0
    return (ChainRole.ANY_ORDER if op in _ANY_ORDER else ChainRole.OTHER), None, 0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None


def _window(step: ProgramStep, constants: Sequence[Any]) -> Window | None:
    """A plain convolution of float32 images or signals with the same padding at both ends; None for others."""
    weight, bias = constants[1], constants[2] if len(constants) > 2 else None
    if not (is_floats(weight, 4) or is_floats(weight, 3)) or step.ins[0] == step.ins[1] or not (bias is None or is_floats(bias, 1)):
        return None
    return conv_window(weight, step.attrs)


def _affine(step: ProgramStep, read: int, constants: Sequence[Any], dims: int) -> Affine | None:
    """A step that scales and shifts by constants, one number or one for each channel."""
    op, first = step.node.op, step.ins[0] == read
    if op == "Identity":
        return affine()
    if op == "BatchNormalization" and first and step.opset >= 9 and not step.attrs.get("training_mode"):
        return of_norm(constants[1:], float(step.attrs.get("epsilon", 1e-5)))
    if op not in ("Add", "Sub", "Mul", "Div") or step.attrs or len(constants) != 2:
        return None
    return of_arithmetic(op.lower(), constants[1 if first else 0], first=first, dims=dims)


def _conv(chain: Chain, steps: Sequence[ProgramStep], known: set[int], env: Sequence[Value]) -> FoldedConv:
    conv = steps[chain.places[0]]
    constants: list[Any] = [env[i] if i in known else None for i in conv.ins]
    window = _window(conv, constants)
    assert window is not None  # it is a chain
    bias = constants[2] if len(constants) > 2 else None
    plain = _one_by_one([steps[p] for p in chain.places], known, env, chain)
    return FoldedConv(constants[1], bias, window, chain.before, chain.activation, chain.after, plain)


def _one_by_one(steps: Sequence[ProgramStep], known: set[int], env: Sequence[Value], chain: Chain) -> Callable[[Tensor], Tensor]:
    """The steps as they stand, for inputs that the folded convolution is not made for."""
    held = {i: env[i] for s in steps for i in s.ins if i in known}

    def run(x: Tensor) -> Tensor:
        values: dict[Any, Any] = {**held, chain.reads: x}
        for step in steps:
            result = step.call(*[values[i] for i in step.ins])
            values[step.outs[0]] = result[0] if isinstance(result, tuple) else result
        return values[chain.makes]

    return run
