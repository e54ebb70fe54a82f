"""What calls that wait for a capture do for it: they leave a core to the worker, and show how hot the plan will be."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.runtime import capturing


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 16)).eval()


@torch.inference_mode()
def test_a_plan_that_calls_waited_for_is_improved_without_another_call() -> None:
    model, x = module(), torch.randn(4, 32)
    with hotfuse.jit(model) as fast:
        fast(x)
        for _ in range(5000):  # all of them before the capture is done, or nearly so
            fast(x)
            if fast.stats()["captures"] and fast.stats()["plans"]:
                break
        until = time.monotonic() + 120
        tried: list[dict[str, object]] = []
        while not tried and time.monotonic() < until:
            fast.wait(30)
            found = fast.explain().to_dict()["decisions"]
            tried = [d for d in found if d["action"] in ("deploy", "refuse") and d["evidence"].get("tier") == 1]
            if not fast.stats()["plans"]:  # calls ended before the capture did
                fast(x)
        assert tried
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("cores", "threads", "spared"), [(4, 4, 1), (4, 5, 1), (8, 4, 0), (2, 2, 0)])
def test_a_team_on_every_core_leaves_one_to_the_worker(
    cores: int, threads: int, spared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "usable_cores", lambda: cores)
    seen: list[int] = []

    def own(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x * 2 + 1

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), hotfuse.jit(own) as fast:
            go_on = threading.Event()
            monkeypatch.setattr(fast._engine.model, "prepare", lambda: go_on.wait(120))  # pyright: ignore[reportPrivateUsage]
            fast(torch.randn(4))
            fast(torch.randn(4))
            assert torch.get_num_threads() == threads
            go_on.set()
            assert fast.wait(120)
            assert fast._engine._capturer._under_way == 0  # pyright: ignore[reportPrivateUsage]
        assert seen[:2] == [threads, threads - spared]
    finally:
        torch.set_num_threads(before)
