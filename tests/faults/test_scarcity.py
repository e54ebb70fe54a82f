"""Where the system has no more threads or files for a while: calls go on and are right, why is told, and plans follow later."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.faults import NO_THREAD, faults, is_alive, is_begun, is_passing
from hotfuse.compile.workers.task import Task
from hotfuse.compile.workers.worker_pool import Pool
from hotfuse.profile.analyzer import Analyzer
from hotfuse.profile.records import Batch, Subject
from hotfuse.runtime import call_group
from hotfuse.runtime.call_group import CallGroup
from hotfuse.runtime.epochs import Epochs
from hotfuse.runtime.tierup import improve


class _NoThreads:
    """While it is on, no thread of ours can be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.refused, start = True, 0, threading.Thread.start

        def maybe(thread: threading.Thread) -> None:
            if self.on and thread.name.startswith("hotfuse"):
                self.refused += 1
                raise RuntimeError(NO_THREAD)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", maybe)


def served(fast: Any, model: nn.Module, until: Callable[[], bool], seconds: float = 150.0) -> bool:
    """Calls, each compared, until something holds."""
    end, x = time.monotonic() + seconds, torch.randn(3, 4)
    with torch.no_grad():
        while not until() and time.monotonic() < end:
            torch.testing.assert_close(fast(x), model(x))
            time.sleep(0.002)
    return until()


def test_errors_that_tell_of_the_moment_are_told_apart() -> None:
    assert is_passing(OSError(errno.EMFILE, "files")) and is_passing(MemoryError()) and is_passing(RuntimeError(NO_THREAD))
    assert is_passing(CaptureError("gone", why=Why.WORKER_DIED))
    assert not is_passing(FileNotFoundError(errno.ENOENT, "no file")) and not is_passing(RuntimeError("shapes"))
    assert not is_passing(CaptureError("no graph"))


def test_a_refusal_of_the_moment_ends_and_any_other_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(call_group.time, "monotonic", lambda: now[0])
    group = CallGroup((), [])
    group.tried.add(())
    group.refuse("no files", passing=True)
    now[0] += call_group.PARDON_S - 1
    assert group.is_refused() and "tried again" in group.refused
    now[0] += 1
    assert not group.is_refused() and not group.tried and not group.refused
    group.refuse("no files", passing=True)
    now[0] += call_group.PARDON_S
    assert group.is_refused(), "each lasts longer than the one before"
    now[0] += call_group.PARDON_S
    assert not group.is_refused()
    group.refuse("no graph of it")
    now[0] += 100 * call_group.MAX_PARDON_S
    assert group.is_refused()


def test_calls_go_on_without_threads_and_a_capture_follows_when_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    none = _NoThreads(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    with hotfuse.jit(model, settings=Settings(hot_calls=2, tiers=0)) as fast:
        served(fast, model, lambda: none.refused > 3, 30)
        assert none.refused > 3 and any(NO_THREAD in text for text in faults.counts())
        assert NO_THREAD in str(fast.explain())
        none.on = False
        assert served(fast, model, lambda: fast.stats()["calls_per_tier"]["0"] > 0), str(fast.explain(full=True))
    faults.clear()


def test_a_pool_without_threads_says_so_and_works_when_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    none, pool = _NoThreads(monkeypatch), Pool()
    try:
        with pytest.raises(CaptureError, match="nothing can ask") as refused:
            pool.submit(Task("a request", {"kind": "ready"})).result(5)
        assert refused.value.why is Why.WORKER_DIED and not pool.busy
        none.on = False
        pool.submit(Task("a request", {"kind": "ready"})).result(120)
    finally:
        pool.close()
    faults.clear()


def test_a_watch_that_ended_by_errors_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    pool._call_sampler = ended  # pyright: ignore[reportPrivateUsage]
    try:
        waiting = pool.submit(Task("a request", {"kind": "ready"}))
        assert is_alive(pool._call_sampler)  # pyright: ignore[reportPrivateUsage]
        waiting.result(120)
    finally:
        pool.close()
    assert not is_alive(None)


def test_a_thread_that_cannot_be_had_is_counted_once_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    none = _NoThreads(monkeypatch)
    assert not is_begun(threading.Thread(target=lambda: None, name="hotfuse-test"))
    assert faults.counts()[f"hotfuse-test: RuntimeError: {NO_THREAD}"] == none.refused == 1
    faults.clear()


def test_calls_are_watched_when_there_is_a_file_and_a_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    analyzer, none, made = Analyzer(), _NoThreads(monkeypatch), os.memfd_create
    try:
        monkeypatch.setattr(os, "memfd_create", no_file)
        assert analyzer.start() is None and "watching calls: OSError: [Errno 24] Too many open files" in faults.counts()
        monkeypatch.setattr(os, "memfd_create", made)
        assert analyzer.start() is None and none.refused == 1
        none.on = False
        batch = Batch(1)
        batch.call(Subject(0, 1, 0, 0), 0, 5, 1)
        analyzer.publish(batch)
        assert analyzer.flush(120) and analyzer.snapshot.records == 1
    finally:
        analyzer.stop()
    faults.clear()


def test_things_are_freed_when_there_is_a_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    none, epochs, freed = _NoThreads(monkeypatch), Epochs(), list[int]()
    epochs.retire(object(), lambda: freed.append(1))
    assert none.refused == 1
    none.on = False
    epochs.retire(object(), lambda: freed.append(2))
    until = time.monotonic() + 60
    while len(freed) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(freed) == [1, 2]
    epochs.stop()
    faults.clear()


def test_an_attempt_that_lacked_files_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(improve, "fused", broken)
    model = nn.Linear(4, 4).eval()
    with hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2)) as fast:
        engine = fast._engine  # pyright: ignore[reportPrivateUsage]
        entries = lambda: [e for s in engine.sites.values() for e in s.entries]  # noqa: E731
        assert served(fast, model, lambda: any(e.retries for e in entries()), 60)


FILES = """
import os, resource, time, torch, hotfuse
from torch import nn
from hotfuse.runtime import call_group
call_group.PARDON_S = 0.2
model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4)
fast = hotfuse.jit(model, settings=hotfuse.Settings(tiers=0))
most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, most[1]))
def serve(until, seconds):
    end = time.monotonic() + seconds
    with torch.no_grad():
        while not until() and time.monotonic() < end:
            assert (fast(x) - model(x)).abs().max() < 1e-5
            time.sleep(0.005)
refused = lambda: fast.stats()["events"].get("refuse.not_capturable", 0)
serve(refused, 60)
print("refused", refused() > 0, "Too many open files" in str(fast.explain()))
resource.setrlimit(resource.RLIMIT_NOFILE, most)
serve(lambda: fast.stats()["calls_per_tier"]["0"] > 0, 150)
print("served", fast.stats()["calls_per_tier"]["0"] > 0)
fast.close()
"""


def test_a_server_that_was_out_of_files_gets_its_plans_when_it_has_some() -> None:
    done = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, check=False, timeout=400)
    assert done.stdout.split("\n")[:2] == ["refused True True", "served True"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr
