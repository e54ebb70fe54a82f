"""The pool of workers: order, deadlines, memory, deaths, replacement, cancellation and its governor, on workers without torch."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotfuse import CaptureError
from hotfuse.base.events import Why
from hotfuse.compile.workers.process import Worker
from hotfuse.compile.workers.scheduler import Governor, LoadMeter
from hotfuse.compile.workers.slot import PoolLimits
from hotfuse.compile.workers.task import Task
from hotfuse.compile.workers.worker_pool import Pool

SCRIPT = """
import json, os, signal, struct, sys, time
def exactly(n):
    data = b""
    while len(data) < n:
        part = os.read(0, n - len(data))
        if not part: sys.exit(0)
        data += part
    return data
hoard = []
while True:
    header = json.loads(exactly(struct.unpack("<I", exactly(4))[0]))
    blobs = [exactly(n) for n in header.pop("sizes")]
    if header.get("sleep"): time.sleep(header["sleep"])
    while header.get("until") and not os.path.exists(header["until"]): time.sleep(0.005)
    while header.get("spin") and not os.path.exists(header["spin"]): pass
    if header.get("die"):
        print("about to die", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if header.get("die_once") and not os.path.exists(header["die_once"]):
        open(header["die_once"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if header.get("eat"): hoard.append(b"x" * header["eat"])
    if header.get("hold"): time.sleep(header["hold"])
    answer = {"ok": True, "pid": os.getpid(), "said": header.get("say"), "got": sum(map(len, blobs)), "sizes": [],
              "usage": {"cpu_s": time.process_time(), "peak_rss": 1}}
    text = json.dumps(answer).encode()
    os.write(1, struct.pack("<I", len(text)) + text)
"""


def light(memory: int) -> Worker:
    return Worker(memory, (sys.executable, "-S", "-c", SCRIPT))


@pytest.fixture
def pools() -> Iterator[Any]:
    made: list[Pool] = []

    def make(workers: int = 1, **changes: Any) -> Pool:
        idle = changes.pop("idle_s", 60.0)
        load = changes.pop("load", lambda: 0.0)
        made.append(Pool(PoolLimits(workers, **changes), light, load, idle))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def said(future: Future[Any]) -> Any:
    return future.result(60)[0]["said"]


@contextmanager
def blocked(pool: Pool) -> Generator[Future[Any]]:
    """Keep the only worker busy, so that what is submitted meanwhile must wait."""
    with tempfile.TemporaryDirectory() as folder:
        go = Path(folder) / "go"
        future = pool.submit(Task("first", {"until": str(go), "say": "first"}))
        while pool.counts()["workers_started"] == 0 or not pool.workers:
            time.sleep(0.005)
        yield future
        go.touch()
        assert said(future) == "first"


def test_answers_come_back_with_their_bytes(pools: Any) -> None:
    pool = pools(2)
    big = os.urandom(3 << 20)
    futures = [pool.submit(Task(f"t{i}", {"say": i}, [big, b"tail"])) for i in range(6)]
    assert [said(f) for f in futures] == list(range(6))
    assert {f.result()[0]["got"] for f in futures} == {len(big) + 4}
    assert 1 <= pool.counts()["workers_started"] <= 2 and pool.counts()["answered"] == 6


def test_the_most_valuable_goes_first_and_values_may_change(pools: Any) -> None:
    pool = pools(1)
    worth = {"a": 1.0, "b": 2.0, "c": 3.0}
    order: list[str] = []
    done = threading.Semaphore(0)

    def answered(f: Future[Any]) -> None:
        order.append(f.result()[0]["said"])
        done.release()

    with blocked(pool):
        for name in worth:
            pool.submit(Task(name, {"say": name}, priority=lambda n=name: worth[n])).add_done_callback(answered)
        worth["a"] = 9.0  # it became hot while it waited
    assert all(done.acquire(timeout=60) for _ in worth)
    assert order == ["a", "c", "b"]


def test_a_newer_request_replaces_the_one_that_waits(pools: Any) -> None:
    pool = pools(1)
    with blocked(pool):
        old = pool.submit(Task("unit", {"say": "old"}, key="unit"))
        new = pool.submit(Task("unit", {"say": "new"}, key="unit"))
        other = pool.submit(Task("unit", {"say": "other"}, key="another"))
        with pytest.raises(CancelledError):
            old.result(60)
    assert [said(f) for f in (new, other)] == ["new", "other"]
    assert pool.counts()["replaced"] == 1 and pool.counts()["answered"] == 3


def test_a_deadline_ends_the_worker_and_the_next_one_serves(pools: Any) -> None:
    pool = pools(1)
    late = pool.submit(Task("slow", {"sleep": 60}, timeout=0.3, tries=3))
    with pytest.raises(CaptureError, match="took longer") as caught:
        late.result(60)
    assert caught.value.why is Why.TIMEOUT
    assert said(pool.submit(Task("next", {"say": 1}))) == 1
    assert pool.counts()["late"] == 1 and pool.counts()["workers_started"] == 2


def test_a_request_that_kills_twice_is_refused_with_the_reason(pools: Any) -> None:
    pool = pools(1)
    for started in (2, 2):  # the second time it does not get a worker any more
        with pytest.raises(CaptureError, match="died with status -9 over unit 7") as caught:
            pool.submit(Task("unit 7", {"die": 1}, tries=2, key="u7")).result(60)
        assert caught.value.because == "about to die" and caught.value.why is Why.WORKER_DIED
        assert pool.counts()["workers_started"] == started
    assert pool.counts()["workers_died"] == 2 and pool.counts()["refused"] == 2
    with pytest.raises(CaptureError, match="died"):
        pool.submit(Task("capture", {"die": 1})).result(60)
    assert pool.counts()["workers_died"] == 3
    assert said(pool.submit(Task("next", {"say": 1}))) == 1


def test_a_request_whose_worker_died_once_is_done_by_another(pools: Any, tmp_path: Path) -> None:
    pool = pools(1)
    future = pool.submit(Task("unit", {"die_once": str(tmp_path / "died"), "say": 5}, tries=2, key="u"))
    assert said(future) == 5 and pool.counts()["workers_died"] == 1


def test_a_worker_that_eats_memory_is_ended_and_a_fat_one_replaced(pools: Any) -> None:
    pool = pools(1, memory=64 << 20)
    with pytest.raises(CaptureError, match="died") as caught:
        pool.submit(Task("hungry", {"eat": 150 << 20, "hold": 30})).result(60)
    assert "64 MiB" in caught.value.because
    assert said(pool.submit(Task("fat", {"eat": 40 << 20, "say": 1}))) == 1
    assert said(pool.submit(Task("next", {"say": 2}))) == 2
    assert pool.counts()["workers_recycled"] >= 1 and pool.counts()["worker_peak_bytes"] > 0


def test_cancelling_drops_what_waits_and_ends_what_runs(pools: Any) -> None:
    pool = pools(1)
    running = pool.submit(Task("mine", {"sleep": 60}, owner="m"))
    waiting = pool.submit(Task("mine too", {"say": 1}, owner="m"))
    other = pool.submit(Task("other", {"say": 2}, owner="o"))
    while not pool.workers:
        time.sleep(0.01)
    assert pool.cancel("m") == 2
    with pytest.raises(CaptureError) as caught:
        running.result(60)
    assert caught.value.why is Why.CANCELLED
    with pytest.raises(CancelledError):
        waiting.result(60)
    assert said(other) == 2


def test_whoever_waits_for_one_of_several_hears_that_they_were_dropped(pools: Any) -> None:
    """As a compilation does: one whose units all waited behind another model's stood there for ever when its model was closed."""
    pool = pools(1)
    with blocked(pool):
        mine = [pool.submit(Task("mine", {"say": n}, owner="m")) for n in range(2)]
        assert mine[0].cancel(), "it has given up one by itself"
        old, new = (pool.submit(Task("unit", {"say": n}, key="unit")) for n in range(2))
        assert pool.cancel("m") == 2
        assert wait([*mine, old], 0).done == {*mine, old} and all(f.cancelled() for f in (*mine, old))
    assert said(new) == 1


def test_closing_ends_everything_in_bounded_time(pools: Any) -> None:
    pool = pools(2)
    futures = [pool.submit(Task("slow", {"sleep": 600})) for _ in range(4)]
    while len(pool.workers) < 2:
        time.sleep(0.01)
    pids = [w.pid for w in pool.workers]
    pool.close(60)
    for f in futures:
        with pytest.raises(CaptureError):
            f.result(1)
    for pid in pids:  # neither running nor a zombie
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(CaptureError, match="ending"):
        pool.submit(Task("late", {})).result(1)


def test_closing_passes_over_what_nobody_waits_for(pools: Any) -> None:
    """A compilation whose sizes changed gives up requests that wait; telling them raised, and nobody behind them was told."""
    pool = pools(1)
    running = pool.submit(Task("slow", {"sleep": 600}))
    while not pool.workers:
        time.sleep(0.01)
    given_up, waiting = (pool.submit(Task("later", {"say": n})) for n in range(2))
    assert given_up.cancel()
    pool.close(60)
    for f in (running, waiting):
        with pytest.raises(CaptureError):
            f.result(60)


def test_idle_workers_go_and_come_back(pools: Any) -> None:
    pool = pools(1, idle_s=0.1)
    assert said(pool.submit(Task("one", {"say": 1}))) == 1
    until = time.monotonic() + 120
    while pool.workers and time.monotonic() < until:
        time.sleep(0.02)
    assert not pool.workers
    assert said(pool.submit(Task("two", {"say": 2}))) == 2 and pool.counts()["workers_started"] == 2


def test_workers_without_work_are_sent_home_and_those_at_work_are_not(pools: Any, tmp_path: Path) -> None:
    pool, go = pools(2), tmp_path / "go"
    busy = pool.submit(Task("busy", {"say": 1, "until": str(go)}))
    assert said(pool.submit(Task("done", {"say": 2}))) == 2
    pool.send_home()
    until = time.monotonic() + 120
    while len(pool.workers) > 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(pool.workers) == 1 and not busy.done()
    go.touch()
    assert said(busy) == 1
    assert said(pool.submit(Task("again", {"say": 3}))) == 3 and pool.counts()["workers_died"] == 0


def test_workers_killed_at_random_lose_nothing(pools: Any, tmp_path: Path) -> None:
    pool = pools(2)
    rng = random.Random(0)
    killed, go = 0, tmp_path / "go"
    futures = [pool.submit(Task(f"t{i}", {"say": i, "sleep": 0.02, "until": str(go)}, tries=50)) for i in range(60)]
    while killed < 10 and not all(f.done() for f in futures):  # then no more: where processes start slowly, none would end
        if alive := pool.workers:
            victim = rng.choice(alive)
            victim.kill()
            killed += 1
            while victim.alive:
                time.sleep(0.002)
            go.touch()  # the first to die was at work
        time.sleep(0.02 * rng.random())
    assert [said(f) for f in futures] == list(range(60))
    assert 1 <= pool.counts()["workers_died"] <= killed


def test_a_busy_machine_stops_workers_and_an_idle_one_lets_them_go(pools: Any, tmp_path: Path) -> None:
    load, end = [1.0], tmp_path / "end"
    pool = pools(1, share=0.0, load=lambda: load[0])
    pool._governor = Governor(0.0, cores=1)  # however many this machine has
    future = pool.submit(Task("work", {"spin": str(end), "say": 1}))
    while pool.counts()["pauses"] == 0:
        time.sleep(0.01)
    waiting = pool.submit(Task("next", {"say": 2}))
    (worker,) = pool.workers
    while worker._stat()[0] != "T":  # pyright: ignore[reportPrivateUsage] - a signal arrives when it is its turn
        time.sleep(0.01)
    used = worker.cpu_s()
    end.touch()
    time.sleep(0.5)
    assert worker.cpu_s() == used and not future.done() and not waiting.done()
    load[0] = 0.0
    assert said(future) == 1 and said(waiting) == 2


def test_the_governor_gives_what_is_left_and_a_share() -> None:
    g = Governor(share=0.1, cores=2)
    assert not any(g.step(0.1, 0.1, load=0.5) for _ in range(100))  # one core of two is idle, one worker uses it
    stopped = [g.step(0.1, 0.0 if g.paused else 0.1, load=1.0) for _ in range(1000)]
    assert 0.70 < sum(stopped) / 1000 < 0.85  # a share of 0.2 cores carries a worker a fifth of the time
    assert not g.step(1.0, 0.0, load=0.0)
    niced = Governor(share=0.1, cores=2)
    assert not any(niced.step(0.1, 0.015, load=1.0) for _ in range(1000))  # priority alone keeps it below its share


def test_the_meter_counts_what_is_not_niced(tmp_path: Path) -> None:
    stat, now = tmp_path / "stat", [0.0]
    stat.write_text("cpu 0 0 0 0 0 0 0 0\n")
    meter = LoadMeter(stat, lambda: now[0])
    now[0] = 1e6
    stat.write_text("cpu 30 40 10 20 0 0 0 0\n")
    assert meter() == pytest.approx(0.4)
    now[0] = 2e6
    stat.write_text("cpu 30 140 10 20 0 0 0 0\n")
    assert meter() == pytest.approx(0.0, abs=1e-3)
    whole = LoadMeter(stat, lambda: now[0], niced=True)  # of a server that is niced itself: so are its calls
    now[0] = 2.5e6
    stat.write_text("cpu 30 220 10 40 0 0 0 0\n")
    assert whole() == pytest.approx(0.8)
    missing = LoadMeter(tmp_path / "none", lambda: now[0])
    now[0] = 3e6
    assert 0.0 <= missing() <= 1.0


def test_a_forked_child_lets_go_of_the_workers(pools: Any) -> None:
    pool = pools(1)
    assert said(pool.submit(Task("one", {"say": 1}))) == 1
    (worker,) = pool.workers
    over, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        pool.abandon()
        os.close(end)
        os.read(over, 1)  # holding a copy of the worker's pipe would keep the worker alive until then
        os._exit(0)
    assert said(pool.submit(Task("two", {"say": 2}))) == 2
    worker._in.close()  # pyright: ignore[reportPrivateUsage]
    until = time.monotonic() + 60
    while worker.alive and time.monotonic() < until:
        time.sleep(0.01)
    assert not worker.alive
    os.close(end)
    os.waitpid(pid, 0)
    os.close(over)


@pytest.mark.parametrize(("threads", "together"), [(0, False), (1, True)])
def test_work_beside_calls_on_a_device_is_done_by_several_workers(pools: Any, tmp_path: Path, threads: int, together: bool) -> None:
    """A team of 64 threads leaves no core for a second worker; calls on a device have no team, whatever torch would use here."""
    pool, go = pools(2, threads=64, load=lambda: 0.9), tmp_path / "go"
    futures = [pool.submit(Task("first", {"until": str(go), "say": 0}, gain=0.4, threads=threads))]
    end = time.monotonic() + 60.0
    while not pool.counts()["share_granted"] and time.monotonic() < end:  # traffic has been seen
        time.sleep(0.01)
    futures.append(pool.submit(Task("second", {"until": str(go), "say": 1}, gain=0.4, threads=threads)))
    until = time.monotonic() + (30.0 if together else 0.5)
    while pool.counts()["workers_started"] < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert (pool.counts()["workers_started"] == 2) is together
    go.touch()
    assert [said(f) for f in futures] == [0, 1]


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_closed_worker_leaves_no_file_open_and_says_what_it_said_last() -> None:
    worker = Worker(command=(sys.executable, "-c", "import sys; sys.stderr.write('one\\nlast\\n'); sys.stderr.flush(); input()"))
    log = worker._log  # pyright: ignore[reportPrivateUsage]
    deadline = time.monotonic() + 60
    while worker.last_words() != "last" and time.monotonic() < deadline:
        time.sleep(0.01)
    worker.close()
    assert log.closed and worker.last_words() == "last"
    worker.close()
    assert worker.last_words() == "last"


WRITER = """
import os, sqlite3, sys, time
wal, path, begun, free = sys.argv[1:]
c = sqlite3.connect(path, isolation_level=None)
if wal == "wal": c.execute("PRAGMA journal_mode = WAL")
c.execute("CREATE TABLE t (n)")
c.execute("BEGIN IMMEDIATE")
c.execute("INSERT INTO t VALUES (1)")
open(begun, "w").close()
while not os.path.exists(free): time.sleep(0.005)
c.execute("COMMIT")
open(begun + "2", "w").close()
while True: time.sleep(0.005)
"""


@pytest.mark.parametrize("kind", ["wal", "file"])
def test_a_worker_that_writes_to_a_database_is_not_stopped_before_it_has_done_so(tmp_path: Path, kind: str) -> None:
    """Stopped there, it would keep everybody else from writing for as long as it stands."""
    begun, free, done = (tmp_path / n for n in ("begun", "free", "begun2"))
    worker = Worker(command=(sys.executable, "-c", WRITER, kind, str(tmp_path / "p.sqlite"), str(begun), str(free)))
    try:
        assert reached(begun)
        worker.pause()
        assert not worker.paused
        free.touch()
        assert reached(done), "it goes on"
        worker.pause()
        assert worker.paused
        worker.resume()
    finally:
        worker.kill()
        worker.close()


def reached(path: Path, seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return path.exists()
