"""The benchmarks' clockwork: contenders take turns, and nobody gets more calls than another."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest

from benchmarks import timing
from benchmarks.timing import MAX_REST_S, REST_S, burst, interleave, rest, summarize


@dataclass
class Machine:
    """Time that only sleeping lets pass; a thread beside computes through the first `busy` sleeps."""

    busy: int
    now: float = 100.0
    used: float = 7.0
    slept: int = 0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1
        if self.slept <= self.busy:
            self.used += seconds


@pytest.mark.parametrize("busy", [0, 1, 9])
def test_a_rest_ends_with_the_first_piece_in_which_nothing_is_computed(
    busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(busy)
    monkeypatch.setattr(timing, "time", machine)
    rest()
    assert machine.slept == busy + 1


def test_a_rest_is_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1_000_000)
    monkeypatch.setattr(timing, "time", machine)
    rest()
    assert MAX_REST_S <= machine.now - 100.0 + 1e-9 <= MAX_REST_S + 2 * REST_S


def test_with_a_rest_the_first_call_of_a_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, order = Machine(0), list[str]()
    monkeypatch.setattr(timing, "time", machine)

    def call() -> None:
        order.append("call")
        machine.now += 1.0 if len(order) % 2 else 0.25  # whoever comes back from a rest is slow

    timings, _ = interleave({"a": call}, rounds=3, warm_up=0, rest_s=0.01)
    assert (len(order), machine.slept) == (6, 3)
    assert timings["a"].low == timings["a"].high == 250.0


def test_calls_after_a_rest_are_not_counted_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, calls = Machine(0), list[float]()
    monkeypatch.setattr(timing, "time", machine)

    def call() -> None:
        calls.append(machine.now)
        machine.now += 0.25

    timings, _ = interleave({"a": call}, rounds=2, inner=2, warm_up=0, rest_s=0.01, warm_s=0.9)
    assert len(calls) == 2 * (4 + 2), "four fill the time that does not count, two count"
    assert timings["a"].calls == 2


@pytest.mark.parametrize(("takes", "warming", "counted"), [(0.25, 3, 8), (0.75, 1, 3), (8.0, 1, 1)])
def test_everybody_is_timed_for_the_same_time_however_long_a_call(
    takes: float, warming: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, calls = Machine(0), list[float]()
    monkeypatch.setattr(timing, "time", machine)

    def call() -> None:
        calls.append(machine.now)
        machine.now += takes if len(calls) > 1 else takes + 0.1  # whoever comes back from a rest is slow

    assert burst(call, 0.7, 2.0) == pytest.approx(takes)
    assert len(calls) == warming + counted


def test_contenders_take_turns_in_turning_order() -> None:
    order: list[str] = []
    timings, ratios = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, inner=2, warm_up=1
    )
    assert "".join(order) == "aabb" + "aabb" + "bbaa" + "aabb", "warming up, then three rounds"
    assert timings["a"].calls == timings["b"].calls == 3
    assert ratios["a"] == 1.0 and ratios["b"] > 0


def test_garbage_collection_is_back_on_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        interleave({"a": lambda: 1 // 0}, rounds=1, warm_up=0)
    assert gc.isenabled()


def test_spread() -> None:
    found = summarize([float(i) for i in range(1, 12)])
    assert (found.median, found.low, found.high, found.calls) == (6.0, 2.0, 10.0, 11)
    assert summarize([4.0]).low == summarize([4.0]).high == 4.0
