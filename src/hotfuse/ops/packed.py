"""Attention over sequences that lie one behind the other, as an operator of torch: `hotfuse.packed_attention`.

    sequence i: rows offsets[i] to offsets[i + 1] of query [tokens, heads, width], the same rows of key and value

What a batch would be padded with is not there, so nobody reads or computes it. The operator runs in eager code sequence by
sequence through `scaled_dot_product_attention`; in a captured graph it is one node, and generated code makes one kernel of it
(`lower.cpu.attention.packed`). torch's `varlen_attn` says the same, but has no kernel for the CPU: see `ops.varlen`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.base.errors import InputError
from hotfuse.ops.own.operator import own_operator

NAME = "hotfuse.packed_attention"
_OFFSETS = (torch.int32, torch.int64)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, offsets_k: Tensor | None = None, *,
    causal: bool = False, scale: float | None = None, window: tuple[int, int] = (-1, -1), bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ · scale + bias) v of each packed sequence by itself.

    `query` is [tokens, heads, width], `key` [tokens, kv heads, width], `value` [tokens, kv heads, value width]; the result is
    [tokens, heads, value width]. Where there are fewer heads of keys and values, each serves as many query heads one behind the
    other. `offsets` (int32 or int64, one more than there are sequences) ascend; sequence i has the rows `offsets[i]` to
    `offsets[i + 1]`, and rows of no sequence are 0 in the result. `offsets_k` are those of keys and values, where they differ.

    `scale` is 1 / sqrt(width) unless given. A query sees its own place among the keys (the last query stands at the last key),
    `window[0]` keys before and `window[1]` after it, -1 being all; `causal` is a window that ends at the place itself. A query that
    sees no key is 0. `bias` is [tokens, heads, keys]: what is added to the scores of a query and the keys of its sequence, counted
    from the sequence's first; it has as many as the longest sequence, or more. For inference: there is no gradient.
    """
    left, right = window
    if causal:
        if right > 0:
            raise InputError(f"packed_attention is causal, and its window reaches {right} keys ahead", hint="window=(left, 0)")
        right = 0
    return torch.ops.hotfuse.packed_attention(query, key, value, offsets, offsets_k, scale, left, right, bias)


@own_operator("hotfuse::packed_attention", __name__)
def _packed_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, offsets_k: Tensor | None = None,
    scale: float | None = None, left: int = -1, right: int = -1, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _check(query, key, value, offsets, offsets_k, bias)
    rows = _ascending(offsets, query.shape[0], "query")
    rows_k = rows if offsets_k is None else _ascending(offsets_k, key.shape[0], "key")
    out = query.new_zeros((query.shape[0], query.shape[1], value.shape[2]))
    for (a, b), (c, d) in zip(pairwise(rows), pairwise(rows_k), strict=True):
        if a < b and c < d:
            if bias is not None and bias.shape[2] < d - c:
                raise InputError(f"packed_attention's bias is for {bias.shape[2]} keys, and a sequence has {d - c}",
                                 hint="as many as the longest sequence has")
            added = None if bias is None else bias[a:b, :, : d - c].transpose(0, 1)
            out[a:b] = _one(query[a:b], key[c:d], value[c:d], scale, left, right, added)
    return out


@_packed_attention.register_fake
def _like(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, offsets_k: Tensor | None = None,
    scale: float | None = None, left: int = -1, right: int = -1, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    _check(query, key, value, offsets, offsets_k, bias)
    return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))


def _check(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, offsets_k: Tensor | None, bias: Tensor | None
) -> None:
    """What sizes and types tell."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise InputError(f"packed_attention takes {name} as [tokens, heads, width], not {x.dim()} dims",
                             hint="tokens of all sequences behind each other, without a batch dim")
        if x.dtype != query.dtype or not x.is_floating_point():
            raise InputError(f"packed_attention's {name} is {x.dtype}, its query {query.dtype}",
                             hint="one floating-point type for all")
    for name, x in (("offsets", offsets), ("offsets_k", offsets_k)):
        if x is not None and (x.dim() != 1 or x.dtype not in _OFFSETS):
            raise InputError(f"packed_attention's {name} have {x.dim()} dims of {x.dtype}", hint="one dim of int32 or int64")
    heads, kv = query.shape[1], key.shape[1]
    if value.shape[1] != kv or query.shape[2] != key.shape[2] or (heads % kv if kv else heads):
        raise InputError(
            f"packed_attention's heads do not fit: queries {heads} of {query.shape[2]}, keys {kv} of {key.shape[2]}, values "
            f"{value.shape[1]}",
            hint="keys and values have the same heads, queries a multiple of them; keys are as wide as queries",
        )
    if key.shape[0] != value.shape[0]:
        raise InputError(f"packed_attention has {key.shape[0]} rows of keys and {value.shape[0]} of values",
                         hint="one row a token in both")
    if offsets_k is None and query.shape[0] != key.shape[0]:
        raise InputError(f"packed_attention has {query.shape[0]} rows of queries and {key.shape[0]} of keys", hint="pass offsets_k")
    if bias is not None and (bias.dim() != 3 or bias.shape[:2] != query.shape[:2] or bias.dtype != query.dtype):
        raise InputError(
            f"packed_attention's bias is {bias.dtype} of {tuple(bias.shape)}",
            hint=f"{query.dtype} of [{query.shape[0]} tokens, {heads} heads, keys]",
        )
    if offsets_k is not None and offsets.shape[0] != offsets_k.shape[0]:
        raise InputError(f"packed_attention has {offsets.shape[0]} offsets, and {offsets_k.shape[0]} of keys",
                         hint="one more than there are sequences, in both")


def _ascending(offsets: Tensor, tokens: int, name: str) -> list[int]:
    """Offsets as numbers; what reaches outside the tensor is said here."""
    found: list[int] = offsets.tolist()
    if not found or found[0] < 0 or found[-1] > tokens or any(b < a for a, b in pairwise(found)):
        shown = f"{found[:6]}...{found[-2:]}" if len(found) > 8 else str(found)
        raise InputError(
            f"the offsets of packed sequences do not ascend within the {tokens} rows of {name}", because=f"they are {shown}"
        )
    return found


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float | None, left: int, right: int, bias: Tensor | None = None) -> Tensor:
    """One sequence: [rows, heads, width]."""
    grouped = q.shape[1] != k.shape[1]
    plain = bias is None and left < 0 and (right < 0 or (right == 0 and q.shape[0] == k.shape[0]))
    window = None if plain or (left < 0 and right < 0) else within_window(q.shape[0], k.shape[0], left, right, q.device)
    mask = window
    if bias is not None:
        mask = bias if window is None else bias.masked_fill(~window, -torch.inf)
    y = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, is_causal=plain and right == 0, scale=scale,
        enable_gqa=grouped,
    )[0].transpose(0, 1)  # fmt: skip
    return y if window is None else y.masked_fill(~window.any(1)[:, None, None], 0.0)


def within_window(queries: int, keys: int, left: int, right: int, device: torch.device) -> Tensor:
    """Which keys [query, key] lie in a window around each query's place; the last query stands at the last key."""
    ahead = torch.arange(keys, device=device) - (torch.arange(queries, device=device)[:, None] + (keys - queries))
    inside = torch.ones(queries, keys, dtype=torch.bool, device=device)
    inside = inside if left < 0 else inside & (ahead >= -left)
    return inside if right < 0 else inside & (ahead <= right)
