"""What serving learned is in the profile store; trouble with the store never touches a call."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hotfuse
import hotfuse.runtime.observe.record as record_module
from hotfuse import Settings
from hotfuse.base import clock
from hotfuse.base.events import Action, EventLog, Why
from hotfuse.profile.store import Store
from hotfuse.runtime.observe.record import Recorder
from tests.races import SLOWER_S, Held, new_plans_win, nobody_wins, raced

INLINE_TIER0 = Settings(capture="inline", tiers=0, record=False)


@pytest.fixture(autouse=True)
def new_plans_always_win(monkeypatch: pytest.MonkeyPatch) -> None:
    new_plans_win(monkeypatch)


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
    before, after = decision.evidence["us_before"], decision.evidence["us_after"]
    assert decision.action == "deploy" and isinstance(before, float) and before > SLOWER_S * 0.9e6, "what lost has slept"
    assert decision.measured_ns == pytest.approx(1000.0 * float(str(after)), rel=0.1) and decision.measured_ns < 1000.0 * before


def test_what_lost_is_not_tried_by_the_next_process_until_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    races: list[Held] = []

    def lose(*, certain: bool) -> None:
        if certain:
            raced(monkeypatch, lambda: (0.0, SLOWER_S), held=races)
        else:
            nobody_wins(monkeypatch, races)

    place = str(tmp_path / "profiles.sqlite")
    settings = Settings(hot_calls=1, profiles=place, tiers=1)
    lose(certain=False)
    serve(settings)
    lose(certain=True)
    serve(settings)
    assert [h.found.decided for h in races] == [False, True], "what was not decided is tried again, against the model's own code"
    serve(settings)
    serve(settings)
    assert len(races) == 4, "so is what lost once against library kernels, which may have been noise"
    stats = serve(settings)
    assert len(races) == 4 and stats["events"]["refuse.lost_before"] == 1  # type: ignore[index]
    serve(settings.with_(objective="energy"))
    assert len(races) == 5, "something else is asked for"
    monkeypatch.setattr(record_module, "usable_cores", lambda: 1000)
    serve(settings)
    assert len(races) == 6, "there are other cores"
    monkeypatch.undo()
    lose(certain=True)
    monkeypatch.setattr(record_module, "program", lambda: "another version")
    serve(settings)
    assert len(races) == 7
    with Store.open(place) as store:
        slower = [d for d in store.decisions() if d.why == "it did not measure faster on a real call"]
        assert len(slower) == 6
        lost = [float(str(d.evidence["us_before"])) < float(str(d.evidence["us_after"])) for d in slower]
        assert sum(lost) >= 5, "all that were decided"


def test_a_process_that_serves_for_months_keeps_its_store_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "PRUNE_EVERY", 8)
    settings = Settings(profiles=str(tmp_path / "p.sqlite"), profiles_rows=5)
    with torch.no_grad(), hotfuse.jit(nn.Linear(8, 8).eval(), settings=INLINE_TIER0) as fast:
        fast(torch.ones(4, 8))
        graph = fast._engine.sites[next(iter(fast._engine.sites))].entries[0].baseline.graph
    recorder = Recorder(settings, EventLog())
    for _ in range(32):
        recorder.tried("m", graph, Action.REFUSE, Why.NOT_FASTER, {"attempt": "tier 1"}, ([torch.ones(4, 8)], 0))
    with Store.open(tmp_path / "p.sqlite") as store:
        assert recorder.stats() == {"written": 32, "failed": 0} and len(store.decisions()) == 5


def test_what_is_remembered_refuses_nothing_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses in a row are believed for an hour, longer with each further one; one that was won or not settled ends the row."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    call, ahead = ([torch.ones(4, 8)], 0), [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(time=lambda: time.time() + ahead[0]))
    settings = Settings(profiles=str(tmp_path / "p.sqlite"))
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE_TIER0) as fast:
        fast(call[0][0])
        graph = fast._engine.sites[next(iter(fast._engine.sites))].entries[0].baseline.graph

    def outcome(why: Why, certain: bool) -> None:
        kept = {"attempt": "tier 1", "us_before": 1.0, "us_after": 2.0, "certain": certain}
        action = Action.DEPLOY if why is Why.FASTER else Action.REFUSE
        Recorder(settings, EventLog()).tried("m", graph, action, why, kept, call)

    def refused(later_s: float = 0.0) -> bool:
        ahead[0] = later_s
        return Recorder(settings, EventLog()).lost(graph, "tier 1", call) is not None

    assert not refused()
    outcome(Why.NOT_FASTER, True)
    assert not refused()
    outcome(Why.NOT_FASTER, True)
    assert refused() and refused(3000.0) and not refused(4000.0)
    outcome(Why.NOT_FASTER, True)
    assert refused(7000.0) and not refused(8000.0)
    outcome(Why.NOT_FASTER, False)
    assert not refused()
    outcome(Why.NOT_FASTER, True)
    outcome(Why.NOT_FASTER, True)
    assert refused()
    outcome(Why.FASTER, True)
    assert not refused()


def test_recording_can_be_switched_off(tmp_path: Path) -> None:
    place = tmp_path / "profiles.sqlite"
    stats = serve(Settings(hot_calls=1, profiles=str(place), record=False))
    assert stats["recorded"] == {"written": 0, "failed": 0} and not place.exists()


def test_a_store_that_cannot_be_used_is_said_once_and_serving_goes_on(tmp_path: Path) -> None:
    stats = serve(Settings(hot_calls=1, profiles="nosuchdb://host/name"))
    assert stats["recorded"]["failed"] == 1 and stats["calls_per_tier"]["1"] > 0  # type: ignore[index]
