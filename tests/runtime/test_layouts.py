"""A real graph gets its layout from the engine: priced with its conversions, decided by what was measured, shown, and right."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.cli.cost_report import costs
from hotfuse.ir.types import Layout, TensorType
from hotfuse.runtime.plan import Plan
from tests.races import layouts_take, slow_library


class Rows(nn.Module):
    """A convolution whose neighbours read rows of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(6, 5, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x.cumsum(-1)).cumsum(-1)


def served(monkeypatch: pytest.MonkeyPatch, *, rows_s: float = 0.0, last_s: float = 0.0) -> tuple[Plan, str]:
    """A model whose convolution sleeps so long in either order, served; and what is said of it."""
    layouts_take(monkeypatch, rows_s=rows_s, last_s=last_s)
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
    plan, said = served(monkeypatch, last_s=2e-3)
    assert not moved(plan)
    assert "leave layout conv2d" in said and "1 conversions move" in said
    assert re.search(r"row-major saves \d{4}\.\d us, measured", said)


def test_channels_last_is_kept_where_row_major_measured_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, said = served(monkeypatch, rows_s=2e-3)
    assert moved(plan)
    assert "take layout conv2d" in said and re.search(r"row-major measured \d{4}\.\d us, what there is \d{1,3}\.\d", said)


def test_conversions_are_shown_with_the_costs_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Rows().eval(), torch.randn(2, 6, 9, 17)
    fast = hotfuse.jit(model, settings=Settings(capture="inline", tiers=0))
    with torch.no_grad():
        fast(x)
    (site,) = fast._engine.sites.values()  # pyright: ignore[reportPrivateUsage]
    layouts_take(monkeypatch, last_s=2e-3)
    found = costs(site.entries[0].baseline.graph, [tuple(x.shape)])
    assert any("leave layout conv2d" in d and "conversions move" in d for d in found["decisions"])
