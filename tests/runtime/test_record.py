"""What serving learned is in the profile store; trouble with the store never touches a call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hotfuse
import hotfuse.runtime.improve as improve_module
from hotfuse import Settings
from hotfuse.profile.store import Store
from hotfuse.runtime.race import Trial


@pytest.fixture(autouse=True)
def new_plans_always_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improve_module, "race", lambda *_a, **_k: Trial(2.0, 1.0, 7, True))


def serve(settings: Settings) -> dict[str, object]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    with torch.no_grad(), hotfuse.jit(model, settings=settings) as fast:
        for _ in range(3):
            for _ in range(8):
                x = torch.randn(4, 8)
                torch.testing.assert_close(fast(x), model(x))
            assert fast.wait(120)
        return fast.stats()


def test_races_are_kept_with_both_times(tmp_path: Path) -> None:
    place = tmp_path / "profiles.sqlite"
    stats = serve(Settings(hot_calls=1, profiles=str(place)))
    assert stats["recorded"] == {"written": 1, "failed": 0}
    with Store.open(place) as store:
        (graph,) = store.graphs()
        (decision,) = store.decisions(graph)
    assert decision.action == "deploy" and decision.evidence["us_before"] == 2.0 and decision.measured_ns == 1000.0


def test_recording_can_be_switched_off(tmp_path: Path) -> None:
    place = tmp_path / "profiles.sqlite"
    stats = serve(Settings(hot_calls=1, profiles=str(place), record=False))
    assert stats["recorded"] == {"written": 0, "failed": 0} and not place.exists()


def test_a_store_that_cannot_be_used_is_said_once_and_serving_goes_on(tmp_path: Path) -> None:
    stats = serve(Settings(hot_calls=1, profiles="nosuchdb://host/name"))
    assert stats["recorded"]["failed"] == 1 and stats["calls_per_tier"]["1"] > 0  # type: ignore[index]
