"""Weights that change under calls on several threads: no call that begins after the change may see the old ones."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange
from tests.races import new_plans_win
from tests.runtime.test_tiers import Compiler, served, tier


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def hot(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Linear, Any]:
    """A model that serves in a plan with copies of its weights, as packed kernels do."""
    new_plans_win(monkeypatch)
    model = nn.Linear(4, 4).eval()
    engine = served(model, Compiler())
    for _ in range(8):
        engine(torch.randn(3, 4))
    assert tier(engine) == 1
    return model, engine


def test_a_change_of_values_is_reported_until_it_is_accepted() -> None:
    model = nn.Linear(2, 2)
    watch = ModelGuard([model], list(model.parameters()))
    assert watch.check() is WeightChange.NONE
    model.weight.mul_(2)
    assert watch.check() is WeightChange.VALUES and watch.check() is WeightChange.VALUES and not watch.same_now()
    observed = watch.observe()
    model.bias.add_(1)
    watch.accept(observed)
    assert watch.check() is WeightChange.VALUES  # the second write came after the observation
    watch.accept(watch.observe())
    assert watch.check() is WeightChange.NONE


def test_a_call_beside_the_one_that_found_the_change_is_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = hot(monkeypatch)
    x = torch.randn(3, 4)
    demote, results, beside = engine.plans.demote, list[torch.Tensor](), list[threading.Thread]()

    def slow(*args: Any) -> None:
        """Another thread calls after the change was found and before the plans are exchanged."""

        def call() -> None:
            with torch.no_grad():
                results.append(engine(x))

        if not beside:
            beside.append(threading.Thread(target=call))
            beside[0].start()
            beside[0].join(0.3)
        demote(*args)

    monkeypatch.setattr(engine.plans, "demote", slow)
    model.weight.mul_(2)
    torch.testing.assert_close(engine(x), model(x))
    beside[0].join(60)
    torch.testing.assert_close(results[0], model(x))
    assert engine.counts()["deopts"] >= 1


def test_a_capture_that_lands_after_a_change_leaves_no_stale_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights change between a call that asks for a capture and the capture, which takes the new ones as given."""
    model, engine = hot(monkeypatch)
    capture = engine.model.capture

    def late(*args: Any) -> Any:
        model.weight.mul_(2)
        return capture(*args)

    monkeypatch.setattr(engine.model, "capture", late)
    engine(torch.zeros(2, 3, 4))  # another rank, so it is captured at once; zeros, so that the change does not show in it
    assert len(next(iter(engine.sites.values())).entries) == 2
    x = torch.randn(3, 4)
    torch.testing.assert_close(engine(x), model(x))


def test_threads_see_each_change_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that begin a call after a change has been made must see it; changes and calls never overlap here.

    Taking plans away is made slow, so that some readers always begin between the moment one of them finds the change and the
    moment the stale plan is gone.
    """
    model, engine = hot(monkeypatch)
    wrong: list[float] = []
    gate = threading.Barrier(5)
    demote = engine.plans.demote

    def slow(*args: Any) -> None:
        time.sleep(0.005)
        demote(*args)

    monkeypatch.setattr(engine.plans, "demote", slow)

    def serve(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(30):
                gate.wait(60)  # the weights are new
                for _ in range(4):
                    x = torch.randn(3, 4, generator=generator)
                    error = float((engine(x) - model(x)).abs().max())
                    if error > 1e-4:
                        wrong.append(error)
                gate.wait(60)  # and may change again

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for n in range(30):
        for _ in range(20):  # nobody else calls now: there is a plan to become stale
            engine(torch.randn(3, 4))
        assert tier(engine) == 1
        model.weight.mul_(-1.01 if n % 2 else -0.99)
        gate.wait(60)
        gate.wait(60)
    for t in threads:
        t.join(60)
    assert not wrong and engine.counts()["deopts"] >= 30
