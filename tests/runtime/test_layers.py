"""Specializations in one plan: a mask that is always open and an input that comes again, each right where the other fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
import hotfuse.profile.agent as agent_module
from hotfuse import Settings
from hotfuse.specialize.table import OPEN_MASK, REPEATED
from tests.races import new_plans_win
from tests.runtime.test_masks import Attention


@pytest.fixture(autouse=True)
def new_plans_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(agent_module, "BUDGET", 1e9)
    monkeypatch.setattr(agent_module, "MOST_PER_SECOND", 1e9, raising=False)
    new_plans_win(monkeypatch)
    with torch.no_grad():
        yield


class Both(nn.Module):
    """Attention under a mask, against texts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.table = Attention(False), nn.Embedding(50, 16)
        self.text = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.attention(x, mask).mean(1) @ self.text(self.table(text)).t()


def test_two_bets_hold_in_one_plan() -> None:
    model, text = Both().eval(), torch.randint(0, 50, (9,))
    fast: Any = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2, watch_rate=2, padding="keep"))

    def check(hide: int, text: torch.Tensor) -> None:
        x, mask = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.int64)
        mask[1, 6 - hide :] = 0
        torch.testing.assert_close(fast(x, mask, text), model(x, mask, text), rtol=1e-4, atol=1e-5)

    def rows() -> list[str]:
        return [key.row for key in next(iter(fast._engine.sites.values())).entries[0].plan.layers]

    for _ in range(8):
        for _ in range(40):
            check(0, text)
        assert fast._engine.call_sampler._shared.analyzer.flush(120)
        if len(rows()) == 2:
            break
    assert rows() == [REPEATED, OPEN_MASK], str(fast.explain(full=True))
    other = torch.randint(0, 50, (9,))
    for hide, of in ((0, text), (2, text), (0, other), (2, other), (5, text), (0, text)):
        check(hide, of)
    bets = {b["row"]: b for s in fast.explain().to_dict()["sites"] for p in s["plans"] for b in p["bets"]}
    assert bets[REPEATED]["held"] > 0 and bets[OPEN_MASK]["held"] > 0 and bets[OPEN_MASK]["missed"] > 0
    fast.close()
