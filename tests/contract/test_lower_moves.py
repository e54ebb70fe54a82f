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
    "windows": (lambda t: t.unfold(1, 4, 2), (2, 11, 3)),
    "windows that overlap in the last dim": (lambda t: t.unfold(-1, 5, 1), (2, 3, 9)),
    "windows apart": (lambda t: t.unfold(0, 2, 3), (8, 3)),
    "one window": (lambda t: t.unfold(1, 6, 1), (2, 6)),
    "diagonal": (lambda t: t.diagonal(), (4, 6)),
    "diagonal above": (lambda t: t.diagonal(1, -2, -1), (2, 5, 4)),
    "diagonal below": (lambda t: t.diagonal(-2, 2, 0), (3, 2, 5)),
    "one place written": (lambda t: t.select_scatter(t.sum(1), 1, 2), (3, 5, 4)),
    "the first place written": (lambda t: t.select_scatter(t.amax(0), 0, 0), (3, 5)),
    "the last place written": (lambda t: t.select_scatter(t.amax(-1), -1, -1), (3, 5)),
    "the only place written": (lambda t: t.select_scatter(t[:, 0] * 3, 1, 0), (3, 1, 4)),
    "a stretch written": (lambda t: t.slice_scatter(t[:, 2:5] * 3, 1, 1, 4), (2, 7, 3)),
    "from the end": (lambda t: t.slice_scatter(t[:, :2] * 3, 1, -2), (2, 7, 3)),
    "to the end": (lambda t: t.slice_scatter(t[1:] * 3, 0, 1, 99), (4, 3)),
    "all written": (lambda t: t.slice_scatter(t * 3, 1), (4, 3)),
    "nothing written": (lambda t: t.slice_scatter(t[:, :0], 1, 3, 3), (4, 5)),
    "beyond the end": (lambda t: t.slice_scatter(t[:, 3:] * 3, 1, 3, 9), (4, 5)),
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
