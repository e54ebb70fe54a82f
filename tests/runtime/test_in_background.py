"""Background work beside calls: one model's does not hold up another's, and calls hardly notice any of it."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import hotfuse
from hotfuse import Settings, api
from hotfuse.base.collector import take_for_old
from hotfuse.base.faults import faults
from hotfuse.compile.request_bodies import RequestBody
from hotfuse.compile.workers.background_priority import (
    PATIENT_NS,
    PUNCTUAL_NS,
    RARER,
    SHARED_S,
    SWITCH_S,
    BackgroundPriority,
)
from hotfuse.compile.workers.service import MAX_THREADS, MAX_WAITING, Service
from hotfuse.pipeline import compile_tier1
from hotfuse.runtime.tierup import race as racing
from hotfuse.session import serving


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


@pytest.fixture
def own() -> Generator[Service]:
    made = Service()
    yield made
    made.stop(60)


def test_a_long_job_of_one_model_holds_up_no_other(own: Service) -> None:
    go, done = threading.Event(), threading.Event()
    own.submit(lambda: assert_set(go), "one")
    own.submit(done.set, "another")
    assert done.wait(120), "it waited for the other model's job"
    go.set()


def test_jobs_of_one_model_run_in_order_and_one_at_a_time(own: Service) -> None:
    ran: list[int] = []
    inside = threading.Lock()
    done = threading.Event()

    def job(n: int) -> None:
        assert inside.acquire(blocking=False), "two jobs of a model at once"
        ran.append(n)
        inside.release()
        if n == 19:
            done.set()

    for n in range(20):
        own.submit(lambda n=n: job(n), "one")
    assert done.wait(60) and ran == list(range(20))


def test_a_job_that_waits_lets_others_go_first_and_goes_on_when_none_is_at_work(own: Service) -> None:
    ran: list[str] = []
    inside, go, done, at_work, let_go = threading.Lock(), *(threading.Event() for _ in range(4))

    def waits() -> None:
        with inside:
            ran.append("begins")
        with own.others_meanwhile():
            assert_set(go)
        assert inside.acquire(blocking=False), "two jobs of a model at once"
        ran.append("goes on")
        inside.release()

    def works(name: str) -> None:
        with inside:
            ran.append(name)
            if name == "second":
                at_work.set()
                assert_set(let_go)
        if name == "fourth":
            done.set()

    own.submit(waits, "one")
    own.submit(lambda: works("first"), "one")
    own.submit(lambda: works("second"), "one")
    assert_set(at_work)
    go.set()  # it comes back while another one is at work
    own.submit(lambda: works("third"), "one")
    own.submit(lambda: works("fourth"), "one")
    time.sleep(0.05)
    let_go.set()
    assert_set(done)
    assert ran == ["begins", "first", "second", "goes on", "third", "fourth"]
    again = threading.Event()
    own.submit(again.set, "one")
    assert_set(again)


def test_however_many_wait_jobs_run(own: Service) -> None:
    go, waiting = threading.Event(), threading.Semaphore(0)

    def waits() -> None:
        with own.others_meanwhile():
            waiting.release()
            assert_set(go)

    for n in range(MAX_WAITING + 2):
        own.submit(waits, n % 3)
    for _ in range(MAX_WAITING):
        assert waiting.acquire(timeout=60)
    go.set()
    done = [threading.Event() for _ in range(3)]
    for n, event in enumerate(done):
        own.submit(event.set, n)
    for event in done:
        assert_set(event)


@pytest.fixture
def thawed() -> None:
    """As in a program that froze nothing; the suite does (`tests/process.py`), and does so again behind this module."""
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_objects_that_somebody_froze_stay_frozen() -> None:
    assert take_for_old() and gc.get_freeze_count() == 0
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert not take_for_old() and gc.get_freeze_count() > frozen // 2, "other threads let go of single ones meanwhile"
    finally:
        gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_the_collection_that_jobs_put_off_comes_when_nobody_calls() -> None:
    class Node:
        me: Node

    def left() -> weakref.ref[Node]:
        made = Node()
        made.me = made
        return weakref.ref(made)

    turns = BackgroundPriority()
    with turns():
        gone = left()
        turns.collect()
        assert gone() is not None  # while a job runs, none
    assert gone() is not None
    turns.collect()
    assert gone() is None
    other = left()
    turns.collect()
    assert other() is not None  # no job left it: that one is the program's own
    with turns():
        pass
    turns.collect()
    assert other() is not None  # not again at once: it takes a hundredth of the time
    gc.collect()


def test_more_models_than_threads_are_all_served(own: Service) -> None:
    go = threading.Event()
    count = 3 * MAX_THREADS
    done = threading.Semaphore(0)
    most: list[int] = []

    def job() -> None:
        most.append(sum(t.name == "hotfuse-service" for t in threading.enumerate()))
        go.wait(60)
        done.release()

    before = sum(t.name == "hotfuse-service" for t in threading.enumerate())
    for n in range(count):
        own.submit(job, n)
    go.set()
    assert all(done.acquire(timeout=120) for _ in range(count))
    assert max(most) <= before + MAX_THREADS


def test_a_job_that_raises_is_counted_and_the_next_one_runs(own: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_value))
    done = threading.Event()

    def bad() -> None:
        raise ValueError("its own fault")

    own.submit(bad, "one")
    own.submit(done.set, "one")
    assert done.wait(120) and not printed
    assert faults.counts() == {"a background job: ValueError: its own fault": 1}


def test_jobs_take_short_turns_and_settings_come_back(own: Service) -> None:
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    seen: list[tuple[float, int]] = []
    done = threading.Event()

    def job() -> None:
        seen.append((sys.getswitchinterval(), gc.get_threshold()[2]))
        done.set()

    assert before > SWITCH_S
    own.submit(job, "one")
    assert done.wait(120)
    own.stop(60)
    assert seen == [(pytest.approx(SWITCH_S), RARER * thresholds[2])]
    assert sys.getswitchinterval() == pytest.approx(before) and gc.get_threshold() == thresholds


def _in_a_thread(answer: Callable[[], object]) -> object:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(answer()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere timers are what they are")
def test_threads_that_serve_are_woken_on_time_and_those_beside_are_not() -> None:
    prctl, get, put = ctypes.CDLL(None).prctl, 30, 29
    model = nn.Linear(4, 4).eval()

    def served(before: int) -> int:
        prctl(put, before)
        model_served(torch.ones(2, 4))
        return prctl(get, 0)

    def beside() -> int:
        own, seen, done = Service(), list[int](), threading.Event()

        def job() -> None:
            seen.append(prctl(get, 0))
            done.set()

        own.submit(job, "one")
        assert done.wait(120)
        own.stop(60)
        return seen[0]

    with torch.no_grad(), hotfuse.jit(model, settings=Settings(capture="off", record=False)) as model_served:
        assert _in_a_thread(lambda: served(50_000)) == PUNCTUAL_NS
        assert _in_a_thread(lambda: served(7_000)) == 7_000  # somebody chose that
    assert _in_a_thread(beside) == PATIENT_NS


def test_what_serving_needs_is_imported_before_anything_serves_and_what_compiling_takes_is_not() -> None:
    """An import beside calls holds the interpreter lock from them; one that a process does not need takes its user's time."""
    code = """
import sys, torch
before = set(sys.modules)
import hotfuse
hotfuse.InferenceSession
hotfuse.jit(torch.nn.Linear(4, 4).eval(), settings=hotfuse.Settings(capture="off"))
new = set(sys.modules) - before
missing = {f"hotfuse.{m}" for m in ("backends.llvm.runs.enter", "native.guard", "runtime.tierup.proof")} - new
assert not missing, missing
compiling = {"sympy", "sqlalchemy", "llvmlite", "sklearn", "torch.fx.experimental.symbolic_shapes"} | {
    f"hotfuse.{m}"
    for m in ("lower.lowering", "fusion.fusion_engine", "hpm.model", "backends.llvm.emission.emit", "compile.run.runs")
}
assert not compiling & new, compiling & new
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_what_somebody_else_sets_meanwhile_stays() -> None:
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        with BackgroundPriority()():
            sys.setswitchinterval(0.003)
            gc.set_threshold(500, 5, 7)
        assert sys.getswitchinterval() == pytest.approx(0.003) and gc.get_threshold() == (500, 5, 7)
    finally:
        sys.setswitchinterval(before)
        gc.set_threshold(*thresholds)


def test_the_last_of_several_jobs_puts_settings_back() -> None:
    before, background_priority = sys.getswitchinterval(), BackgroundPriority()
    with background_priority():
        with background_priority():
            pass
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_job_that_waits_is_not_at_work() -> None:
    background_priority = BackgroundPriority()
    with background_priority.waiting():  # nobody's job
        assert not background_priority.at_work
        with background_priority():
            assert background_priority.at_work
            with background_priority.waiting():
                assert not background_priority.at_work
                other = threading.Thread(target=lambda: seen.append(_at_work_beside(background_priority)))
                seen: list[bool] = []
                other.start()
                other.join()
                assert seen == [True]
            assert background_priority.at_work
    assert not background_priority.at_work


def _at_work_beside(background_priority: BackgroundPriority) -> bool:
    with background_priority():
        return background_priority.at_work


def test_a_job_that_waits_asks_nothing_of_the_interpreter() -> None:
    before, background_priority = sys.getswitchinterval(), BackgroundPriority()
    with background_priority.waiting():  # not in a job
        assert sys.getswitchinterval() == pytest.approx(before)
    with background_priority():
        with background_priority.waiting():
            assert sys.getswitchinterval() == pytest.approx(before) and background_priority.jobs == 1
            other = threading.Thread(target=lambda: _in_a_job(background_priority))
            other.start()
            other.join()
            assert sys.getswitchinterval() == pytest.approx(before)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == pytest.approx(before)


def _in_a_job(background_priority: BackgroundPriority) -> None:
    with background_priority():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)


def test_several_threads_that_serve_keep_longer_turns() -> None:
    before, background_priority = sys.getswitchinterval(), BackgroundPriority()
    background_priority.serves()
    background_priority.serves()
    done, counted = threading.Event(), threading.Event()

    def other() -> None:
        background_priority.serves()
        counted.set()
        done.wait(60)

    thread = threading.Thread(target=other)
    with background_priority():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        thread.start()
        assert counted.wait(60) and sys.getswitchinterval() == pytest.approx(SHARED_S)
    assert sys.getswitchinterval() == pytest.approx(before)
    done.set()
    thread.join()
    with background_priority():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_sizes_that_differ_before_the_worker_is_ready_need_one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call alone would be captured for its very sizes, and the second one again."""
    ready = threading.Event()
    monkeypatch.setattr(api.TorchModel, "prepare", lambda self: ready.wait(60))
    model = nn.Linear(4, 4).eval()
    with torch.no_grad(), hotfuse.jit(model, settings=Settings(tiers=0, record=False)) as fast:
        fast(torch.ones(3, 4))
        fast(torch.ones(5, 4))
        ready.set()
        assert fast.wait(120)
        assert torch.equal(fast(torch.ones(7, 4)), model(torch.ones(7, 4)))
        assert fast.stats()["captures"] == 1 and fast.stats()["graph_calls"] == 1, str(fast.explain(full=True))


def test_two_races_do_not_measure_each_other() -> None:
    running: list[int] = []

    def plan() -> None:
        running.append(1)
        assert len(running) == 1
        running.pop()

    def one() -> None:
        racing.race(plan, plan, (), 0.01)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not running


def test_a_plan_that_is_let_go_of_needs_no_collection() -> None:
    """Full collections are rare beside jobs, and a plan holds packed weights: it must go with its last reference."""
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).eval(), torch.randn(3, 32)
    settings = Settings(capture="inline", tiers=0, record=False)
    with torch.no_grad(), hotfuse.jit(model, settings=settings) as fast:
        fast(x)
        (entry,) = [e for site in fast._engine.sites.values() for e in site.entries]
        plan = compile_tier1(entry.baseline.graph, entry.weights, [x], settings)
        assert plan.runs and torch.allclose(plan.run(x)[0], model(x), rtol=1e-4, atol=1e-5)
        gone = [weakref.ref(run) for run in plan.runs]
        gc.disable()
        try:
            del plan
            assert all(ref() is None for ref in gone)
        finally:
            gc.enable()


def test_a_session_has_its_worker_ready_before_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ready = threading.Event()

    def ask(body: RequestBody, _blobs: object, _settings: Settings) -> None:
        asked.append(body.kind)
        ready.set()

    monkeypatch.setattr(serving, "ask", ask)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [out])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    hotfuse.InferenceSession(str(path), settings=Settings(record=False)).close()
    assert ready.wait(120) and asked == ["ready"]


ENDS = """
import threading, torch
from hotfuse.compile.workers.service import service
begun = threading.Event()
def job():
    a = torch.ones(256, 256)
    begun.set()
    while True:
        a = torch.tanh(a @ a)
service().submit(job)
assert begun.wait(60)
"""


def test_a_process_ends_in_the_middle_of_a_job_without_an_end() -> None:
    """A thread that is still inside native code when the interpreter goes aborts the process."""
    found = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0 and not found.stderr, (found.returncode, found.stderr)


def test_a_job_is_left_where_it_stands_when_its_service_stops() -> None:
    service, begun = Service(), threading.Event()

    def job() -> None:
        begun.set()
        while True:
            torch.ones(8) + 1

    service.submit(job)
    assert begun.wait(60)
    (thread,) = [t for t in threading.enumerate() if t.name == "hotfuse-service"]
    service.stop(60)
    assert not thread.is_alive()


def test_what_every_call_asks_is_native_while_other_jobs_wait() -> None:
    """A capture or a plan may wait for seconds; meanwhile Python would look through the model in every call."""
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    going_on = threading.Event()
    with torch.no_grad(), hotfuse.jit(model, settings=Settings(tiers=0, record=False)) as fast:
        fast(x)
        assert fast.wait(60)
        background = fast._engine._background
        background.start(lambda: going_on.wait(60) and None)
        try:
            until = time.monotonic() + 30
            while time.monotonic() < until and (watch := fast._engine.plans.watch) is not None and watch.native is False:
                fast(x)
                time.sleep(0.01)
            assert watch is not None and watch.native is True, watch and watch.native
            assert not background.wait(0.0)
        finally:
            going_on.set()
        assert fast.wait(60)
