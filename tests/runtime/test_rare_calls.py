"""Rare calls hold up nothing: other jobs of the model run while their race waits for them, and hot calls are captured first."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.events import Action
from hotfuse.compile.workers import service as services
from hotfuse.compile.workers.service import Service
from hotfuse.runtime.tierup import judge
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.judge import Judge
from hotfuse.runtime.tierup.lull import Lull


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Generator[Service]:
    made = Service()
    monkeypatch.setattr(judge, "service", lambda: made)
    monkeypatch.setattr(judge, "RARE_S", 0.05)
    yield made
    made.stop(60)


class Awaited:
    """An entry and plans as far as a race on live calls asks them."""

    closed = False
    contest: Any = None

    def close(self, contest: Any) -> None:
        self.contest = None if self.contest is contest else self.contest


@pytest.mark.parametrize("rare", [True, False])
def test_other_jobs_run_while_a_race_waits_for_rare_calls(own: Service, rare: bool) -> None:
    plan: Any = object()
    entry, contest = Awaited(), PlanContest(plan, plan)
    entry.contest = contest
    contest.answered_s = 0.0 if rare else 1.0  # calls that take all of the time are not disturbed by others
    calls = iter(range(10**9))
    lull = Lull(calls=lambda: next(calls), inside=lambda: False)
    found, other = list[bool](), threading.Event()

    def race() -> None:
        found.append(Judge(entry)._on_calls(entry, contest, lull, time.monotonic()))  # type: ignore[arg-type]

    own.submit(race, "model")
    own.submit(other.set, "model")
    assert other.wait(60 if rare else 0.5) == rare
    contest.give_up()
    assert other.wait(60)
    end = time.monotonic() + 60
    while not found and time.monotonic() < end:
        time.sleep(0.005)
    assert found == [True] and entry.contest is None


class TwoKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, step: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(x) if step is None else self.inner(x) + step


def test_what_is_called_more_is_captured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    with hotfuse.jit(TwoKinds().eval(), settings=Settings(record=False, cache="off")) as fast, torch.no_grad():
        monkeypatch.setattr(fast._engine.model, "prepare", lambda: go_on.wait(120))  # pyright: ignore[reportPrivateUsage]
        x = torch.randn(2, 8)
        fast(x)  # a prompt
        for _ in range(30):
            fast(x, torch.randn(2, 8))  # and its steps
        go_on.set()
        assert fast.wait(120)
        captures = [d.evidence["call"] for d in fast._engine.log.decisions if d.action is Action.CAPTURE]  # pyright: ignore[reportPrivateUsage]
    assert [str(c).count("tensor") for c in captures] == [2, 1]
    assert services.in_background() is False
