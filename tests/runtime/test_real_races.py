"""Nothing is decided beforehand but who is slower: real kernels, real rounds, a real clock, and what serves in the end.

If plans stopped winning (or losing) their races, every test here would fail. Speed is not asserted: the loser sleeps for as long as
no kernel of these models could take on however busy a machine (`tests.races`).
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from torch import nn

import hotfuse
from hotfuse.base.events import Why
from hotfuse.base.settings import Settings
from hotfuse.compile.unit import units
from hotfuse.ir.types import TensorType
from hotfuse.runtime.tierup.race import ROUNDS_HALVED
from tests.races import SLOWER_S, kernels_win, skipping_pays, slow_kernels, slow_library

MAX_S = 120.0
LONG_S = 0.1
BACKGROUND = Settings(hot_calls=3, record=False, idle=False)
INLINE = BACKGROUND.with_(capture="inline")


class Mlp(nn.Module):
    """Small, and better as a kernel or two; its own code takes its time, a graph captured from it does not."""

    def __init__(self, seconds: float = SLOWER_S) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            time.sleep(self.seconds)
        return x + self.down(F.gelu(self.up(x)))


class ReluMlp(nn.Module):
    """Nine hidden channels in ten are zero, at places of their own in every row; its own code takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 256)
        nn.init.constant_(self.up.bias, -1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            time.sleep(3 * SLOWER_S)
        return self.down(torch.relu(self.up(x)))


def wanted(model: Mlp, x: torch.Tensor) -> torch.Tensor:
    """The same in float64, without sleeping."""
    up, down = (nn.Linear(*reversed(m.weight.shape)).double() for m in (model.up, model.down))
    for to, of in ((up, model.up), (down, model.down)):
        to.load_state_dict(of.state_dict())
    return x.double() + down(F.gelu(up(x.double())))


@pytest.fixture(autouse=True)
def kernels_are_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a busy machine a kernel may lose its trial in the worker, and there would be no plan to race: only those are given."""
    kernels_win(monkeypatch)
    monkeypatch.setattr(units, "measuring", lambda _sizes: None)
    with torch.no_grad():
        yield


def decisions(fast: Any, action: str, tier: int) -> list[dict[str, Any]]:
    found = fast.explain().to_dict()["decisions"]
    return [d for d in found if d["action"] == action and d["evidence"].get("tier") == tier]


def call_until(call: Callable[[], object], done: Callable[[], bool], said: Callable[[], object]) -> None:
    until = time.monotonic() + MAX_S
    while not done():
        assert time.monotonic() < until, said()
        call()


def raced(decision: dict[str, Any]) -> tuple[float, float]:
    """What a race found, in microseconds: a written verdict has no rounds that took that long."""
    evidence = decision["evidence"]
    assert evidence["rounds"] >= ROUNDS_HALVED, evidence
    return evidence["us_before"], evidence["us_after"]


@pytest.mark.parametrize("settings", [INLINE, BACKGROUND], ids=["inline", "background"])
def test_kernels_win_against_a_library_that_is_slower(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_library(monkeypatch)
    model = Mlp().eval()
    fast = hotfuse.jit(model, settings=settings)

    def call() -> None:
        x = torch.randn(5, 32)
        torch.testing.assert_close(fast(x).double(), wanted(model, x), rtol=1e-4, atol=1e-4)

    call_until(call, lambda: bool(decisions(fast, "deploy", 1)), lambda: fast.explain(full=True))
    (won,) = decisions(fast, "deploy", 1)
    before, after = raced(won)
    assert won["why"] == Why.FASTER.value and before > SLOWER_S * 0.9e6 > after
    served = fast.stats()["calls_per_tier"]["1"]
    call()
    assert fast.stats()["calls_per_tier"]["1"] == served + 1, "it won, and does not serve"
    fast.close()


@pytest.mark.parametrize("settings", [INLINE, BACKGROUND], ids=["inline", "background"])
def test_kernels_that_are_slower_are_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than twice: what looks worse than that is kept off live calls, and has no rounds. Both take so long that no other
    program makes one of a round's calls look like the other."""
    slow_library(monkeypatch, LONG_S)
    slow_kernels(monkeypatch, 1.5 * LONG_S)
    model = Mlp(LONG_S).eval()
    fast = hotfuse.jit(model, settings=settings)
    call_until(lambda: fast(torch.randn(5, 32)), lambda: bool(decisions(fast, "refuse", 1)), lambda: fast.explain(full=True))
    (lost,) = decisions(fast, "refuse", 1)
    assert lost["why"] == Why.NOT_FASTER.value and lost["evidence"]["us_after"] > lost["evidence"]["us_before"]
    served, x = fast.stats()["calls_per_tier"]["1"], torch.randn(5, 32)  # calls may have answered rounds of the race
    torch.testing.assert_close(fast(x).double(), wanted(model, x), rtol=1e-4, atol=1e-4)
    assert not decisions(fast, "deploy", 1) and fast.stats()["calls_per_tier"]["1"] == served, "it lost, and serves"
    fast.close()


def test_a_session_deploys_what_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_library(monkeypatch)
    w = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        [onnx.numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    session = hotfuse.InferenceSession(str(tmp_path / "m.onnx"), settings=INLINE)

    def call() -> None:
        x = np.random.default_rng().standard_normal((4, 32)).astype(np.float32)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], np.tanh(x.astype(np.float64) @ w), rtol=1e-4, atol=1e-4)

    call_until(call, lambda: bool(decisions(session, "deploy", 1)), lambda: session.explain(full=True))
    before, after = raced(decisions(session, "deploy", 1)[0])
    assert before > SLOWER_S * 0.9e6 > after


def test_a_plan_for_recurring_sizes_wins_against_one_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tier 1 is the loser here: plans of graphs with open sizes sleep, those of fixed sizes do not."""
    slow_library(monkeypatch, 3 * SLOWER_S)
    slow_kernels(monkeypatch, SLOWER_S, lambda graph, _: any(
        isinstance(v.type, TensorType) and not all(isinstance(d, int) for d in v.type.shape) for v in graph.inputs
    ))  # fmt: skip
    model = Mlp().eval()
    fast = hotfuse.jit(model, settings=INLINE.with_(watch=True))
    sizes = iter([3, 4, 5, 6, *[7] * 100_000])
    call_until(lambda: fast(torch.randn(next(sizes), 32)), lambda: bool(decisions(fast, "deploy", 2)),
               lambda: fast.explain(full=True))  # fmt: skip
    before, after = raced(decisions(fast, "deploy", 2)[0])
    assert before > SLOWER_S * 0.9e6 > after
    for rows in (7, 5):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(fast(x).double(), wanted(model, x), rtol=1e-4, atol=1e-4)
    fast.close()


@pytest.mark.budget_s(10)
def test_zeros_that_a_relu_leaves_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says that there are zeros: sampled calls show them, the worker measures from which share on they are left out, and
    the plan with that side is proven and raced on live calls. Plans without such a side sleep."""
    slow_library(monkeypatch, 3 * SLOWER_S)
    skipping_pays(monkeypatch)
    slow_kernels(monkeypatch, SLOWER_S, lambda _, plan: plan.sides is None)
    model = ReluMlp().eval()
    calls = [torch.randn(64, 64) for _ in range(4)]
    assert all(0.8 < (torch.relu(model.up(x)) == 0).double().mean() < 1 for x in calls)
    up, down = (copy.deepcopy(m).double() for m in (model.up, model.down))
    fast = hotfuse.jit(model, settings=BACKGROUND.with_(watch=True))
    turns = itertools.cycle(calls)
    call_until(lambda: fast(next(turns)), lambda: bool(decisions(fast, "deploy", 2)), lambda: fast.explain(full=True))
    before, after = raced(decisions(fast, "deploy", 2)[0])
    assert before > SLOWER_S * 0.9e6 > after
    for x in (*calls, 100 * torch.randn(64, 64)):  # the last one leaves half of them
        want = down(torch.relu(up(x.double())))
        torch.testing.assert_close(fast(x).double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    assert fast.stats()["calls_per_tier"]["2"] >= len(calls)
    fast.close()
