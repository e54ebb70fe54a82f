"""What background work gets of a busy machine: share, priority and price as functions of made-up figures, and on workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hotfuse
from hotfuse.base.environment import for_child
from hotfuse.compile.value import FIRST_PLAN_GAIN, LATER_PLAN_GAIN
from hotfuse.compile.workers import priority, slot
from hotfuse.compile.workers.priority import LOWEST, RAISED
from hotfuse.compile.workers.process import Worker
from hotfuse.compile.workers.scheduler import AHEAD_RATE, AHEAD_S, FULL_SHARE_GAIN, Governor, LoadMeter, granted_share
from hotfuse.compile.workers.served_calls import served_calls
from hotfuse.compile.workers.shortage import SHORT, Shortage
from hotfuse.compile.workers.slot import PoolLimits
from hotfuse.compile.workers.task import Task
from hotfuse.compile.workers.worker_pool import Pool
from hotfuse.machine.cores import usable_cores
from tests.runtime.test_pool import SCRIPT, blocked, said

TICK = 0.05


def saturated(governor: Governor, gain: float, seconds: float, gets: float = 0.45, starves: float = 0.03) -> float:
    """A worker beside calls that use two cores wholly: CPU seconds it gets, with and without priority in cores."""
    total = 0.0
    for _ in range(round(seconds / TICK)):
        used = 0.0 if governor.paused else TICK * (gets if governor.raised else starves)
        governor.step(TICK, used, load=1.0 - used / TICK / 2, gain=gain, traffic=1.0 - used / TICK / 2)
        total += used
    return total


def test_the_share_grows_with_the_gain_and_with_traffic() -> None:
    assert granted_share(0.2, 0.0, 1.0) == granted_share(0.2, 0.5, 0.0) == 0.0
    assert granted_share(0.2, FULL_SHARE_GAIN, 1.0) == granted_share(0.2, 1.0, 1.0) == 0.2
    shares = [granted_share(0.2, g, 1.0) for g in (0.0, 0.01, LATER_PLAN_GAIN, 0.15, FIRST_PLAN_GAIN)]
    assert shares == sorted(shares) and shares[2] < shares[-1] == 0.2
    assert granted_share(0.2, LATER_PLAN_GAIN, 0.5) < granted_share(0.2, LATER_PLAN_GAIN, 1.0)
    assert granted_share(0.2, 1.0, 1.0, threads=4) == 0.05, "whoever holds one of four threads up holds the call up"


def test_a_starved_worker_is_raised_and_then_gets_its_share_and_no_more() -> None:
    for share in (0.05, 0.1, 0.2):
        governor = Governor(share, cores=2)
        saturated(governor, FIRST_PLAN_GAIN, 10 * AHEAD_S, gets=1.0)  # what may be taken ahead is taken
        assert governor.raised and share <= governor.granted < 1.5 * share, "less is left than one slice of a worker takes"
        got = saturated(governor, FIRST_PLAN_GAIN, 60.0, gets=1.0) / 60.0 / 2
        assert 0.9 * share <= got <= 1.1 * share


def test_a_minutes_share_is_taken_at_once_at_three_times_the_rate() -> None:
    """The first plan needs five CPU seconds: it comes in a third of the time, and calls lose no more by then."""
    share = 0.1
    governor = Governor(share, cores=2)
    saturated(governor, FIRST_PLAN_GAIN, 1.0, gets=1.0)
    assert governor.granted == pytest.approx(AHEAD_RATE * share) == governor.peak
    got = saturated(governor, FIRST_PLAN_GAIN, 10.0, gets=1.0)
    assert 5.0 < got <= 1.1 * 10.0 * 2 * governor.peak
    assert 2 * share < governor.price.lost <= 1.1 * governor.peak
    lost = governor.price.lost_s
    assert lost == pytest.approx(governor.price.taken_s / 2), "calls of one thread lose what workers take"
    saturated(governor, FIRST_PLAN_GAIN, 600.0, gets=1.0)
    assert governor.price.lost_s <= 1.05 * share * (611.0 + AHEAD_S), "the bound is the long run's"
    for _ in range(round(2 * AHEAD_S / TICK)):  # quiet cores: nothing is taken from anybody
        governor.step(TICK, TICK, load=0.1, gain=FIRST_PLAN_GAIN, traffic=0.1)
    assert governor.most == governor.peak


def test_calls_that_other_programs_keep_from_the_cores_ask_for_them_all_the_same() -> None:
    """One caller on one thread, always in a call, beside programs that fill both cores: it gets an eighth of the machine, and would
    use half of it. A call now and then asks for little."""
    got: list[float] = []
    for demand in (0.5, 0.05, 0.0):
        governor = Governor(0.1, cores=2)
        for _ in range(200):
            used = 0.0 if governor.paused else TICK * (0.5 if governor.raised else 0.03)
            governor.step(TICK, used, 1.0 - used / TICK / 2, FIRST_PLAN_GAIN, demand / 4, 0.0, demand)
        got.append(governor.granted)
    assert got == [pytest.approx(0.3, rel=0.01), pytest.approx(0.03, rel=0.01), 0.0]


def test_a_team_that_waits_for_other_programs_is_held_up_less_by_a_worker() -> None:
    governor = Governor(0.1, cores=2)
    governor.threads = 2
    for others, held_up in ((0.0, 2.0), (0.25, 1.5), (0.5, 1.0), (1.0, 1.0)):
        for _ in range(400):
            governor.step(TICK, 0.0, load=1.0, gain=0.0, traffic=1.0 - others)
        assert governor.held_up == pytest.approx(held_up, abs=0.01)
    governor.threads = 1
    assert governor.held_up == 1.0
    wide = Governor(0.1, cores=16)
    wide.threads = 8
    for _ in range(400):
        wide.step(TICK, 0.0, load=1.0, gain=0.0, traffic=0.5)
    assert wide.held_up == 8.0, "others have cores of their own"


def test_the_first_work_beside_busy_cores_is_raised_within_a_second() -> None:
    governor = Governor(0.2, cores=2)
    governor.threads = 2
    saturated(governor, FIRST_PLAN_GAIN, 1.0)
    assert governor.raised, "that nothing was seen before is no idle time"
    got = saturated(governor, FIRST_PLAN_GAIN, 4.0)
    assert governor.raised and got > 0.9 * 4.0 * min(0.45, 2 * 0.6 / 2)
    governor.forget()
    saturated(governor, FIRST_PLAN_GAIN, 1.0)
    assert governor.raised


def test_less_gain_gets_less_and_none_gets_nothing_of_a_busy_machine() -> None:
    gains = (FIRST_PLAN_GAIN, LATER_PLAN_GAIN, 0.0)
    got: list[float] = []
    for gain in gains:
        governor = Governor(0.2, cores=2)
        saturated(governor, gain, 10 * AHEAD_S, gets=1.0)
        got.append(saturated(governor, gain, 60.0, gets=1.0))
        assert governor.raised is (gain > 0)
    assert got[0] > 1.5 * got[1] and got[1] > 4 * got[2], "what is left is what the lowest priority gets"
    assert got[1] / 120 == pytest.approx(0.2 * LATER_PLAN_GAIN / FULL_SHARE_GAIN, rel=0.15)


def test_niced_work_of_others_leaves_nothing_idle() -> None:
    governor = Governor(0.2, cores=2)
    for _ in range(400):  # calls have a core, somebody's niced work all of the rest: no load, and no idle time either
        used = 0.0 if governor.paused else TICK * (0.45 if governor.raised else 0.03)
        governor.step(TICK, used, load=0.5, gain=FIRST_PLAN_GAIN, traffic=0.5, unused=0.0)
    assert governor.raised and governor.price.taken_s > 0


def test_a_team_on_all_cores_has_one_worker_beside_it() -> None:
    governor = Governor(0.2, cores=16)
    governor.threads = 16
    assert governor.abreast(8) == 8, "nobody calls"
    for threads, abreast in ((16, 1), (12, 4), (4, 8), (1, 8)):
        governor.threads = threads
        governor.step(TICK, 0.0, load=0.5, gain=FIRST_PLAN_GAIN, traffic=0.5)
        assert governor.abreast(8) == abreast
    governor.threads = 16
    governor.rest()
    assert governor.abreast(8) == 8


def test_idle_cores_are_used_at_the_lowest_priority() -> None:
    governor = Governor(0.2, cores=2)
    for _ in range(400):  # one core serves, the worker has the other
        assert not governor.step(TICK, TICK, load=0.5, gain=FIRST_PLAN_GAIN, traffic=0.5)
        assert not governor.raised
    assert governor.price.taken_s == governor.price.raised_s == 0.0


def test_priority_is_given_back_when_the_load_ends() -> None:
    governor = Governor(0.2, cores=2)
    saturated(governor, FIRST_PLAN_GAIN, 5.0)
    assert governor.raised
    steps = 0
    while governor.raised:
        governor.step(TICK, 0.0 if governor.paused else TICK, load=0.1, gain=FIRST_PLAN_GAIN, traffic=0.1)
        steps += 1
        assert steps < 200
    saturated(governor, FIRST_PLAN_GAIN, 5.0)
    assert governor.raised, "and taken again"
    saturated(governor, 0.0, 2.0)
    assert not governor.raised and governor.granted == 0.0, "nothing is left to gain"


def test_work_that_others_keep_from_the_cores_is_not_this_models_to_claim() -> None:
    """Other processes use the machine wholly, calls of ours a twentieth of it: little is saved there, so the share is small."""
    governor = Governor(0.2, cores=2)
    for _ in range(200):
        governor.step(TICK, TICK * 0.03, load=0.985, gain=FIRST_PLAN_GAIN, traffic=0.05)
    assert 0.0 < governor.granted < 0.1 * governor.peak + 0.01


def test_work_that_was_raised_goes_on_when_calls_end_and_others_use_the_machine() -> None:
    governor = Governor(0.2, cores=2)
    saturated(governor, FIRST_PLAN_GAIN, 5.0)
    assert governor.raised
    got = 0.0
    for _ in range(int(60 / TICK)):  # nobody calls any more; the lowest priority gets 3% of a core
        used = 0.0 if governor.paused else TICK * (0.45 if governor.raised else 0.03)
        got += used
        governor.step(TICK, used, load=0.985, gain=FIRST_PLAN_GAIN, traffic=0.0, unused=0.0)
    assert not governor.raised and not governor.paused and got > 0.8 * 0.03 * 60


def test_the_meter_reads_the_cores_we_may_use(tmp_path: Path) -> None:
    stat, now = tmp_path / "stat", [0.0]
    stat.write_text("cpu 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\nintr 5\n")
    meter = LoadMeter(stat, lambda: now[0], frozenset({1}))
    now[0] = 1e6
    stat.write_text("cpu 100 0 0 100 0 0 0 0\ncpu0 100 0 0 0 0 0 0 0\ncpu1 25 0 0 75 0 0 0 0\nintr 6\n")
    assert meter() == pytest.approx(0.25) and 0.0 <= meter.own < 0.01


# --- on workers ----------------------------------------------------------------------------------


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("HOTFUSE_WORKER_NICE", raising=False)
    made: list[Pool] = []

    def make(load: Callable[[], float] | None = lambda: 1.0) -> Pool:
        def start(memory: int) -> Worker:
            return Worker(memory, (sys.executable, "-S", "-c", LEVELLED), level=pool._books.level)  # pyright: ignore[reportPrivateUsage]

        pool = Pool(PoolLimits(1, share=0.2), start, load)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.close()


LEVELLED = "import os; os.nice(int(os.environ['HOTFUSE_WORKER_LEVEL']))\n" + SCRIPT


def level_of(worker: Worker) -> int:
    nice = os.getpriority(os.PRIO_PROCESS, worker.pid)
    return LOWEST if nice == 19 else nice - os.getpriority(os.PRIO_PROCESS, 0)  # tests may be niced themselves


def until(what: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def levels(pool: Pool) -> list[int]:
    return [level_of(w) for w in pool.workers]


@pytest.mark.skipif(not priority.may_raise(), reason="takes the privilege to raise priorities")
def test_a_worker_that_starves_over_valuable_work_is_reniced_where_that_is_allowed(pools: Any, tmp_path: Path) -> None:
    pool, go = pools(), tmp_path / "go"
    future = pool.submit(Task("capture", {"until": str(go), "say": 1}, gain=FIRST_PLAN_GAIN))
    until(lambda: levels(pool) == [RAISED])
    (worker,) = pool.workers
    until(lambda: pool.counts()["raised_s"] > 0)
    assert pool.counts()["workers_starved"] == 0 and pool.counts()["share_granted"] == pytest.approx(0.6)
    go.touch()
    assert said(future) == 1
    later, more = tmp_path / "later", pool.submit(Task("what was measured", {"until": str(tmp_path / "later"), "say": 2}))
    until(lambda: levels(pool) == [LOWEST] and pool.workers[0].pid == worker.pid)  # nothing is to be gained by this one
    later.touch()
    assert said(more) == 2 and pool.counts()["workers_started"] == 1


def test_it_is_replaced_by_one_that_begins_with_the_priority_where_it_is_not(
    pools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot, "may_raise", lambda: False)
    monkeypatch.setattr("hotfuse.compile.workers.process.renice", lambda _pid, _level: False)
    pool, go = pools(), tmp_path / "go"
    future = pool.submit(Task("capture", {"until": str(go), "say": 1}, gain=FIRST_PLAN_GAIN))
    until(lambda: levels(pool) == [RAISED] and pool.counts()["workers_starved"] == 1)
    go.touch()
    assert said(future) == 1 and pool.counts()["workers_started"] == 2 and pool.counts()["workers_died"] == 0
    idle = pool.submit(Task("what was measured", {"say": 2}))
    assert said(idle) == 2 and pool.counts()["workers_starved"] == 1


UNPRIVILEGED = """
import ctypes, json, os, sys
libc, head, caps = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(head, caps) == 0
for i in (0, 1, 2):  # effective, permitted, inheritable: all but CAP_SYS_NICE stay
    caps[i] &= ~(1 << 23)
assert libc.capset(head, caps) == 0
from hotfuse.compile.workers import priority
assert not priority.may_raise()
pid = os.fork()
if not pid:
    import time
    priority.step_back(priority.LOWEST)
    time.sleep(60)
    os._exit(0)
import time
for _ in range(1000):
    if os.getpriority(os.PRIO_PROCESS, pid) > 10: break
    time.sleep(0.01)
refused = not priority.renice(pid, priority.RAISED)
os.kill(pid, 9); os.waitpid(pid, 0)
pid = os.fork()
if not pid:
    priority.step_back(priority.RAISED)
    os._exit(os.getpriority(os.PRIO_PROCESS, 0) - int(sys.argv[1]))
print(json.dumps({"refused": refused, "began": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="privileges are given up as on Linux")
def test_without_the_privilege_a_lowered_worker_stays_low_and_a_new_one_may_begin_higher() -> None:
    env = for_child()
    env.pop("HOTFUSE_WORKER_NICE", None)
    here = str(os.getpriority(os.PRIO_PROCESS, 0))
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED, here], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"refused": True, "began": RAISED}


def test_a_user_who_chose_a_level_keeps_it(pools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, go = pools(), tmp_path / "go"
    monkeypatch.setenv("HOTFUSE_WORKER_NICE", "7")
    assert priority.chosen_by_user() == 7
    future = pool.submit(Task("capture", {"until": str(go), "say": 1}, gain=FIRST_PLAN_GAIN))
    until(lambda: pool.counts()["raised_s"] > 0.2)
    assert levels(pool) == [LOWEST], "as this worker began: nobody touches it"
    go.touch()
    assert said(future) == 1


# --- on a real machine ---------------------------------------------------------------------------


def test_a_model_on_saturated_cores_is_captured_and_gets_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many calling threads as cores: plans come all the same, and what they cost is told."""
    monkeypatch.delenv("HOTFUSE_WORKER_NICE", raising=False)
    torch.manual_seed(3)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.LayerNorm(256))]
    model = torch.nn.Sequential(*layers).eval()
    stop, faults = threading.Event(), list[str]()
    with hotfuse.jit(model, settings=hotfuse.Settings(idle=False)) as fast:

        def call() -> None:
            with torch.inference_mode():
                while not stop.is_set():
                    x = torch.randn(64, 256)
                    if not torch.allclose(fast(x), model(x), atol=1e-4):
                        faults.append("wrong")

        threads = [threading.Thread(target=call) for _ in range(max(2, os.cpu_count() or 1))]
        for t in threads:
            t.start()
        try:
            until(lambda: any(d["action"] in ("deploy", "refuse") and d["evidence"].get("tier") == 1
                              for d in fast.explain().to_dict()["decisions"]), 300.0)  # fmt: skip
        finally:
            stop.set()
            for t in threads:
                t.join()
        told = fast.explain(full=True)
    assert not faults
    data, text = told.to_dict(), str(told)
    assert data["background"]["worker_cpu_s"] > 0 and 0 < data["background"]["share_most"] <= 1
    assert "CPU seconds in workers" in text and "calls in flight" in text
    assert data["concurrency"]["most"] >= 2 and data["concurrency"]["calls_in_flight"] > 1


def test_who_waits_for_work_claims_what_calls_would_use(pools: Any, tmp_path: Path) -> None:
    pool, go = pools(None), tmp_path / "go"
    future = pool.submit(Task("capture", {"until": str(go), "say": 1}, gain=FIRST_PLAN_GAIN))
    with pool.waited_for():
        until(lambda: pool.counts()["share_granted"] > 0.1)  # this process uses nearly nothing
    go.touch()
    assert said(future) == 1


def test_work_beside_calls_in_flight_claims_what_they_ask_for(pools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs keep them from the cores: this process uses nearly nothing."""
    pool, go, asked = pools(None), tmp_path / "go", list[int]()
    monkeypatch.setattr(served_calls, "in_flight", lambda: asked.append(1) or usable_cores())
    future = pool.submit(Task("capture", {"until": str(go), "say": 1}, gain=FIRST_PLAN_GAIN))
    until(lambda: pool.counts()["share_granted"] > 0.1)
    go.touch()
    assert said(future) == 1 and asked


def test_calls_in_flight_are_counted_from_the_first_on() -> None:
    seen: list[int] = []

    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(served_calls.in_flight())
            return x + 1

    with hotfuse.jit(Asks(), settings=hotfuse.Settings(idle=False)) as fast:
        for _ in range(3):  # the model's own code answers, long before there is a graph
            fast(torch.zeros(2))
    assert 1 in seen[1:] and 0 not in seen[1:] and served_calls.in_flight() == 0


def test_work_is_short_of_time_where_others_have_the_cores() -> None:
    def after(seconds: float, used: float, unused: float, calls: float = 0.4) -> str:
        found = Shortage(cores=2)
        for _ in range(round(seconds / TICK)):
            found.step(TICK, used * TICK, unused, calls, 1.0 - unused - used / 2)
        return found.text

    told = after(20.0, used=0.1, unused=0.0)
    assert told.startswith(SHORT) and "0.10 of 2 cores" in told and "calls 0.80, other programs 1.10" in told
    assert after(5.0, used=0.1, unused=0.0) == "", "first plans take that long anyway"
    assert after(20.0, used=0.9, unused=0.0) == "", "it has a core"
    assert after(20.0, used=0.1, unused=0.4) == "", "whatever it waits for, it is not cores"


def test_a_shortage_is_of_the_work_in_hand() -> None:
    found = Shortage(cores=2)
    for _ in range(400):
        found.step(TICK, 0.0, 0.0, 1.0, 1.0)
    assert found.text
    found.rest()
    assert found.text == ""
    found.step(TICK, 0.0, 0.0, 1.0, 1.0)
    assert found.text == "", "that was about other work"


@pytest.mark.parametrize("load", [0.0, 1.0])
def test_a_pool_tells_that_its_worker_starves(pools: Any, monkeypatch: pytest.MonkeyPatch, load: float) -> None:
    monkeypatch.setattr("hotfuse.compile.workers.shortage.AFTER_S", 0.2)
    pool = pools(lambda: load)
    with blocked(pool):
        until = time.monotonic() + (30.0 if load else 0.6)
        while not pool.short_of_time and time.monotonic() < until:
            time.sleep(0.02)
        assert pool.short_of_time.startswith(SHORT) is bool(load)
