"""com.microsoft attention: packed weights, separate projections, grouped queries with a cache, rotary positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import ModelError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.onnx.domains.cached_attention import attend_by_sequence, grown
from hotfuse.frontends.onnx.native_floats.native_grouped_queries import GroupedQueries, native_grouped_queries
from hotfuse.frontends.onnx.ops import attention as ops_attention
from hotfuse.frontends.onnx.ops.attention import join_heads, repeat_heads, split_heads, window_mask
from hotfuse.frontends.onnx.ops.quant import matmul_integer
from hotfuse.frontends.onnx.registry import Ctx, onnx_op

_MS = "com.microsoft"
_WHOLE_FLOATS = (torch.float32, torch.float64)


def _mask_bias(mask: Tensor, q_len: Any, kv_len: Any, value: float, dtype: torch.dtype) -> Tensor:
    """Flags per key, or per query and key, as numbers to add to the scores."""
    keep = mask != 0
    while keep.dim() < 4:
        keep = keep.unsqueeze(1)
    if mask.dim() == 4:
        # (batch, 1, longest, longest): the rows and columns of this step
        keep = keep[:, :, kv_len - q_len : kv_len, :kv_len]
    return torch.zeros_like(keep, dtype=dtype).masked_fill(~keep, value)


def _key_mask(mask: Tensor, batch: Any, kv_len: Any) -> Tensor:
    """A 1-d mask as one flag per key: per batch a count of keys, or the ends and then the starts of the valid ones."""
    if mask.dim() != 1:
        return mask
    keys = torch.arange(kv_len, device=mask.device)
    keep = keys < mask[:batch].unsqueeze(1)
    if mask.shape[0] == 2 * batch:
        keep = keep & (keys >= mask[batch:].unsqueeze(1))
    return keep


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, past: Any, scale: float | None, value: float
) -> Tensor:
    """Whole attention; a causal mask that starts after a past is written out. One query sees everything before it."""
    causal = causal and not (_same(q.shape[2], 1) and _same(k.shape[2] - past, 1))
    if causal and bias is None and isinstance(past, int) and past == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if causal:
        seen = window_mask(q.shape[2], k.shape[2], past, causal=True, left=-1, right=-1, device=q.device)
        assert seen is not None
        ahead = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, value)
        bias = ahead if bias is None else bias + ahead
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale)


def _self_attention(
    ctx: Ctx,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past: Tensor | None,
    attention_bias: Tensor | None,
    unidirectional: int,
    scale: float | None,
    filter_value: float,
) -> Any:
    """From projected heads to the joined output; the cache is keys and values stacked."""
    before: Any = 0
    present: Tensor | None = None
    if past is not None:
        before = past.shape[3]
        present = torch.cat([past, torch.stack([k, v])], 3)
        k, v = present[0], present[1]
    bias = attention_bias
    if mask is not None:
        keys = _key_mask(mask, q.shape[0], k.shape[2])
        extra = _mask_bias(keys, q.shape[2], k.shape[2], filter_value, q.dtype)
        bias = extra if bias is None else bias + extra
    y = join_heads(_attend(q, k, v, bias, causal=bool(unidirectional), past=before, scale=scale or None, value=filter_value))
    if ctx.n_outputs == 1:
        return y
    return y, torch.stack([k, v]) if present is None else present


@onnx_op("Attention", domain=_MS)
def attention(
    ctx: Ctx,
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask_index: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Sequence[int] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> Any:
    """One product makes queries, keys and values."""
    if do_rotary or past_present_share_buffer:
        raise ModelError(
            "com.microsoft::Attention with rotary positions or a shared cache buffer",
            because="their layouts belong to one GPU kernel",
            hint="export without do_rotary and past_present_share_buffer",
        )
    qkv = F.linear(x, weights.t(), bias)
    third = weights.shape[1] // 3
    q, k, v = torch.split(qkv, list(qkv_hidden_sizes) if qkv_hidden_sizes else [third] * 3, -1)
    q, k, v = (split_heads(t, num_heads) for t in (q, k, v))
    return _self_attention(ctx, q, k, v, mask_index, past, attention_bias, unidirectional, scale, mask_filter_value)


@onnx_op("QAttention", domain=_MS)
def qattention(
    ctx: Ctx,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    input_scale: Tensor,
    weight_scale: Tensor,
    mask_index: Tensor | None = None,
    input_zero_point: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    past: Tensor | None = None,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: int = 0,
    do_rotary: int = 0,
    past_present_share_buffer: int = 0,
) -> Any:
    """The projection in 8 bits, the rest in float."""
    if do_rotary or past_present_share_buffer:
        raise ModelError(
            "com.microsoft::QAttention with an option that is not supported",
            because="it rotates its heads, or its cache has room behind what is valid",
            hint="export without these options",
        )
    product = matmul_integer(ctx, x, weight, input_zero_point, weight_zero_point)
    qkv = product.float() * (input_scale * weight_scale) + bias
    q, k, v = (split_heads(t, num_heads) for t in qkv.chunk(3, -1))
    return _self_attention(ctx, q, k, v, mask_index, past, None, unidirectional, scale, mask_filter_value)


@onnx_op("MultiHeadAttention", domain=_MS)
def multi_head_attention(
    ctx: Ctx,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *_: Any,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> Any:
    """Projected inputs; keys and values of a cross attention may come already split into heads."""
    if key is None or value is None:
        raise ModelError("com.microsoft::MultiHeadAttention with packed inputs", because="it has no CPU definition")
    parts: list[Tensor | None] = [None, None, None]
    if bias is not None:
        wide = query.shape[2]
        v_wide = bias.shape[0] - 2 * wide
        parts = list(torch.split(bias, [wide, wide, v_wide]))

    def heads(x: Tensor, b: Tensor | None) -> Tensor:
        if x.dim() == 4:
            return x
        return split_heads(x if b is None else x + b, num_heads)

    q, k, v = heads(query, parts[0]), heads(key, parts[1]), heads(value, parts[2])
    before: Any = 0
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    extra = attention_bias
    if key_padding_mask is not None:
        keys = _key_mask(key_padding_mask, q.shape[0], k.shape[2])
        added = _mask_bias(keys, q.shape[2], k.shape[2], mask_filter_value, q.dtype)
        extra = added if extra is None else extra + added
    y = join_heads(_attend(q, k, v, extra, causal=bool(unidirectional), past=before, scale=scale or None, value=mask_filter_value))
    return y if ctx.n_outputs == 1 else (y, k, v)


@onnx_op("RotaryEmbedding", domain=_MS)
def rotary_embedding(
    ctx: Ctx,
    x: Tensor,
    position_ids: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """A single position is the first of consecutive ones."""
    packed = x.dim() == 3
    if packed:
        size = x.shape[2] // num_heads if num_heads else cos_cache.shape[1] * 2
        data = x.reshape(x.shape[0], x.shape[1], -1, size).transpose(1, 2)
    else:
        data = x
    at = position_ids
    if at.dim() == 1:
        at = (at + torch.arange(data.shape[2], device=x.device)).unsqueeze(0).expand(data.shape[0], -1)
    cos, sin = F.embedding(at, cos_cache), F.embedding(at, sin_cache)
    y = ops_attention.rotary(data, cos, sin, interleaved=bool(interleaved), dim=rotary_embedding_dim)
    return join_heads(y) if packed else y


@dataclass(frozen=True, slots=True)
class _CachePlaces:
    """Where the keys and values of a step stand in a cache: behind each sequence's own past."""

    length: Any
    """Of what the step gives."""
    steps: Any
    before: Tensor | None
    """Keys of each sequence before the step; None where there are none in any."""

    def joined(self, cache: Tensor | None, new: Tensor) -> Tensor:
        """The past with the new rows behind it, and zeros behind those. Every row is picked, not written to where data say: that
        fuses with what computes the new ones, and reads and writes the cache once.
        """
        if self.before is None or cache is None:
            return new if _same(self.length, self.steps) else F.pad(new, [0, 0, 0, self.length - self.steps])
        place = torch.arange(self.length, device=new.device).reshape(1, 1, -1, 1) - self.before.reshape(-1, 1, 1, 1)
        grown: Any = self.length - cache.shape[2]
        past = cache if _same(grown, 0) else F.pad(cache, [0, 0, 0, grown])
        taken = new
        if not _same(self.steps, 1):
            shape = [new.shape[0], new.shape[1], self.length, new.shape[3]]
            taken = new.gather(2, place.clamp(min=0).clamp(max=self.steps - 1).expand(shape))
        behind = torch.where(place < self.steps, taken, 0.0)
        return torch.where(place < 0, past, behind)


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal, without asking a guard."""
    return isinstance(a, int) and isinstance(b, int) and a == b


def _cache_places(lens: Tensor, steps: Any, total: Any, past: Any) -> _CachePlaces:
    """Caches grow by the step, or have room already; the first prompt has no past, whatever its padded length says."""
    if bool(total == past + steps):
        length = past + steps
    elif bool(total <= past):
        length = past
    else:
        raise ModelError(
            "com.microsoft::GroupQueryAttention over a cache of another length",
            because=f"total_sequence_length is {total}, the past {past} long and the step {steps}",
            hint="it is the past and the step together, or at most the past where that has room for both",
        )
    if bool(steps == total):
        return _CachePlaces(length, steps, None)
    keys = torch.arange(length, device=lens.device)
    last = keys.index_select(0, lens - 1)  # what is told has to be in the cache, which the operator checks in every tier
    return _CachePlaces(length, steps, keys.index_select(0, last - (steps - 1)))


@onnx_op("GroupQueryAttention", domain=_MS)
def group_query_attention(
    ctx: Ctx,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos_cache: Tensor | None = None,
    sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_bias: Tensor | None = None,
    *unsupported: Tensor | None,
    kv_num_heads: int,
    num_heads: int,
    causal: int = 1,
    do_rotary: int = 0,
    local_window_size: int = -1,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    smooth_softmax: int = -1,
    softcap: float = 0.0,
    **other: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention over a cache; `seqlens_k` holds each sequence's last valid key position."""
    refused = any(t is not None for t in unsupported) or smooth_softmax > 0 or other.get("kv_cache_bit_width")
    if refused or other.get("qk_output") or other.get("sliding_window_cache") or not causal:
        raise ModelError(
            "com.microsoft::GroupQueryAttention with an option that is not supported",
            because="it has head sinks, query or key norms, a quantized or ring cache, or shows its scores",
            hint="export without these options",
        )
    # while a graph is made, lengths are no numbers, or stand for others; a bias is as wide as the whole cache
    at_hand = type(query) is Tensor and query.is_cpu and query.dtype in _WHOLE_FLOATS and attention_bias is None
    if at_hand and position_ids is None:
        window = max(0, local_window_size)
        node = GroupedQueries(num_heads, kv_num_heads, bool(do_rotary), bool(rotary_interleaved), window, scale, softcap)
        caches = (past_key, past_value, seqlens_k, total_sequence_length, cos_cache, sin_cache)
        if (made := native_grouped_queries(node, query, key, value, *caches)) is not None:
            return made
    if key is None or value is None:
        size = query.shape[2] // (num_heads + 2 * kv_num_heads)
        q, k, v = torch.split(query, [num_heads * size, kv_num_heads * size, kv_num_heads * size], -1)
    else:
        q, k, v = query, key, value
    q, k, v = split_heads(q, num_heads), split_heads(k, kv_num_heads), split_heads(v, kv_num_heads)
    steps, total = q.shape[2], ctx.ints(total_sequence_length)[0]
    lens = seqlens_k.reshape(-1).long() + 1
    places = _cache_places(lens, steps, total, 0 if past_key is None else past_key.shape[2])
    before = torch.zeros_like(lens) if places.before is None else places.before
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise ModelError(
                "com.microsoft::GroupQueryAttention rotates", because="cos_cache or sin_cache is not given"
            )
        at = torch.arange(steps, device=q.device) + before.unsqueeze(1) if position_ids is None else position_ids
        cos, sin = F.embedding(at, cos_cache), F.embedding(at, sin_cache)
        dim = cos_cache.shape[1] * 2
        dim = 0 if bool(dim == q.shape[3]) else dim
        turned = ops_attention.rotary(torch.cat([q, k], 1), cos, sin, interleaved=bool(rotary_interleaved), dim=dim)
        q, k = turned[:, :num_heads], turned[:, num_heads:]
    length = places.length
    if at_hand and q.numel():
        starts: list[int] = before.tolist()
        past = (None, None) if places.before is None else (past_key, past_value)
        k, v = (grown(cache, new, starts, length) for cache, new in zip(past, (k, v), strict=True))
        y = attend_by_sequence(
            q, k, v, starts, scale=scale or 1.0 / math.sqrt(q.shape[3]), window=max(0, local_window_size), softcap=softcap
        )
        return y, k, v
    k, v = places.joined(past_key, k), places.joined(past_value, v)
    left = local_window_size - 1 if local_window_size > 0 else -1
    offset: Any = 0 if places.before is None else places.before.reshape(-1, 1, 1, 1)
    if places.before is None and left < 0 and attention_bias is None and not softcap and _same(length, steps):
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale or None, enable_gqa=num_heads != kv_num_heads
        )
        return join_heads(y), k, v
    seen = window_mask(steps, length, offset, causal=True, left=left, right=-1, device=q.device)
    assert seen is not None
    if attention_bias is not None:
        gap: Any = length - attention_bias.shape[-1]
        mask = F.pad(attention_bias, [0, gap]).masked_fill(~seen, -math.inf)
    else:
        mask = seen
    if softcap:
        times = num_heads // kv_num_heads
        factor = scale or 1.0 / math.sqrt(q.shape[3])
        scores = torch.matmul(q * factor, repeat_heads(k, times).transpose(-1, -2))
        scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        y = torch.matmul(torch.softmax(scores, -1), repeat_heads(v, times))
    else:
        grouped = num_heads != kv_num_heads
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale or None, enable_gqa=grouped)
    return join_heads(y), k, v
