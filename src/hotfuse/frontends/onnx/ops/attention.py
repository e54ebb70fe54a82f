"""Attention and what models build around it: rotary positions, cache updates, linear attention."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.frontends.onnx.registry import Ctx, DataDependent, onnx_op

_PRECISION = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, time, heads * size) -> (batch, heads, time, size)."""
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(batch, heads, time, size) -> (batch, time, heads * size)."""
    return x.transpose(1, 2).flatten(2)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Each key/value head stands for `times` query heads in a row."""
    return x if times == 1 else x.repeat_interleave(times, 1)


def window_mask(
    q_len: Any, kv_len: Any, offset: Any, *, causal: bool, left: int, right: int, device: torch.device
) -> Tensor | None:
    """Which keys a query at `offset + row` may see; offset is a number, or (batch, 1, 1, 1) numbers."""
    if not causal and left < 0 and right < 0:
        return None
    at = torch.arange(q_len, device=device).unsqueeze(1) + offset
    keys = torch.arange(kv_len, device=device)
    seen: Tensor | None = None
    if causal:
        seen = keys <= at
    if left >= 0:
        near = keys >= at - left
        seen = near if seen is None else seen & near
    if right >= 0:
        near = keys <= at + right
        seen = near if seen is None else seen & near
    return seen


def _combine(mask: Tensor | None, seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """One mask: boolean if the given one is, else additive."""
    if mask is None or seen is None:
        return seen if mask is None else mask
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.to(dtype).masked_fill(~seen, -math.inf)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, precision: Any, mode: int
) -> tuple[Tensor, Tensor]:
    """Attention step by step, for what the whole operator cannot show or do."""
    root = math.sqrt(scale)
    scores = torch.matmul(q * root, (k * root).transpose(-1, -2))
    shown = scores
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    if mode == 1:
        shown = scores
    blind: Tensor | None = None
    if mask is not None:
        bias = _bias(mask, q.dtype)
        scores = scores + bias
        blind = torch.isneginf(bias.amax(-1, keepdim=True))
    if mode == 2:
        shown = scores
    probs = torch.softmax(scores if precision is None else scores.to(_PRECISION[precision]), -1)
    if blind is not None:
        probs = probs.masked_fill(blind, 0.0)
    probs = probs.to(q.dtype)
    return torch.matmul(probs, v), probs if mode == 3 else shown


@onnx_op("Attention")
def attention(
    ctx: Ctx,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
) -> Any:
    """`scaled_dot_product_attention` whole, unless a soft cap, the scores or another precision are asked for."""
    packed = q.dim() == 3
    if packed:
        if not q_num_heads or not kv_num_heads:
            raise ModelError("Attention over 3-d inputs", because="q_num_heads and kv_num_heads are not both given")
        q, k, v = split_heads(q, q_num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    offset: Any = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = (k, v)
    q_len, kv_len = q.shape[2], k.shape[2]
    valid: Tensor | None = None
    if nonpad_kv_seqlen is not None:
        lens = nonpad_kv_seqlen.reshape(-1, 1, 1, 1)
        valid = torch.arange(kv_len, device=q.device) < lens
        if past_key is None:
            offset = lens - q_len
    mask = attn_mask
    if mask is not None:
        # a mask may be shorter than the keys; only a fixed size can show that it is not
        gap: Any = kv_len - mask.shape[-1]
        if not (isinstance(gap, int) and gap == 0):
            mask = F.pad(mask, [0, gap], value=False if mask.dtype == torch.bool else -math.inf)
    square = bool(is_causal) and mask is None and valid is None and past_key is None
    causal_whole = square and left_window_size < 0 and right_window_size < 0
    whole = softcap == 0.0 and ctx.n_outputs < 4 and softmax_precision is None and q.dtype == v.dtype
    if not (whole and causal_whole):
        left, right = left_window_size, right_window_size
        seen = window_mask(q_len, kv_len, offset, causal=bool(is_causal), left=left, right=right, device=q.device)
        mask = _combine(_combine(mask, seen, q.dtype), valid, q.dtype)
        if mask is not None and mask.dim() < 4:
            mask = mask[(None,) * (4 - mask.dim())]
    if whole:
        grouped = bool(k.shape[1] != q.shape[1])
        y = F.scaled_dot_product_attention(
            q, k, v, None if causal_whole else mask, 0.0, causal_whole, scale=scale, enable_gqa=grouped
        )
        return (join_heads(y) if packed else y, *present)
    times = int(q.shape[1] // k.shape[1])
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    y, shown = _explicit(
        q,
        repeat_heads(k, times),
        repeat_heads(v, times),
        mask,
        factor,
        softcap,
        softmax_precision,
        qk_matmul_output_mode,
    )
    return (join_heads(y) if packed else y, *present, shown)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs of x's last axis: halves, or neighbours when interleaved."""
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([cos * a - sin * b, sin * a + cos * b], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([cos * a - sin * b, sin * a + cos * b], -1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, dim: int) -> Tensor:
    """x is (batch, heads, time, size), cos and sin (batch, time, dim / 2); only the first `dim` numbers turn."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if dim == 0:
        return rotate(x, cos, sin, interleaved=interleaved)
    return torch.cat([rotate(x[..., :dim], cos, sin, interleaved=interleaved), x[..., dim:]], -1)


@onnx_op("RotaryEmbedding")
def rotary_embedding(
    ctx: Ctx,
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    if position_ids is not None:
        cos_cache, sin_cache = F.embedding(position_ids, cos_cache), F.embedding(position_ids, sin_cache)
    if x.dim() == 4:
        return rotary(x, cos_cache, sin_cache, interleaved=bool(interleaved), dim=rotary_embedding_dim)
    heads = split_heads(x, num_heads)
    return join_heads(rotary(heads, cos_cache, sin_cache, interleaved=bool(interleaved), dim=rotary_embedding_dim))


@onnx_op("TensorScatter")
def tensor_scatter(
    ctx: Ctx, past: Tensor, update: Tensor, write_indices: Tensor | None = None, *, axis: int = -2, mode: str = "linear"
) -> Tensor:
    """Each sample's update lands at its own place along `axis`, wrapping around in circular mode."""
    axis = axis % past.dim()
    shape = [1] * past.dim()
    shape[axis] = -1
    at = torch.arange(update.shape[axis], device=past.device).reshape(shape)
    if write_indices is not None:
        at = at + write_indices.reshape([-1] + [1] * (past.dim() - 1))
    if mode == "circular":
        at = at % past.shape[axis]
    return past.scatter(axis, at.expand(update.shape), update)


@onnx_op("LinearAttention")
def linear_attention(
    ctx: Ctx,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    kv_num_heads: int,
    q_num_heads: int,
    chunk_size: int = 64,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Tensor, Tensor]:
    """A state per head that each token decays, corrects and adds to; accumulated in float32."""
    steps: Any = query.shape[1]
    if not isinstance(steps, int):
        raise DataDependent("linear attention over a symbolic number of steps")
    q, k, v = split_heads(query, q_num_heads).float(), split_heads(key, kv_num_heads), split_heads(value, kv_num_heads)
    k, v = k.float(), v.float()
    gate = None if decay is None else split_heads(decay, kv_num_heads).float().exp()
    rate = None if beta is None else split_heads(beta, beta.shape[2]).float()
    if past_state is None:
        state = q.new_zeros([q.shape[0], kv_num_heads, k.shape[3], v.shape[3]])
    else:
        state = past_state.float()
    factor = scale or 1.0 / math.sqrt(q.shape[3])
    out: list[Tensor] = []
    for t in range(steps):
        k_t, v_t = k[:, :, t], v[:, :, t]
        if gate is not None and "gated" in update_rule:
            state = state * gate[:, :, t].unsqueeze(3)
        if rate is not None and "delta" in update_rule:
            v_t = rate[:, :, t] * (v_t - torch.einsum("bhdm,bhd->bhm", state, k_t))
        state = state + k_t.unsqueeze(3) * v_t.unsqueeze(2)
        read = repeat_heads(state, q_num_heads // kv_num_heads)
        out.append(factor * torch.einsum("bhd,bhdm->bhm", q[:, :, t], read))
    y = join_heads(torch.stack(out, 2)).to(query.dtype)
    return y, state.to(query.dtype if past_state is None else past_state.dtype)
