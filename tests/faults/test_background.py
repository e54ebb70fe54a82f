"""Errors in background work: each is a decision or a count, nothing is printed, and no mechanism ends because of one."""

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
from hotfuse.base import faults as faults_module
from hotfuse.base.events import Action, Why
from hotfuse.base.faults import MAX_KINDS, MAX_RESTARTS, Faults, faults, steady
from hotfuse.runtime.background import Background
from hotfuse.runtime.tierup import improve as improve_module
from hotfuse.runtime.tierup.improve import Improver
from hotfuse.runtime.tierup.skipping import all_finite

INLINE = Settings(capture="inline", hot_calls=2)


@pytest.fixture(autouse=True)
def printed(monkeypatch: pytest.MonkeyPatch) -> Generator[list[object]]:
    """What threads would print on the user's terminal: nothing may be among it when a test ends."""
    said: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: said.append(args.exc_value))
    yield said
    assert not said


def decisions(fast: hotfuse.api.Jit, why: Why) -> list[dict[str, Any]]:
    return [dict(d.evidence) | {"action": d.action} for d in fast._engine.log.decisions if d.why is why]  # pyright: ignore[reportPrivateUsage]


class Inside(nn.Module):
    """As people have them: parameters that require gradients, a buffer, tied weights, a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 12)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.randn(12))
        self.seen = 0
        self.first.register_forward_hook(self._count)

    def _count(self, *_args: object) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))) + self.shift


def test_weights_made_in_inference_mode_are_looked_at_in_threads_that_have_gradients() -> None:
    with torch.inference_mode():
        made = nn.Linear(3, 3)
    assert made.weight.requires_grad and torch.is_grad_enabled()
    assert all_finite(dict(made.named_parameters()))


@pytest.mark.parametrize("inside", [True, False])
def test_background_work_on_modules_as_people_have_them_raises_nothing(inside: bool) -> None:
    with torch.inference_mode(inside):
        model = Inside().eval()
    with torch.inference_mode(), hotfuse.jit(model, settings=Settings(hot_calls=2, compile_workers=1)) as fast:
        x = torch.randn(5, 12)
        want, until = model(x), time.monotonic() + 200
        while time.monotonic() < until and not fast.stats()["calls_per_tier"]["1"]:
            torch.testing.assert_close(fast(x), want)
            fast.wait(0.2)
            if any(d["action"] is Action.REFUSE for d in decisions(fast, Why.NOT_FASTER)):
                break
        assert fast.wait(120)
        assert fast.stats()["graph_calls"] and not decisions(fast, Why.BACKGROUND_FAILED), str(fast.explain(full=True))
        assert not fast.stats()["background_faults"]


def test_an_attempt_that_raises_is_refused_with_its_reason_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def broken(*_args: Any) -> None:
        asked.append(1)
        raise ZeroDivisionError("no such row\nand more")

    monkeypatch.setattr(improve_module, "fused", broken)
    model, x = nn.Linear(4, 4).eval(), torch.randn(3, 4)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(50):
            torch.testing.assert_close(fast(x), model(x))
        assert len(asked) == 1
        (told,) = decisions(fast, Why.BACKGROUND_FAILED)
        assert told == {"action": Action.REFUSE, "what": "tier 1", "error": "ZeroDivisionError: no such row"}
        assert fast.stats()["events"]["refuse.background_failed"] == 1
        assert "ZeroDivisionError: no such row" in str(fast.explain(full=True))


def test_a_job_outside_any_attempt_is_a_decision_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> None:
        raise RuntimeError("cannot be made native")

    monkeypatch.setattr("hotfuse.runtime.weights.model_guard.ModelGuard.harden", broken)
    monkeypatch.setattr(Improver, "consider", lambda *_a: None)
    model, x = nn.Linear(4, 4).eval(), torch.randn(3, 4)
    with torch.no_grad(), hotfuse.jit(model, settings=Settings(hot_calls=2, tiers=0)) as fast:
        until = time.monotonic() + 120
        while not (told := decisions(fast, Why.BACKGROUND_FAILED)) and time.monotonic() < until:
            torch.testing.assert_close(fast(x), model(x))
            fast.wait(0.1)
        assert told[0]["error"] == "RuntimeError: cannot be made native"
        assert fast.stats()["events"]["background_failures"] == len(told)


def test_jobs_run_without_gradients_and_whoever_waits_is_told_the_end() -> None:
    errors: list[Exception] = []
    seen: list[bool] = []
    background = Background(lambda job: job(), inline=False, failed=errors.append)
    background.start(lambda: seen.append(torch.is_grad_enabled()))
    background.start(lambda: [][0])
    assert seen == [False] and torch.is_grad_enabled()
    assert [type(e) for e in errors] == [IndexError] and background.wait(0)


def test_a_thread_that_raises_begins_anew_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults_module, "RESTART_S", 0.0)
    began: list[int] = []

    def work() -> None:
        began.append(1)
        if len(began) < 3:
            raise OSError("not now")

    thread = steady(work, "a mechanism")
    thread.start()
    thread.join(60)
    assert len(began) == 3 and faults.counts() == {"a mechanism: OSError: not now": 2}

    def never() -> None:
        raise OSError("never")

    thread = steady(never, "another")
    thread.start()
    thread.join(60)
    assert faults.counts()["another: OSError: never"] == MAX_RESTARTS
    assert faults.counts()["another, which has ended: OSError: never"] == 1


def test_kinds_of_errors_are_bounded() -> None:
    own = Faults()
    for i in range(10 * MAX_KINDS):
        own.note("here", ValueError(str(i)))
    counts = own.counts()
    assert len(counts) == MAX_KINDS + 1 and sum(counts.values()) == 10 * MAX_KINDS
