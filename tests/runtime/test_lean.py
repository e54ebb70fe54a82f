"""Whoever asks for little memory gets convolutions whose weights do not grow, and is told what that gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Objective, Settings
from hotfuse.runtime.plan import Plan, PlanMemory
from hotfuse.runtime.tierup.objective import decide
from hotfuse.runtime.tierup.race import Trial
from tests.races import kernels_win, layouts_take, slow_library


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def served(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, str]:
    """The plan of tier 1 that comes of asking for something, and what is said about it."""
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    layouts_take(monkeypatch, rows_s=2e-3)
    torch.manual_seed(0)
    model, x = Images().eval(), torch.randn(1, 32, 28, 28)
    settings = Settings(capture="inline", hot_calls=2, objective=objective, release_weights=True)
    fast = hotfuse.jit(model, settings=settings)
    with torch.no_grad():
        want = model.double()(x.double()).float()
        model.float()
        for _ in range(8):
            fast(x)
        assert torch.allclose(fast(x), want, atol=1e-4, rtol=1e-4)
        (entry,) = next(iter(fast._engine.sites.values())).entries  # pyright: ignore[reportPrivateUsage]
        assert entry.plan.tier >= 1, str(fast.explain(full=True))
        text = str(fast.explain(full=True))
        plan = entry.plan
        assert plan.account is not None
        lines = "\n".join(plan.account.lines())
        fast.close()
    return plan, f"{text}\n{lines}"


def test_weights_of_convolutions_do_not_grow_where_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _ = served("latency", monkeypatch)
    lean, said = served("memory", monkeypatch)
    own = 2 * (32 * 32 * 9) * 4
    assert fast.memory.constants > 1.7 * own, "two to four times what the weights take"
    assert lean.memory.constants < 1.2 * own
    assert "leave transformed weights of conv" in said and "memory was asked for" in said
    assert "for memory:" in said


def test_what_copies_are_larger_than_released_originals_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = served("memory", monkeypatch)
    keys = frozenset(plan.weights)
    originals = sum(w.nbytes for w in plan.weights.values())
    settings = Settings(objective="memory", release_weights=True)

    def trade(constants: int) -> int:
        made = replace(plan, memory=PlanMemory(100, constants, 1000), unread=keys)
        won = Trial(100.0, 50.0, 9, True)
        return decide(settings, lambda *_a, **_k: won, made, made, [torch.randn(1, 32, 28, 28)])[1].bytes[1]

    assert trade(originals) == 100, "they take the place of the originals"
    assert trade(3 * originals) == 100 + 2 * originals
