"""What torch's fused attention layers do with masks, written as a graph can hold it.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` (self-attention, `batch_first`, no gradients) run as one fused operator in
eager. It differs from the operators that a trace sees in three points: a query whose keys are all hidden gives NaN, not 0; a
layer's mask of numbers hides a key wherever the number is not 0; and the result is contiguous, where the operators leave batch and
sequence exchanged in memory. So these modules spell their attention out while they are traced:

    %w = softmax(%q @ %k.T + %hidden)                              NaN where a row is -inf throughout
    %y = %w @ %v

Which calls are fused is torch's own list of conditions, gradients included.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Mask = torch.Tensor | None


def with_eagers_masks(modules: Iterable[nn.Module]) -> None:
    """Have the attention layers of a model that is about to be traced do what they do in eager; they are nobody else's."""
    for module in modules:
        for kind, instead in ((nn.TransformerEncoderLayer, _layer), (nn.MultiheadAttention, _attention)):
            if isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in vars(module):
                module.__dict__["forward"] = functools.partial(instead, module)


def _layer(
    layer: nn.TransformerEncoderLayer, src: torch.Tensor, src_mask: Mask = None, src_key_padding_mask: Mask = None,
    is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """As torch's own `forward`; `layer` is left as it is."""
    forward = nn.TransformerEncoderLayer.forward
    if not _layer_is_fused(layer, src):
        return forward(layer, src, src_mask, src_key_padding_mask, is_causal)
    if src_mask is None and src_key_padding_mask is None:
        return forward(layer, src, is_causal=is_causal).contiguous()
    spelled_out, attention = copy.copy(layer), copy.copy(layer.self_attn)
    attention.__dict__["forward"] = functools.partial(_spelled_out, layer.self_attn)
    spelled_out.__dict__["_modules"] = {**layer._modules, "self_attn": attention}  # pyright: ignore[reportPrivateUsage]
    masks = _hiding(layer.self_attn, src, src_mask, src_key_padding_mask)
    return forward(spelled_out, src, *masks, False).contiguous()  # noqa: FBT003  (the fused operator reads the mask, whatever is said of it)


def _attention(
    attention: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    key_padding_mask: Mask = None, need_weights: bool = True, attn_mask: Mask = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """As torch's own `forward`; with its weights asked for, attention is spelled out in any case."""
    masks = [m for m in (key_padding_mask, attn_mask) if m is not None]
    fused = query is key and key is value and not any(map(torch.is_floating_point, masks)) and _attention_is_fused(attention, query)
    forward = _spelled_out if masks and fused and not need_weights else nn.MultiheadAttention.forward
    asked = (query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
    result, weights = forward(attention, *asked)
    return (result.contiguous() if fused else result), weights


def _spelled_out(
    attention: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    key_padding_mask: Mask = None, need_weights: bool = False, attn_mask: Mask = None, average_attn_weights: bool = False,
    is_causal: bool = False,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Scores, weights and products one by one."""
    asked = (attention, query, key, value, key_padding_mask, True, attn_mask, False, is_causal)
    return nn.MultiheadAttention.forward(*asked)[0], None


def _hiding(attention: nn.MultiheadAttention, src: torch.Tensor, mask: Mask, padding: Mask) -> tuple[Mask, Mask]:
    """A layer's masks such that they hide what its fused operator hides: where their sum is not 0."""
    given = [m for m in (mask, padding) if m is not None]
    if all(m.dtype == torch.bool for m in given):
        return mask, padding
    if len(given) == 1:
        (one,) = given
        hidden = one.masked_fill(one != 0, -math.inf)
        return (hidden, None) if padding is None else (None, hidden)
    one, other = (m if m.is_floating_point() else torch.zeros_like(m, dtype=src.dtype).masked_fill(m, -math.inf) for m in given)
    total, _ = attention.merge_masks(one, other, src)
    assert total is not None
    rows = total.shape[-1]
    return total.masked_fill(total != 0, -math.inf).reshape(-1, rows, rows), None


def _layer_is_fused(layer: nn.TransformerEncoderLayer, src: torch.Tensor) -> bool:
    inner: Any = layer
    bias: torch.Tensor | None = inner.self_attn.in_proj_bias
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())  # pyright: ignore[reportPrivateUsage]
    of = (layer.norm1, layer.norm2, layer.linear1, layer.linear2)
    return (
        not layer.training and not hooked and inner.activation_relu_or_gelu != 0 and layer.norm1.eps == layer.norm2.eps
        and bias is not None and _attention_is_fused(layer.self_attn, src) and not _differentiated(of)
    )  # fmt: skip


def _attention_is_fused(attention: nn.MultiheadAttention, query: torch.Tensor) -> bool:
    inner: Any = attention
    weight, bias = inner.in_proj_weight, inner.in_proj_bias
    if not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled() or query.dim() != 3:
        return False
    if attention.training or not attention.batch_first or attention.num_heads % 2 or not inner._qkv_same_embed_dim:
        return False
    if attention.bias_k is not None or attention.bias_v is not None or attention.add_zero_attn or bias is None:
        return False
    return query.dtype == weight.dtype == bias.dtype and not _differentiated((attention, attention.out_proj), query)


def _differentiated(modules: Iterable[nn.Module], *tensors: torch.Tensor) -> bool:
    used = (*tensors, *(p for m in modules for p in m.parameters(recurse=False)))
    return torch.is_grad_enabled() and any(t.requires_grad for t in used)
