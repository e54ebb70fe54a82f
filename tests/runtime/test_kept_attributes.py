"""Models that keep tensors and counts in attributes from call to call: plans compute what eager leaves there."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.native import model_guard
from hotfuse.runtime.weights.model_guard import ModelGuard, WeightChange

INLINE = Settings(capture="inline", hot_calls=2, watch=False)


class Recurs(nn.Module):
    """A state that begins with nothing, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.state: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            self.state = x.new_zeros(x.shape[0], 8)
        self.state = state = self.cell(x, self.state)
        self.calls += 1
        return state * self.calls


class Pair(nn.Module):
    """A tuple, whose first tensor is the result."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.state = (torch.zeros(2, 8), torch.zeros(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.cell(x, self.state)
        return self.state[0]


class Averages(nn.Module):
    """A buffer that is bound anew beside one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.average = self.average * 0.9 + y.mean(0) * 0.1
        self.count += 1
        return y - self.average


class Notes(nn.Module):
    """A buffer that is bound anew, and that no result shows: torch's export tells of that in the outermost module only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = x.mean(0)
        return self.inner(x)


class Streams(nn.Module):
    """What the last block of samples ended with is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 2, 3)
        self.register_buffer("state", torch.zeros(1, 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.state, x.view(1, 1, -1)], -1)
        self.state = x[..., -2:].clone()
        return self.inner(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.weights: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weights = torch.softmax(self.inner(x), -1)
        return self.weights * x


class Shows(nn.Module):
    """What inner modules computed is kept for whoever looks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def kept(model: nn.Module) -> list[Any]:
    names = ("state", "calls", "average", "count", "weights")
    return [getattr(m, n) for m in model.modules() for n in names if hasattr(m, n)]


def pair(make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    model = make().eval()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("make", [Recurs, Pair, Averages, Notes, Streams, Shows])
def test_calls_leave_what_eager_leaves(make: Callable[[], nn.Module]) -> None:
    model, eager = pair(make)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for k in range(16):
            x = torch.randn(2, 8)
            got, want = fast(x), eager(x)
            torch.testing.assert_close(got, want)
            if k % 5 == 4 and make is Pair:  # the result is what is kept
                got.add_(1)
                want.add_(1)
            torch.testing.assert_close(kept(model), kept(eager))
            assert fast.wait(60)
        assert fast.stats()["graph_calls"] > 4


def test_what_the_program_sets_is_what_the_next_call_begins_with() -> None:
    model, eager = pair(Recurs)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for k in range(30):
            if k == 10:
                model.state = eager.state = None
            if k == 16:
                model.state, eager.state = torch.ones(3, 8), torch.ones(3, 8)
            if k == 20:
                model.cell.weight_hh.mul_(2)
                eager.cell.weight_hh.mul_(2)
            if k == 25:
                model.calls = eager.calls = 3
            x = torch.randn(3 if k >= 16 else 2, 8)
            torch.testing.assert_close(fast(x), eager(x))
            torch.testing.assert_close(kept(model), kept(eager))
            assert fast.wait(60)
        assert fast.stats()["graph_calls"] > 10
        del model.state
        with pytest.raises(AttributeError):
            fast(torch.randn(3, 8))


def test_a_call_that_raises_leaves_what_eager_leaves_and_threads_get_the_own_code() -> None:
    model, eager = pair(Recurs)
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(8):
            x = torch.randn(2, 8)
            torch.testing.assert_close(fast(x), eager(x))
        for m in (fast, eager):
            with pytest.raises(RuntimeError):
                m(torch.randn(2, 9))
        torch.testing.assert_close(kept(model), kept(eager))

        def call() -> None:
            with torch.no_grad():
                for _ in range(20):
                    fast(torch.randn(2, 8))

        threads = [threading.Thread(target=call) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert model.calls >= 20


def test_in_the_background() -> None:
    """A capture without state that was still under way when the state was found says nothing new."""
    model, eager = pair(Recurs)
    with torch.no_grad(), hotfuse.jit(model, settings=Settings(hot_calls=2, watch=False, idle=False, record=False)) as fast:
        for _ in range(40):
            x = torch.randn(2, 8)
            torch.testing.assert_close(fast(x), eager(x))
            assert fast.wait(60)
        torch.testing.assert_close(kept(model), kept(eager))
        assert fast.explain().to_dict()["sites"][-1]["plans"], str(fast.explain(full=True))


@pytest.mark.skipif(not model_guard.tags([{}]), reason="dicts have no tags here")
def test_a_guard_sweeps_natively_beside_what_every_call_sets() -> None:
    model: Any = Recurs()
    guard = ModelGuard(list(model.modules()), list(model.parameters()), (), [(model.__dict__, "state")])
    guard.harden()
    for k in range(4):
        model.state = torch.ones(k)
        assert guard.unchanged()
    model.calls = 5
    assert not guard.unchanged() and guard.check() is WeightChange.MODEL
    model.calls = 0
    assert guard.check() is WeightChange.NONE and guard.unchanged()
    model.more = 1
    assert not guard.unchanged() and guard.check() is WeightChange.MODEL
