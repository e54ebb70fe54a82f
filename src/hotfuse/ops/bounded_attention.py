"""Packed attention with a bound on every sequence's length: what packed rows on a device use (`specialize.packing`).

`hotfuse.packed_attention` looks at its offsets on the host, which a CUDA graph cannot. With a bound nobody has to: torch's flash
kernel takes offsets as they lie on the device, and where it has none for the operands (fp32, wide heads) rows are spread to the
bound and masked. Offsets are the caller's word: they ascend from 0 and end within the rows. Rows of no sequence are anything.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.ops.own.operator import own_operator

NAME = "hotfuse.bounded_packed_attention"
_FLASH = (torch.float16, torch.bfloat16)
_MAX_WIDTH = 256
_EVEN = 8
"""Widths that the flash kernel takes are multiples of it."""


@own_operator("hotfuse::bounded_packed_attention", __name__)
def _bounded(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, offsets_k: Tensor | None, scale: float | None, longest: int,
    causal: bool,
) -> Tensor:  # fmt: skip
    keys = offsets if offsets_k is None else offsets_k
    if query.is_cuda and flash_takes(query, key, value):
        queries = longest if offsets_k is None else min(longest, query.shape[0])
        op: Any = torch.ops.aten._flash_attention_forward
        begins = offsets.int()
        begins_k = begins if offsets_k is None else keys.int()
        return op(query, key, value, begins, begins_k, queries, longest, 0.0, causal, False, scale=scale)[0]
    return _spread(query, key, value, offsets, keys, scale, longest, causal=causal)


@_bounded.register_fake
def _like(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, offsets_k: Tensor | None, scale: float | None, longest: int,
    causal: bool,
) -> Tensor:  # fmt: skip
    return query.new_empty((query.shape[0], query.shape[1], value.shape[2]))


def flash_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch's flash kernel has these types and widths."""
    width = query.shape[2]
    same = query.dtype == key.dtype == value.dtype and query.dtype in _FLASH and value.shape[2] == width
    return same and width % _EVEN == 0 and width <= _MAX_WIDTH and all(x.stride(-1) == 1 for x in (query, key, value))


def _spread(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, offsets_k: Tensor, scale: float | None, longest: int, *, causal: bool
) -> Tensor:
    """Sequences of one length again, [sequences, heads, longest, width], their rest hidden."""
    rows = offsets.shape[0] - 1
    at_q, there_q = _places(offsets, min(longest, max(1, q.shape[0])), q.shape[0])
    at_k, there_k = _places(offsets_k, longest, k.shape[0])
    spread = [x[at].transpose(1, 2) for x, at in ((q, at_q), (k, at_k), (v, at_k))]
    seen = there_k[:, None, None, :]
    if causal:  # the last query stands at the last key
        ahead = (offsets_k[1:] - offsets_k[:-1]) - (offsets[1:] - offsets[:-1])
        rows_at, keys_at = (torch.arange(n, device=q.device) for n in (at_q.shape[1], longest))
        seen = seen & (keys_at <= rows_at[:, None] + ahead[:, None, None])[:, None]
    y = F.scaled_dot_product_attention(*spread, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    flat = y.transpose(1, 2).reshape(rows * at_q.shape[1], q.shape[1], v.shape[2])
    out = q.new_zeros((q.shape[0] + 1, q.shape[1], v.shape[2]))  # one row more, for what is no row
    return out.index_copy_(0, torch.where(there_q, at_q, q.shape[0]).reshape(-1), flat)[:-1]


def _places(offsets: Tensor, longest: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which row each place of each sequence is, and whether it is one."""
    at = offsets[:-1, None] + torch.arange(longest, device=offsets.device)
    return at.clamp(max=max(0, rows - 1)), at < offsets[1:, None]
