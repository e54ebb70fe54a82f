"""Quotients that are rounded and saturated: two products instead of a division, the same integers; exact sums need no doubles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hotfuse.lower.cpu.group import lower_group
from hotfuse.lower.ops import quotients
from hotfuse.tile.text import show
from tests.contract.lowering import group_of, interpret, run_native

ODD = (torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 3.4e38, -3.4e38, 1e-38)


def _quantized(scale: float, zero: float, low: int, high: int) -> Any:
    def quantize(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.round(x / scale) + zero, low, high)

    return quantize


def _numbers(scale: float, zero: float, low: int, high: int) -> torch.Tensor:
    """Around every tie, everywhere between, and odd ones."""
    ties = ((np.arange(low - zero - 3, high - zero + 4) + 0.5) * np.float64(np.float32(scale))).astype(np.float32)
    near = [ties]
    for end in (np.float32(-np.inf), np.float32(np.inf)):
        at = ties
        for _ in range(12):
            at = np.nextafter(at, end)
            near.append(at)
    anywhere = np.random.default_rng(0).uniform(ties[0], ties[-1], 20000).astype(np.float32)
    return torch.from_numpy(np.concatenate([*near, anywhere, np.array(ODD, np.float32)]))


@pytest.mark.parametrize(("low", "high", "zero"), [(0, 255, 0.0), (0, 255, 130.0), (-128, 127, -5.0), (-32768, 32767, 17.0)])
@pytest.mark.parametrize("scale", [0.013669396750628948, 0.035827308893203735, 1 / 3, 0.0625, 1e-4, 7.3, 255.0])
def test_two_products_round_as_a_division(scale: float, low: int, high: int, zero: float) -> None:
    scale = float(np.float32(scale))
    quantize, x = _quantized(scale, zero, low, high), _numbers(scale, zero, low, high)
    group = group_of(quantize, [x])
    lowered = lower_group(group.graph)
    assert torch.equal(run_native(lowered, group, [x])[0], quantize(x))
    node = next(n for n in group.graph.nodes if n.op == "aten.div.Tensor")
    assert ("map.div" in show(lowered.kernel)) == (quotients.parts_of_reciprocal(node, group.graph) is None)


def test_most_scales_need_no_division() -> None:
    """Those that do have a tie whose neighbours two products do not tell apart."""
    scales = np.random.default_rng(1).uniform(1e-4, 0.5, 200).astype(np.float32)
    x = torch.zeros(4)
    found = 0
    for scale in scales:
        graph = group_of(_quantized(float(scale), 3.0, 0, 255), [x]).graph
        node = next(n for n in graph.nodes if n.op == "aten.div.Tensor")
        found += quotients.parts_of_reciprocal(node, graph) is not None
    assert found > 150, found


def test_the_kernel_means_the_same_as_it_computes() -> None:
    quantize, x = _quantized(0.02, 3.0, 0, 255), _numbers(0.02, 3.0, 0, 255)[:500]
    group = group_of(quantize, [x])
    assert torch.equal(interpret(lower_group(group.graph), group, [x])[0], quantize(x))


def test_what_is_not_a_number_stays_so() -> None:
    quantize, x = _quantized(0.02, 3.0, 0, 255), torch.tensor([torch.nan] * 20 + [1.0])
    group = group_of(quantize, [x])
    assert torch.isnan(run_native(lower_group(group.graph), group, [x])[0][:20]).all()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.round(x / 0.1),  # any integer
        lambda x: torch.clamp(x / 0.1, 0, 255),  # the quotient itself
        lambda x: torch.clamp(torch.round(x / 0.1) + 0.5, 0, 255),
        lambda x: (x / 0.1, torch.clamp(torch.round(x / 0.1), 0, 255))[0],
    ],
)
def test_other_quotients_are_divided(fn: Any) -> None:
    x = torch.randn(40) * 5
    group = group_of(fn, [x])
    lowered = lower_group(group.graph)
    assert "map.div" in show(lowered.kernel)
    assert torch.equal(run_native(lowered, group, [x])[0], fn(x))


def test_integers_come_back_from_doubles_as_they_were() -> None:
    """i32 -> f64 -> i32 is nothing, i32 -> f64 -> f32 one conversion with the same rounding, x - 0 is x."""

    def exact(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = x.double()
        return wide.to(torch.int32) + 1, wide.float(), (x.float() - 0.0) * 2

    x = torch.randint(-(2**31), 2**31 - 2, (1003,), dtype=torch.int32)
    group = group_of(exact, [x])
    lowered = lower_group(group.graph)
    assert "map.sub" not in show(lowered.kernel)
    for got, want in zip(run_native(lowered, group, [x]), exact(x), strict=True):
        assert torch.equal(got, want)
