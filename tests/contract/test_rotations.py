"""Halves that change places are turned views on a device: the same numbers, bit by bit, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hotfuse.backends.library import meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.compile.device.rotations import turned
from hotfuse.ops.table import packet
from tests.contract.lowering import group_of


def rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    y = x.reshape(2, 3, 4, 8).transpose(1, 2)
    return y * cos + rotated(y) * sin


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "not negated": lambda x: torch.cat((x[..., 4:], x[..., :4]), -1),
    "the first one negated": lambda x: torch.cat((x[..., 4:], -x[..., :4]), -1),
    "no halves": lambda x: torch.cat((-x[..., 3:], x[..., :3]), -1),
    "another dim": lambda x: torch.cat((-x[..., 4:], x[..., :4]), 0),
    "integers": lambda x: torch.cat((-x.long()[..., 4:], x.long()[..., :4]), -1),
    "of two": lambda x: torch.cat((-x[..., 4:], (x + 1)[..., :4]), -1),
}


def run(graph: Any, weights: Any, *args: torch.Tensor) -> tuple[Any, ...]:
    return flat_function(graph, meaning, weights)[0](*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.half, torch.bfloat16])
def test_the_same_bits_without_pieces(dtype: torch.dtype) -> None:
    x, cos, sin = torch.randn(2, 3, 32).to(dtype), torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype)
    x[0, 0, :6] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-8])
    found = group_of(rope, (x, cos, sin))
    graph = turned(found.graph)
    ops = {packet(n.op) for n in graph.nodes}
    assert "aten.cat" not in ops and "aten.neg" not in ops and "aten.flip" in ops
    got, want = run(graph, found.weights, x, cos, sin)[0], rope(x, cos, sin)
    assert torch.equal(got.nan_to_num(), want.nan_to_num()) and torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("name", OTHERS)
def test_other_pieces_stay(name: str) -> None:
    x = torch.randn(2, 8)
    found = group_of(OTHERS[name], (x,))
    assert turned(found.graph) is found.graph
    assert torch.equal(run(found.graph, found.weights, x)[0], OTHERS[name](x))
