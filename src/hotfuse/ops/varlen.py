"""torch's `varlen_attn` in terms of packed attention: torch has kernels for it on GPUs only.

A graph that calls it on CPU tensors has `hotfuse.packed_attention` in its place, so that everything below the front end knows one
operator. Arguments go by name: torch 2.10 has fewer than 2.13. Paged keys (`block_table`) and `seqused_k` stay what they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hotfuse.base.errors import InputError
from hotfuse.ops.packed import within_window
from hotfuse.ops.schema import argument_names

OP = "torch_attn._varlen_attn.default"
_ELSEWHERE = ("seqused_k", "block_table")


def as_packed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """A call's arguments as those of `hotfuse.packed_attention`; None where they ask for more than that."""
    named = dict(zip(argument_names(OP), args, strict=False)) | dict(kwargs)
    if any(named.get(n) is not None for n in _ELSEWHERE) or named.get("cu_seq_k") is None:
        return None
    left, right = named.get("window_size") or (-1, -1)
    scale = named.get("scale")
    if not (isinstance(left, int) and isinstance(right, int) and (scale is None or isinstance(scale, int | float))):
        return None
    q, k, v, offsets, offsets_k = (named[n] for n in ("query", "key", "value", "cu_seq_q", "cu_seq_k"))
    return q, k, v, offsets, offsets_k, scale, left, 0 if named.get("is_causal") else right


def varlen_on_cpu() -> None:
    """Let `torch.nn.attention.varlen.varlen_attn` run on CPU tensors in this process: torch has no kernel for them.

    A model that `hotfuse.jit` serves runs its own code at first, so one that calls `varlen_attn` on the CPU needs this (or
    `hotfuse.packed_attention` instead, which does not). Importing Hotfuse does not do it, as other code in the process would see
    it. Paged keys and `seqused_k` stay refused.
    """
    _registered()


@functools.cache
def _registered() -> None:
    from torch.nn.attention import varlen

    op: Any = getattr(varlen, "_varlen_attn")  # noqa: B009

    @op.register_kernel("cpu")
    def _on_cpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        packed = as_packed(args, kwargs)
        if packed is None:
            raise InputError("varlen_attn with paged keys or seqused_k has no form for the CPU")
        out = torch.ops.hotfuse.packed_attention(*packed)
        return out, _lse(*packed), torch.zeros(2, dtype=torch.uint64)

    del _on_cpu


def _lse(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, offsets_k: Tensor, scale: float | None, left: int, right: int
) -> Tensor:
    """The logarithm of each query's sum of exponentials, [heads, queries]."""
    del v
    found = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32)
    shared = q.shape[1] // max(k.shape[1], 1)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    for (a, b), (c, d) in zip(pairwise(offsets.tolist()), pairwise(offsets_k.tolist()), strict=True):
        if a < b and c < d:
            keys = k[c:d].float().repeat_interleave(shared, 1)
            scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * factor
            hidden = ~within_window(b - a, d - c, left, right, q.device)
            found[:, a:b] = torch.logsumexp(scores.masked_fill(hidden, -torch.inf), -1)
    return found
