"""Selection by value: operators whose result, or its size, depends on what the elements are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotfuse.frontends.onnx.elements import Value, carry, from_ordered, moves, norm_axis, to_ordered
from hotfuse.frontends.onnx.registry import Ctx, onnx_op


@onnx_op("NonZero")
def non_zero(ctx: Ctx, x: Value) -> Tensor:
    """One row of indices per axis; a scalar counts as a vector of one."""
    given = x if isinstance(x, Tensor) else torch.from_numpy(x.astype(bool))
    return torch.nonzero(carry(given.reshape(1) if given.dim() == 0 else given)).t()


@onnx_op("Compress")
@moves(0)
def compress(ctx: Ctx, x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """The condition may be shorter than the axis: what it does not reach is dropped."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    return torch.index_select(x, norm_axis(axis, x.dim()), torch.nonzero(condition).reshape(-1))


@onnx_op("TopK")
def top_k_1(ctx: Ctx, x: Tensor, *, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    return _top_k(x, k, axis, largest=True)


@onnx_op("TopK", since=10)
def top_k(
    ctx: Ctx, x: Tensor, k: Tensor, *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, Tensor]:
    """Equal values come in the order of their indices, which is why this is a stable sort and not torch's topk."""
    return _top_k(x, ctx.ints(k)[0], axis, largest=bool(largest))


def _top_k(x: Tensor, k: Any, axis: int, *, largest: bool) -> tuple[Tensor, Tensor]:
    axis = norm_axis(axis, x.dim())
    values, indices = torch.sort(to_ordered(x), dim=axis, descending=largest, stable=True)
    return from_ordered(values.narrow(axis, 0, k), x.dtype), indices.narrow(axis, 0, k)


@onnx_op("Unique")
def unique(ctx: Ctx, x: Value, *, axis: int | None = None, sorted: int = 1) -> tuple[Value, ...]:
    """The distinct elements (or slices), where each first stands, which one every element is, and the counts."""
    if isinstance(x, np.ndarray):
        flat = x.reshape(-1) if axis is None else x
        names, codes = np.unique(flat.astype(str), return_inverse=True)
        ranks = torch.from_numpy(codes.reshape(flat.shape).astype(np.int64))
        values, *rest = _unique(ranks, axis, in_order=bool(sorted))
        return names[values.numpy()].astype(object), *rest
    values, *rest = _unique(to_ordered(x), axis, in_order=bool(sorted))
    return from_ordered(values, x.dtype), *rest


def _unique(x: Tensor, axis: int | None, *, in_order: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if axis is None:
        x, axis = x.reshape(-1), 0
    axis = norm_axis(axis, x.dim())
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=axis)
    n: int = x.shape[axis]
    first = torch.full_like(counts, n).scatter_reduce(0, inverse, torch.arange(n, device=x.device), "amin")
    if not in_order:
        order = torch.argsort(first)
        values = torch.index_select(values, axis, order)
        first, counts = first[order], counts[order]
        inverse = torch.argsort(order)[inverse]
    return values, first, inverse, counts
