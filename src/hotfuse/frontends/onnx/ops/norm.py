"""Normalizations, each as torch's own whole operator where the two definitions meet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.frontends.onnx.registry import Ctx, Prepared, onnx_op


def _batch_norm(x: Tensor, scale: Tensor, b: Tensor, mean: Tensor | None, var: Tensor | None, eps: float) -> Tensor:
    """Without statistics they are taken from the batch. Mixed element types meet in the parameters' type."""
    wide = x.dtype
    for t in (scale, b, mean, var):
        if t is not None and t.dtype is not wide:  # asking torch would leave a node in the graph
            wide = torch.promote_types(wide, t.dtype)
    args = [None if t is None else t.to(wide) for t in (mean, var, scale, b)]
    data = x.to(wide).unsqueeze(1) if x.dim() == 1 else x.to(wide)
    y = torch.batch_norm(data, args[2], args[3], args[0], args[1], mean is None, 0.0, eps, False)
    return (y.squeeze(1) if x.dim() == 1 else y).to(x.dtype)


def _batch_stats(x: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Per-channel mean and population variance, summed in at least float32."""
    dims = [d for d in range(x.dim()) if d != 1] if x.dim() > 1 else [0]
    work = x.to(torch.promote_types(torch.float32, wide))
    var, mean = torch.var_mean(work, dims, correction=0)
    return mean.to(wide).reshape(-1), var.to(wide).reshape(-1)


@onnx_op("BatchNormalization", since=7)
def batch_norm_7(
    ctx: Ctx,
    x: Tensor,
    scale: Tensor,
    b: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
) -> Any:
    """More than one output means training; `spatial=0` (version 7 only) means statistics per activation."""
    if not spatial:
        flat = batch_norm_7(
            ctx, x.flatten(1), *(t.flatten() for t in (scale, b, mean, var)), epsilon=epsilon, momentum=momentum
        )
        if not isinstance(flat, tuple):
            return flat.reshape(x.shape)
        return (flat[0].reshape(x.shape), *(t.reshape(mean.shape) for t in flat[1:]))
    if ctx.n_outputs == 1:
        return _batch_norm(x, scale, b, mean, var, epsilon)
    saved_mean, saved_var = _batch_stats(x, mean.dtype)
    return (
        _batch_norm(x, scale, b, None, None, epsilon),
        mean * momentum + saved_mean * (1 - momentum),
        var * momentum + saved_var * (1 - momentum),
        saved_mean,
        saved_var,
    )


@onnx_op("BatchNormalization", since=14)
def batch_norm_14(
    ctx: Ctx,
    x: Tensor,
    scale: Tensor,
    b: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Any:
    if not training_mode:
        return _batch_norm(x, scale, b, mean, var, epsilon)
    now_mean, now_var = _batch_stats(x, mean.dtype)
    return (
        _batch_norm(x, scale, b, None, None, epsilon),
        mean * momentum + now_mean * (1 - momentum),
        var * momentum + now_var * (1 - momentum),
    )


def _prepare_instance_norm(ctx: Ctx, _inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared:
    """As a group norm of one channel a group where the interpreter runs it: the library's instance norm copies scale and bias for
    every image and goes through a batch norm, which takes 5 to 8 times as long.
    """

    def call(x: Tensor, scale: Tensor, b: Tensor) -> Tensor:
        if not x.numel():  # the library's wants an image
            return torch.empty_like(x)
        plain = x.device.type == "cpu" and all(t.dtype is torch.float32 for t in (x, scale, b))
        if not plain or scale.shape != x.shape[1:2] or b.shape != scale.shape:
            return instance_norm(ctx, x, scale, b, **attrs)
        return torch.group_norm(x, x.shape[1], scale, b, float(attrs.get("epsilon", 1e-5)))

    return Prepared(call, 0)


@onnx_op("InstanceNormalization", prepare=_prepare_instance_norm)
def instance_norm(ctx: Ctx, x: Tensor, scale: Tensor, b: Tensor, *, epsilon: float = 1e-5, **_: Any) -> Tensor:
    """Called on the ATen operator: the functional form refuses a single spatial element."""
    return torch.instance_norm(x, scale, b, None, None, True, 0.0, epsilon, False)


def layer_norm_of(x: Tensor, scale: Tensor | None, b: Tensor | None, axis: int, eps: float) -> Tensor:
    """`layer_norm` whole when scale and bias have the normalized shape; broadcast afterwards when not."""
    shape = x.shape[axis:]
    same = all(t is None or tuple(t.shape) == tuple(shape) for t in (scale, b))
    if same and all(t is None or t.dtype == x.dtype for t in (scale, b)):
        return F.layer_norm(x, shape, scale, b, eps)
    y = F.layer_norm(x, shape, None, None, eps)
    if scale is not None:
        y = y * scale
    return y if b is None else y + b


@onnx_op("LayerNormalization")
def layer_norm(
    ctx: Ctx,
    x: Tensor,
    scale: Tensor,
    b: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Any:
    """The optional mean and inverse deviation keep reduced dims and are float32 unless stashed as double."""
    axis = axis % x.dim()
    y = layer_norm_of(x, scale, b, axis, epsilon)
    if ctx.n_outputs == 1:
        return y
    work = x.to(torch.float64 if stash_type == 11 else torch.float32)
    var, mean = torch.var_mean(work, list(range(axis, x.dim())), correction=0, keepdim=True)
    return y, mean, torch.rsqrt(var + epsilon)


def rms_norm_of(x: Tensor, scale: Tensor, axis: int, eps: float) -> Tensor:
    """`rms_norm` whole when the scale has the normalized shape; broadcast afterwards when not."""
    shape = list(x.shape[axis:])
    if list(scale.shape) == shape and scale.dtype == x.dtype:
        return F.rms_norm(x, shape, scale, eps)
    return F.rms_norm(x, shape, None, eps) * scale


@onnx_op("RMSNormalization")
def rms_norm(
    ctx: Ctx, x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return rms_norm_of(x, scale, axis % x.dim(), epsilon)


@onnx_op("GroupNormalization", since=18)
def group_norm_18(
    ctx: Ctx, x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5
) -> Tensor:
    """Version 18 had one scale per group, not per channel."""
    per = x.shape[1] // num_groups
    wide = [t.unsqueeze(1).expand(num_groups, per).reshape(-1) for t in (scale, bias)]
    return torch.group_norm(x, num_groups, wide[0], wide[1], epsilon, False)


@onnx_op("GroupNormalization", since=21)
def group_norm_21(
    ctx: Ctx, x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return torch.group_norm(x, num_groups, scale, bias, epsilon, False)


@onnx_op("LpNormalization")
def lp_norm(ctx: Ctx, x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """A zero vector stays zero."""
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return x / torch.where(norm == 0, torch.ones_like(norm), norm)


@onnx_op("MeanVarianceNormalization", since=9)
def mean_variance_norm(ctx: Ctx, x: Tensor, *, axes: list[int] | None = None) -> Tensor:
    var, mean = torch.var_mean(x, axes if axes is not None else [0, 2, 3], correction=0, keepdim=True)
    return (x - mean) / (torch.sqrt(var) + 1e-9)


@onnx_op("LRN")
def lrn(ctx: Ctx, x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    """The window reaches further right than left when `size` is even (torch's reaches further left)."""
    pads = [0, 0] * (x.dim() - 2) + [(size - 1) // 2, math.ceil((size - 1) / 2)]
    windows = F.pad(x * x, pads).unfold(1, size, 1)
    return x / (bias + windows.sum(-1) * (alpha / size)) ** beta
