"""Measuring for calls of several threads: idle cores are counted, requests have threads of their own, labels name theirs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotfuse.backends.llvm.native import compile_kernel
from hotfuse.compile import request_context
from hotfuse.compile.host import this_host
from hotfuse.compile.learn import learned
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.compile.variants import served_threads, trial
from hotfuse.compile.variants.served_threads import IdleCores, apart, as_served
from hotfuse.hpm import calibrate, model
from hotfuse.hpm.work import NAMES
from hotfuse.ir.text import parse
from hotfuse.lower import lower
from hotfuse.lower.common.errors import CannotLower
from hotfuse.profile.rows import Measurement
from hotfuse.profile.store import Store
from tests.races import CHARGED_S, kernels_charged

GRAPH = """graph g(%x: f32[256, 1024]) {
  %y: f32[256, 1024] = aten.gelu.default(%x)
  return %y }"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Cores:
    """Accounts of cores of which some do nothing."""

    def __init__(self, busy: int, idle: int) -> None:
        self.busy, self.idle, self.looked, self.now = busy, idle, 0, 0.0

    def ticks(self) -> dict[int, tuple[int, int]]:
        self.looked += 1
        return {c: (0 if c < self.busy else 10 * self.looked, 10 * self.looked) for c in range(self.busy + self.idle)}

    def watch(self) -> IdleCores:
        return IdleCores(self.ticks, lambda: self.now, lambda _s: None)


def test_idle_cores_are_counted_once_in_a_while() -> None:
    cores = Cores(busy=3, idle=5)
    watch = cores.watch()
    assert watch.idle() == 5 and cores.looked == 2
    assert watch.idle() == 5 and cores.looked == 2, "an answer holds for a while"
    cores.now += served_threads.FRESH_S
    cores.idle = 1
    assert watch.idle() == 1


def test_the_systems_accounts_are_read() -> None:
    found = served_threads.core_ticks()
    assert set(found) <= os.sched_getaffinity(0)
    assert all(0 <= idle <= all_ for idle, all_ in found.values())


@pytest.mark.parametrize(("idle", "measured"), [(0, 1), (2, 1), (3, 4), (16, 4)])
def test_measured_on_the_threads_that_serve_where_cores_are_idle(idle: int, measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_threads, "_watch", Cores(1, idle).watch())
    with as_served(4) as threads:
        assert threads == measured == torch.get_num_threads()
    assert torch.get_num_threads() == 1
    with as_served(1) as threads:
        assert threads == 1


def test_requests_for_several_threads_are_answered_apart() -> None:
    import threading

    me = threading.get_ident()
    with request_context.used_by({"threads": 5}):
        assert apart(5, lambda: (threading.get_ident() != me, request_context.threads())) == (True, 5)
        with pytest.raises(KeyError, match="lost"):
            apart(5, lambda: {}["lost"])
    assert apart(1, threading.get_ident) == me
    assert request_context.threads() == 1


def outcome(times: float, threads: int, busy: int, monkeypatch: pytest.MonkeyPatch) -> trial.Outcome:
    """A trial for calls of so many threads on a machine of 16 cores; the kernel takes so many times as long as the library."""
    monkeypatch.setattr(served_threads, "_watch", Cores(busy, 16 - busy).watch())
    kernels_charged(monkeypatch, times * CHARGED_S, CHARGED_S)
    with request_context.used_by({"threads": threads}):
        core = kernel_cache().core
    assert core.threads == threads
    lowered = lower(parse(GRAPH), core)
    return trial.attempt(parse(GRAPH), lowered, compile_kernel(lowered.kernel), {}, threads=threads)


def test_what_loses_narrowly_on_one_thread_is_for_the_race_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(0.7, 4, 0, monkeypatch).threads == 4
    assert outcome(0.7, 4, 16, monkeypatch).threads == 1
    assert outcome(1.12, 4, 16, monkeypatch).threads == 1, "nobody knows how it does on four"
    for times, threads, busy in ((1.12, 4, 0), (1.5, 4, 16), (1.12, 1, 16)):
        with pytest.raises(CannotLower):
            outcome(times, threads, busy, monkeypatch)


def test_labels_say_how_many_threads(tmp_path: Path) -> None:
    path = str(tmp_path / "p.sqlite")
    place = {"profiles": path, "record": True}
    for threads in (1, 16):
        with request_context.used_by({**place, "threads": threads}):
            kept = learned.notes()
            assert kept is not None and kept.host.at.threads == threads
            kept.tried(f"k{threads}", parse(GRAPH), {}, 50.0, 60.0, threads)
            kept.tried("busy", parse(GRAPH), {}, 50.0, 60.0, 1)
    learned.flush()
    with Store.open(path) as store:
        found = {(m.kernel.split(":")[0], m.threads) for m in store.measurements(source="race")}
    assert found == {("k1", 1), ("k16", 16), ("busy", 1)}
    learned.forget()


def test_a_model_trained_for_one_thread_is_not_used_for_sixteen(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "p.sqlite")) as store:
        hosts = {n: this_host(store, n, measure_peaks=False) for n in (1, 16)}
        rng = torch.Generator().manual_seed(0)
        rows: list[Measurement] = []
        for i in range(2 * model.MIN_SAMPLES):
            features: dict[str, Any] = {n: float(torch.rand((), generator=rng)) * 1e4 for n in NAMES}
            rows.append(Measurement(f"p{i}:n={i}:16x32x1:1", "pointwise", features, "f32", 1, 1e5 + i, 0.01, "calibrate"))
        store.record_measurements(rows, hosts[1].machine)
        made = calibrate.train(store, hosts[1].machine, hosts[1].at)
        assert made is not None and made.facts["threads"] == 1
        assert model.load(store, hosts[1].machine) is not None
        assert model.load(store, hosts[1].machine, threads=16) is None
        assert learned.Foresight.of(store, hosts[16]) is None
        assert calibrate.train(store, hosts[1].machine, hosts[16].at) is None, "no row is for sixteen"
        other = replace(made, facts={**made.facts, "threads": 16})
        assert model.save(store, other, hosts[1].machine) == 1
        found = model.load(store, hosts[1].machine, threads=16)
        assert found is not None and found.facts["threads"] == 16
