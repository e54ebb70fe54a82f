"""A real graph gets its layout from the engine: priced with its conversions, decided by what was measured, shown, and right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.cli.costs import costs
from hotfuse.compile.unit.contest import UnitContests
from hotfuse.ir.types import Layout, TensorType
from hotfuse.runtime.plan import Plan
from tests.races import slow_library


class Rows(nn.Module):
    """A convolution whose neighbours read rows of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(6, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x.cumsum(-1)).cumsum(-1)


def served(monkeypatch: pytest.MonkeyPatch, rows_us: float, last_us: float) -> tuple[Plan, str]:
    """A model whose convolution takes so long in either order, served; and what is said of it."""

    def measured(_: UnitContests, old: Sequence[Any], new: Sequence[Any]) -> tuple[float, float]:
        last = [any("contiguous" in n.op for g, _ in side for n in g.nodes) for side in (old, new)]
        return (last_us if last[0] else rows_us) * 1e-6, (last_us if last[1] else rows_us) * 1e-6

    monkeypatch.setattr(UnitContests, "_measured", measured)
    slow_library(monkeypatch)
    torch.manual_seed(1)
    model, x = Rows().eval(), torch.randn(2, 6, 9, 17)
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2))
    with torch.no_grad():
        for _ in range(8):
            fast(x)
        got = fast(x)
        want = model.double()(x.double())
    assert (got.double() - want).abs().max() < 1e-4 * want.abs().max()
    (site,) = fast._engine.sites.values()  # pyright: ignore[reportPrivateUsage]
    plan = site.entries[0].plan
    assert plan.tier >= 1 and plan.account is not None
    return plan, "\n".join(plan.account.lines())


def moved(plan: Plan) -> bool:
    types = [v.type for n in plan.graph.nodes for v in n.outs]
    return any(isinstance(t, TensorType) and t.layout != Layout() for t in types)


def test_row_major_neighbours_keep_a_convolution_row_major_where_that_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, said = served(monkeypatch, rows_us=50.0, last_us=100.0)
    assert not moved(plan)
    assert "leave layout conv2d" in said and "1 conversions move" in said and "row-major saves 50.0 us, measured" in said


def test_channels_last_is_kept_where_row_major_measured_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, said = served(monkeypatch, rows_us=100.0, last_us=50.0)
    assert moved(plan)
    assert "take layout conv2d" in said and "row-major measured 100.0 us, what there is 50.0" in said


def test_conversions_are_shown_with_the_costs_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Rows().eval(), torch.randn(2, 6, 9, 17)
    fast = hotfuse.jit(model, settings=Settings(capture="inline", tiers=0))
    with torch.no_grad():
        fast(x)
    (site,) = fast._engine.sites.values()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(UnitContests, "_measured", lambda *_a: (1e-4, 5e-5))
    found = costs(site.entries[0].baseline.graph, [tuple(x.shape)])
    assert any("leave layout conv2d" in d and "conversions move" in d for d in found["decisions"])
