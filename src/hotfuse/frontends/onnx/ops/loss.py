"""Losses and the optimizers of ai.onnx.preview.training: what exported training graphs hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.registry import Ctx, onnx_op

_TRAINING = "ai.onnx.preview.training"
# a label no class has, for torch's operators when ONNX ignores none
_NONE = -(2**31)


@onnx_op("NegativeLogLikelihoodLoss")
def nll_loss(
    ctx: Ctx,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    skip = _NONE if ignore_index is None else ignore_index
    return F.nll_loss(x, target.long(), weight, ignore_index=skip, reduction=reduction)


@onnx_op("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(
    ctx: Ctx,
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Any:
    """The optional second output holds the log probabilities."""
    skip = _NONE if ignore_index is None else ignore_index
    if ctx.n_outputs == 1:
        return F.cross_entropy(scores, labels.long(), weights, ignore_index=skip, reduction=reduction)
    log_prob = torch.log_softmax(scores, 1)
    return F.nll_loss(log_prob, labels.long(), weights, ignore_index=skip, reduction=reduction), log_prob


def _groups(tensors: tuple[Tensor, ...], n: int) -> list[tuple[Tensor, ...]]:
    """The variadic inputs are n lists of equal length, one after another."""
    if len(tensors) % n:
        raise ModelError(f"an optimizer has {len(tensors)} tensors", because=f"it takes them in groups of {n}")
    each = len(tensors) // n
    return [tensors[i * each : (i + 1) * each] for i in range(n)]


@onnx_op("Adagrad", domain=_TRAINING)
def adagrad(
    ctx: Ctx,
    rate: Tensor,
    count: Tensor,
    *tensors: Tensor,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> tuple[Tensor, ...]:
    xs, gs, hs = _groups(tensors, 3)
    r = rate / (1 + count * decay_factor)
    out: list[tuple[Tensor, Tensor]] = []
    for x, g, h in zip(xs, gs, hs, strict=True):
        pull = norm_coefficient * x + g
        squares = h + pull * pull
        out.append((x - r * pull / (torch.sqrt(squares) + epsilon), squares))
    return (*(o[0] for o in out), *(o[1] for o in out))


@onnx_op("Adam", domain=_TRAINING)
def adam(
    ctx: Ctx,
    rate: Tensor,
    count: Tensor,
    *tensors: Tensor,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Tensor, ...]:
    """The rate is corrected for the moments' start at zero, except at the very first step."""
    xs, gs, vs, hs = _groups(tensors, 4)
    t = count.to(rate.dtype)
    warm = rate * torch.sqrt(1 - beta**t) / torch.where(count > 0, 1 - alpha**t, torch.ones_like(t))
    r = torch.where(count > 0, warm, rate)
    out: list[tuple[Tensor, Tensor, Tensor]] = []
    for x, g, v, h in zip(xs, gs, vs, hs, strict=True):
        pull = norm_coefficient * x + g
        first = alpha * v + (1 - alpha) * pull
        second = beta * h + (1 - beta) * pull * pull
        out.append(((1 - norm_coefficient_post) * (x - r * first / (torch.sqrt(second) + epsilon)), first, second))
    return tuple(o[i] for i in range(3) for o in out)


@onnx_op("Momentum", domain=_TRAINING)
def momentum(
    ctx: Ctx,
    rate: Tensor,
    count: Tensor,
    *tensors: Tensor,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
) -> tuple[Tensor, ...]:
    xs, gs, vs = _groups(tensors, 3)
    fresh = torch.where(count > 0, torch.full_like(rate, beta), torch.ones_like(rate))
    out: list[tuple[Tensor, Tensor]] = []
    for x, g, v in zip(xs, gs, vs, strict=True):
        pull = norm_coefficient * x + g
        speed = alpha * v + fresh * pull
        out.append((x - rate * (pull + alpha * speed if mode == "nesterov" else speed), speed))
    return tuple(o[i] for i in range(2) for o in out)
