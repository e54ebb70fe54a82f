"""What an op gives for operands that are one number each: the number that all elements of its result are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hotfuse.ir.graph import Arg, Kind, Node, Value
from hotfuse.ir.types import TensorType
from hotfuse.ops.table import Access, is_mutating, is_random, lookup, packet, resolve
from hotfuse.ops.torch_args import to_torch
from hotfuse.ops.torch_dtypes import torch_dtype

SPREAD = frozenset(f"aten.{n}" for n in (
    "unsqueeze", "expand", "view", "reshape", "_unsafe_view", "slice", "select", "permute", "transpose", "t", "squeeze", "alias",
    "clone", "contiguous", "expand_as", "repeat", "flatten", "broadcast_to", "detach",
))  # fmt: skip
"""Ops that give elements of their first operand."""


def number_of(v: Value, number: Any) -> torch.Tensor:
    """A number as an element of a value."""
    assert isinstance(v.type, TensorType)
    return torch.full((), number, dtype=torch_dtype(v.type.dtype))


def evaluated(node: Node, known: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What all elements of a node's result are, where its operands tell."""
    if node.kind is not Kind.OPERATOR or len(node.outs) != 1 or is_random(node.op) or is_mutating(node.op):
        return None
    out = node.outs[0]
    tensors = [v for v in node.ins if isinstance(v.type, TensorType)]
    if not isinstance(out.type, TensorType) or not tensors or any(v.name not in known for v in tensors):
        return None
    if packet(node.op) in SPREAD:
        return known[tensors[0].name]
    if lookup(node.op).access is not Access.POINTWISE or len(tensors) != len(node.ins):
        return None
    run = resolve(node.op)
    value: dict[str, Any] = {v.name: known[v.name] for v in tensors}
    try:
        made = run(*[_filled(a, value) for a in node.args], **{k: _filled(a, value) for k, a in node.attrs})
    except (RuntimeError, TypeError, ValueError):  # an op of which one number says nothing: it stays
        return None
    if not isinstance(made, torch.Tensor) or made.dtype is not torch_dtype(out.type.dtype) or made.numel() != 1:
        return None
    return made.reshape(()).cpu()  # an op may say on which device its result is to be


def _filled(arg: Arg, value: Mapping[str, Any]) -> Any:
    if isinstance(arg, Value):
        return value[arg.name]
    return [_filled(a, value) for a in arg] if isinstance(arg, tuple) else to_torch(arg)
