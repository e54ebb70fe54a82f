"""Grouped queries over a cache whose lengths are at hand: each sequence attends to its own keys, and to nothing behind them.

A graph has to leave lengths open, so it picks every row of the cache and masks what lies behind a sequence's end. Where the
operator runs by itself, lengths are numbers: the past is copied once, and one query of a sequence is two products over its keys.
Decision 485 has figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hotfuse.frontends.onnx.ops.attention import repeat_heads, window_mask


def grown(past: Tensor | None, new: Tensor, before: Sequence[int], length: int) -> Tensor:
    """A cache of this length: each sequence's past up to its own end, its new rows, and zeros behind them."""
    steps = new.shape[2]
    if past is not None and all(b == past.shape[2] for b in before) and length == past.shape[2] + steps:
        return torch.cat([past, new], 2)
    made = new.new_empty(new.shape[0], new.shape[1], length, new.shape[3])
    olds = [None] * len(before) if past is None else past.unbind()
    for whole, old, fresh, at in zip(made.unbind(), olds, new.unbind(), before, strict=True):
        if at and old is not None:
            whole.narrow(1, 0, at).copy_(old.narrow(1, 0, at))
        whole.narrow(1, at, steps).copy_(fresh)
        if (behind := length - at - steps) > 0:
            whole.narrow(1, at + steps, behind).zero_()
    return made


def attend_by_sequence(
    q: Tensor, k: Tensor, v: Tensor, before: Sequence[int], *, scale: float, window: int, softcap: float
) -> Tensor:
    """The causal attention of new rows (batch, heads, steps, size) behind `before` others: (batch, steps, heads * size).

    `k` and `v` are grown caches (batch, groups, length, size); a window of 0 is no window.
    """
    batch, heads, steps, _ = q.shape
    y = q.new_empty(batch, steps, heads, v.shape[3])
    alike = len(set(before)) == 1 and before[0] + steps == k.shape[2] and not 0 < window < k.shape[2]
    for rows in (slice(0, batch),) if alike else [slice(b, b + 1) for b in range(batch)]:
        at = before[rows.start]
        first = max(0, at - window + 1) if window else 0
        keys, values = k[rows, :, first : at + steps], v[rows, :, first : at + steps]
        seen = _one_row if steps == 1 else _many_rows
        y[rows] = seen(q[rows], keys, values, at - first, scale, window, softcap).transpose(1, 2)
    return y.flatten(2)


def _one_row(q: Tensor, k: Tensor, v: Tensor, at: int, scale: float, window: int, softcap: float) -> Tensor:
    """A single query sees all keys there are; those of heads that share keys are the rows of one product."""
    batch, heads, _, size = q.shape
    groups = k.shape[1]
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    asked = q.reshape(batch * groups, heads // groups, size)
    scores = torch.bmm(asked, k.transpose(1, 2)).mul_(scale)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return torch.bmm(torch.softmax(scores, -1), v).view(batch, heads, 1, v.shape[-1])


def _many_rows(q: Tensor, k: Tensor, v: Tensor, at: int, scale: float, window: int, softcap: float) -> Tensor:
    times, steps, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = repeat_heads(k, times), repeat_heads(v, times)
    if not at and not 0 < window < keys and not softcap:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    seen = window_mask(steps, keys, at, causal=True, left=window - 1 if window else -1, right=-1, device=q.device)
    assert seen is not None
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
    return torch.matmul(torch.softmax(scores.masked_fill_(~seen, -math.inf), -1), v)
