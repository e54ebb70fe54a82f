"""The same engine wins time, energy or memory, as the user asks; every decision shows the trade."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse.runtime.tierup.attempt_runner as runner_module
from hotfuse.base.events import Why
from hotfuse.base.settings import Objective, Settings
from hotfuse.explain import explain_engine
from hotfuse.machine.energy import EnergyMeter, watts_per_core
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plan import Plan, PlanMemory
from hotfuse.runtime.tierup.objective import SLOWER, CoreSeconds
from hotfuse.runtime.tierup.race import Trial
from tests.races import raced
from tests.runtime.test_tiers import SETTINGS, Compiler, served

OLD_S = 0.02
"""How long what serves sleeps in a race."""


def busy(run: Callable[..., Any], seconds: float = 0.003) -> Callable[..., Any]:
    """The same with a core kept busy before."""

    def slower(*args: Any) -> Any:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass
        return run(*args)

    return slower


class Sized(Compiler):
    """Tier-1 plans that take so many bytes."""

    def __init__(self, memory: PlanMemory) -> None:
        super().__init__()
        self.memory = memory

    def __call__(self, *args: Any, **more: Any) -> Plan:
        return replace(super().__call__(*args, **more), memory=self.memory)


def outcome(monkeypatch: pytest.MonkeyPatch, objective: Objective, memory: PlanMemory, times: float) -> tuple[int, Engine]:
    """The tier that serves after a race in which the new plan took so many times as long as the old one."""
    raced(monkeypatch, lambda: (OLD_S, times * OLD_S))
    model = nn.Linear(4, 4).eval()
    with torch.no_grad():
        engine = served(model, Sized(memory), SETTINGS.with_(objective=objective))
        for _ in range(6):
            engine(torch.randn(3, 4))
    return next(iter(engine.sites.values())).entries[0].plan.tier, engine


@pytest.mark.parametrize(
    ("objective", "times", "arena", "tier"),
    [
        ("latency", 0.5, 9000, 1), ("latency", 1.2, 10, 0),
        ("memory", 0.5, 9000, 0), ("memory", 1.2, 10, 1), ("memory", 1.3 * SLOWER, 10, 0),
        ("memory", 0.5, 1000, 1), ("memory", 1.2, 1000, 0),
    ],
)  # fmt: skip
def test_what_was_asked_for_decides(
    monkeypatch: pytest.MonkeyPatch, objective: Objective, times: float, arena: int, tier: int
) -> None:
    found, engine = outcome(monkeypatch, objective, PlanMemory(arena, 0, 1000), times)
    assert found == tier
    decision = next(d for d in reversed(engine.log.decisions) if "bytes_after" in d.evidence)
    assert (decision.evidence["bytes_before"], decision.evidence["bytes_after"]) == (1000, arena)
    assert decision.evidence["uj_after"] and decision.evidence["energy"] == "estimated"
    assert (decision.why in (Why.BETTER, Why.NOT_BETTER)) is (objective == "memory")
    told = explain_engine(engine, full=True)
    (plan,) = told.to_dict()["sites"][0]["plans"]
    assert (plan["trade"] is not None) is bool(tier) and (f"for {objective}:" in str(told)) is bool(tier)


def test_weights_that_are_released_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch, "memory", PlanMemory(10, 5000, 1000), 1.0)[0] == 0
    assert SETTINGS.release_weights is False


def test_a_race_for_energy_runs_on_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On that clock sleep costs nothing: the old plan computes."""
    real, held = runner_module.race, list[tuple[Trial, Any]]()

    def race(old: Callable[..., Any], new: Callable[..., Any], *more: Any, before: Any = (), **how: Any) -> Trial:
        held.append((real(busy(old), new, *more, **how), how.get("clock")))
        return held[-1][0]

    monkeypatch.setattr(runner_module, "race", race)
    with torch.no_grad():
        for objective in ("energy", "latency"):
            engine = served(
                nn.Linear(4, 4).eval(), Compiler(), Settings(capture="inline", hot_calls=2, objective=objective)
            )
            for _ in range(6):
                engine(torch.randn(3, 4))
            decision = next(d for d in engine.log.decisions if d.why in (Why.BETTER, Why.FASTER))
            if objective == "energy":
                assert (
                    decision.evidence["uj_before"] == pytest.approx(held[0][0].old_us * watts_per_core(), abs=0.1)
                    and decision.evidence["us_before"] != pytest.approx(held[0][0].old_us, abs=0.1)
                )
    assert isinstance(held[0][1], CoreSeconds) and held[1][1] is None


def test_joules_are_counted_where_the_processor_has_meters() -> None:
    counts = iter([100, 300, 50])
    clock = CoreSeconds([EnergyMeter("cpu package-0", lambda: next(counts), 0.1, wraps=1000), EnergyMeter("gpu 0", lambda: 0, 1.0)])
    assert clock.source == "measured"
    first = clock()
    assert first == pytest.approx(200 * 0.1 / watts_per_core())
    assert clock() - first == pytest.approx(750 * 0.1 / watts_per_core()), "it wrapped"
    assert CoreSeconds([]).source == "estimated" and CoreSeconds([])() > 0
