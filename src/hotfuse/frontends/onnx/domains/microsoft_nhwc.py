"""com.microsoft operators on images with channels last: what ONNX Runtime saves of a quantized file that it optimized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hotfuse.frontends.onnx.ops.pool import max_pool
from hotfuse.frontends.onnx.ops.quant import prepare_qlinear_conv, qlinear_conv
from hotfuse.frontends.onnx.registry import Ctx, Prepared, onnx_op
from hotfuse.frontends.onnx.values import Value

_MS = "com.microsoft"


def _prepare(ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """A layer of bytes reads images in any order; filters lie as ONNX's do."""
    others = {k: v for k, v in attrs.items() if k != "channels_last"}
    made = prepare_qlinear_conv(ctx, inputs, others)
    if made is None or not attrs.get("channels_last"):
        return made
    run = made.call
    return replace(made, call=lambda x, *rest: run(x.movedim(-1, 1), *rest).movedim(1, -1))


@onnx_op("QLinearConv", domain=_MS, prepare=_prepare)
def qlinear_conv_in_order(ctx: Ctx, x: Tensor, *rest: Any, channels_last: int = 0, **attrs: Any) -> Value:
    """ONNX's, of images whose channels may come last."""
    if not channels_last:
        return qlinear_conv(ctx, x, *rest, **attrs)
    return qlinear_conv(ctx, x.movedim(-1, 1), *rest, **attrs).movedim(1, -1)


@onnx_op("NhwcMaxPool", domain=_MS)
def nhwc_max_pool(ctx: Ctx, x: Tensor, **attrs: Any) -> Tensor:
    """The maxima of windows of an image whose channels come last."""
    return max_pool(ctx, x.movedim(-1, 1), **attrs).movedim(1, -1)
