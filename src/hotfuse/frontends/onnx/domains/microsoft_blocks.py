"""com.microsoft operators whose weights or tables are numbers of few bits, in blocks that each have a scale and a zero point."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx import constant_products
from hotfuse.frontends.onnx.int8.layers import WIDENED_BYTES
from hotfuse.frontends.onnx.registry import Ctx, Prepared, Varies, onnx_op
from hotfuse.ops.folded_conv import is_floats
from hotfuse.ops.own.nibbles import MAX_ROWS, WORD, nibble_mm, packed

_MS = "com.microsoft"


def _unpacked(x: Tensor, bits: int) -> Tensor:
    """Numbers of `bits` bits from bytes along the last axis, the lowest bits first."""
    if bits == 8:
        return x
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)
    return ((x.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)


def _prepare_blocks(_ctx: Ctx, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Prepared | None:
    """Constant weights are expanded once: doing it in every call takes some forty times as long as the product of one row."""
    given: list[Any] = [*inputs[1:], None, None]
    b, scales, zero_points, g_idx = given[:4]
    if any(isinstance(t, Varies) for t in (b, scales, zero_points, g_idx)):
        return None
    if attrs["N"] * attrs["K"] * scales.element_size() > WIDENED_BYTES:
        return None
    sizes = (attrs["K"], attrs["N"], attrs["block_size"], attrs.get("bits", 4), attrs.get("weight_prepacked", 0))
    dense = _dense(b, scales, zero_points, g_idx, scales.dtype, *sizes).contiguous()

    def call(a: Tensor, *rest: Any) -> Tensor:
        return F.linear(a, dense.to(a.dtype), rest[4] if len(rest) > 4 else None)

    bias = inputs[5] if len(inputs) > 5 else None
    if is_floats(dense, 2) and (bias is None or is_floats(bias, 1)) and dense.numel() and constant_products.available():
        return Prepared(constant_products.ConstantProduct(dense, bias, call), dense.nbytes)
    return Prepared(call, dense.nbytes)


@onnx_op("MatMulNBits", domain=_MS, prepare=_prepare_blocks)
def matmul_nbits(
    ctx: Ctx,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> Tensor:
    """Weights in blocks along K, each with a scale and a zero point, expanded before the product; once where they are constants.

    A graph's products of few rows take four bits as they are.
    """
    rows: Any = math.prod(a.shape[:-1])
    if ctx.traced and isinstance(rows, int) and 0 < rows <= MAX_ROWS and g_idx is None and not weight_prepacked:
        few = _few_rows(a.reshape(rows, -1), b, scales, zero_points, K, N, block_size, bits)
        if few is not None:
            y = few.reshape(*a.shape[:-1], N)
            return y if bias is None else y + bias
    return F.linear(a, _dense(b, scales, zero_points, g_idx, a.dtype, K, N, block_size, bits, weight_prepacked), bias)


def _few_rows(
    rows: Tensor, b: Tensor, scales: Tensor, zero_points: Tensor | None, K: int, N: int, block_size: int, bits: int
) -> Tensor | None:
    """The product of few rows with weights of four bits that stay so; None where they are of another kind."""
    whole = zero_points is None or zero_points.dtype == torch.uint8
    floats = rows.dtype == scales.dtype == torch.float32
    if bits != 4 or not whole or not floats or block_size % WORD or not N or not K:
        return None
    blocks = -(-K // block_size)
    zeros = None if zero_points is None else _unpacked(zero_points.reshape(N, -1), bits)[:, :blocks]
    panels, scale, zero = packed(b.reshape(N, blocks, block_size // 2), scales.reshape(N, blocks), zeros)
    beyond = blocks * block_size - K
    return nibble_mm(F.pad(rows, [0, beyond]) if beyond else rows, panels, scale, zero, N)


def _dense(
    b: Tensor, scales: Tensor, zero_points: Tensor | None, g_idx: Tensor | None, dtype: torch.dtype,
    K: int, N: int, block_size: int, bits: int, weight_prepacked: int,
) -> Tensor:  # fmt: skip
    """Weights of blocks as numbers, (N, K)."""
    if weight_prepacked:
        raise ModelError("com.microsoft::MatMulNBits with prepacked weights", because="their layout is a device's own")
    blocks = -(-K // block_size)
    w = _unpacked(b.reshape(N, blocks, -1), bits).to(dtype)
    scale = scales.reshape(N, blocks, 1).to(dtype)
    if zero_points is None:
        zero: Any = float(2 ** (bits - 1))
    elif zero_points.dtype == torch.uint8:
        zero = _unpacked(zero_points.reshape(N, -1), bits)[:, :blocks].unsqueeze(2).to(dtype)
    else:
        zero = zero_points.reshape(N, blocks, 1).to(dtype)
    if g_idx is None:
        return ((w - zero) * scale).reshape(N, -1)[:, :K]
    at = g_idx.long()
    shift = zero if isinstance(zero, float) else zero[:, :, 0].index_select(1, at)
    return (w.reshape(N, -1)[:, :K] - shift) * scale[:, :, 0].index_select(1, at)


@onnx_op("GatherBlockQuantized", domain=_MS)
def gather_block_quantized(
    ctx: Ctx,
    data: Any,
    indices: Tensor,
    scales: Tensor,
    zero_points: Any = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Tensor:
    """Rows of a blockwise quantized table: taken first, expanded after. Bytes hold numbers packed along the last axis."""
    rank = scales.dim()
    axis, along = gather_axis % rank, quantize_axis % rank - rank
    if axis == along + rank:
        raise ModelError("com.microsoft::GatherBlockQuantized", because="it gathers along the quantized axis")

    def taken(t: Any) -> Tensor:
        packed = isinstance(t, Tensor) and t.dtype == torch.uint8
        tensor = t if isinstance(t, Tensor) else torch.from_numpy(t.astype(np.int32))
        rows = tensor[(slice(None),) * axis + (indices,)]
        return _unpacked(rows, bits) if packed else rows

    values, scale = taken(data), scales[(slice(None),) * axis + (indices,)]
    packed = isinstance(data, Tensor) and data.dtype == torch.uint8
    zero: Any = 2 ** (bits - 1) if packed else 0
    if zero_points is not None:
        zero = taken(zero_points).narrow(along, 0, scale.shape[along])
        zero = zero.repeat_interleave(block_size, along).narrow(along, 0, values.shape[along]).to(scale.dtype)
    wide = scale.repeat_interleave(block_size, along).narrow(along, 0, values.shape[along])
    return (values.to(scale.dtype) - zero) * wide
