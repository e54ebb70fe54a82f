"""Elementwise arithmetic: one to one, two to one, and the running sums along an axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.elements import FLOAT8, UNSIGNED, carry, norm_axis, orders, to_ordered, wraps
from hotfuse.frontends.onnx.registry import Ctx, onnx_op


def _unary(name: str, fn: Callable[[Tensor], Tensor]) -> None:
    @onnx_op(name)
    def op(ctx: Ctx, x: Tensor) -> Tensor:
        return fn(x)

    op.__name__ = name


for _name, _fn in (
    ("Acos", torch.acos),
    ("Acosh", torch.acosh),
    ("Asin", torch.asin),
    ("Asinh", torch.asinh),
    ("Atan", torch.atan),
    ("Atanh", torch.atanh),
    ("Ceil", torch.ceil),
    ("Cos", torch.cos),
    ("Cosh", torch.cosh),
    ("Exp", torch.exp),
    ("Floor", torch.floor),
    ("Log", torch.log),
    ("Reciprocal", torch.reciprocal),
    ("Round", torch.round),
    ("Sin", torch.sin),
    ("Sinh", torch.sinh),
    ("Sqrt", torch.sqrt),
    ("Tan", torch.tan),
):
    _unary(_name, _fn)


@onnx_op("Abs")
def absolute(ctx: Ctx, x: Tensor) -> Tensor:
    return x if x.dtype in UNSIGNED else torch.abs(x)


@onnx_op("Neg")
@wraps(0)
def negate(ctx: Ctx, x: Tensor) -> Tensor:
    return torch.neg(x)


@onnx_op("Sign")
def sign(ctx: Ctx, x: Tensor) -> Tensor:
    """NaN has the sign NaN, as in NumPy; torch gives 0."""
    if x.dtype in UNSIGNED:
        return (carry(x) != 0).to(x.dtype)
    return torch.where(x != x, x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


@onnx_op("Erf")
def erf(ctx: Ctx, x: Tensor) -> Tensor:
    return torch.erf(x).to(x.dtype)


@onnx_op("IsNaN")
def is_nan(ctx: Ctx, x: Tensor) -> Tensor:
    return torch.isnan(x.float() if x.dtype in FLOAT8 else x)


@onnx_op("IsInf")
def is_inf(ctx: Ctx, x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    x = x.float() if x.dtype in FLOAT8 else x
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_positive:
        return torch.isposinf(x)
    if detect_negative:
        return torch.isneginf(x)
    return torch.zeros_like(x, dtype=torch.bool)


@onnx_op("Add", since=7)
@wraps()
def add(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.add(a, b)


@onnx_op("Sub", since=7)
@wraps()
def sub(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.sub(a, b)


@onnx_op("Mul", since=7)
@wraps()
def mul(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.mul(a, b)


def _unsigned64_quotient(a: Tensor, b: Tensor) -> Tensor:
    """a // b for the int64 carriers of uint64: halve to fit a signed division, then correct by at most one."""
    half = (a >> 1) & torch.iinfo(torch.int64).max
    small = b > 0
    guess = torch.div(half, torch.where(small, b, 1), rounding_mode="trunc") << 1
    rest = a - guess * b
    guess = guess + (to_ordered(rest.view(torch.uint64)) >= to_ordered(b.view(torch.uint64))).to(torch.int64)
    above = to_ordered(a.view(torch.uint64)) >= to_ordered(b.view(torch.uint64))
    return torch.where(small, guess, above.to(torch.int64))


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """Integer division towards zero, unsigned types included."""
    if a.dtype == torch.uint64:
        return _unsigned64_quotient(carry(a), carry(b)).view(torch.uint64)
    if a.dtype in UNSIGNED:
        return torch.div(a.to(torch.int64), b.to(torch.int64), rounding_mode="trunc").to(a.dtype)
    return torch.div(a, b, rounding_mode="trunc")


@onnx_op("Div", since=7)
def div(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.is_floating_point() or a.is_complex() else _quotient(a, b)


@onnx_op("Mod")
def mod(ctx: Ctx, a: Tensor, b: Tensor, *, fmod: int = 0) -> Tensor:
    if a.dtype == torch.uint64:
        a, b = carry(a), carry(b)
        return (a - _unsigned64_quotient(a, b) * b).view(torch.uint64)
    if a.dtype in UNSIGNED:
        return torch.fmod(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)
    if fmod:
        return torch.fmod(a, b)
    y = torch.remainder(a, b)
    # Version 28 fixes the sign of a zero result, which torch takes from `a`.
    return torch.where(y == 0, torch.copysign(y, b), y) if ctx.opset >= 28 and a.is_floating_point() else y


@onnx_op("Pow", since=7)
def power(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    if b.dtype in UNSIGNED:
        b = b.to(torch.int64)
    if a.is_floating_point():
        return torch.pow(a, b).to(a.dtype)
    if b.is_floating_point():
        return torch.pow(a.to(torch.float64), b.to(torch.float64)).to(a.dtype)
    return torch.pow(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)


@onnx_op("BitwiseAnd")
@wraps()
def bitwise_and(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_and(a, b)


@onnx_op("BitwiseOr")
@wraps()
def bitwise_or(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_or(a, b)


@onnx_op("BitwiseXor")
@wraps()
def bitwise_xor(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.bitwise_xor(a, b)


@onnx_op("BitwiseNot")
@wraps()
def bitwise_not(ctx: Ctx, x: Tensor) -> Tensor:
    return torch.bitwise_not(x)


@onnx_op("BitShift")
def bit_shift(ctx: Ctx, a: Tensor, b: Tensor, *, direction: str) -> Tensor:
    """A count below zero or past the width leaves only what the sign extends to, in torch as in ONNX."""
    if direction not in ("LEFT", "RIGHT"):
        raise ModelError(f"BitShift has direction {direction!r}", hint="use LEFT or RIGHT")
    shift = torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift
    dtype = a.dtype
    if dtype in (torch.uint16, torch.uint32):
        return shift(a.to(torch.int64), b.to(torch.int64)).to(dtype)
    a, b = carry(a), carry(b)
    if dtype == torch.uint64 and direction == "RIGHT":
        halved = (a >> 1) & torch.iinfo(torch.int64).max
        return torch.where(b == 0, a, shift(halved, b - 1)).view(dtype)
    return shift(a, b).view(dtype)


@onnx_op("Max")
@orders()
def maximum(ctx: Ctx, *xs: Tensor) -> Tensor:
    return functools.reduce(torch.maximum, xs)


@onnx_op("Min")
@orders()
def minimum(ctx: Ctx, *xs: Tensor) -> Tensor:
    return functools.reduce(torch.minimum, xs)


@onnx_op("Sum")
@wraps()
def sum_of(ctx: Ctx, *xs: Tensor) -> Tensor:
    return functools.reduce(torch.add, xs)


@onnx_op("Mean")
def mean_of(ctx: Ctx, *xs: Tensor) -> Tensor:
    return functools.reduce(torch.add, xs) / len(xs)


_LARGEST = torch.finfo(torch.float32).max


@onnx_op("Clip")
def clip_6(ctx: Ctx, x: Tensor, *, min: float = -_LARGEST, max: float = _LARGEST) -> Tensor:
    """Bounds not given are the largest floats, which infinities do exceed; those given as infinities bound nothing."""
    limits = torch.finfo(x.dtype)
    low, high = (b if math.isinf(b) else _within(b, limits) for b in (min, max))
    return torch.clamp(x, low, high)


def _within(bound: float, limits: torch.finfo) -> float:
    """The nearest number that the type has."""
    return limits.min if bound < limits.min else limits.max if bound > limits.max else bound


@onnx_op("Clip", since=11)
@orders()
def clip(ctx: Ctx, x: Tensor, lowest: Tensor | None = None, highest: Tensor | None = None) -> Tensor:
    if lowest is None and highest is None:
        return x
    if all(t is None or ctx.known(t) for t in (lowest, highest)):  # plain numbers trace into a simpler operator
        low, high = (None if t is None else ctx.ints(t)[0] for t in (lowest, highest))
        return torch.clamp(x, low, high)
    return torch.clamp(x, lowest, highest)


def _cumulative(
    ctx: Ctx, x: Tensor, axis: Tensor, exclusive: int, reverse: int, run: Callable[..., Tensor], start: int
) -> Tensor:
    dim: int = norm_axis(ctx.ints(axis)[0], x.dim())
    if reverse:
        x = x.flip(dim)
    if exclusive:
        n = x.shape[dim]
        x = torch.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim) + [1, 0], start).narrow(dim, 0, n)
    y = run(x, dim, dtype=x.dtype)
    return y.flip(dim) if reverse else y


@onnx_op("CumSum")
@wraps(0)
def cum_sum(ctx: Ctx, x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    return _cumulative(ctx, x, axis, exclusive, reverse, torch.cumsum, 0)


@onnx_op("CumProd")
@wraps(0)
def cum_prod(ctx: Ctx, x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    return _cumulative(ctx, x, axis, exclusive, reverse, torch.cumprod, 1)
