"""Comparisons, boolean logic and selection."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotfuse.frontends.onnx.elements import Value, moves, orders
from hotfuse.frontends.onnx.registry import Ctx, onnx_op


@onnx_op("And", since=7)
def logical_and(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.logical_and(a, b)


@onnx_op("Or", since=7)
def logical_or(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.logical_or(a, b)


@onnx_op("Xor", since=7)
def logical_xor(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.logical_xor(a, b)


@onnx_op("Not")
def logical_not(ctx: Ctx, x: Tensor) -> Tensor:
    return torch.logical_not(x)


@onnx_op("Equal", since=7)
def equal(ctx: Ctx, a: Value, b: Value) -> Tensor:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.eq(a, b)
    return torch.from_numpy(np.asarray(a == b, dtype=np.bool_))


@onnx_op("Less", since=7)
@orders()
def less(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.lt(a, b)


@onnx_op("LessOrEqual")
@orders()
def less_or_equal(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.le(a, b)


@onnx_op("Greater", since=7)
@orders()
def greater(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.gt(a, b)


@onnx_op("GreaterOrEqual")
@orders()
def greater_or_equal(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.ge(a, b)


@onnx_op("Where")
@moves(1, 2)
def where(ctx: Ctx, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)
