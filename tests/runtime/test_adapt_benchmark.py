"""The benchmark of throughput over time judges made-up calls as its text says; no clock is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import adapt
from benchmarks.adapt_report import Curve, row, settled, speeds


def calls(seconds: float, slow: dict[int, float] | None = None, length: int = 20) -> list[list[float]]:
    """One call after another of 0.1 s each, or so many times that in the given seconds of the run."""
    out: list[list[float]] = []
    now = 0.0
    while now < seconds:
        taken = 0.1 * (slow or {}).get(int(now), 1.0)
        out.append([now, length, taken])
        now += taken
    return out


def test_eager_is_one_at_every_length() -> None:
    eager = [*calls(10), *[[b + 10, 40, t * 2] for b, _, t in calls(10)]]
    curve = Curve(eager)
    assert curve(20) == pytest.approx(0.1) and curve(40) == pytest.approx(0.2) and 0.1 < curve(30) < 0.2
    assert all(s == pytest.approx(1.0) for s in speeds(calls(10), curve, 10)[:-1])


def test_steady_is_reached_in_the_first_second_that_lasts() -> None:
    assert settled([1, 1, 1, 2, 2, 2, 2, 2, 2]) == (3.0, 2)
    assert settled([1, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]) == (5.0, 2), "one fast second is not it"
    assert settled([2, 2, 1, 2, 2, 2, 2, 2]) == (0.0, 2), "nor does one slow second undo it"


def test_a_row_finds_the_worst_call_and_the_slowest_second_after_the_shift() -> None:
    curve = Curve(calls(30))
    found, _ = row(calls(30, {0: 4.0, 22: 2.0}), curve, 30, 20)
    assert found.worst_call == pytest.approx(4.0) and found.worst_after_first == pytest.approx(4.0)
    assert found.lowest_after == pytest.approx(0.5, rel=0.1) and found.time_to_steady_s == pytest.approx(1.0, abs=1.0)
    assert found.steady == pytest.approx(1.0, rel=0.05)


def test_who_is_not_steady_at_the_shift_is_judged_over_the_whole_run() -> None:
    late = [[0.0, 20, 25.0], *[[25 + b, n, t] for b, n, t in calls(35)]]
    assert row(late, Curve(calls(60)), 60, 20)[0].time_to_steady_s == 25.0


def test_pieces_are_kept_and_measured_again_where_something_changed(tmp_path: Path) -> None:
    o = adapt.Options(55.0, 40.0, 1)
    adapt.keep("eager", o, tmp_path, {"calls": [[0.0, 1, 1.0]]})
    assert adapt.kept("eager", o, tmp_path) == {"calls": [[0.0, 1, 1.0]]}
    assert adapt.kept("eager", adapt.Options(55.0, 40.0, 2), tmp_path) is None
    assert adapt.kept("ort", o, tmp_path) is None


def test_the_last_line_is_plain_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    idle = {"before": [0.1] * 50, "compiling": [0.11] * 50, "after": [0.1] * 50}
    found = {name: {"calls": calls(20)} for name in adapt.CONTENDERS}
    found |= {"watching": {"watching_overhead": 0.004, "watching_noise": 0.001}, "dispatch": {"dispatch_us": 1.5}}
    adapt.report({**found, "p99-1": idle, "p99-2": idle}, adapt.Options(20.0, 12.0, 1), None, True)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    wanted = {
        "calls_first_30s_vs_eager", "time_to_steady_s", "time_to_steady_vs_inductor", "worst_call_vs_eager_median", "recovery_s",
        "min_throughput_vs_eager_after_shift", "watching_overhead", "dispatch_us", "p99_compiling_vs_idle",
    }  # fmt: skip
    assert wanted <= set(last) and all(isinstance(v, int | float) for v in last.values())
    assert last["p99_compiling_vs_idle"] == pytest.approx(1.1) and last["calls_first_30s_vs_eager"] == 1.0
