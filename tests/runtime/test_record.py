"""What serving learned is in the profile store; trouble with the store never touches a call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hotfuse
import hotfuse.runtime.improve as improve_module
import hotfuse.runtime.record as record_module
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


def test_what_lost_is_not_tried_by_the_next_process_until_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    races: list[int] = []

    def lose(certain: bool) -> None:
        def run(*_a: object, **_k: object) -> Trial:
            races.append(1)
            return Trial(1.0, 2.0, 7, False, certain)

        monkeypatch.setattr(improve_module, "race", run)

    place = str(tmp_path / "profiles.sqlite")
    settings = Settings(hot_calls=1, profiles=place, tiers=1)
    lose(certain=False)
    serve(settings)
    lose(certain=True)
    serve(settings)
    assert len(races) == 2, "what was not settled is tried again"
    stats = serve(settings)
    assert len(races) == 2 and stats["events"]["refuse.lost_before"] == 1  # type: ignore[index]
    serve(settings.with_(objective="energy"))
    assert len(races) == 3, "something else is asked for"
    monkeypatch.setattr(record_module, "program", lambda: "another version")
    serve(settings)
    assert len(races) == 4
    with Store.open(place) as store:
        slower = [d for d in store.decisions() if d.why == "it did not measure faster on a real call"]
        assert [(d.evidence["us_before"], d.evidence["us_after"]) for d in slower] == [(1.0, 2.0)] * 3


def test_recording_can_be_switched_off(tmp_path: Path) -> None:
    place = tmp_path / "profiles.sqlite"
    stats = serve(Settings(hot_calls=1, profiles=str(place), record=False))
    assert stats["recorded"] == {"written": 0, "failed": 0} and not place.exists()


def test_a_store_that_cannot_be_used_is_said_once_and_serving_goes_on(tmp_path: Path) -> None:
    stats = serve(Settings(hot_calls=1, profiles="nosuchdb://host/name"))
    assert stats["recorded"]["failed"] == 1 and stats["calls_per_tier"]["1"] > 0  # type: ignore[index]
