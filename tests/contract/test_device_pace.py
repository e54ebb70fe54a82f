"""Measurements beside calls: each is followed by a rest, and only what was measured counts."""

from __future__ import annotations

import pytest

from hotfuse.compile.device.pace import MAX_REST_S, RestingPace


class Clock:
    def __init__(self) -> None:
        self.at, self.slept = 0.0, list[float]()

    def measured(self, seconds: float) -> float:
        self.at += seconds
        return seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds


def test_a_rest_is_as_long_as_several_measurements_and_does_not_count() -> None:
    clock = Clock()
    pace = RestingPace(5.0, lambda: clock.at, clock.sleep)
    assert pace(lambda: clock.measured(0.01)) == 0.01
    assert pace(lambda: clock.measured(2.0)) == 2.0
    assert clock.slept == pytest.approx([0.05, MAX_REST_S]) and pace.busy_s == pytest.approx(2.01)


def test_a_measurement_that_fails_counts_too() -> None:
    clock = Clock()
    pace = RestingPace(5.0, lambda: clock.at, clock.sleep)

    def fails() -> float:
        clock.measured(0.02)
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        pace(fails)
    assert clock.slept == pytest.approx([0.1]) and pace.busy_s == pytest.approx(0.02)


def test_a_first_plan_is_in_a_hurry() -> None:
    clock = Clock()
    pace = RestingPace(0.0, lambda: clock.at, clock.sleep)
    pace(lambda: clock.measured(1.0))
    assert not clock.slept and pace.busy_s == 1.0
