"""A branch that always goes one way becomes straight-line code; a flip costs no wrong answer, and back again no compile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hotfuse
from hotfuse import Settings
from tests.races import new_plans_win, samples_cost_nothing

INLINE = Settings(capture="inline", hot_calls=2, watch_rate=2)


@pytest.fixture(autouse=True)
def new_plans_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here: samples are taken whatever they cost."""
    samples_cost_nothing(monkeypatch)
    new_plans_win(monkeypatch)
    with torch.no_grad():
        yield


class Branchy(torch.nn.Module):
    """Which way it goes depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        y = torch.cond(x.sum() > 0, lambda t: torch.relu(self.first(t)), lambda t: self.second(t) * 2, (h,))
        return y + 1


def serve(fast: Any, model: torch.nn.Module, sign: float, calls: int) -> None:
    for _ in range(calls):
        x = torch.rand(3, 8) * sign
        torch.testing.assert_close(fast(x), model(x))


def entry_of(fast: Any) -> Any:
    return next(iter(fast._engine.sites.values())).entries[0]


def settle(fast: Any, model: torch.nn.Module, sign: float) -> None:
    """Calls until what they showed has been analyzed and acted upon."""
    for _ in range(6):
        serve(fast, model, sign, 100)
        assert fast._engine.call_sampler._shared.analyzer.flush(120)


@pytest.mark.budget_s(10)
def test_the_hot_branch_becomes_straight_line_code_and_flips_are_served() -> None:
    model = Branchy().eval()
    fast = hotfuse.jit(model, settings=INLINE)
    settle(fast, model, 1.0)
    entry = entry_of(fast)
    assert list(entry.bets) and entry.plan.tier == 2, str(fast.explain(full=True))
    watched = fast._engine.call_sampler._watched[entry.key]
    assert watched.deep == 0, "native runs and bets tell their branches: no call need be slow for that"
    assert set(watched.variants) <= {id(entry.plan), id(entry.baseline)}  # those of plans that serve no more are gone
    (bet,) = entry.bets.values()
    assert list(bet.hot) == [True]
    assert not any(n.op.startswith("control.") for n in bet.hot[True].graph.nodes)
    seen = fast._engine.call_sampler.seen(entry.key)
    (control,) = [c for c in seen.controls if not c.loop]
    assert dict(control.outcomes)[1] == pytest.approx(1.0)
    hits = bet.outcomes.hits
    serve(fast, model, 1.0, 10)
    assert bet.outcomes.hits > hits and bet.outcomes.misses == 0
    serve(fast, model, -1.0, 10)  # the bet misses: right answers from the general code behind the condition
    assert bet.outcomes.misses >= 8
    settle(fast, model, -1.0)
    (bet,) = entry_of(fast).bets.values()
    assert set(bet.hot) == {True, False}, str(fast.explain(full=True))
    compiles = fast.stats()["events"]["specialize.recurs"]
    misses = bet.outcomes.misses
    settle(fast, model, 1.0)  # back again: the code is still there
    (bet,) = entry_of(fast).bets.values()
    assert fast.stats()["events"]["specialize.recurs"] == compiles and bet.outcomes.misses == misses
    assert "bets that" in str(fast.explain(full=True))
    fast.close()


def test_explain_says_how_often_the_sides_of_a_branch_run() -> None:
    """No call is sampled before the first plan of kernels, so kept calls are asked: most of them take the second side."""
    model = Branchy().eval()
    with hotfuse.jit(model, settings=INLINE.with_(hot_calls=200)) as fast:
        for i in range(300):
            serve(fast, model, -1.0 if i % 16 else 1.0, 1)
        text = str(fast.explain(full=True))
        (line,) = [x for x in text.splitlines() if "runs a call:" in x][:1]
        then, other = re.search(r"then ([\d.]+), else ([\d.]+) \(\d+ seen\)", line).groups()  # pyright: ignore[reportOptionalMemberAccess]
        assert 0 < float(then) < 0.5 < float(other) < 1 and float(then) + float(other) == pytest.approx(1, abs=0.01)


def test_without_watching_nobody_bets() -> None:
    model = Branchy().eval()
    fast = hotfuse.jit(model, settings=INLINE.with_(watch=False))
    serve(fast, model, 1.0, 200)
    assert not entry_of(fast).bets and "specialize.recurs" not in fast.stats()["events"]
    fast.close()
