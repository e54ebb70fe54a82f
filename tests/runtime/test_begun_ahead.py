"""Calls that begin before anybody has looked whether the model is still the same, as replays on a device do."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.machine.heap import heap
from hotfuse.pipeline.device_passes import memory_of
from hotfuse.runtime.whole_calls import WholeCalls

CALLS = 400


class Served:
    """A model with a plan of tier 1 that replays: what it computes is tier 0's, from memory of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        self.fast = hotfuse.jit(self.model, settings=Settings(tiers=0, record=False, idle=False, watch=False))
        self.begun = 0
        self.raises = False
        self.fast(torch.randn(3, 4))
        assert self.fast.wait(60)
        (self.site,) = self.fast._engine.sites.values()
        (self.entry,) = self.site.entries
        self.plain = self.entry.plan
        self.entry.plan = replace(self.plain, tier=1, ahead=self.ahead, holds=memory_of(self.plain.weights))
        # blocks of calls in the own code, which begin where an audit is in doubt, would decide by time how many calls begin ahead
        self.entry.whole = WholeCalls(self.entry.plan, ended=True)

    def ahead(self, *inputs: torch.Tensor) -> tuple[Any, ...] | None:
        self.begun += 1
        if self.raises:
            raise RuntimeError("a replay failed")
        return self.plain.run(*inputs) if inputs[0].shape[0] == 3 else None

    def call(self, rows: int = 3) -> None:
        x = torch.randn(rows, 4)
        assert torch.equal(self.fast(x), self.model(x))


@pytest.fixture
def served() -> Iterator[Served]:
    with torch.no_grad():
        made = Served()
        with made.fast:
            yield made


def until_begun(served: Served) -> None:
    """Calls that are looked at go the ordinary way."""
    for _ in range(CALLS):
        served.call()
        if served.begun:
            return
    raise AssertionError(str(served.fast.explain(full=True)))


def test_calls_are_counted_and_looked_at_as_ever(served: Served) -> None:
    for _ in range(CALLS):
        served.call()
    counts = served.fast.stats()
    assert served.begun > CALLS // 2
    assert served.entry.calls == CALLS
    assert counts["calls_per_tier"]["1"] + counts["calls_per_tier"]["module"] == CALLS + 1
    assert counts["looked_at"] > 0 and "begun_in_vain" not in counts["events"]


def test_a_kind_that_is_not_recorded_goes_the_ordinary_way(served: Served) -> None:
    until_begun(served)
    for _ in range(20):
        served.call(1)
        served.call(0)


def test_gradients_go_the_ordinary_way(served: Served) -> None:
    until_begun(served)
    before = served.begun
    with torch.enable_grad():
        for _ in range(10):
            assert served.fast(torch.randn(3, 4)).requires_grad
    assert served.begun == before


def test_a_replay_that_raises_is_answered_the_ordinary_way(served: Served) -> None:
    until_begun(served)
    served.raises = True
    for _ in range(10):
        served.call()
    assert served.begun > 1


@pytest.mark.parametrize("change", ["written", "exchanged", "another part"])
def test_what_was_begun_with_another_model_is_dropped(served: Served, change: str) -> None:
    until_begun(served)
    while served.entry.calls + 1 >= served.entry.next_look:
        served.call()
    first: Any = served.model[0]
    if change == "written":
        first.weight.mul_(-2.0)
    elif change == "exchanged":
        first.weight.data = torch.randn(4, 4)
    else:
        served.model[1] = nn.Tanh()
    served.call()
    assert served.fast.stats()["events"]["begun_in_vain"] == 1
    for _ in range(20):
        served.call()


def test_memory_of_weights_is_held_for_replays_and_let_go_when_nobody_calls(served: Served) -> None:
    until_begun(served)
    first: Any = served.model[0]
    storage = first.weight.untyped_storage()
    held, address = weakref.ref(storage), storage.data_ptr()
    first.weight.data = torch.randn(4, 4)
    assert any(s.data_ptr() == address for s in served.entry.plan.holds)
    del storage
    heap.when_idle()
    assert not served.entry.plan.holds
    until = time.monotonic() + 20
    while held() is not None and time.monotonic() < until:  # old plans are freed by a thread of its own
        gc.collect()
        time.sleep(0.02)
    assert held() is None
    served.call()
