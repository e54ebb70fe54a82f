"""What serving measured is of use: to the model of this process, of the next one, and to whoever plans."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hotfuse.compile import request_context
from hotfuse.compile.learn import learned, strategy_history
from hotfuse.compile.learn.calibrate import Calibration
from hotfuse.compile.request_bodies import LearnedRequest
from hotfuse.compile.request_context import RequestContext
from hotfuse.compile.requests import Here
from hotfuse.hpm import model
from hotfuse.hpm.bottleneck import Bottleneck, Strategy
from hotfuse.hpm.model import CostPredictor
from hotfuse.hpm.work import Candidate
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.profile.rows import SpeedRow
from hotfuse.profile.store import Store
from tests.contract.test_hpm import AT, drawn, invented


def test_trials_correct_the_model_here_and_in_the_next_process(tmp_path: Path) -> None:
    p = drawn(1, "contraction")[0]
    with Store.open(tmp_path / "p.sqlite") as store:
        model.save(store, model.fit(invented(60), AT), store.machine(fingerprint()))
    found = learned.Notes.of(RequestContext(str(tmp_path / "p.sqlite")))
    assert found is not None and found.ahead is not None
    for n in range(40):
        found.tried(f"k{n}", p.graph, p.sizes[-1], 1e9, 0.0)  # a thousand seconds: far from any prediction
    found.flush()
    assert found.ahead.online.drifted.any and len(found.store.measurements(source="race")) == 40
    with Store.open(tmp_path / "p.sqlite") as store:
        ahead = learned.Foresight.of(store)  # another process, later
        assert ahead is not None and ahead.online.drifted.everything == found.ahead.online.drifted.everything != 0
        again = Calibration(store, ahead.host, Here())
        first = next(again.items)
        assert first.problem.family == "served" and len(store.problems()) == 40


def test_only_a_store_that_may_be_written_is_begun_and_written(tmp_path: Path) -> None:
    place = tmp_path / "p.sqlite"
    assert learned.Notes.of(RequestContext(str(place), record=False)) is None and not place.exists()
    assert learned.Notes.of(RequestContext(":memory:")) is None and learned.Notes.of(RequestContext("nosuch://host/name")) is None
    p = drawn(1, "contraction")[0]
    for record in (True, False):
        kept = learned.Notes.of(RequestContext(str(place), record))
        assert kept is not None and kept.ahead is None
        kept.tried("k", p.graph, p.sizes[-1], 100.0, 200.0)
        kept.flush()
        kept.store.close()
    with Store.open(place) as store:
        assert len(store.measurements()) == 2 and len(store.problems()) == 1, "measured before there is a model"


def test_what_others_learn_meanwhile_is_read_when_a_graph_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RequestContext(str(tmp_path / "p.sqlite"))
    with request_context.used_by(place.header()):
        mine = learned.notes()
        assert mine is not None and learned.foresight() is None and learned.notes() is mine
        with Store.open(place.path) as store:
            model.save(store, model.fit(invented(60), AT), store.machine(fingerprint()))
        learned.refresh()
        assert learned.foresight() is None, "not so soon"
        monkeypatch.setattr(learned, "FRESH_S", 0.0)
        learned.refresh()
        assert learned.foresight() is not None
    with request_context.used_by({}):
        assert learned.notes() is not mine, "another request, another store"


def test_a_slower_machine_counts_until_samples_speak(tmp_path: Path) -> None:
    with Store.open(tmp_path / "p.sqlite") as store:
        machine = store.machine(fingerprint())
        model.save(store, model.fit(invented(60), AT), machine)
        store.record_drift([SpeedRow("fma", 1.6, 1.0, at=float(n + 1)) for n in range(3)], machine)
        ahead = learned.Foresight.of(store)
        assert ahead is not None and ahead.online.drifted.everything == pytest.approx(math.log(1.6))
        p = drawn(1, "contraction")[0]
        quiet = CostPredictor(ahead.predictor.model, ahead.host.at, ahead.predictor.row_cache)
        ask = [Candidate(p.graph, p.sizes[-1], ahead.host.core)]
        plain = quiet.predict(ask).seconds[0]
        assert ahead.predictor.predict(ask).seconds[0] == pytest.approx(1.6 * plain)
        for _ in range(10):  # measured since, and as fast as ever
            ahead.online.observe(0, 0, 1e-3, 1e-3)
        assert ahead.predictor.predict(ask).seconds[0] == pytest.approx(plain)


def test_what_promises_were_worth_is_remembered_by_the_next_process(tmp_path: Path) -> None:
    place = RequestContext(str(tmp_path / "p.sqlite"))

    def process(learn: bool) -> strategy_history.StrategyHistory:
        mine = strategy_history.StrategyHistory()
        with request_context.used_by(place.header()):
            mine.begin(strategy_history.states())
            if learn:
                mine.trust.learn("vertical", 10.0, 5.0)
                mine.ledger.learn(Bottleneck.MEMORY, Strategy.VERTICAL, 2.0, 1.0)
            strategy_history.handle(LearnedRequest(more=mine.more()))
        return mine

    assert process(learn=False).trust.arms == {}
    process(learn=True)
    process(learn=True)
    third = process(learn=False)
    assert third.trust.arms["vertical"].count == 2 and third.trust.trust("vertical") < 1
    assert third.ledger.rows[Bottleneck.MEMORY, Strategy.VERTICAL].helped == 2
