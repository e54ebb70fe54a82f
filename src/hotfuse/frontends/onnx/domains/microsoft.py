"""com.microsoft: the fused float operators that ONNX Runtime's optimizer and exporters write into models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.ops import activation as ops_activation
from hotfuse.frontends.onnx.ops import conv as ops_conv
from hotfuse.frontends.onnx.ops import image as ops_image
from hotfuse.frontends.onnx.ops import norm as ops_norm
from hotfuse.frontends.onnx.registry import Ctx, find, onnx_op

_MS = "com.microsoft"

# activation -> meaning with its parameters in order
_FUSED: dict[str, Callable[[Tensor, Sequence[float]], Tensor]] = {
    "Relu": lambda x, p: torch.relu(x),
    "Tanh": lambda x, p: torch.tanh(x),
    "Sigmoid": lambda x, p: torch.sigmoid(x),
    "LeakyRelu": lambda x, p: F.leaky_relu(x, p[0] if p else 0.01),
    "Clip": lambda x, p: torch.clamp(x, p[0], p[1]),
    "HardSigmoid": lambda x, p: torch.clamp(x * p[0] + p[1], 0, 1),
    "Elu": lambda x, p: F.elu(x, p[0] if p else 1.0),
    "Softplus": lambda x, p: F.softplus(x, threshold=40.0),
    "Softsign": lambda x, p: F.softsign(x),
    "ThresholdedRelu": lambda x, p: F.threshold(x, p[0] if p else 1.0, 0.0),
}


def _activate(x: Tensor, name: str, params: Sequence[float]) -> Tensor:
    if not name:
        return x
    if name not in _FUSED:
        raise ModelError(f"a fused operator's activation is {name!r}", because="it is not one ONNX Runtime fuses")
    return _FUSED[name](x, params)


# ---- products --------------------------------------------------------------------------------------------------------


def _arranged(x: Tensor, trans: int, trans_batch: int) -> Tensor:
    """`transBatch` brings the first axis behind the batch axes; `trans` then swaps the last two."""
    if trans_batch and x.dim() > 2:
        x = x.permute([*range(1, x.dim() - 1), 0, x.dim() - 1])
    return x.transpose(-1, -2) if trans and x.dim() > 1 else x


@onnx_op("FusedMatMul", "TransposeMatMul", domain=_MS)
def fused_matmul(
    ctx: Ctx,
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    y = torch.matmul(_arranged(a, transA, transBatchA), _arranged(b, transB, transBatchB))
    return y if alpha == 1.0 else y * alpha


@onnx_op("FusedGemm", domain=_MS)
def fused_gemm(
    ctx: Ctx,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    a = a.t() if transA else a
    y = F.linear(a, b if transB else b.t())
    y = y if alpha == 1.0 else y * alpha
    if c is not None:
        y = y + (c if beta == 1.0 else c * beta)
    params = [p for p in (activation_alpha, activation_beta, activation_gamma) if p is not None]
    return _activate(y, activation, params)


@onnx_op("FusedConv", domain=_MS)
def fused_conv(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] = (),
    **attrs: Any,
) -> Tensor:
    """A convolution, then a residual, then an activation."""
    y = ops_conv.conv(ctx, x, w, b, **attrs)
    return _activate(y if z is None else y + z, activation, activation_params)


@onnx_op("ConvTransposeWithDynamicPads", domain=_MS)
def conv_transpose_dynamic(
    ctx: Ctx, x: Tensor, w: Tensor, pads: Tensor | None = None, b: Tensor | None = None, **attrs: Any
) -> Tensor:
    given = None if pads is None else ctx.ints(pads)
    return ops_conv.conv_transpose(ctx, x, w, b, pads=given, **attrs)


# ---- norms -----------------------------------------------------------------------------------------------------------


@onnx_op("LayerNormalization", domain=_MS)
def layer_norm(ctx: Ctx, *args: Tensor | None, **attrs: Any) -> Any:
    return ops_norm.layer_norm(ctx, *args, **attrs)  # type: ignore[arg-type]


def _rms(ctx: Ctx, x: Tensor, scale: Tensor, axis: int, eps: float) -> tuple[Tensor, Tensor | None]:
    """The normalized values and, if asked for, the inverse root mean square in float32."""
    y = ops_norm.rms_norm_of(x, scale, axis, eps)
    if ctx.n_outputs == 1:
        return y, None
    work = x.float()
    return y, torch.rsqrt(work.square().mean(list(range(axis, x.dim())), keepdim=True) + eps)


@onnx_op("SimplifiedLayerNormalization")
@onnx_op("SimplifiedLayerNormalization", domain=_MS)
def simplified_layer_norm(
    ctx: Ctx, x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    y, inverse = _rms(ctx, x, scale, axis % x.dim(), epsilon)
    return y if inverse is None else (y, inverse)


@onnx_op("SkipLayerNormalization", domain=_MS)
def skip_layer_norm(
    ctx: Ctx,
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> Any:
    """Outputs: the norm, mean, inverse deviation, and the sum that was normalized."""
    total = x + skip if bias is None else x + skip + bias
    y = ops_norm.layer_norm_of(total, gamma, beta, total.dim() - 1, epsilon)
    if ctx.n_outputs == 1:
        return y
    var, mean = torch.var_mean(total.float(), -1, correction=0, keepdim=True)
    return y, mean, torch.rsqrt(var + epsilon), total


@onnx_op("SkipSimplifiedLayerNormalization", domain=_MS)
def skip_simplified_layer_norm(
    ctx: Ctx, x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None, *, epsilon: float = 1e-12
) -> Any:
    total = x + skip if bias is None else x + skip + bias
    y, inverse = _rms(ctx, total, gamma, total.dim() - 1, epsilon)
    return y if inverse is None else (y, torch.zeros_like(inverse), inverse, total)


@onnx_op("EmbedLayerNormalization", domain=_MS)
def embed_layer_norm(
    ctx: Ctx,
    input_ids: Tensor,
    segment_ids: Tensor | None,
    word: Tensor,
    position: Tensor,
    segment: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 1,
) -> tuple[Tensor, ...]:
    """Word, position and segment embeddings summed and normalized; the mask index counts each row's tokens."""
    total = F.embedding(input_ids, word)
    total = total + (position[: input_ids.shape[1]] if position_ids is None else F.embedding(position_ids, position))
    if segment is not None and segment_ids is not None:
        total = total + F.embedding(segment_ids, segment)
    y = ops_norm.layer_norm_of(total, gamma, beta, 2, epsilon)
    if mask is None or not mask_index_type:
        index = torch.zeros([input_ids.shape[0]], dtype=torch.int32, device=y.device)
    else:
        index = (mask != 0).sum(1, dtype=torch.int32)
    return y, index, total


# ---- activations -----------------------------------------------------------------------------------------------------


@onnx_op("Gelu", domain=_MS)
def gelu(ctx: Ctx, x: Tensor) -> Tensor:
    return ops_activation.gelu(ctx, x)


@onnx_op("BiasGelu", domain=_MS)
def bias_gelu(ctx: Ctx, x: Tensor, bias: Tensor) -> Tensor:
    return ops_activation.gelu(ctx, x + bias)


@onnx_op("FastGelu", domain=_MS)
def fast_gelu(ctx: Ctx, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@onnx_op("QuickGelu", domain=_MS)
def quick_gelu(ctx: Ctx, x: Tensor, *, alpha: float = 1.702) -> Tensor:
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(x * alpha)


# ---- older spellings of operators ONNX has by now --------------------------------------------------------------------


def _alias(name: str, like: str, opset: int) -> None:
    """The same function as an ONNX operator's at an opset version."""

    def call(ctx: Ctx, *args: Any, **attrs: Any) -> Any:
        row = find("", like, opset)
        if row is None:
            raise ModelError(f"com.microsoft::{name} stands for {like}", because=f"{like} has no row")
        return row.fn(ctx, *args, **attrs)

    onnx_op(name, domain=_MS)(call)


_alias("GatherND", "GatherND", 13)
_alias("Trilu", "Trilu", 14)
_alias("Pad", "Pad", 18)
_alias("Range", "Range", 11)


@onnx_op("Unique", domain=_MS)
def unique(ctx: Ctx, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values in order of first appearance, where each element went, and how often each occurs."""
    values, inverse, counts = torch.unique(x, sorted=True, return_inverse=True, return_counts=True)
    places = torch.arange(x.shape[0], device=x.device)
    inverse, counts = inverse.to(torch.int64), counts.to(torch.int64)  # as they are; torch 2.11's fake tensors say otherwise
    first = torch.full_like(counts, x.shape[0]).scatter_reduce(0, inverse, places, "amin")
    order = torch.argsort(first)
    rank = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
    return values[order], rank[inverse], counts[order]


@onnx_op("ExpandDims", domain=_MS)
def expand_dims(ctx: Ctx, x: Tensor, axis: Tensor) -> Tensor:
    return x.unsqueeze(ctx.ints(axis)[0])


@onnx_op("Inverse", domain=_MS)
def inverse(ctx: Ctx, x: Tensor) -> Tensor:
    work = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return torch.linalg.inv(work).to(x.dtype)


@onnx_op("CDist", domain=_MS)
def cdist(ctx: Ctx, a: Tensor, b: Tensor, *, metric: str = "sqeuclidean") -> Tensor:
    d = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    return d if metric == "euclidean" else d * d


@onnx_op("GridSample", domain=_MS)
def grid_sample(ctx: Ctx, x: Tensor, grid: Tensor, **attrs: Any) -> Tensor:
    return ops_image.grid_sample(ctx, x, grid, **attrs)


@onnx_op("CropAndResize", domain=_MS)
def crop_and_resize(
    ctx: Ctx,
    x: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    crop_size: Tensor,
    *,
    extrapolation_value: float = 0.0,
    mode: str = "bilinear",
) -> Tensor:
    """Boxes (y1, x1, y2, x2) in units of the image, sampled on a grid whose ends are the box's edges."""
    data = x.index_select(0, batch_indices.long())
    beyond: list[Tensor] = []
    for axis, (low, high), count in zip((2, 3), ((0, 2), (1, 3)), ctx.ints(crop_size), strict=True):
        size: Any = x.shape[axis]
        start, end = rois[:, low].unsqueeze(1), rois[:, high].unsqueeze(1)
        if count > 1:
            steps = torch.arange(count, dtype=x.dtype, device=x.device)
            at = start * (size - 1) + steps * ((end - start) * (size - 1) / (count - 1))
        else:
            at = 0.5 * (start + end) * (size - 1)
        beyond.append((at < 0) | (at > size - 1))
        shape = [-1, 1, count, 1] if axis == 2 else [-1, 1, 1, count]

        def take(
            place: Tensor, source: Tensor = data, axis: int = axis, shape: list[Any] = shape, n: Any = size
        ) -> Tensor:
            index = place.clamp(0, n - 1).long().reshape(shape)
            wide = list(source.shape)
            wide[axis] = shape[axis]
            return torch.gather(source, axis, index.expand(wide))

        if mode == "nearest":
            data = take(torch.round(at))
        else:
            low_at = torch.floor(at)
            part = (at - low_at).reshape(shape)
            data = take(low_at) * (1 - part) + take(low_at + 1) * part
    outside = beyond[0].unsqueeze(2) | beyond[1].unsqueeze(1)
    return data.masked_fill(outside.unsqueeze(1), extrapolation_value)
