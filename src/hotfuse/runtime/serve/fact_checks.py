"""Facts of a call checked in Python: the meaning that native guards are tested against, and what serves until they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hotfuse.analysis.call_facts import (
    Aligned,
    AllEqual,
    Dense,
    Fact,
    Facts,
    Holds,
    Outer,
    Plain,
    Ranked,
    Sized,
    Typed,
    lies_outside,
    size_holds,
)
from hotfuse.analysis.decision import Ask, DecisionDag, Hit
from hotfuse.ir.types import DType
from hotfuse.ops.torch_dtypes import torch_dtype

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain(value: Any, device: str = "cpu") -> bool:
    """Whether native code may read an object as a tensor of the device."""
    if type(value) is not torch.Tensor and type(value) is not nn.Parameter:
        return False
    try:
        return (
            value.layout is torch.strided
            and str(value.device) == device
            and not value.is_neg()
            and not value.is_conj()
            and not value.is_quantized
            and not value.is_nested
            and (value.data_ptr() != 0 or value.numel() == 0)
        )
    except RuntimeError:  # a wrapper without memory of its own
        return False


def _dense(t: torch.Tensor, order: tuple[int, ...] | None) -> bool:
    return t.is_contiguous() if order is None else t.permute(order).is_contiguous()


def _all_equal(t: torch.Tensor, fact: AllEqual) -> bool:
    if fact.dtype is DType.BOOL:
        return bool((t.view(torch.uint8) != 0).eq(bool(fact.value)).all())
    bits = _INT[t.element_size()]
    return bool((t.view(bits) == torch.tensor(fact.value, dtype=t.dtype).view(bits)).all())


def holds(fact: Fact, leaves: Sequence[Any]) -> bool:
    """Whether a fact holds of a call; those that must be asked before it must hold."""
    match fact:
        case Plain(i, device):
            return plain(leaves[i], device)
        case Typed(i, dtype):
            return leaves[i].dtype is torch_dtype(dtype)
        case Ranked(i, rank):
            return leaves[i].dim() == rank
        case Dense(i, _, order, yes):
            return _dense(leaves[i], order) is yes
        case Outer(i):
            return lies_outside(fact, leaves[i].shape, leaves[i].stride())
        case Aligned(i, count):
            return leaves[i].data_ptr() % count == 0
        case Sized() | Holds():
            return size_holds(fact, lambda i, d: int(leaves[i].shape[d]))
        case AllEqual(i):
            return _all_equal(leaves[i], fact)


def failed(facts: Facts, leaves: Sequence[Any]) -> Fact | None:
    """The first fact that does not hold; None if all do."""
    return next((f for f in facts if not holds(f, leaves)), None)


def python_select(decision: DecisionDag) -> Callable[..., int]:
    """What `native_select` computes, step by step: number of a plan, or -(1 + number of a fact)."""
    steps, facts, inputs = decision.steps, decision.facts, decision.inputs

    def select(*leaves: Any) -> int:
        if len(leaves) != inputs:
            raise TypeError(f"{len(leaves)} tensors for {inputs} inputs")
        step = steps[0]
        while isinstance(step, Ask):
            step = steps[step.yes if holds(facts[step.fact], leaves) else step.no]
        return step.plan if isinstance(step, Hit) else -1 - step.fact

    return select
