"""Weights that are written behind torch's back: noticed in time, whoever serves copies of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import hotfuse
from hotfuse import InputError, Settings
from hotfuse.base.events import Action, Why
from hotfuse.machine import pages
from hotfuse.machine.copied import Copied
from hotfuse.runtime.weights.originals import Originals
from hotfuse.runtime.weights.scrubber import scrubber
from tests.races import SLOWER_S, kernels_win, raced, slow_library

INLINE = Settings(capture="inline", hot_calls=1, watch=False, weights_calls=20, weights_ms=1e9)


@pytest.fixture(autouse=True)
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    with torch.no_grad():
        yield


class Net(nn.Module):
    """As people have them: a table, tied weights, a buffer, one number, something folded, a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 48)
        self.first, self.second, self.last = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 50, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.randn(48))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one, self.two = nn.Parameter(torch.randn(20, 48)), nn.Parameter(torch.randn(30, 48))
        self.first.register_forward_hook(lambda *_a: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(torch.relu(self.first(self.table(x) + self.shift))) * self.scale
        return self.last(h) + h @ torch.cat([self.one, self.two]).t()


X = torch.randint(0, 50, (6, 9))


def hot(fast: hotfuse.api.Jit, x: torch.Tensor = X, native: bool = True) -> None:
    for _ in range(60):
        fast(x)
    assert fast.stats()["calls_per_tier"]["1"] > 0, str(fast.explain(full=True))
    assert fast.stats()["model_watch"]["native"] is native


def until_right(fast: hotfuse.api.Jit, model: nn.Module, most: int, x: torch.Tensor = X) -> int:
    """The call, of those after a change, whose answer is right; all behind it are right too."""
    want = model(x)
    late = next((i for i in range(most) if torch.allclose(fast(x), want, rtol=1e-4, atol=1e-4)), None)
    if late is None:
        raise AssertionError(f"not noticed in {most} calls: {fast.stats()['model_watch']}")
    for _ in range(60):
        torch.testing.assert_close(fast(x), want, rtol=1e-3, atol=1e-3)
    return late


def by_dlpack(p: torch.Tensor) -> None:
    torch.from_dlpack(p.detach()).mul_(1.5)


WAYS: dict[str, Callable[[Net], object]] = {
    "data": lambda m: m.first.weight.data.mul_(1.5),
    "one number of many": lambda m: m.last.weight.data[37, 11].add_(100),
    "numpy": lambda m: m.first.weight.detach().numpy().__imul__(1.5),
    "dlpack": lambda m: by_dlpack(m.one),
    "tied": lambda m: m.second.weight.data.neg_(),
    "bias": lambda m: m.second.bias.data.add_(1),
    "a buffer": lambda m: m.shift.numpy().__iadd__(1),
    "one number": lambda m: m.scale.data.fill_(3.0),
    "part of what is folded": lambda m: m.two.data[29, 47].add_(100),
}


IN_PLACE = ("bias", "a buffer")
"""What kernels read where it lies: right at once, and nothing to notice."""


@pytest.mark.parametrize("way", list(WAYS))
def test_a_write_that_leaves_no_trace_is_noticed_within_the_calls_allowed(way: str) -> None:
    model = Net().eval()
    with hotfuse.jit(model, settings=INLINE) as fast:
        hot(fast)
        versions = [p._version for p in (*model.parameters(), *model.buffers())]
        WAYS[way](model)
        assert [p._version for p in (*model.parameters(), *model.buffers())] == versions
        late = until_right(fast, model, INLINE.weights_calls + 1)
        decided = [d for d in fast._engine.log.decisions if d.why is Why.WEIGHTS_WRITTEN_UNSEEN]
        if way in IN_PLACE:
            assert late == 0 and not decided
        else:
            assert [d.action for d in decided] == [Action.NOTICE]
            assert 0 < decided[0].evidence["at_most_calls"] <= INLINE.weights_calls
            assert fast.stats()["model_watch"]["memory"]["noticed_late"] == 1
        assert fast.stats()["calls_per_tier"]["1"] > 60 and fast._engine.plans.originals.bytes, "compiled anew, and compared anew"


@pytest.mark.parametrize("native", [True, False])
def test_tensors_of_inference_mode_have_no_version_and_are_noticed_all_the_same(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr("hotfuse.native.model_guard.refused", lambda _noted: "not here")
    with torch.inference_mode():
        model = Net().eval()
        with hotfuse.jit(model, settings=INLINE) as fast:
            hot(fast, native=native)
            model.first.weight.mul_(1.5)
            until_right(fast, model, INLINE.weights_calls + 1)


def test_memory_shared_with_others_is_noticed() -> None:
    model = Net().eval()
    model.share_memory()
    with hotfuse.jit(model, settings=INLINE) as fast:
        hot(fast)
        model.last.weight.data[3, 3] = 40.0
        until_right(fast, model, INLINE.weights_calls + 1)


def test_checked_weights_are_right_in_the_very_next_call() -> None:
    model = Net().eval()
    with hotfuse.jit(model, weights="checked", settings=INLINE) as fast:
        for change in WAYS.values():
            hot(fast)
            change(model)
            assert until_right(fast, model, 1) == 0


def test_frozen_weights_are_not_compared_and_what_torch_shows_is_noticed() -> None:
    model = Net().eval()
    with hotfuse.jit(model, weights="frozen", settings=INLINE) as fast:
        hot(fast)
        old = fast(X)
        model.last.weight.data.mul_(2)
        for _ in range(3 * INLINE.weights_calls):
            assert torch.equal(fast(X), old), "the promise was broken by the user, and nobody looks"
        assert not fast.stats()["model_watch"]["memory"]["bytes"]
        model.last.weight.mul_(1)
        assert until_right(fast, model, 1) == 0


def test_a_call_long_after_the_last_pass_compares_everything_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "join", lambda _model: None)
    model = Net().eval()
    with hotfuse.jit(model, settings=INLINE.with_(weights_calls=10_000, weights_ms=0.0)) as fast:
        hot(fast)
        model.first.weight.data.mul_(1.5)
        time.sleep(0.05)  # the clock that calls read is coarse
        assert until_right(fast, model, 1) == 0
        assert fast.stats()["model_watch"]["memory"]["passes_by_calls"] > 0


def test_the_thread_notices_where_no_call_comes() -> None:
    model = Net().eval()
    with hotfuse.jit(model, settings=INLINE.with_(weights_calls=1_000_000, weights_ms=200.0)) as fast:
        hot(fast)
        model.one.data[3, 5] = 7.0
        until = time.monotonic() + 120
        while time.monotonic() < until and not fast.stats()["model_watch"]["memory"]["noticed_late"]:
            time.sleep(0.01)
        assert fast.stats()["model_watch"]["memory"]["noticed_late"] == 1
        assert until_right(fast, model, 1) == 0


def test_the_thread_compares_on_a_clock_and_only_where_calls_did_not() -> None:
    now = [0]
    own = Originals(Settings(weights_ms=1000.0), clock=lambda: now[0])
    w = torch.randn(1000)
    taken = own.take([w])
    assert own.still(taken, [w])
    own.compare([w])
    room = Copied()
    assert not own.due() and own.scrub(room, lambda: None) is None and not own.by_thread
    now[0] = 600_000_000
    assert own.due() and own.scrub(room, lambda: None) is None and own.by_thread == 1 and not own.due()
    w[999] += 1
    assert not own.still(taken, [w])
    now[0] = 1_200_000_000
    late = own.scrub(room, lambda: None)
    assert late is not None and late.ms == 600.0
    own.forget()
    assert not own.due() and not own.bytes and not own.still(taken, [w])
    room.close()


def test_a_write_while_a_plan_is_made_keeps_it_from_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().eval()
    with hotfuse.jit(model, settings=INLINE) as fast:

        def sleeps() -> tuple[float, float]:
            if not held:
                model.first.weight.data.mul_(3)  # the plan was made and proven with others
            return SLOWER_S, 0.0

        held = raced(monkeypatch, sleeps)
        for _ in range(80):
            want, before = model(X), len(held)
            got = fast(X)
            assert before != len(held) or torch.allclose(got, want, rtol=1e-3, atol=1e-3)
        refused = [d for d in fast._engine.log.decisions if d.action is Action.REFUSE and d.why is Why.WEIGHTS_CHANGED]
        assert refused and len(held) >= 2 and fast.stats()["calls_per_tier"]["1"] > 0


def test_weights_that_are_read_in_place_are_not_compared_and_are_right_at_once() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(3000, 48), nn.Linear(48, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.table(x)))

    model = Lookup().eval()
    with hotfuse.jit(model, settings=INLINE) as fast:
        hot(fast)
        compared = fast.stats()["model_watch"]["memory"]["bytes"]
        assert model.out.weight.nbytes <= compared < model.table.weight.nbytes
        model.table.weight.data.mul_(-1)
        assert until_right(fast, model, 1) == 0
        model.out.weight.data.mul_(-1)
        assert until_right(fast, model, INLINE.weights_calls + 1) >= 0


def test_weights_from_a_file_nobody_can_write_are_not_compared(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 48])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 48])],
        [numpy_helper.from_array(rng.standard_normal((48, 48)).astype(np.float32), "w")],
    )  # fmt: skip
    file = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), file)
    session = hotfuse.InferenceSession(str(file), settings=INLINE)
    for _ in range(40):
        session.run(None, {"x": rng.standard_normal((4, 48)).astype(np.float32)})
    assert not session._engine.plans.originals.bytes


def test_released_weights_are_noticed_and_stay_in_their_file(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768)).eval()
    settings = INLINE.with_(release_weights=True, cache_dir=tmp_path, weights_ms=200.0)
    with hotfuse.jit(model, settings=settings) as fast:
        x = torch.randn(4, 768)
        hot(fast, x)
        plans = fast._engine.plans
        if plans.released is None or not plans.released.bytes:
            pytest.skip("nothing can be released here")
        ranges = plans.released.ranges
        room = Copied()
        assert plans.originals.scrub(room, lambda: None) is None
        assert pages.resident(ranges) < plans.released.bytes // 2, "comparing brings no pages back"
        model[2].weight.data[400, 400] += 50
        until = time.monotonic() + 120
        while time.monotonic() < until and not fast.stats()["model_watch"]["memory"]["noticed_late"]:
            time.sleep(0.01)
        assert until_right(fast, model, 1, x) == 0
        room.close()


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(InputError, match="checked"):
        hotfuse.jit(nn.Linear(2, 2), weights="always")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="release_weights"):
        hotfuse.jit(nn.Linear(2, 2), weights="checked", settings=INLINE.with_(release_weights=True))


def test_a_small_model_of_inference_tensors_is_right_in_the_next_call() -> None:
    """They have no version counter: neither `load_state_dict` nor an in-place operator shows."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
        x = torch.randn(4, 24)
        with hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2)) as fast:
            for factor in (1.5, -2.0, 0.5):
                for _ in range(12):
                    fast(x)
                assert fast._engine.plans.originals.bytes > 0, "else no plan has copies, and nothing is tested"
                model.load_state_dict({k: v * factor for k, v in model.state_dict().items()})
                torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
                for _ in range(12):
                    fast(x)
                model[0].weight.add_(0.1)
                torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
