"""Reductions: the Reduce family and the arg-extremes.

Up to version 17 (12 for ReduceSum) the axes are an attribute, later an input; no axes means all of them, or none where
`noop_with_empty_axes` says so. What a reduction does to each element before and after adding up still happens then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotfuse.frontends.onnx.elements import UNSIGNED, is_known, norm_axis, orders, to_ordered, wraps
from hotfuse.frontends.onnx.registry import Ctx, OpFn, onnx_op

Reducer = Callable[[Tensor, list[int], bool], Tensor]


def _axes(ctx: Ctx, x: Tensor, axes: Tensor | Sequence[int] | None, noop: int) -> list[int]:
    """The axes to reduce, in order; empty when nothing is to be reduced (or the tensor has none)."""
    given = ctx.ints(axes) if isinstance(axes, Tensor) else list(axes or ())
    if given:
        return sorted({norm_axis(a, x.dim()) for a in given})
    return [] if noop else list(range(x.dim()))


def _reduction(name: str, reduce: Reducer, *, axes_input_since: int = 18, guard: Callable[[OpFn], OpFn] | None) -> None:
    """Two rows, for the axes as an attribute and as an input; `guard` lets unsigned types in."""

    def with_attribute(ctx: Ctx, x: Tensor, *, axes: Sequence[int] | None = None, keepdims: int = 1) -> Tensor:
        return reduce(x, _axes(ctx, x, axes, 0), keepdims == 1)

    def with_input(
        ctx: Ctx, x: Tensor, axes: Tensor | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        return reduce(x, _axes(ctx, x, axes, noop_with_empty_axes), keepdims == 1)

    onnx_op(name)(guard(with_attribute) if guard else with_attribute)
    onnx_op(name, since=axes_input_since)(guard(with_input) if guard else with_input)


def _sum(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    # torch takes an empty list to mean every axis
    return torch.sum(x, dims, keepdim, dtype=x.dtype) if dims else x


def _mean(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    if not dims:
        return x
    if x.is_floating_point():
        return torch.mean(x, dims, keepdim)
    total = torch.sum(x, dims, keepdim, dtype=torch.int64)
    return torch.div(total, _count(x, dims), rounding_mode="trunc").to(x.dtype)


def _count(x: Tensor, dims: list[int]) -> Any:
    n: Any = 1
    for d in dims:
        n = n * x.shape[d]
    return n


def _prod(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    for d in reversed(dims):
        x = torch.prod(x, d, keepdim, dtype=x.dtype)
    return x


def _extreme(reduce: Callable[..., Tensor], sign: int) -> Reducer:
    def run(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        if not dims:
            return x
        if any(is_known(x.shape[d], 0) for d in dims):
            return _filled(x, dims, keepdim, _limit(x.dtype, sign))
        return reduce(x, dims, keepdim)

    return run


def _limit(dtype: torch.dtype, sign: int) -> Any:
    """What the extreme of nothing is: the far end of the type."""
    if dtype == torch.bool:
        return sign > 0
    if dtype.is_floating_point:
        return sign * float("inf")
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min


def _filled(x: Tensor, dims: list[int], keepdim: bool, value: Any) -> Tensor:
    shape = [1 if i in dims else n for i, n in enumerate(x.shape) if keepdim or i not in dims]
    return torch.full(shape, value, dtype=x.dtype, device=x.device)


def _in_float(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of real numbers; integers go through float64 and come back truncated."""
    return fn(x) if x.is_floating_point() else fn(x.to(torch.float64)).to(x.dtype)


def _l1(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return _sum(torch.abs(x), dims, keepdim)


def _sum_square(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return _sum(torch.square(x), dims, keepdim)


def _l2(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return _in_float(x, lambda t: torch.sqrt(_sum_square(t, dims, keepdim)))


def _log_sum(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return _in_float(x, lambda t: torch.log(_sum(t, dims, keepdim)))


def _log_sum_exp(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return _in_float(x, lambda t: torch.logsumexp(t, dims, keepdim) if dims else t)


def _widened(reduce: Reducer) -> Reducer:
    """Let unsigned types in by way of int64, for the reductions that are not sums modulo 2^n."""

    def run(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        return reduce(x.to(torch.int64), dims, keepdim).to(x.dtype) if x.dtype in UNSIGNED else reduce(x, dims, keepdim)

    return run


_reduction("ReduceSum", _sum, axes_input_since=13, guard=wraps(0))
_reduction("ReduceSumSquare", _sum_square, guard=wraps(0))
_reduction("ReduceProd", _prod, guard=wraps(0))
_reduction("ReduceMax", _extreme(torch.amax, -1), guard=orders(0))
_reduction("ReduceMin", _extreme(torch.amin, 1), guard=orders(0))
for _name, _reducer in (
    ("ReduceMean", _mean),
    ("ReduceL1", _l1),
    ("ReduceL2", _l2),
    ("ReduceLogSum", _log_sum),
    ("ReduceLogSumExp", _log_sum_exp),
):
    _reduction(_name, _widened(_reducer), guard=None)


def _arg(x: Tensor, axis: int, keepdims: int, last: int, pick: Callable[..., Tensor]) -> Tensor:
    x = to_ordered(x)
    axis = norm_axis(axis, x.dim())
    if not last:
        return pick(x, axis, keepdims == 1)
    return x.shape[axis] - 1 - pick(x.flip(axis), axis, keepdims == 1)


@onnx_op("ArgMax")
def arg_max(ctx: Ctx, x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _arg(x, axis, keepdims, select_last_index, torch.argmax)


@onnx_op("ArgMin")
def arg_min(ctx: Ctx, x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return _arg(x, axis, keepdims, select_last_index, torch.argmin)
