"""Models whose calls change their own buffers: as eager after every call, in plans, one call after another (decision 201)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.runtime import own_state
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.samples import snapshot
from hotfuse.runtime.serve.effects import Before

D = 8


class _Layer(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        for name, value in buffers.items():
            self.register_buffer(name, value)


class Counts(_Layer):
    n: torch.Tensor

    def __init__(self) -> None:
        super().__init__(n=torch.zeros((), dtype=torch.int64), scale=torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += x.shape[0]
        return self.a(x) * self.scale * self.n


class Averages(_Layer):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__(mean=torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.a(x - self.mean)


class Caches(_Layer):
    keys: torch.Tensor
    at: torch.Tensor

    def __init__(self) -> None:
        super().__init__(keys=torch.zeros(16, D), at=torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(0, self.at, self.a(x[:1]))
        self.at.add_(1).remainder_(16)
        return (self.b(x) @ self.keys.t()).softmax(-1) @ self.keys


class Recurs(_Layer):
    h: torch.Tensor

    def __init__(self) -> None:
        super().__init__(h=torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h.copy_(torch.tanh(self.a(x).mean(0) + self.b(self.h)))
        return self.h


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU(), nn.Linear(D, D), nn.BatchNorm1d(D, momentum=0.3)).train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "counts": Counts, "averages": Averages, "caches": Caches, "recurs": Recurs, "batch norms": _norms,
}  # fmt: skip


def served(model: nn.Module, **settings: Any) -> hotfuse.Jit:
    return hotfuse.jit(model, settings=Settings(capture="inline", record=False, **settings))


def in_plans(fast: hotfuse.Jit) -> int:
    counts = fast.stats()["calls_per_tier"]
    return sum(counts[tier] for tier in ("0", "1", "2"))


def same_state(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))


@pytest.mark.parametrize("tiers", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_what_calls_change_is_changed_by_plans(name: str, tiers: int) -> None:
    model = MODELS[name]()
    eager = copy.deepcopy(model)
    fast = served(model, tiers=tiers)
    with torch.no_grad():
        for i in range(40):
            x = torch.randn(2 + i % 3, D)
            torch.testing.assert_close(fast(x), eager(x))
            same_state(model, eager)
    assert in_plans(fast) > 20
    assert "is an argument and a result of the graph" in str(fast.explain(full=True))
    assert fast.stats()["calls"] == 40


def test_a_result_that_is_the_buffer_is_the_buffer() -> None:
    model = Recurs()
    fast = served(model, tiers=0)
    with torch.no_grad():
        for _ in range(12):
            assert fast(torch.randn(2, D)) is model.h
    assert in_plans(fast)


def test_a_result_in_a_buffers_memory_stays_with_the_models_own_code() -> None:
    class Shows(Recurs):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:3]

    model = Shows()
    fast = served(model, tiers=0)
    with torch.no_grad():
        shown = [fast(torch.randn(2, D)) for _ in range(12)]
    assert all(torch.equal(s, model.h[:3]) for s in shown)  # all of them show what the last call left
    assert not in_plans(fast) and "shares memory" in str(fast.explain(full=True))


def test_what_the_program_does_to_the_state_and_the_model_counts() -> None:
    model = nn.Sequential(Counts(), Averages())
    eager = copy.deepcopy(model)
    fast = served(model)

    def both(change: Callable[[Any], None]) -> None:
        for m in (model, eager):
            change(m)
        before = in_plans(fast)
        with torch.no_grad():
            for _ in range(12):
                x = torch.randn(3, D)
                torch.testing.assert_close(fast(x), eager(x))
                same_state(model, eager)
        assert in_plans(fast) > before

    both(lambda m: None)
    both(lambda m: m[0].n.zero_())
    both(lambda m: setattr(m[1], "mean", torch.ones(D)))
    both(lambda m: m[0].scale.mul_(2))
    both(lambda m: m.load_state_dict({k: v * 0 + 1 for k, v in m.state_dict().items()}))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        new = Counts()
    both(lambda m: m.__setitem__(0, copy.deepcopy(new)))


def test_threads_that_call_at_once_get_the_models_own_code() -> None:
    model = Counts()
    fast = served(model, tiers=0)
    with torch.no_grad():
        for _ in range(12):
            fast(torch.randn(1, D))
        assert in_plans(fast)
        turn = fast._serving._turn  # pyright: ignore[reportPrivateUsage]
        turn.acquire()  # as a call under way has it
        other = threading.Thread(target=lambda: fast(torch.randn(1, D)))
        other.start()
        other.join(0.2)
        assert other.is_alive()  # what is under way writes its results first
        turn.release()
        other.join()
        before = in_plans(fast)
        for _ in range(4):
            fast(torch.randn(1, D))
    assert int(model.n) == 17 and in_plans(fast) == before
    assert "several threads call it at once" in str(fast.explain(full=True))


def test_gradients_are_the_models_own() -> None:
    model = Averages()
    eager = copy.deepcopy(model)
    fast = served(model, tiers=0)
    with torch.no_grad():
        for _ in range(10):
            x = torch.randn(3, D)
            torch.testing.assert_close(fast(x), eager(x))
    for _ in range(4):
        x = torch.randn(3, D)
        grads = [torch.autograd.grad(call(x).sum(), m.a.weight)[0] for call, m in ((fast, model), (eager, eager))]
        torch.testing.assert_close(*grads)
        same_state(model, eager)


def test_a_call_that_raises_leaves_what_eager_leaves() -> None:
    model = Counts()
    eager = copy.deepcopy(model)
    fast = served(model, tiers=0)
    with torch.no_grad():
        for i in range(20):
            x = torch.randn(3, D if i % 5 else D + 1)
            for call in (fast, eager):
                if i % 5:
                    call(x)
                else:
                    with pytest.raises(RuntimeError):
                        call(x)
            same_state(model, eager)


def test_copies_have_state_of_their_own() -> None:
    model = Counts()
    fast = served(model, tiers=0)
    with torch.no_grad():
        for _ in range(8):
            fast(torch.randn(1, D))
        other = copy.deepcopy(fast)
        other(torch.randn(1, D))
    assert int(model.n) == 8 and int(other.n) == 9


@pytest.mark.parametrize("t", [
    torch.randn(6)[::2], torch.randn(4, 4).t(), torch.randn(3, 1).expand(3, 5), torch.tensor(3.0), torch.arange(5)[1:],
    torch.randn(4, dtype=torch.complex64).conj(), torch.tensor([True, False]),
    torch.randn(8).bfloat16()[1::3], torch.randn(3, dtype=torch.complex64).conj().imag, torch.randn(2, 3, requires_grad=True),
    torch.tensor([float("nan"), 1.0]),
], ids=lambda t: f"{t.dtype}{tuple(t.shape)}{t.stride()}")  # fmt: skip
def test_what_a_call_left_in_any_tensor_is_compared_bit_by_bit(t: torch.Tensor) -> None:
    """A batch norm writes its statistics uncounted, so captures compare what small arguments hold, whatever their layout."""
    before, was = Before((t,), {}, [t]), snapshot(t)
    assert not before.written([was])
    first = t.data.as_strided((1,), (1,))  # through `data`, writes are not counted
    first.logical_not_() if t.dtype is torch.bool else first.fill_(77)
    (written,) = before.written([was]).values()
    assert torch.equal(written, t.detach())


@pytest.mark.parametrize("name", MODELS)
def test_calls_without_gradients_are_served_behind_any_number_with_them(name: str) -> None:
    """A program that tries its model before it serves has gradients enabled, as torch has by default."""
    model = MODELS[name]()
    eager = copy.deepcopy(model)
    fast = served(model, tiers=0)
    for grad in (True, False, True):
        before = in_plans(fast)
        with torch.set_grad_enabled(grad):
            for _ in range(24):
                x = torch.randn(3, D)
                torch.testing.assert_close(fast(x), eager(x))
                same_state(model, eager)
        if any(b.requires_grad for b in model.buffers()):
            return  # what a call wrote there hangs on it
        assert bool(in_plans(fast) - before) is not grad, str(fast.explain(full=True))
        assert ("under torch.no_grad()" in str(fast.explain())) or before or not grad
    fast.close()


def test_calls_that_rest_are_not_taken_apart_beside_background_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first plan takes seconds in which a job waits, and on a team that leaves cores free calls need nothing of it."""
    model = Counts()
    eager, fast = copy.deepcopy(model), served(model, tiers=0)
    taken: list[int] = []
    real = Engine.serve

    def also(self: Engine, *args: Any, **how: Any) -> Any:
        taken.append(1)
        return real(self, *args, **how)

    with torch.no_grad():
        for _ in range(8):
            x = torch.randn(3, D)
            torch.testing.assert_close(fast(x), eager(x))
        (site,) = fast._engine.sites.values()
        fast._serving._site, site.resting = site, 10
        monkeypatch.setattr(Engine, "serve", also)
        monkeypatch.setattr(own_state.team_size, "has_every_core", lambda: False)
        monkeypatch.setattr(own_state, "is_compiling", lambda: taken.append(2))  # asked where calls do not rest
        with background_priority():
            for _ in range(10):
                torch.testing.assert_close(fast(x), eager(x))
        assert not taken and site.resting == 0
        same_state(model, eager)
    fast.close()
