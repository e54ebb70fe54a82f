# pyright: reportPrivateUsage=false
"""Whole calls decide whether a plan is faster in use: what races cannot see, between the caller and the first look, is in them."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.errors import InternalError
from hotfuse.base.events import Why
from hotfuse.native import model_guard as native_guard
from hotfuse.runtime import engine as engines
from hotfuse.runtime import site as sites
from hotfuse.runtime.site import Entry
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.whole_calls import BLOCK, FIRST_ROUNDS, MAX_BROKEN, MAX_ROUNDS, SlowerInUse, WholeCalls


class SomePlan:
    """What is compared: anything that need not be held."""


PLAN = SomePlan()


def compared(plan_s: float, own_s: float, *, broken: bool = False) -> tuple[list[SlowerInUse], WholeCalls, int]:
    """Blocks of calls that take so long, until nothing is compared any more."""
    whole, now, number, answered, blocks = WholeCalls(PLAN, ended=False), 0.0, 100, 7, 0
    found: list[SlowerInUse] = []
    while not whole.ended:
        own = whole.by_own_code
        whole.begins(number, 1, answered, now)
        now += BLOCK * (own_s if own else plan_s)
        number, answered = number + 1 + (0 if own else BLOCK), answered + (BLOCK if own else 0) - broken
        slower = whole.arrived(number, 1, answered, now)
        found += [] if slower is None else [slower]
        answered += 1  # the look's own call may be one
        blocks += 1
    return found, whole, blocks


def test_a_plan_that_is_slower_in_use_goes_after_a_few_blocks() -> None:
    (found,), whole, blocks = compared(39e-6, 24e-6)
    assert found.rounds == 8 and blocks == 16 and whole.is_of(PLAN)
    assert (found.plan_s, found.own_s) == pytest.approx((39e-6, 24e-6))


def test_a_plan_that_is_faster_or_hardly_slower_stays() -> None:
    assert not compared(24e-6, 39e-6)[0]
    stays = compared(24.5e-6, 24e-6)
    assert not stays[0] and stays[2] == 2 * MAX_ROUNDS  # it loses every round, and less than is worth a change


def test_blocks_that_something_came_between_count_for_nothing() -> None:
    found, _, blocks = compared(39e-6, 24e-6, broken=True)
    assert not found and blocks == MAX_BROKEN


class Counts(nn.Module):
    """Its own code takes Python some time that no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1_000):
            pass
        return self.layer(x)


def served() -> tuple[Any, Entry]:
    """A model whose tier 0 was found faster than its own code, as live calls may find."""
    fast = hotfuse.jit(Counts().eval(), settings=Settings(profiles=":memory:", tiers=0, watch=False, hot_calls=1 << 30))
    for _ in range(8):
        fast(torch.ones(2, 4))
    assert fast.wait(60)
    fast(torch.ones(2, 4))
    (site,) = fast._engine.sites.values()
    (entry,) = site.entries
    entry.own, entry.own_ratio = False, 2.0
    return fast, entry


def made_native(fast: Any) -> None:
    """What a hot model has done in the background."""
    (site,) = fast._engine.sites.values()
    for job in (*site.hardening_jobs(), *fast._engine.plans.watch.hardening_jobs(), engines._harden):
        job()


@pytest.mark.parametrize("slow", [True, False])
def test_what_no_race_sees_is_noticed_in_use(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "IN_DOUBT", 0.0)
    with torch.no_grad():
        fast, entry = served()
        made_native(fast)
        model, x = fast._target, torch.randn(2, 4)
        (site,) = fast._engine.sites.values()
        until = time.monotonic() + 90  # rounds are paid from the time of calls, and dear where others use the cores
        for i in itertools.count():
            if slow and not site.resting:  # before the engine begins
                begin = time.perf_counter()
                while time.perf_counter() - begin < 3e-4:
                    pass
            y = fast(x)
            if i % 64 == 0:
                torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)
            if entry.own or (entry.whole is not None and entry.whole.ended) or time.monotonic() > until:
                break
        assert entry.own == slow and entry.plan is entry.baseline
        drops = [d.to_dict() for d in fast._engine.log.decisions if "in whole calls" in str(d)]
        assert len(drops) == slow
        assert slow or entry.audits[None].rounds >= FIRST_ROUNDS
        fast.close()


def test_nothing_is_decided_while_python_looks_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until native code does, that takes longer than a small plan, whatever the plan is worth; soon it takes nothing."""
    monkeypatch.setattr(sites, "IN_DOUBT", 0.0)
    with torch.no_grad():
        fast, entry = served()
        x, audit = torch.randn(2, 4), None
        for _ in range(20_000):
            fast(x)
            if (audit := entry.audits.get(None)) is not None and audit.rounds > 2 * FIRST_ROUNDS:
                break
        assert audit is not None and audit.rounds > 2 * FIRST_ROUNDS
        assert entry.whole is None or not (entry.whole.under_way or entry.whole.ended or entry.whole._rounds)
        made_native(fast)
        for _ in range(20_000):
            fast(x)
            if entry.whole is not None and entry.whole.ended:
                break
        assert entry.whole is not None and entry.whole.ended
        fast.close()


def test_where_native_code_cannot_be_had_python_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise InternalError("no compiler")

    monkeypatch.setattr(sites, "IN_DOUBT", 0.0)
    with torch.no_grad():
        fast, entry = served()
        monkeypatch.setattr(native_guard, "unchanged", broken)
        with pytest.raises(InternalError):
            made_native(fast)
        engines._harden()
        assert "no compiler" in fast.stats()["model_watch"]["why_not"]
        model, x = fast._target, torch.randn(2, 4)
        for _ in range(20_000):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
            if entry.whole is not None and entry.whole.ended:
                break
        assert entry.whole is not None and entry.whole.ended
        fast.close()


def test_a_comparison_with_the_own_code_outlives_changed_weights() -> None:
    """Tier 0 reads weights live: where they change every hundred calls, it is compared all the same."""
    with torch.no_grad():
        fast, entry = served()
        contest = PlanContest(entry.baseline, entry.baseline, own=True)
        entry.open(contest)
        fast(torch.ones(2, 4))
        for p in fast._target.parameters():
            p.add_(0.5)
        x = torch.randn(2, 4)
        torch.testing.assert_close(fast(x), fast._target(x), rtol=1e-5, atol=1e-6)
        assert entry.contest is contest and Why.WEIGHTS_CHANGED in {d.why for d in fast._engine.log.decisions}
        while contest.trial is None:
            fast(x)
        assert entry.own_ratio == contest.ratio
        fast.close()
