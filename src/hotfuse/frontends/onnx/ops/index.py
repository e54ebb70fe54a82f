"""Indexing: gathering and scattering by computed positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.elements import Value, moves, norm_axis, orders, wraps
from hotfuse.frontends.onnx.registry import Ctx, onnx_op


def _from_front(index: Tensor, size: Any) -> Tensor:
    """Indices as int64 without negative ones, for the torch operators that do not count from the end."""
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index)


@onnx_op("Gather")
@moves(0)
def gather(ctx: Ctx, x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis = norm_axis(axis, x.dim())
    if indices.dim() == 0:  # torch would read a lone index from the data
        if ctx.known(indices):
            return x.select(axis, ctx.ints(indices)[0])
        return x.index_select(axis, _from_front(indices.reshape(1), x.shape[axis])).squeeze(axis)
    before = (slice(None),) * axis
    return x[(*before, indices.to(torch.int64))]


@onnx_op("GatherElements")
@moves(0)
def gather_elements(ctx: Ctx, x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis = norm_axis(axis, x.dim())
    return torch.gather(x, axis, _from_front(indices, x.shape[axis]))


@onnx_op("GatherND")
@moves(0)
def gather_nd(ctx: Ctx, x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """The last axis of `indices` names positions; leading batch axes run along with those of the data."""
    parts = torch.unbind(indices.to(torch.int64), -1)
    rank = indices.dim() - 1
    batch = [
        torch.arange(x.shape[d], device=x.device).reshape([-1 if i == d else 1 for i in range(rank)])
        for d in range(batch_dims)
    ]
    return x[(*batch, *parts)]


_REDUCES = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@onnx_op("Scatter", "ScatterElements")
def scatter_elements(
    ctx: Ctx, x: Value, indices: Tensor, updates: Value, *, axis: int = 0, reduction: str = "none"
) -> Value:
    if reduction == "none":
        return _scatter(ctx, x, updates, indices=indices, axis=axis)
    return _reduce_by(reduction)(ctx, x, updates, indices=indices, axis=axis, reduce=_REDUCES[reduction])


@moves(0, 1)
def _scatter(ctx: Ctx, x: Tensor, updates: Tensor, *, indices: Tensor, axis: int) -> Tensor:
    axis = norm_axis(axis, x.dim())
    return torch.scatter(x, axis, _from_front(indices, x.shape[axis]), updates)


def _scatter_reduce(ctx: Ctx, x: Tensor, updates: Tensor, *, indices: Tensor, axis: int, reduce: str) -> Tensor:
    axis = norm_axis(axis, x.dim())
    return torch.scatter_reduce(x, axis, _from_front(indices, x.shape[axis]), updates, reduce)


_scatter_modular = wraps(0, 1)(_scatter_reduce)
_scatter_ordered = orders(0, 1)(_scatter_reduce)


def _reduce_by(reduction: str) -> Any:
    if reduction not in _REDUCES:
        raise ModelError(f"a scatter has reduction {reduction!r}", because="ONNX knows none, add, mul, max and min")
    return _scatter_modular if reduction in ("add", "mul") else _scatter_ordered


@onnx_op("ScatterND")
def scatter_nd(ctx: Ctx, x: Value, indices: Tensor, updates: Value, *, reduction: str = "none") -> Value:
    if reduction == "none":
        return _put(ctx, x, updates, indices=indices)
    if not isinstance(x, Tensor) or not isinstance(updates, Tensor):
        raise ModelError(f"ScatterND cannot {reduction} elements of type {x.dtype}")
    # one index into the axes that are named, laid flat, leaves an ordinary scatter along axis 0
    k = indices.shape[-1]
    flat: Any = torch.zeros_like(indices[..., 0], dtype=torch.int64)
    for d, part in enumerate(torch.unbind(indices, -1)):
        flat = flat * x.shape[d] + _from_front(part, x.shape[d])
    inner = x.shape[k:]
    rows = x.reshape(-1, *inner)
    sources = updates.reshape(-1, *inner)
    at = flat.reshape(-1, *[1] * len(inner)).expand(sources.shape)
    y = _reduce_by(reduction)(ctx, rows, sources, indices=at, axis=0, reduce=_REDUCES[reduction])
    return y.reshape(x.shape)


@moves(0, 1)
def _put(ctx: Ctx, x: Tensor, updates: Tensor, *, indices: Tensor) -> Tensor:
    return torch.index_put(x, torch.unbind(indices.to(torch.int64), -1), updates)


@onnx_op("OneHot")
def one_hot(ctx: Ctx, indices: Tensor, depth: Tensor, values: Value, *, axis: int = -1) -> Value:
    n = ctx.ints(depth)[0]
    n = int(n) if isinstance(n, float) else n
    at = norm_axis(axis, indices.dim() + 1)
    positions = torch.arange(n, device=indices.device)
    positions = positions.reshape([-1 if i == at else 1 for i in range(indices.dim() + 1)])
    hot = positions == _from_front(indices, n).unsqueeze(at)
    return _choose(ctx, values, hot=hot)


@moves(0)
def _choose(ctx: Ctx, values: Tensor, *, hot: Tensor) -> Tensor:
    return torch.where(hot, values[1], values[0])
