"""Promotion to a higher tier with a fake compiler and a fake clock: proof first, then measurement, then one swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse.runtime.engine as engine_module
from hotfuse.api import TorchModel, engine_stats
from hotfuse.base.errors import InternalError
from hotfuse.base.events import EventLog
from hotfuse.base.settings import Settings
from hotfuse.ir.graph import Graph
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.race import Trial, race

SETTINGS = Settings(capture="inline", hot_calls=2)


class Compiler:
    """Makes tier-1 plans that do what tier 0 does, changed by `twist`."""

    def __init__(self, twist: Callable[[Any], Any] = lambda out: out) -> None:
        self.made = 0
        self.twist = twist
        self.frozen = False

    def __call__(self, graph: Graph, weights: Mapping[str, torch.Tensor], _sample: Sequence[torch.Tensor]) -> Plan:
        self.made += 1
        kept = {k: w.clone() for k, w in weights.items()}  # as packed weights are: copies
        plan = compile_tier0(graph, kept, SETTINGS)
        return replace(plan, tier=1, run=lambda *args: tuple(self.twist(o) for o in plan.run(*args)))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def race_says(monkeypatch: pytest.MonkeyPatch, won: bool) -> None:
    monkeypatch.setattr(engine_module, "race", lambda *_a, **_k: Trial(100.0, 50.0 if won else 150.0, 9, won))


def served(model: nn.Module, compiler: Any, settings: Settings = SETTINGS) -> Engine:
    return Engine(TorchModel(model, settings), lambda g, w: compile_tier0(g, w, settings), lambda job: job(), settings,
                  EventLog(), compiler)


def tier(engine: Engine) -> int:
    return next(iter(engine.sites.values())).entries[0].plan.tier


def calls(engine: Engine, n: int, model: nn.Module) -> None:
    for _ in range(n):
        x = torch.randn(3, 4)
        torch.testing.assert_close(engine(x), model(x))


def test_a_hot_plan_is_exchanged_for_a_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model, compiler = nn.Linear(4, 4).eval(), Compiler()
    engine = served(model, compiler)
    calls(engine, 2, model)
    assert compiler.made == 0 and tier(engine) == 0
    calls(engine, 3, model)
    assert compiler.made == 1 and tier(engine) == 1
    stats = engine_stats(engine)
    assert stats["calls_per_tier"] == {"module": 1, "0": 2, "1": 2} and stats["events"]["deploy.faster"] == 1


@pytest.mark.parametrize(
    ("compiler", "won", "event"),
    [
        (Compiler(lambda out: out + 1), True, "refuse.mismatch"),
        (Compiler(lambda out: out.double()), True, "refuse.mismatch"),
        (Compiler(), False, "refuse.not_faster"),
    ],
)
def test_only_winners_deploy(monkeypatch: pytest.MonkeyPatch, compiler: Compiler, won: bool, event: str) -> None:
    race_says(monkeypatch, won)
    model = nn.Linear(4, 4).eval()
    engine = served(model, compiler)
    calls(engine, 8, model)
    assert tier(engine) == 0 and compiler.made == 1  # a loser is not tried again
    assert engine_stats(engine)["events"][event] == 1


def test_a_compiler_that_fails_is_a_refusal() -> None:
    def broken(*_args: Any) -> Plan:
        raise InternalError("no registers left")

    model = nn.Linear(4, 4).eval()
    engine = served(model, broken)
    calls(engine, 6, model)
    said = [d for d in engine.log.decisions if d.why.name == "NOT_COMPILED"]
    assert len(said) == 1 and said[0].evidence["what"] == "no registers left"


def test_changed_weights_fall_back_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model, compiler = nn.Linear(4, 4).eval(), Compiler()
    engine = served(model, compiler)
    calls(engine, 5, model)
    assert tier(engine) == 1
    model.weight.mul_(2)
    calls(engine, 1, model)
    assert tier(engine) == 0 and engine_stats(engine)["deopts"] == 1
    calls(engine, 4, model)
    assert tier(engine) == 1 and compiler.made == 2


def test_a_plan_that_raises_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    broken: list[bool] = []

    def twist(out: torch.Tensor) -> torch.Tensor:
        if broken:
            raise RuntimeError("a kernel failed")
        return out

    model = nn.Linear(4, 4).eval()
    engine = served(model, Compiler(twist))
    calls(engine, 5, model)
    broken.append(True)
    calls(engine, 2, model)
    assert tier(engine) == 0 and engine_stats(engine)["events"]["drop.run_failed"] == 1


def test_tiers_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    race_says(monkeypatch, won=True)
    model, compiler = nn.Linear(4, 4).eval(), Compiler()
    engine = served(model, compiler, SETTINGS.with_(tiers=0))
    calls(engine, 6, model)
    assert compiler.made == 0


def test_a_race_is_decided_by_most_rounds_and_a_margin() -> None:
    now = [0.0]

    def taking(*steps: float) -> Callable[..., None]:
        turn = iter(steps * 400)

        def run(*_args: Any) -> None:
            now[0] += next(turn)

        return run

    def outcome(old: Callable[..., None], new: Callable[..., None]) -> bool:
        return race(old, new, (), 0.5, clock=lambda: now[0]).won

    assert outcome(taking(1.0), taking(0.5))
    assert not outcome(taking(1.0), taking(0.99))
    assert not outcome(taking(1.0), taking(1.2))
    assert not outcome(taking(1.0), taking(0.1, 1.1, 1.1))  # a lucky round or two is no win
    assert race(taking(0.001), taking(0.0005), (), 0.01, clock=lambda: now[0]).rounds >= 5
