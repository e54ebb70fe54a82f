"""Generators: tensors made from shapes, numbers and chance.

A seeded random operator draws from NumPy's generator of that seed, as ONNX's own reference does, and so gives the
same numbers on every call. Without a seed torch draws, anew on every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotfuse.frontends.onnx.elements import Value, torch_dtype
from hotfuse.frontends.onnx.registry import Ctx, DataDependent, onnx_op


@onnx_op("Shape")
def shape(ctx: Ctx, x: Value, *, start: int = 0, end: int | None = None) -> Tensor:
    sizes: Sequence[Any] = tuple(x.shape)
    return ctx.tensor(sizes[start:end])


@onnx_op("Size")
def size(ctx: Ctx, x: Value) -> Tensor:
    return ctx.tensor(math.prod(x.shape))


@onnx_op("ConstantOfShape")
def constant_of_shape(ctx: Ctx, shape: Tensor, *, value: Value | None = None) -> Value:
    sizes = ctx.ints(shape)
    if value is None:
        return torch.zeros(sizes, dtype=torch.float32)
    if isinstance(value, np.ndarray):
        return np.full(sizes, value.reshape(-1)[0], dtype=value.dtype)
    if value.dtype in (torch.float32, torch.int64, torch.int32, torch.bool):
        return torch.full(sizes, ctx.ints(value)[0], dtype=value.dtype)
    return value.reshape(()).expand(sizes)


@onnx_op("EyeLike")
def eye_like(ctx: Ctx, x: Tensor, *, dtype: int = 0, k: int = 0) -> Tensor:
    if x.dim() != 2:
        raise ValueError(f"EyeLike of a tensor of rank {x.dim()}")
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    columns = torch.arange(x.shape[1], device=x.device)
    return (columns - rows == k).to(torch_dtype(dtype) if dtype else x.dtype)


@onnx_op("Range")
def range_(ctx: Ctx, start: Tensor, limit: Tensor, delta: Tensor, *, stash_type: int = 1) -> Tensor:
    """Half precision counts in float32, where the steps add up exactly enough."""
    first, last, step = (ctx.ints(t)[0] for t in (start, limit, delta))
    half = start.dtype in (torch.float16, torch.bfloat16)
    empty = isinstance(first, (int, float)) and isinstance(last, (int, float)) and (last - first) * step <= 0
    y = torch.arange(
        first,
        first if empty else last,
        step,
        dtype=torch.float32 if half else start.dtype,
        device=start.device,
    )
    return y.to(start.dtype) if half else y


def _draw(
    sizes: Sequence[Any],
    seed: float | None,
    from_numpy: Callable[[np.random.RandomState, tuple[int, ...]], Any],
    from_torch: Callable[[list[Any]], Tensor],
) -> Tensor:
    """Random float64 numbers (torch's own draws may be narrower)."""
    if seed is None or math.isnan(seed):
        return from_torch(list(sizes))
    if not all(isinstance(n, int) for n in sizes):
        raise DataDependent("a seeded random operator needs its shape")
    return torch.from_numpy(np.asarray(from_numpy(np.random.RandomState(int(seed)), tuple(sizes)), dtype=np.float64))


def _uniform(sizes: Sequence[Any], seed: float | None, low: float, high: float) -> Tensor:
    return _draw(
        sizes,
        seed,
        lambda state, shape: low + state.rand(*shape) * (high - low),
        lambda shape: low + torch.rand(shape) * (high - low),
    )


def _normal(sizes: Sequence[Any], seed: float | None, mean: float, scale: float) -> Tensor:
    return _draw(
        sizes,
        seed,
        lambda state, shape: state.randn(*shape) * scale + mean,
        lambda shape: torch.randn(shape) * scale + mean,
    )


@onnx_op("RandomUniform")
def random_uniform(
    ctx: Ctx, *, shape: Sequence[int], dtype: int = 1, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Tensor:
    return _uniform(shape, seed, low, high).to(torch_dtype(dtype))


@onnx_op("RandomNormal")
def random_normal(
    ctx: Ctx, *, shape: Sequence[int], dtype: int = 1, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Tensor:
    return _normal(shape, seed, mean, scale).to(torch_dtype(dtype))


@onnx_op("RandomUniformLike")
def random_uniform_like(
    ctx: Ctx, x: Tensor, *, dtype: int = 0, low: float = 0.0, high: float = 1.0, seed: float | None = None
) -> Tensor:
    y = _uniform(tuple(x.shape), seed, low, high)
    return y.to(device=x.device, dtype=torch_dtype(dtype) if dtype else x.dtype)


@onnx_op("RandomNormalLike")
def random_normal_like(
    ctx: Ctx, x: Tensor, *, dtype: int = 0, mean: float = 0.0, scale: float = 1.0, seed: float | None = None
) -> Tensor:
    y = _normal(tuple(x.shape), seed, mean, scale)
    return y.to(device=x.device, dtype=torch_dtype(dtype) if dtype else x.dtype)


@onnx_op("Bernoulli")
def bernoulli(ctx: Ctx, x: Tensor, *, dtype: int = 0, seed: float | None = None) -> Tensor:
    drawn = _uniform(tuple(x.shape), seed, 0.0, 1.0).to(x.device)
    return (drawn < x).to(torch_dtype(dtype) if dtype else x.dtype)


@onnx_op("Multinomial")
def multinomial(ctx: Ctx, x: Tensor, *, dtype: int = 6, sample_size: int = 1, seed: float | None = None) -> Tensor:
    """Rows of log-probabilities that need not add up; a draw is the first class whose running sum passes it."""
    running = torch.softmax(x.to(torch.float64), -1).cumsum(-1)
    drawn = _uniform((x.shape[0], sample_size), seed, 0.0, 1.0).to(device=x.device, dtype=torch.float64)
    return torch.searchsorted(running, drawn, right=True).clamp(max=x.shape[1] - 1).to(torch_dtype(dtype))
