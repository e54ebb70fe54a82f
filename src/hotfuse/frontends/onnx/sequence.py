"""Sequence and optional operators. A sequence is a list that is never changed in place; an empty optional is None."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hotfuse.frontends.onnx.model_file import PortType
from hotfuse.frontends.onnx.registry import Ctx, onnx_op

Sequence_ = list[Any]


@onnx_op("SequenceConstruct", since=11)
def sequence_construct(ctx: Ctx, *items: Any) -> Sequence_:
    return list(items)


@onnx_op("SequenceEmpty", since=11)
def sequence_empty(ctx: Ctx, *, dtype: int = 1) -> Sequence_:
    return []


@onnx_op("SequenceAt", since=11)
def sequence_at(ctx: Ctx, seq: Sequence_, position: torch.Tensor) -> Any:
    return seq[_index(ctx, position, len(seq), "SequenceAt")]


@onnx_op("SequenceInsert", since=11)
def sequence_insert(ctx: Ctx, seq: Sequence_, item: Any, position: torch.Tensor | None = None) -> Sequence_:
    at = len(seq) if position is None else _index(ctx, position, len(seq) + 1, "SequenceInsert", len(seq))
    return [*seq[:at], item, *seq[at:]]


@onnx_op("SequenceErase", since=11)
def sequence_erase(ctx: Ctx, seq: Sequence_, position: torch.Tensor | None = None) -> Sequence_:
    at = len(seq) - 1 if position is None else _index(ctx, position, len(seq), "SequenceErase")
    if not seq:
        raise IndexError("SequenceErase of an empty sequence")
    return [*seq[:at], *seq[at + 1 :]]


@onnx_op("SequenceLength", since=11)
def sequence_length(ctx: Ctx, seq: Sequence_) -> torch.Tensor:
    return ctx.tensor(len(seq))


def _index(ctx: Ctx, position: torch.Tensor, limit: int, op: str, wrap: int | None = None) -> int:
    at = int(ctx.ints(position)[0])
    at = at + (limit if wrap is None else wrap) if at < 0 else at
    if not 0 <= at < limit:
        raise IndexError(f"{op} at a position outside of the sequence")
    return at


@onnx_op("SplitToSequence", since=11)
def split_to_sequence(
    ctx: Ctx, x: torch.Tensor, split: torch.Tensor | None = None, *, axis: int = 0, keepdims: int = 1
) -> Sequence_:
    size = x.shape[axis]
    if split is None:
        parts = torch.split(x, 1, axis) if size else ()  # of nothing the library makes one part
        return list(parts) if keepdims else [p.squeeze(axis) for p in parts]
    sizes = ctx.ints(split)
    if split.dim() == 0:
        whole, rest = divmod(size, sizes[0])
        sizes = [sizes[0]] * whole + ([rest] if rest else [])
    return list(torch.split(x, sizes, axis))


@onnx_op("ConcatFromSequence", since=11)
def concat_from_sequence(ctx: Ctx, seq: Sequence_, *, axis: int, new_axis: int = 0) -> Any:
    if seq and isinstance(seq[0], np.ndarray):
        return np.stack(seq, axis) if new_axis else np.concatenate(seq, axis)
    return torch.stack(seq, axis) if new_axis else torch.cat(seq, axis)


@onnx_op("Optional", since=15)
def optional(ctx: Ctx, value: Any = None, *, type: PortType | None = None) -> Any:
    return value


@onnx_op("OptionalHasElement", since=15)
def optional_has_element(ctx: Ctx, value: Any = None) -> torch.Tensor:
    return torch.tensor(value is not None)


@onnx_op("OptionalGetElement", since=15)
def optional_get_element(ctx: Ctx, value: Any) -> Any:
    if value is None:
        raise ValueError("OptionalGetElement of an empty optional")
    return value


@onnx_op("Identity", since=1)
def identity(ctx: Ctx, value: Any) -> Any:
    return value
