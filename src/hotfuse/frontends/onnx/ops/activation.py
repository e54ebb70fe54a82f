"""Activations, the softmax family and dropout: pointwise meanings and normalizations over one axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.frontends.onnx.registry import Ctx, DataDependent, onnx_op
from hotfuse.ops.own import unbounded_gelu


@onnx_op("Relu")
def relu(ctx: Ctx, x: Tensor, **_: Any) -> Tensor:
    return torch.relu(x)


@onnx_op("LeakyRelu")
def leaky_relu(ctx: Ctx, x: Tensor, *, alpha: float = 0.01, **_: Any) -> Tensor:
    return F.leaky_relu(x, alpha)


@onnx_op("PRelu")
def prelu(ctx: Ctx, x: Tensor, slope: Tensor, **_: Any) -> Tensor:
    """From version 7 the slope broadcasts; before, a vector meant one number per channel."""
    if ctx.opset < 7 and slope.dim() == 1 and x.dim() > 2:
        slope = slope.reshape([-1] + [1] * (x.dim() - 2))
    return torch.where(x < 0, slope * x, x)


@onnx_op("Elu")
def elu(ctx: Ctx, x: Tensor, *, alpha: float = 1.0, **_: Any) -> Tensor:
    return F.elu(x, alpha)


@onnx_op("Selu")
def selu(
    ctx: Ctx, x: Tensor, *, alpha: float = 1.6732631921768188, gamma: float = 1.0507010221481323, **_: Any
) -> Tensor:
    if abs(alpha - 1.6732631921768188) < 1e-6 and abs(gamma - 1.0507010221481323) < 1e-6:
        return F.selu(x)
    return F.elu(x, alpha) * gamma


@onnx_op("Celu")
def celu(ctx: Ctx, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.celu(x, alpha)


@onnx_op("HardSigmoid")
def hard_sigmoid(ctx: Ctx, x: Tensor, *, alpha: float = 0.2, beta: float = 0.5, **_: Any) -> Tensor:
    return torch.clamp(x * alpha + beta, 0, 1)


@onnx_op("HardSwish")
def hard_swish(ctx: Ctx, x: Tensor) -> Tensor:
    return F.hardswish(x)


@onnx_op("Sigmoid")
def sigmoid(ctx: Ctx, x: Tensor, **_: Any) -> Tensor:
    return torch.sigmoid(x)


@onnx_op("Tanh")
def tanh(ctx: Ctx, x: Tensor, **_: Any) -> Tensor:
    return torch.tanh(x)


@onnx_op("Softplus")
def softplus(ctx: Ctx, x: Tensor) -> Tensor:
    """The linear branch only where it is exact in every dtype."""
    return F.softplus(x, threshold=40.0)


@onnx_op("Softsign")
def softsign(ctx: Ctx, x: Tensor) -> Tensor:
    return F.softsign(x)


@onnx_op("ThresholdedRelu")
def thresholded_relu(ctx: Ctx, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, 0.0)  # what is no number exceeds nothing; F.threshold would hand it on


@onnx_op("Mish")
def mish(ctx: Ctx, x: Tensor) -> Tensor:
    return F.mish(x)


@onnx_op("Gelu")
def gelu(ctx: Ctx, x: Tensor, *, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate) if ctx.traced else unbounded_gelu.gelu(x, approximate=approximate)


@onnx_op("Swish")
def swish(ctx: Ctx, x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(x * alpha)


@onnx_op("SwiGLU")
def swiglu(ctx: Ctx, gate: Tensor, value: Tensor, *, alpha: float = 1.0) -> Tensor:
    return swish(ctx, gate, alpha=alpha) * value


@onnx_op("Shrink")
def shrink(ctx: Ctx, x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    outside = torch.where(x < -lambd, (x + bias).to(x.dtype), (x - bias).to(x.dtype))
    return torch.where((x < -lambd) | (x > lambd), outside, torch.zeros_like(x))


def _over_trailing(x: Tensor, axis: int, fn: Any) -> Tensor:
    """Before version 13 the axes from `axis` on were one: coerced to 2-d, `fn` over the last."""
    if axis in (-1, x.dim() - 1):
        return fn(x, -1)
    return fn(x.flatten(axis), -1).reshape(x.shape)


def _hardmax_at(x: Tensor, axis: int) -> Tensor:
    if not x.shape[axis]:
        return torch.zeros_like(x)
    at = x.argmax(axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, at, torch.ones_like(at, dtype=x.dtype))


@onnx_op("Softmax", since=1)
def softmax_1(ctx: Ctx, x: Tensor, *, axis: int = 1) -> Tensor:
    return _over_trailing(x, axis, torch.softmax)


@onnx_op("Softmax", since=13)
def softmax_13(ctx: Ctx, x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


@onnx_op("LogSoftmax", since=1)
def log_softmax_1(ctx: Ctx, x: Tensor, *, axis: int = 1) -> Tensor:
    return _over_trailing(x, axis, torch.log_softmax)


@onnx_op("LogSoftmax", since=13)
def log_softmax_13(ctx: Ctx, x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


@onnx_op("Hardmax", since=1)
def hardmax_1(ctx: Ctx, x: Tensor, *, axis: int = 1) -> Tensor:
    return _over_trailing(x, axis, _hardmax_at)


@onnx_op("Hardmax", since=13)
def hardmax_13(ctx: Ctx, x: Tensor, *, axis: int = -1) -> Tensor:
    return _hardmax_at(x, axis)


@onnx_op("Dropout", since=1)
def dropout_1(ctx: Ctx, x: Tensor, *, ratio: float = 0.5, **_: Any) -> Any:
    """Inference only: the data itself. Until version 10 the mask had the data's type."""
    if ctx.n_outputs == 1:
        return x
    return x, torch.ones_like(x) if ctx.opset < 10 else torch.ones_like(x, dtype=torch.bool)


def _seeded_keep(x: Tensor, ratio: float, seed: int) -> Tensor:
    """The keep mask a seed stands for, as ONNX's reference draws it: fixed numbers, so fixed sizes."""
    sizes: tuple[Any, ...] = tuple(x.shape)
    if not all(isinstance(n, int) for n in sizes):
        raise DataDependent("seeded dropout over symbolic sizes")
    return torch.from_numpy(np.asarray(np.random.RandomState(seed).uniform(0, 1.0, sizes) >= ratio))


@onnx_op("Dropout", since=12)
def dropout_12(
    ctx: Ctx, x: Tensor, ratio: Tensor | None = None, training_mode: Tensor | None = None, *, seed: int | None = None
) -> Any:
    """Random only in training mode; the same seed gives the same mask, no seed a fresh one each run."""
    training = training_mode is not None and bool(ctx.ints(training_mode)[0])
    p = (0.5 if ratio is None else float(ctx.ints(ratio)[0])) if training else 0.0
    if p == 0.0:
        return x if ctx.n_outputs == 1 else (x, torch.ones_like(x, dtype=torch.bool))
    keep = torch.rand_like(x, dtype=torch.float32) >= p if seed is None else _seeded_keep(x, p, seed)
    return (x * keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0)).to(x.dtype), keep
