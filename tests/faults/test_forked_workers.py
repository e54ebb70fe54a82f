"""Workers that are forks of the serving process: forked while others compute and serve; what they must not hold; how they fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
import torch

import hotfuse
from hotfuse import Settings
from hotfuse.base.settings import Workers
from hotfuse.compile.workers import forked, slot, starting
from hotfuse.compile.workers.forked import ForkedProcess, ForkedWorker, ForkFailed
from hotfuse.compile.workers.process import Worker
from hotfuse.compile.workers.slot import PoolLimits
from hotfuse.compile.workers.starting import Starter, unsafe
from hotfuse.compile.workers.task import Task, Waiting
from hotfuse.compile.workers.worker_pool import Pool

READY = {"kind": "ready", "front": "torch"}


@pytest.fixture
def nothing_against_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have used an accelerator, or much memory; no worker here does anything with either."""
    for device in (torch.cuda, torch.xpu):
        monkeypatch.setattr(device, "is_initialized", lambda: False)
    monkeypatch.setattr(starting, "MAX_BYTES", 1 << 62)


def answers(worker: ForkedWorker) -> bool:
    """Whether it does what workers do: an unknown request is refused, not fatal."""
    header, _ = worker.ask({"kind": "nonsense"}, [])
    return header["answer"] == "refusal"


@contextmanager
def beside(*works: Callable[[], object]) -> Generator[None]:
    """Threads that do something again and again."""
    stop = threading.Event()

    def again(work: Callable[[], object]) -> None:
        while not stop.is_set():
            work()

    threads = [threading.Thread(target=again, args=(w,)) for w in works]
    for t in threads:
        t.start()
    try:
        yield
    finally:
        stop.set()
        for t in threads:
            t.join()


def test_forks_come_up_while_threads_compute_log_allocate_and_serve() -> None:
    """Each of these threads holds locks most of the time. A fork that met one of them is noticed at once, not later."""
    log = logging.getLogger("a server")
    log.addHandler(logging.StreamHandler(open(os.devnull, "w")))  # noqa: SIM115
    log.setLevel(logging.INFO)
    weight = torch.randn(256, 256)

    async def served() -> None:
        listening = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.close()
        await writer.wait_closed()
        listening.close()

    with beside(
        lambda: torch.nn.functional.linear(torch.randn(32, 256), weight),
        lambda: log.info("a call"),
        lambda: [bytearray(random.randrange(1, 1 << 16)) for _ in range(100)],
        lambda: asyncio.run(served()),
    ):
        failed = 0
        for _ in range(8):
            try:
                worker = ForkedWorker(1 << 30)
            except ForkFailed:
                failed += 1
                continue
            assert answers(worker) and answers(worker)
            worker.close()
    assert failed <= 4


def test_a_fork_holds_no_socket_of_the_server() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = listening.getsockname()
        worker = ForkedWorker()
        assert answers(worker), "it waits for the next request now, and opens and closes nothing"
        open_there = {os.readlink(p) for p in Path(f"/proc/{worker.pid}/fd").iterdir()}
        assert not [name for name in open_there if name.startswith("socket:")]
    with socket.socket() as again:  # nobody listens there any more: the address is free
        again.bind(address)
    assert answers(worker)
    worker.close()


def test_a_fork_dies_quietly_and_leaves_no_zombie(capfd: pytest.CaptureFixture[str]) -> None:
    worker = ForkedWorker()
    assert Path(f"/proc/{worker.pid}/comm").read_text().strip() == "hotfuse-worker"
    worker.kill()
    with pytest.raises((EOFError, OSError)):
        worker.ask(READY, [])
    worker.close()
    assert worker.status == -signal.SIGKILL and not worker.alive
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
    assert capfd.readouterr() == ("", "")


def test_whoever_asks_while_another_thread_hears_how_it_ended_is_told_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells it once. To the second who asked there was no such child, and it was taken for one that ended well."""
    waitpid, heard = os.waitpid, list[int | None]()

    def meanwhile(pid: int, how: int) -> tuple[int, int]:
        found = waitpid(pid, how)
        heard.append(fork.poll())
        return found

    pid = os.fork()
    if pid == 0:
        os._exit(7)
    fork = ForkedProcess(pid)
    monkeypatch.setattr(os, "waitpid", meanwhile)
    assert fork.wait() == 7 and heard == [None] and fork.poll() == 7


def test_signals_mean_the_same_as_in_a_fresh_process() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda n, _: heard.append(n))
    try:
        worker = ForkedWorker()
        os.kill(worker.pid, signal.SIGINT)
        assert answers(worker)
        os.kill(worker.pid, signal.SIGTERM)
        until = time.monotonic() + 120
        while worker.alive and time.monotonic() < until:
            time.sleep(0.01)
        assert worker.status == -signal.SIGTERM and not heard
        worker.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_it_inherits_does_not_count_as_its_memory() -> None:
    kept = bytearray(os.urandom(1 << 20) * 200)
    worker = ForkedWorker(64 << 20)
    assert worker.rss() < 32 << 20 < len(kept)
    assert answers(worker)
    worker.close()


def test_a_child_that_cannot_say_hello_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "QUIET_S", 0.2)
    lock = threading.Lock()
    with lock, pytest.raises(ForkFailed, match="hello"):
        ForkedWorker(before_hello=lambda: lock.acquire())  # type: ignore[arg-type, return-value]
    with pytest.raises(ForkFailed, match="ended with status 3"):
        ForkedWorker(before_hello=lambda: os._exit(3))


@pytest.mark.usefixtures("nothing_against_forks")
def test_forks_that_fail_are_counted_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def silent(_memory: int = 0, **_more: object) -> ForkedWorker:
        made.append(1)
        raise ForkFailed("no hello", because="a test")

    monkeypatch.setattr(forked, "ForkedWorker", silent)
    start = Starter()
    for _ in range(2):
        worker = start(0)
        assert not worker.forked
        worker.close()
    assert len(made) == starting.TRIES and start.because == "no hello: a test"
    assert start.counts == {"forks_failed": starting.TRIES, "workers_spawned": 2}


@pytest.mark.usefixtures("nothing_against_forks")
def test_what_speaks_against_a_fork_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsafe("auto") == ""
    assert "settings" in unsafe("spawn")
    with monkeypatch.context() as patch:
        patch.setattr(starting, "MAX_BYTES", 1)
        assert "MiB" in unsafe("auto") and unsafe("fork") == ""
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert "cuda" in unsafe("fork")
    with monkeypatch.context() as patch:
        patch.setattr(forked, "importing", lambda: "somewhere")
        assert "somewhere" in unsafe("auto")
    monkeypatch.setattr("sys.platform", "darwin")
    assert "darwin" in unsafe("auto")


@functools.cache
def _in_fork_of(home: int, _here: int) -> bool:
    """Whether this is a fork of a process; what is found out once in a process is no effect of a model's."""
    return os.getppid() == home and "hotfuse.compile.workers.worker" not in Path("/proc/self/cmdline").read_text()


@functools.cache
def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


class Sleeps(torch.nn.Module):
    """Stands still in the first process that captures it, if that is a fork; `home` is where it was made."""

    def __init__(self, crash: bool) -> None:
        super().__init__()
        self.home, self.crash = os.getpid(), crash

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _in_fork_of(self.home, os.getpid()):
            if self.crash:
                _crash()
            threading.Event().wait()
        return x + 1


@pytest.mark.usefixtures("nothing_against_forks")
@pytest.mark.parametrize("crash", [False, True])
def test_a_fork_that_stands_still_or_crashes_is_replaced_by_a_fresh_worker(
    crash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotfuse.compile.workers import service as services

    monkeypatch.setattr(slot, "STALL_S", 60.0 if crash else 1.0)
    own = services.Service()
    monkeypatch.setattr(services, "_service", own)
    fast = hotfuse.jit(Sleeps(crash), settings=Settings(tiers=0))
    x = torch.ones(2)
    assert torch.equal(fast(x), x + 1)
    assert fast.wait(120)
    counts = fast.stats()["compile"]
    assert counts["forks_crashed" if crash else "forks_stalled"] == 1 and counts["workers_died"] == 0
    assert counts["workers_forked"] >= 1 and counts["workers_spawned"] == 1  # a slow machine may look like a second one
    assert torch.equal(fast(x), x + 1) and fast.stats()["graph_calls"] == 1, str(fast.explain(full=True))
    assert ("crashed" if crash else "threading.py") in own.pool.starter.because_of_forks
    own.stop(10)


class Asleep(Worker):
    """A forked worker as it looks from outside when it waits for the next word of whoever started it."""

    forked, alive, pid = True, True, -1

    def __init__(self) -> None:
        self.paused, self.asked, self.killed = False, 0, False

    def sleeps(self) -> bool:
        return True

    def ask_where(self) -> None:
        self.asked += 1

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.kill()


def test_a_worker_that_answered_while_it_was_killed_is_not_asked_again() -> None:
    """It seemed to be alive for a moment more, and the next request died with it."""
    place, worker = slot.WorkerSlot(slot.Books(PoolLimits(1), Starter())), Asleep()
    place.worker = worker
    place.begin(Waiting(Task("in time", READY), Future()))
    place.done()
    assert place.worker is worker and not worker.killed
    place.begin(Waiting(Task("just too late", READY, timeout=slot.GLANCE_S / 2), Future()))
    place.look(slot.GLANCE_S)
    assert worker.killed
    place.done()  # its answer had been on its way
    assert place.worker is None and place.running is None


def test_a_server_that_was_stopped_for_long_does_not_take_its_worker_for_stalled() -> None:
    """It looked once behind that, and killed who had waited for it; and had not asked where that one stood."""
    place, worker = slot.WorkerSlot(slot.Books(PoolLimits(1), Starter())), Asleep()
    place.worker = worker
    place.begin(Waiting(Task("a request", READY, timeout=2 * slot.STALL_S), Future()))
    place.look(10 * slot.STALL_S)
    assert not worker.killed and not worker.asked, "it was seen asleep for a moment only"
    looks = 1
    while not worker.killed:
        place.look(slot.GLANCE_S)
        looks += 1
    assert looks == slot.STALL_S / slot.GLANCE_S + 1 and worker.asked == 1


@pytest.mark.usefixtures("nothing_against_forks")
@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_workers_of_both_kinds_are_killed_replaced_and_bounded(kind: Workers) -> None:
    both = Pool(PoolLimits(1, 8 << 30, kind=kind), load=lambda: 0.0)
    try:
        assert both.submit(Task("one", READY)).result(60)[0]["answer"] == "ready"
        (worker,) = both.workers
        assert worker.forked is (kind == "fork")
        os.kill(worker.pid, signal.SIGKILL)
        while worker.alive:
            time.sleep(0.01)
        assert both.submit(Task("two", READY)).result(60)[0]["answer"] == "ready"
        assert both.counts()["workers_forked" if kind == "fork" else "workers_spawned"] == 2
        limits = Path(f"/proc/{both.workers[0].pid}/limits").read_text()
        line = next(line for line in limits.splitlines() if line.startswith("Max address space"))
        assert line.split()[3] != "unlimited"
    finally:
        both.close()


FORBIDDEN = """
import sys, torch
from hotfuse.compile.workers.forked import ForkedWorker, ForkFailed

left = int(sys.argv[1])

def hook(event, _args):
    global left
    if event == "os.fork" and left:
        left -= 1
        raise RuntimeError("os.fork is unsafe now")

sys.addaudithook(hook)
try:
    ForkedWorker().close()
    print("forked")
except ForkFailed as e:
    print(e.because)
"""


@pytest.mark.parametrize(("times", "said"), [(3, "forked"), (10**6, "it cannot be done now: os.fork is unsafe now")])
def test_a_fork_that_a_library_forbids_waits_and_then_fails(times: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORBIDDEN, str(times)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == said, done.stderr


class SlowToFind(MetaPathFinder):
    """Looks for a module until it is told to stop: meanwhile nothing shows of it but its lock."""

    def __init__(self) -> None:
        self.begun, self.stop = threading.Event(), threading.Event()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "not_to_be_found":
            self.begun.set()
            self.stop.wait(30)


def test_no_fork_is_made_while_a_module_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child would wait for ever for the lock of a module that a thread of its parent is about to import."""
    finder = SlowToFind()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    thread = threading.Thread(target=_import_nothing, daemon=True)
    thread.start()
    assert finder.begun.wait(30)
    assert forked.importing(0.05) == "not_to_be_found"
    monkeypatch.setattr(forked, "FORBIDDEN_S", 0.05)
    with pytest.raises(ForkFailed) as failed:
        ForkedWorker()
    assert failed.value.because == "it cannot be done now: module not_to_be_found is being imported"
    finder.stop.set()
    thread.join(30)
    assert not forked.importing(10.0)
    ForkedWorker().close()


def _import_nothing() -> None:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("not_to_be_found")
