"""A back end that is nothing but a folder and a row serves a model through the ordinary engine: the tile interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotfuse
from hotfuse.backends.interp import backend as interpreting
from hotfuse.base.settings import Settings
from tests.races import new_plans_win

SERVED = Settings(capture="inline", hot_calls=1, backend="interp", tiers=1, record=False)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.relu(self.up(self.norm(x))), -1)


def backends(fast: Any) -> list[str]:
    plans = [p for s in fast.explain().to_dict()["sites"] for p in s["plans"] if p["tier"] == 1]
    return [part["backend"] for p in plans for part in p["partitions"]]


def served(model: nn.Module, calls: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """The model after these calls, each right; and how many kernels were interpreted for the last one."""
    new_plans_win(monkeypatch, 0.2)  # an interpreter wins no other race
    counted, run = list[str](), interpreting.interpreter.run

    def noted(kernel: Any, *args: Any) -> None:
        counted.append(kernel.name)
        run(kernel, *args)

    monkeypatch.setattr(interpreting.interpreter, "run", noted)
    fast = hotfuse.jit(model, settings=SERVED)
    for x in calls:
        counted.clear()
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
        assert fast.wait(120)
    return fast, len(counted)


def test_a_model_is_served_by_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    model = Head().eval()
    calls = [*(torch.randn(rows, 6) for rows in (2, 3, 2, 4)), torch.randn(6, 3).t(), torch.randn(3, 6)]
    fast, interpreted = served(model, calls, monkeypatch)
    with fast:
        assert set(backends(fast)) == {"interp"} and interpreted > 0
        assert fast.stats()["calls_per_tier"]["1"] > 0
        assert fast(torch.full((2, 6), torch.nan)).isnan().all()
        plans = [p for s in fast.explain().to_dict()["sites"] for p in s["plans"]]
        assert any("enters kernels one by one" in n for p in plans for n in p["notes"])


def test_a_name_that_nobody_has_is_refused_with_the_names_there_are() -> None:
    from hotfuse.backends import registry
    from hotfuse.base.errors import InputError

    with pytest.raises(InputError, match="no back end 'abacus'") as e:
        registry.kernels("abacus")
    assert "llvm" in e.value.hint and "interp" in e.value.hint
