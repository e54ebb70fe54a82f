"""Attention of a step of a generation, on a device: its keys are one more in every call, and a mask says which of them count.

    attention(q: [1, 12, 1, 64], k: [1, 12, n, 64], v: [1, 12, n, 64], mask: [1, 1, 1, n])

The library that torch prefers for masks there (cuDNN) makes a plan for every length that it has not met: 25 ms on an H200, for a
step that takes 3. Programs that bring no mask do not get there; a graph has one where the model's code looks at data first. Such a
step is a product of a vector, whose parts take microseconds for any length, so it is computed by those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotfuse.ir.graph import Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.ops.schema import argument

ATTENTION = "aten.scaled_dot_product_attention.default"
_by_parts: Any = torch.ops.aten._scaled_dot_product_attention_math.default


def is_step(node: Node) -> bool:
    """Whether a node is such an attention: its queries are a number, its keys are told by the call."""
    if node.op != ATTENTION or not isinstance(argument(node, "attn_mask"), Value):
        return False
    query, key = argument(node, "query"), argument(node, "key")
    if not (isinstance(query, Value) and isinstance(key, Value)):
        return False
    q, k = query.type, key.type
    if not (isinstance(q, TensorType) and isinstance(k, TensorType)) or q.device == "cpu" or min(len(q.shape), len(k.shape)) < 2:
        return False
    return isinstance(q.shape[-2], int) and not isinstance(k.shape[-2], int)


def step_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *more: float, scale: float | None = None,
    enable_gqa: bool = False, **named: float,
) -> Tensor:  # fmt: skip
    """As torch.nn.functional.scaled_dot_product_attention, by its parts; `more` and `named`: dropout, and if it is causal."""
    if attn_mask is not None and attn_mask.dtype is torch.bool:  # the parts add it to the scores
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    return _by_parts(query, key, value, attn_mask, *more, scale=scale, enable_gqa=enable_gqa, **named)[0]
