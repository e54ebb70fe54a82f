"""Movements that are several simple ones: rolls along many dims, pixels and channels shuffled; as torch moves them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hotfuse.lower.cpu.group import lower_group
from tests.contract.lowering import group_of, interpret, run_native

Tensor = torch.Tensor
CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "windows shifted": (lambda t: torch.roll(t, (-2, -2), (1, 2)), (2, 6, 8, 5)),
    "back": (lambda t: torch.roll(t, (3, 11), (2, 1)), (1, 4, 9, 3)),
    "one dim twice": (lambda t: torch.roll(t, (1, 2), (0, 0)), (5, 3)),
    "not at all": (lambda t: torch.roll(t, (0, 6), (0, 1)), (3, 6)),
    "pixels": (lambda t: F.pixel_shuffle(t, 2), (2, 12, 3, 5)),
    "pixels of three": (lambda t: F.pixel_shuffle(t, 3), (9, 4, 2)),
    "pixels back": (lambda t: F.pixel_unshuffle(t, 2), (2, 3, 4, 6)),
    "channels": (lambda t: torch.channel_shuffle(t, 3), (2, 6, 4, 5)),
    "no image": (lambda t: F.pixel_shuffle(t, 2), (0, 8, 3, 5)),
    "one pixel": (lambda t: F.pixel_shuffle(t, 2), (1, 4, 1, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("case", CASES)
def test_as_torch_moves_them(case: str, dtype: torch.dtype) -> None:
    move, shape = CASES[case]
    x = torch.randint(-99, 99, shape).to(dtype)

    def fn(t: Tensor) -> Tensor:
        return move(t * 2) + 1

    group = group_of(fn, [x])
    lowered = lower_group(group.graph)
    for (got,) in (interpret(lowered, group, [x]), run_native(lowered, group, [x])):
        assert torch.equal(got, fn(x))
