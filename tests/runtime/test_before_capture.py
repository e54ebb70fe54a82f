"""What calls do for background work beside them: they leave a core to it, and show how hot a plan will be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.compile.workers.background_priority import background_priority
from hotfuse.machine import team_size
from hotfuse.runtime.admission import GraphAdmission
from hotfuse.runtime.call_group import CallGroup
from hotfuse.runtime.serve.answering import turn_of
from hotfuse.runtime.tierup import lull as lull_module
from hotfuse.runtime.tierup import proof, tiers
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.lull import NEXT_S, Lull


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 16)).eval()


@pytest.mark.parametrize("calls", [40, tiers.MANY_CALLS + 100])  # few, and so many that most looks weigh nothing
@torch.inference_mode()
def test_a_plan_that_calls_waited_for_is_improved_without_another_call(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = module(), torch.randn(4, 32)
    go, learn = threading.Event(), GraphAdmission._capture_and_deploy

    def held(self: GraphAdmission, *args: Any) -> None:
        assert go.wait(120)
        learn(self, *args)

    monkeypatch.setattr(GraphAdmission, "_capture_and_deploy", held)
    with hotfuse.jit(model) as fast:
        for _ in range(calls):
            fast(x)
        go.set()
        until(lambda: any(d.evidence.get("tier") == 1 for d in fast._engine.log.decisions))  # pyright: ignore[reportPrivateUsage]
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_calls_whose_capture_is_under_way_are_counted_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture stands still until they are over: of a small model a look takes longer than the call."""
    model, x, calls = module(), torch.randn(4, 32), 400
    go, learn, looks = threading.Event(), GraphAdmission._capture_and_deploy, list[int]()
    note = CallGroup.note

    def held(self: GraphAdmission, *args: Any) -> None:
        assert go.wait(120)
        learn(self, *args)

    def noted(self: CallGroup, shapes: tuple[tuple[int, ...], ...]) -> None:
        looks.append(1)
        note(self, shapes)

    monkeypatch.setattr(GraphAdmission, "_capture_and_deploy", held)
    monkeypatch.setattr(CallGroup, "note", noted)
    with hotfuse.jit(model, settings=Settings(record=False, tiers=0)) as fast:
        for _ in range(calls):
            fast(x)
        assert len(looks) < calls / 4 and fast.stats()["calls_per_tier"]["module"] == calls
        go.set()
        assert fast.wait(120)
        (entry,) = next(iter(fast._engine.sites.values())).entries
        assert entry.heat == calls - 1, "each of them shows how hot the plan will be"
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert fast.stats()["calls_per_tier"]["0"] == 1, "the next call is not passed by"


@pytest.mark.parametrize(("cores", "threads", "has"), [(4, 4, 3), (4, 5, 3), (8, 4, 4), (2, 2, 2), (1, 4, 1)])
def test_a_team_on_every_core_leaves_one_to_background_work(
    cores: int, threads: int, has: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_size, "usable_cores", lambda: cores)
    seen: list[int] = []
    known: list[int] = []

    def own(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        known.append(team_size.threads())
        return x * 2 + 1

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), hotfuse.jit(own) as fast:
            begun, go_on = threading.Event(), threading.Event()

            def prepare() -> None:  # the job that looks into the cache is over by then
                begun.set()
                assert go_on.wait(120)

            monkeypatch.setattr(fast._engine.model, "prepare", prepare)  # pyright: ignore[reportPrivateUsage]
            fast(torch.randn(4))
            assert begun.wait(120) and background_priority.jobs > 0
            fast(torch.randn(4))
            assert torch.get_num_threads() == threads, "the caller's own loops have all of them"
            assert in_a_new_thread(torch.get_num_threads) == threads
            go_on.set()
            assert fast.wait(120)
            until(lambda: background_priority.jobs == 0)
            assert ("1 calls left one core" in fast.explain(full=True).text(full=True)) is (has < threads)
        assert seen[:2] == [threads, has] and known[:2] == [threads, threads]
    finally:
        torch.set_num_threads(before)


def test_calls_of_every_tier_leave_the_core_and_decisions_are_for_the_whole_team(monkeypatch: pytest.MonkeyPatch) -> None:
    """A team that is smaller for some calls is no other number of threads: nothing is decided anew for it."""
    monkeypatch.setattr(team_size, "usable_cores", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        model, x = module(), torch.randn(4, 32)
        with torch.inference_mode(), hotfuse.jit(model, settings=hotfuse.Settings(tiers=0, record=False)) as fast:
            for _ in range(20):
                fast(x)
                assert fast.wait(120)
            (entry,) = (e for s in fast._engine.sites.values() for e in s.entries)  # pyright: ignore[reportPrivateUsage]
            stamp, seen, run = entry.stamp, list[int](), entry.plan.run

            def counted(*leaves: torch.Tensor) -> tuple[Any, ...]:
                seen.append(torch.get_num_threads())
                return run(*leaves)

            entry.plan = entry.baseline = replace(entry.plan, run=counted)
            entry.own = False  # whichever was faster
            with background_priority():
                for _ in range(200):
                    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
            assert set(seen) == {3} and entry.stamp == stamp and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_number_that_a_call_chooses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_size, "usable_cores", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        team_size.leaving_cores(lambda: torch.set_num_threads(2))
        assert torch.get_num_threads() == team_size.threads() == 2, "as without Hotfuse"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "threads", "in_flight", "beside", "calls"),
    [(16, 16, 1, 3, 12), (16, 16, 4, 3, 12), (8, 8, 1, 1, 6), (4, 4, 1, 1, 3), (16, 4, 1, 4, 4), (16, 4, 4, 1, 4), (2, 2, 1, 2, 2)],
)
def test_what_computes_beside_calls_has_the_cores_that_they_leave(
    cores: int, threads: int, in_flight: int, beside: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_size, "usable_cores", lambda: cores)

    def in_a_call() -> int:
        return team_size.leaving_cores(torch.get_num_threads) if team_size.has_every_core() else torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with team_size.in_background(in_flight):
            assert torch.get_num_threads() == beside and team_size.threads() == threads and team_size.computes_in_background()
            assert in_a_new_thread(in_a_call) == calls
        with team_size.in_background(in_flight, at_least=2):  # what is measured between threads needs two
            assert torch.get_num_threads() == max(2, beside)
        assert torch.get_num_threads() == threads and not team_size.computes_in_background()
        assert in_a_new_thread(in_a_call) == (cores - 1 if threads == cores >= team_size.SPARE_FROM else threads)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_a_proof_beside_calls_leaves_them_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_size, "usable_cores", lambda: 4)
    before, seen = torch.get_num_threads(), list[tuple[int, bool]]()
    torch.set_num_threads(4)
    timed = proof._timed  # pyright: ignore[reportPrivateUsage]

    def noted(run: Any, inputs: Any) -> Any:
        seen.append((torch.get_num_threads(), team_size.computes_in_background()))
        return timed(run, inputs)

    monkeypatch.setattr(proof, "_timed", noted)
    try:
        model, x = module(), torch.randn(4, 32)
        with hotfuse.jit(model, settings=hotfuse.Settings(record=False, hot_calls=2)) as fast:
            end = time.monotonic() + 120
            while not seen and time.monotonic() < end:
                fast(x)
            assert fast.wait(120)
        assert seen and seen[0] == (1, True), "calls never paused"
    finally:
        torch.set_num_threads(before)


def test_what_computes_while_nobody_calls_has_its_whole_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_size, "usable_cores", lambda: 4)
    before, now, calls = torch.get_num_threads(), [0.0], [7]
    torch.set_num_threads(4)
    try:
        lull = Lull(lambda: now[0], lambda: calls[0], lambda: False)
        now[0] += 1.0
        with lull.computing():
            assert torch.get_num_threads() == 4 and not team_size.computes_in_background()
        calls[0] += 1
        with lull.computing():
            assert torch.get_num_threads() == 1 and team_size.computes_in_background()
        now[0] += 1.0
        with lull.computing():
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("ends_at", "waits"), [(0.02, 0.02), (9.0, NEXT_S)])
def test_calls_under_way_are_over_before_anything_is_computed(
    ends_at: float, waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have every core until their end; what never ends is waited for for a while."""
    monkeypatch.setattr(team_size, "usable_cores", lambda: 4)
    monkeypatch.setattr(lull_module, "calls_in_flight", lambda: 1)
    before, now, marked = torch.get_num_threads(), [0.0], list[bool]()

    def sleep(seconds: float) -> None:
        marked.append(team_size.computes_in_background())
        now[0] += seconds

    torch.set_num_threads(4)
    try:
        lull = Lull(lambda: now[0], lambda: int(now[0] >= ends_at), lambda: True, sleep)
        with lull.computing():
            assert abs(now[0] - waits) < 0.01 and torch.get_num_threads() == 1
        assert marked and all(marked), "calls that begin meanwhile leave their cores"
    finally:
        torch.set_num_threads(before)


def test_calls_beside_computing_are_no_rounds() -> None:
    plan: Any = object()
    contest = PlanContest(plan, plan)
    entry: Any = SimpleNamespace(contest=contest, effects=None, counted=False)
    assert turn_of(entry, plan, (), (), grad=False) is not None
    with team_size.in_background(1):
        assert turn_of(entry, plan, (), (), grad=False) is None
    assert turn_of(entry, plan, (), (), grad=False) is not None


def in_a_new_thread(ask: Callable[[], int]) -> int:
    """What a thread is told that has asked nothing before."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def until(what: Callable[[], bool]) -> None:
    """Wait for something that is sure to come."""
    end = time.monotonic() + 120
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)
