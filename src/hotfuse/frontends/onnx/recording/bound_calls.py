"""Operators on inputs whose sizes, types and numbers are known: calls of torch without what the general function looks at.

A recording (`recording.size_folding`) has seen the call that each of these stands for: what is refused was refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.frontends.onnx.constant_folding import Bounded
from hotfuse.frontends.onnx.constant_products import ConstantProduct
from hotfuse.frontends.onnx.elements import moved_as_it_is, norm_axis
from hotfuse.frontends.onnx.native_floats.native_recurrent import NativeRecurrent
from hotfuse.frontends.onnx.onnx_program import ProgramStep
from hotfuse.frontends.onnx.recording.conv_product import faster_of
from hotfuse.frontends.onnx.recording.written_runs import KnownBehind


class FirstInput:
    """The result is the first input itself."""


FIRST_INPUT: Final = FirstInput()
BoundCall = tuple[Callable[..., Any], tuple[int, ...]]
"""What to call, and which inputs it takes."""

_RESHAPED = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that give the elements as they are in another shape."""
_REDUCED = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"})
"""Operators that do so over axes of one element."""
_FLOATS: dict[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "MatMul": torch.matmul, "Sqrt": torch.sqrt,
    "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Relu": torch.relu, "Erf": torch.erf, "Exp": torch.exp, "Neg": torch.neg,
}  # fmt: skip
"""On float32 these are all that the operators' functions do."""
_MEANS: dict[str, Callable[..., Any]] = {"ReduceMean": torch.mean, "ReduceSum": torch.sum}
_slice = torch.ops.aten.slice.Tensor._op  # pyright: ignore[reportPrivateUsage] - without its Python wrapper


def reshapes(step: ProgramStep, x: Any, result: Any) -> bool:
    """Whether a call only gave another shape to the elements of its first input."""
    op = step.node.op
    if step.node.domain not in ("", "ai.onnx") or not isinstance(x, Tensor) or not moved_as_it_is(x):
        return False
    return op in _RESHAPED or (op in _REDUCED and 0 < result.numel() == x.numel() and result.dtype is x.dtype)


def bound(
    step: ProgramStep | None, call: Callable[..., Any], xs: Sequence[Any], result: Any, fixed: Sequence[bool]
) -> BoundCall | FirstInput | None:  # fmt: skip
    """The call with what is known of it; None where it stays as it is. `fixed` says which inputs are the same in every call."""
    x = xs[0]
    if step is None:
        if isinstance(call, ConstantProduct):
            return call.for_sizes(x) or KnownBehind(F.linear, call.constants), (0,)
        return (faster_of(call.conv, x), (0,)) if isinstance(call, Bounded) else None
    op = step.node.op
    if not isinstance(x, Tensor):
        return None
    if isinstance(call, NativeRecurrent) and (layer := call.for_sizes(xs)) is not None:
        return layer, tuple(range(len(xs)))
    if isinstance(call, ConstantProduct) and (product := call.for_sizes(x)) is not None:
        return product, tuple(range(len(xs)))
    if isinstance(call, ConstantProduct) and op == "Gemm" and x.dtype is torch.float32:
        return KnownBehind(F.linear, call.constants), (0,)
    if op in ("Identity", "Cast") and result is x:
        return FIRST_INPUT
    if moved_as_it_is(x) and all(fixed[1:]):
        if reshapes(step, x, result):
            return FIRST_INPUT if result.shape == x.shape else (_reshaped(tuple(result.shape)), (0,))
        if op == "Expand":
            return KnownBehind(Tensor.expand, (tuple(result.shape),)), (0,)
        if op == "Transpose":
            return KnownBehind(Tensor.permute, (tuple(step.attrs.get("perm") or range(x.dim())[::-1]),)), (0,)
        if op == "Gather":
            return _gathered(x, xs[1], int(step.attrs.get("axis", 0)))
        if op == "Slice" and step.opset >= 10 and (found := _sliced(xs)) is not None:
            return FIRST_INPUT if result.shape == x.shape else (found, (0,))
        mirrored = op == "Pad" and step.opset >= 11 and step.attrs.get("mode", "constant") != "constant"
        if mirrored and (found := _padded(step, xs)) is not None:
            return found, (0,)
    if op == "Pow" and x.dtype is torch.float32 and fixed[1] and isinstance(xs[1], Tensor) and xs[1].dim() == 0:
        power = float(xs[1])  # which is what torch makes of such a tensor
        if power == 2.0:
            return torch.square, (0,)
        return KnownBehind(torch.pow, (power,)), (0,)
    if op in _MEANS and x.dtype is torch.float32 and all(fixed[1:]) and (found := _reduced(step, xs)) is not None:
        return found, (0,)
    if x.dtype is torch.float32 and (layer := _LAYERS.get(op)) is not None and (found := layer(step, xs, fixed)) is not None:
        return found, (0,)
    if op == "Concat" and "axis" in step.attrs and all(isinstance(v, Tensor) and v.dtype is x.dtype and v.dim() for v in xs):
        axis = norm_axis(int(step.attrs["axis"]), x.dim())
        return (lambda *ys: torch.cat(ys, axis)), tuple(range(len(xs)))
    plain = _FLOATS.get(op)
    if plain is not None and not step.attrs and all(isinstance(v, Tensor) and v.dtype is torch.float32 for v in xs):
        return plain, tuple(range(len(xs)))
    if step.prepare is None and step.fn is not None:  # the size of its result was reckoned when it was recorded
        return partial(step.fn, step.ctx, **step.attrs), tuple(range(len(xs)))
    return None


def _reshaped(sizes: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    return KnownBehind(Tensor.reshape, (sizes,))


def _gathered(x: Tensor, indices: Any, axis: int) -> BoundCall | None:
    if not isinstance(indices, Tensor) or indices.dim() > 1:
        return None
    axis = norm_axis(axis, x.dim())
    if indices.dim() == 0:
        return KnownBehind(Tensor.select, (axis, int(indices))), (0,)
    places = indices.to(torch.int64)
    places = torch.where(places < 0, places + x.shape[axis], places)
    return KnownBehind(Tensor.index_select, (axis, places)), (0,)


def _sliced(xs: Sequence[Any]) -> Callable[[Tensor], Tensor] | None:
    """Ascending slices with the numbers of the call."""
    x, starts, ends = xs[0], xs[1].tolist(), xs[2].tolist()
    axes = xs[3].tolist() if len(xs) > 3 and xs[3] is not None else list(range(len(starts)))
    steps = xs[4].tolist() if len(xs) > 4 and xs[4] is not None else [1] * len(starts)
    if any(step < 1 for step in steps):
        return None
    cuts = [(norm_axis(a, x.dim()), s, e, n) for a, s, e, n in zip(axes, starts, ends, steps, strict=True)]
    if len(cuts) == 1:
        return KnownBehind(_slice, cuts[0])

    def cut(y: Tensor) -> Tensor:
        for axis, start, end, step in cuts:
            y = _slice(y, axis, start, end, step)
        return y

    return cut


def _reduced(step: ProgramStep, xs: Sequence[Any]) -> Callable[[Tensor], Tensor] | None:
    """A mean or sum over axes that are named; None where they are not, which means several things."""
    given = xs[1].tolist() if len(xs) > 1 and isinstance(xs[1], Tensor) else step.attrs.get("axes")
    if not given:
        return None
    dims, kept = sorted({norm_axis(a, xs[0].dim()) for a in given}), bool(step.attrs.get("keepdims", 1))
    return KnownBehind(_MEANS[step.node.op], (dims, kept))


def _softmax(step: ProgramStep, xs: Sequence[Any], _fixed: Sequence[bool]) -> Callable[[Tensor], Tensor] | None:
    return KnownBehind(torch.softmax, (int(step.attrs.get("axis", -1)),)) if step.opset >= 13 else None


def _layer_norm(step: ProgramStep, xs: Sequence[Any], fixed: Sequence[bool]) -> Callable[[Tensor], Tensor] | None:
    """With one result, and constants of the sizes that are normalized."""
    x, (scale, bias) = xs[0], (*xs[1:], None, None)[:2]
    sizes = tuple(x.shape[norm_axis(int(step.attrs.get("axis", -1)), x.dim()) :])
    plain = all(t is None or (isinstance(t, Tensor) and t.dtype is torch.float32 and t.shape == sizes) for t in (scale, bias))
    if step.ctx.n_outputs != 1 or not plain or not all(fixed[1:]):
        return None
    return KnownBehind(torch.layer_norm, (sizes, scale, bias, float(step.attrs.get("epsilon", 1e-5)), False))


def _global_mean(_step: ProgramStep, xs: Sequence[Any], _fixed: Sequence[bool]) -> Callable[[Tensor], Tensor] | None:
    return KnownBehind(torch.mean, (list(range(2, xs[0].dim())), True)) if xs[0].dim() > 2 else None


_LAYERS: dict[str, Callable[[ProgramStep, Sequence[Any], Sequence[bool]], Callable[[Tensor], Tensor] | None]] = {
    "Softmax": _softmax, "LayerNormalization": _layer_norm, "GlobalAveragePool": _global_mean,
}  # fmt: skip
"""Operators of one varying input, on float32, of which all else is known."""


def _padded(step: ProgramStep, xs: Sequence[Any]) -> Callable[[Tensor], Tensor] | None:
    """Mirrored, repeated or wrapped ends of one axis: elements at places that are known."""
    x, pads = xs[0], xs[1].tolist()
    axes = xs[3].tolist() if len(xs) > 3 and xs[3] is not None else list(range(x.dim()))
    grown = [k for k in range(len(axes)) if pads[k] or pads[k + len(axes)]]
    if len(grown) != 1 or step.fn is None or min(pads) < 0:
        return None
    axis = norm_axis(axes[grown[0]], x.dim())
    line = torch.arange(x.shape[axis]).reshape([-1 if d == axis else 1 for d in range(x.dim())])
    places = step.fn(step.ctx, line, *xs[1:], **step.attrs).reshape(-1)
    return KnownBehind(Tensor.index_select, (axis, places))
