"""Idle time: kernels are measured and the model is trained while nobody wants the machine, and only then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.events import EventLog, Why
from hotfuse.compile import requests
from hotfuse.compile.answer_bodies import IdleAnswer, ModelFacts, message, received
from hotfuse.compile.host import this_host
from hotfuse.compile.learn import idle as idle_work
from hotfuse.compile.learn.measure import BoundCall, tile_of
from hotfuse.compile.request_context import RequestContext
from hotfuse.compile.workers import wire
from hotfuse.hpm import model
from hotfuse.hpm.features import derive
from hotfuse.hpm.row_cache import RowCache
from hotfuse.ir.text import show
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.profile.store import Store
from hotfuse.runtime.observe import idle, record
from hotfuse.runtime.observe.idle import Idle, IdleState
from tests.contract.test_hpm import drawn
from tests.runtime.test_speed import PEAKS


class Fake:
    """A worker that answers when it is told to, unless it is stopped."""

    def __init__(self, memory: int = 0) -> None:
        self.paused = False
        self.answers: list[wire.Message] = []
        self.asked: list[dict[str, Any]] = []
        self.go = threading.Semaphore(0)
        self.closed = threading.Event()

    def ask(self, header: dict[str, Any], blobs: list[bytes], /) -> wire.Message:
        self.asked.append(header)
        self.go.acquire()
        if self.closed.is_set():
            raise EOFError
        return self.answers.pop(0)

    def answer(self, **said: Any) -> None:
        self.answers.append(message(IdleAnswer(**{"measured": 0, "left": True, **said})))
        self.go.release()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def close(self) -> None:
        self.closed.set()
        self.go.release()


def until(holds: Callable[[], object], seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AFTER_S": 0.02, "QUIET_S": 0.01, "TICK_S": 0.001, "REST_S": 0.001, "LOAD_S": 0.0}.items():
        monkeypatch.setattr(idle, name, value)


class Scene:
    """An idle worker with everything around it made up."""

    def __init__(self) -> None:
        self.worker, self.calls, self.inside, self.load, self.started = Fake(), 0, False, 0.0, 0
        self.log = EventLog()
        self.idle = Idle(RequestContext("nowhere"), 0, self._start, lambda: self.load, lambda: (self.calls, self.inside))

    def _start(self, memory: int) -> Fake:
        self.started += 1
        return self.worker

    def __enter__(self) -> Scene:
        self.idle.join(self.log)
        return self

    def __exit__(self, *_exc: object) -> None:
        self.idle.end()


def test_it_works_in_idle_time_and_says_what_it_learned() -> None:
    with Scene() as s:
        until(lambda: s.worker.asked)
        assert s.worker.asked[0]["kind"] == "idle" and s.worker.asked[0]["profiles"] == "nowhere"
        s.worker.answer(measured=7)
        s.worker.answer(measured=3, model=4, facts=ModelFacts(50, 0.2, "forest"), left=False)
        until(lambda: s.idle.told.state is IdleState.DONE)
        assert (s.idle.told.measured, s.idle.told.version, s.idle.told.slices) == (10, 4, 2)
        until(s.worker.closed.is_set)
        assert [d.why for d in s.log.decisions] == [Why.IDLE, Why.IDLE, Why.RETRAINED]
        assert s.log.decisions[-1].evidence == {"version": 4, "samples": 50, "mape": 0.2}
    assert s.idle.told.state is IdleState.ENDED


@pytest.mark.parametrize("wanted", ["calls", "inside", "load"])
def test_it_stops_where_it_stands_when_somebody_wants_the_machine(wanted: str) -> None:
    with Scene() as s:
        until(lambda: s.worker.asked)

        def busy() -> bool:
            s.calls += wanted == "calls"
            s.inside, s.load = wanted == "inside", 0.9 if wanted == "load" else 0.0
            return s.worker.paused

        until(busy)
        until(lambda: s.idle.told.stops >= 1)
        s.inside, s.load = False, 0.0
        until(lambda: not s.worker.paused)
        assert s.started == 1 and not s.worker.closed.is_set()


def test_it_ends_where_it_stays_stopped_and_begins_again_when_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "KEPT_STOPPED_S", 0.05)
    with Scene() as s:
        until(lambda: s.worker.asked)
        first, s.worker = s.worker, Fake()
        s.inside = True
        until(first.closed.is_set)
        until(lambda: s.idle.told.state is IdleState.WAITING)
        assert s.started == 1 and s.idle.told.failures == 0, "that it was ended is no failure"
        s.inside = False
        until(lambda: s.worker.asked)
        assert s.started == 2


def test_a_busy_machine_never_gets_one() -> None:
    busy = Scene()
    busy.inside = True
    with busy as s:
        time.sleep(0.2)
        assert not s.started and s.idle.told.state is IdleState.WAITING


def test_it_ends_with_the_last_model_and_begins_again_with_the_next() -> None:
    with Scene() as s:
        until(lambda: s.worker.asked)
        s.idle.leave(s.log)
        until(s.worker.closed.is_set)
        s.worker = Fake()
        s.idle.join(s.log)
        until(lambda: s.worker.asked)


def test_a_worker_that_dies_is_counted_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "DONE_S", 0.0)
    with Scene() as s:
        for n in range(idle.MAX_FAILURES):
            until(lambda: s.worker.asked)
            dying, s.worker = s.worker, Fake()
            dying.closed.set()
            dying.go.release()
            until(lambda n=n: s.idle.told.failures == n + 1)
        time.sleep(0.1)
        assert s.started == idle.MAX_FAILURES and s.idle.told.because


# --- the work itself ----------------------------------------------------------------------------------------------------------


def kernels_take(patch: pytest.MonkeyPatch, place: RequestContext, times: float) -> None:
    """Kernels are compiled, bound and run as ever; what they took is so many times what their roofline says."""
    with Store.open(place.path) as store:
        at = this_host(store, torch.get_num_threads(), measure_peaks=False).at

    def figure(bound: BoundCall) -> tuple[float, float]:
        assert bound.times, "it ran"
        floor = derive(RowCache(tile_of).rows([bound.candidate]), at).roofline.seconds[0]
        return times * float(floor), 0.0

    patch.setattr(BoundCall, "figure", figure)


@pytest.mark.parametrize(("times", "kept"), [(1.0, False), (7.0, True)])
def test_slices_measure_what_models_contain_and_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float, kept: bool
) -> None:
    """A model is judged on what it measured: where rooflines are exact it cannot be better, where they are far off it is."""
    monkeypatch.setattr(model, "MIN_SAMPLES", 4)
    monkeypatch.setattr("hotfuse.compile.learn.measure.PASSES", 2)
    monkeypatch.setattr(idle_work, "MAX_DRAWN_ROWS", 0)  # nothing is drawn
    monkeypatch.setattr(idle_work, "_begun", {})
    place = RequestContext(str(tmp_path / "p.sqlite"))
    with Store.open(place.path) as store:
        store.machine(fingerprint(), PEAKS.to_dict())
        for p in drawn(6, "pointwise"):
            store.record_problem(p.key, show(p.graph), p.sizes[0])
    kernels_take(monkeypatch, place, times)
    header = {"kind": "idle", "seconds": 200.0, **place.header()}
    first, _ = received(requests.answer(header, []), IdleAnswer)
    assert first.measured >= 6 and not first.left and first.model == (1 if kept else None)
    with Store.open(place.path) as store:
        names = {m.kernel for m in store.measurements(source="calibrate")}
        assert len(names) == first.measured and (model.load(store) is not None) is kept
    again, _ = received(requests.answer(header, []), IdleAnswer)
    assert again.measured == 0 and not again.left and again.model is None, "nothing is measured twice"
    reading, _ = received(requests.answer({**header, "record": False}, []), IdleAnswer)
    assert reading.measured == 0 and "no store" in reading.because


# --- as a user has it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False])
def test_a_model_that_rests_is_learned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    monkeypatch.setattr(idle, "SLICE_S", 1.0)
    monkeypatch.setattr(idle, "BUSY", 1.1)  # other programs on this machine
    monkeypatch.setattr(record, "_stores", {})
    place = tmp_path / "p.sqlite"
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval()
    with torch.no_grad(), hotfuse.jit(net, settings=Settings(hot_calls=1, profiles=str(place), idle=on)) as fast:
        for _ in range(3):
            for _ in range(6):
                fast(torch.randn(64, 256))
            assert fast.wait(120)
        if on:
            until(lambda: fast.explain().to_dict()["idle"].get("measured", 0) > 0, 200.0)
            assert any(d["why"] == Why.IDLE.value for d in fast.explain().to_dict()["decisions"])
            assert "idle time" in str(fast.explain(full=True))
        else:
            time.sleep(0.3)
            assert fast.explain().to_dict()["idle"] == {"state": "switched off by the settings"}
        assert fast.stats()["idle"]["state"]
    for shared in list(record._stores.values()):  # pyright: ignore[reportPrivateUsage]
        shared.idle.end()
        shared.watch.stop()
    with Store.open(place) as store:
        kinds = {m.source for m in store.measurements()}
        assert ("calibrate" in kinds) is on and store.problems(), "workers write where the settings say"


def test_memory_is_given_back_once_when_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "GIVE_BACK_S", 0.02)
    calls, given = [0], list[int]()
    own = Idle(
        RequestContext("nowhere"), 0, Fake, lambda: 1.0, lambda: (calls[0], False), give_back=lambda: given.append(calls[0])
    )
    log = EventLog()
    own.join(log)
    try:
        for n in (1, 2):  # others may use the machine as they like: only calls count
            calls[0] = n
            until(lambda n=n: given.count(n) == 1)
        time.sleep(0.1)
        assert given.count(1) <= 1 and given.count(2) == 1
    finally:
        own.end()


def test_memory_is_given_back_while_background_work_goes_on_and_once_more_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "GIVE_BACK_S", 0.02)
    calls, works, given = [0], [True], list[bool]()
    own = Idle(
        RequestContext("nowhere"), 0, Fake, lambda: 1.0, lambda: (calls[0], works[0]), give_back=lambda: given.append(works[0])
    )
    log = EventLog()
    own.join(log)
    try:
        calls[0] = 1
        until(lambda: given)
        time.sleep(0.1)
        assert given and all(given) and len(given) <= 2, "once behind the last call: one was made while it looked"
        works[0] = False
        until(lambda: not given[-1])
        assert given.count(False) == 1
    finally:
        own.end()
