"""Contractions: matrix products, Einsum and the determinant."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.frontends.onnx.elements import wraps
from hotfuse.frontends.onnx.registry import Ctx, onnx_op


@onnx_op("MatMul")
@wraps()
def matmul(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@onnx_op("Gemm", since=7)
@wraps()
def gemm(
    ctx: Ctx,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """A plain layer (B transposed, a bias row) stays one `linear`; the rest is `addmm`."""
    a = a.t() if transA else a
    if transB and alpha == 1.0 and a.is_floating_point() and (c is None or (beta == 1.0 and c.dim() == 1)):
        return F.linear(a, b, c)
    b = b.t() if transB else b
    if c is not None and a.is_floating_point():
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    y = torch.matmul(a, b)
    y = y if alpha == 1.0 else (y * alpha).to(a.dtype)
    if c is None:
        return y
    return y + (c if beta == 1.0 else (c * beta).to(a.dtype))


@onnx_op("Einsum")
@wraps()
def einsum(ctx: Ctx, *xs: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *xs)


@onnx_op("Det")
def det(ctx: Ctx, x: Tensor) -> Tensor:
    if x.dtype in (torch.float16, torch.bfloat16):
        return torch.linalg.det(x.float()).to(x.dtype)
    return torch.linalg.det(x)
