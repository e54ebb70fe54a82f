"""A further capture waits for the first plan of a graph that is captured, where both would have the same worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hotfuse.compile.workers.slot import PoolLimits
from hotfuse.compile.workers.task import Task, Waiting
from hotfuse.compile.workers.worker_pool import Pool
from hotfuse.runtime.capture_turn import FREE_S, MAX_OTHERS, MAX_WAIT_S, RATE_S, TICK_S, CaptureTurn
from hotfuse.runtime.capturing import Capturer
from hotfuse.runtime.tierup.improve import Improver
from hotfuse.specialize.table import TIER1


class Clock:
    """Time passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def turn(
    until: float, busy: Callable[[float], bool] = lambda now: True, several: bool = False, calls_s: float = 100.0
) -> tuple[CaptureTurn, Clock]:  # fmt: skip
    """Of a plan that is made until then, for calls at such a rate."""
    clock = Clock()

    def awaited() -> int | None:
        return int(clock.now * calls_s) if clock.now < until else None

    return CaptureTurn(awaited, lambda: not busy(clock.now), lambda: several, clock, clock.sleep), clock


def test_a_capture_begins_when_the_first_plan_is_there() -> None:
    waits, _ = turn(4.0)
    assert waits.wait(lambda: 0) == pytest.approx(4.0, abs=2 * TICK_S)


def test_it_waits_for_nothing_where_no_plan_is_made() -> None:
    waits, clock = turn(0.0)
    assert waits.wait(lambda: 0) == 0.0 and clock.now == 0.0


def test_it_waits_for_nothing_where_another_worker_is_free() -> None:
    waits, clock = turn(4.0, busy=lambda now: False, several=True)
    assert waits.wait(lambda: 0) == 0.0 and clock.now == 0.0
    waits, _ = turn(4.0, busy=lambda now: now < 2.0, several=True)
    assert waits.wait(lambda: 0) == pytest.approx(2.0, abs=2 * TICK_S)


def test_the_pause_between_two_requests_of_a_plan_is_not_its_end() -> None:
    waits, _ = turn(6.0, busy=lambda now: not 2.0 <= now < 2.0 + FREE_S / 2)
    assert waits.wait(lambda: 0) == pytest.approx(6.0, abs=2 * TICK_S)


def test_a_plan_that_is_raced_leaves_the_worker_to_the_capture() -> None:
    waits, _ = turn(9.0, busy=lambda now: now < 3.0)
    assert waits.wait(lambda: 0) == pytest.approx(3.0 + FREE_S, abs=3 * TICK_S)


def test_a_plan_that_takes_long_holds_captures_up_no_longer_than_so() -> None:
    waits, _ = turn(1000.0)
    assert waits.wait(lambda: 0) == pytest.approx(MAX_WAIT_S, abs=2 * TICK_S)


@pytest.mark.parametrize(("times", "waited"), [(2 * MAX_OTHERS, RATE_S), (MAX_OTHERS / 2, 4.0)])
def test_calls_that_wait_for_the_capture_count_where_they_are_many_more(times: float, waited: float) -> None:
    waits, clock = turn(4.0)
    assert waits.wait(lambda: int(times * 100 * clock.now)) == pytest.approx(waited, abs=2 * TICK_S)


def queued(recalled: bool, calls: int, ran: list[Any]) -> Any:
    sample = SimpleNamespace(number=0, seconds=1.0, waited_s=0.0)
    found = SimpleNamespace(group=SimpleNamespace(noted=calls), sample=sample, recalled=["a start"] * recalled)
    found.capture = lambda: ran.append(found)
    return found


def capturer(*captures: Any) -> tuple[Any, list[int]]:
    waited = list[int]()

    def wait(missed: Callable[[], int]) -> float:
        waited.append(missed())
        return 2.5

    model, plans = SimpleNamespace(prepare=lambda: None), SimpleNamespace(lock=threading.Lock())
    return SimpleNamespace(turn=SimpleNamespace(wait=wait), _queued=list(captures), _model=model, _plans=plans), waited


def test_a_capture_says_how_long_it_waited() -> None:
    ran = list[Any]()
    made, waited = capturer(queued(False, 3, ran), queued(False, 7, ran))
    Capturer._next_capture(cast(Capturer, made))  # pyright: ignore[reportPrivateUsage]
    assert waited == [10] and [(q.group.noted, q.sample.waited_s) for q in ran] == [(7, 2.5)]


def test_what_an_earlier_process_kept_waits_for_nothing() -> None:
    ran = list[Any]()
    made, waited = capturer(queued(False, 9, ran), queued(True, 2, ran))
    Capturer._next_capture(cast(Capturer, made))  # pyright: ignore[reportPrivateUsage]
    assert not waited and [(bool(q.recalled), q.sample.waited_s) for q in ran] == [(True, 0.0)]


def improver(*entries: Any, closed: bool = False) -> Improver:
    site = SimpleNamespace(entries=entries)
    settings = SimpleNamespace(hot_calls=10)
    return cast(Improver, SimpleNamespace(_plans=SimpleNamespace(settings=settings, sites={"": site}, closed=closed)))


def entry(serving: str = "tier 0", trying: Any = None, refused: Any = (), heat: int = 0, replaced: bool = False) -> Any:
    baseline = SimpleNamespace(graph=SimpleNamespace(nodes=()))
    plan = baseline if serving == "tier 0" else serving
    return SimpleNamespace(
        plan=plan, baseline=baseline, trying=trying, refused=refused, heat=heat, seconds=10.0, replaced=replaced, calls=5
    )


def test_captures_wait_for_graphs_that_are_hot_and_have_no_plan_yet() -> None:
    calls = Improver.calls_before_first_plans
    made, hot = entry(trying=TIER1), entry(heat=1000)
    assert calls(improver(made, hot, entry())) == 10
    assert calls(improver(entry(), entry("tier 1", trying=TIER1), entry(heat=1000, refused=(TIER1,)))) is None
    assert calls(improver(entry(heat=1000, replaced=True))) is None and calls(improver(made, closed=True)) is None


def test_a_pool_says_whether_a_worker_is_free() -> None:
    pool = Pool(PoolLimits(workers=1))
    try:
        assert pool.room
        pool._queue.append(Waiting(Task("", {}, [], 0.0, 1.0), Future()))  # pyright: ignore[reportPrivateUsage]
        assert not pool.room
    finally:
        pool.close(1.0)
