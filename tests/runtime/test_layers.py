"""Specializations in one plan: a mask that is always open and an input that comes again, each right where the other fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.runtime.observe import call_sampler
from hotfuse.specialize.table import BRANCH, OPEN_MASK, PADDING, REPEATED
from tests.padded import PaddedEncoder, batch
from tests.races import new_plans_win, samples_cost_nothing
from tests.runtime.test_masks import Attention


@pytest.fixture(autouse=True)
def new_plans_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    samples_cost_nothing(monkeypatch)
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


class Four(nn.Module):
    """A padded encoder, a memory under a mask, and two ways to go on; sizes are the calls'."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.memory = PaddedEncoder(layers=1), nn.Linear(16, 5)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, memory: torch.Tensor, seen: torch.Tensor, flag: torch.Tensor
    ) -> torch.Tensor:
        y, m = self.encoder(ids, mask), self.memory(memory)[:, None]
        hidden = (1.0 - seen[:, None, None, :].to(y.dtype)) * torch.finfo(y.dtype).min
        y = y + nn.functional.scaled_dot_product_attention(y[:, None, None], m, m, attn_mask=hidden)[:, 0, 0]
        return torch.cond(flag.sum() > 0, lambda t: torch.relu(self.first(t)), lambda t: self.second(t) * 2, (y,))


def test_four_bets_hold_in_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is right where it holds, where it breaks by itself, and where all break."""
    monkeypatch.setattr(call_sampler, "BUDGET", 1e9)  # which way branches go behind a packed plan is seen in the baseline
    model = Four().eval()
    fast: Any = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2, watch_rate=2))

    def check(rows: int, *, padded: bool, open_: bool, flag: bool) -> None:
        ids, mask = batch(3, rows, 0.3 if padded else 2.0)
        seen = torch.ones(3, 7, dtype=torch.int64)
        seen[1, 4:] = int(open_)
        given = (ids, mask, torch.randn(3, 7, 16), seen, torch.full((2,), 1.0 if flag else -1.0))
        torch.testing.assert_close(fast(*given), model(*given), rtol=1e-4, atol=1e-5)

    def entry() -> Any:
        return next(e for e in next(iter(fast._engine.sites.values())).entries if e.symbols)

    for rows in (20, 24, 28, 20, 32):
        check(rows, padded=True, open_=True, flag=True)
    wanted = {BRANCH, OPEN_MASK, PADDING}
    for _ in range(8):
        for _ in range(40):
            check(24, padded=True, open_=True, flag=True)
        assert fast._engine.call_sampler._shared.analyzer.flush(120)
        if wanted <= {k.row for k in entry().plan.layers} and entry().versions:
            break
    assert wanted <= {k.row for k in entry().plan.layers}, str(fast.explain(full=True))
    assert any(wanted <= {k.row for k in v.layers} for v in entry().versions.values()), "sizes that recur have the same layers"
    for kept, padded, open_, flag in itertools.product((True, False), repeat=4):
        check(24 if kept else 21, padded=padded, open_=open_, flag=flag)
    shown = str(fast.explain())
    assert all(f"bet on: {row}" in shown for row in wanted), shown
    fast.close()
