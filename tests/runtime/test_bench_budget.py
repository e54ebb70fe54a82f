"""How the cases of the side-by-side share time: by a clock that only moves when somebody takes some."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.side import report
from benchmarks.side.budget import (
    LOAD_S,
    MIN_LOAD_S,
    MIN_ROUNDS,
    MIN_TRAFFIC_S,
    PREPARING_S,
    READY_S,
    Allowance,
    Purse,
    allowance,
    need_s,
    starts,
    traffic_s,
)
from benchmarks.side.cases import CASES, Case, Model
from benchmarks.side.contenders import CONTENDERS
from benchmarks.side.records import Record
from benchmarks.side.turns import Late, Process, Table, environment


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_a_case_leaves_over_goes_to_all_that_follow() -> None:
    clock = Clock()
    purse = Purse([10.0, 20.0, 30.0], 120.0, clock)
    assert purse.next() == pytest.approx(20.0)
    clock.now += 5.0  # 15 less than it had
    assert purse.next() == pytest.approx(115.0 * 20 / 50)
    clock.now += 46.0
    assert purse.next() == pytest.approx(69.0)


def test_a_late_case_takes_from_all_and_nobody_goes_empty() -> None:
    clock, needs = Clock(), [10.0] * 10
    purse = Purse(needs, 100.0, clock)
    given: list[float] = []
    for i in range(10):
        given.append(purse.next())
        clock.now += given[-1] * (1.5 if i < 3 else 1.0)
    assert given[0] == pytest.approx(10.0) and min(given) > 5.0
    assert sorted(given[3:]) == pytest.approx([given[3]] * 7), "the loss of three is shared by those after them"
    assert clock.now <= 200.0 + 1e-6, "and the whole run ends in time"


def test_time_that_is_used_up_is_none() -> None:
    clock = Clock()
    purse = Purse([1.0, 1.0], 10.0, clock)
    clock.now += 11.0
    assert purse.next() == 0.0 and purse.next() == 0.0


def test_a_slow_contender_leaves_those_behind_it_what_they_take() -> None:
    clock, behind = Clock(), ["ort", "openvino", "tvm"]
    time = Allowance(60.0, 10.0, clock=clock)
    assert Allowance(20.0, 10.0, clock=clock).to_prepare(behind) == PREPARING_S
    assert Allowance(1e6, 0.0, clock=clock).to_prepare(behind) == LOAD_S
    clock.now += 5.0
    limit = time.to_load("inductor", behind)
    assert limit == pytest.approx(60 - 5 - 10 - sum(READY_S[n] for n in behind))
    clock.now += limit
    for i, name in enumerate(behind):
        assert time.to_load(name, behind[i + 1 :]) >= max(MIN_LOAD_S, READY_S[name])
        clock.now += READY_S[name]
    assert time.left() == pytest.approx(10.0), "what measuring takes is there whatever happened"
    clock.now += 30.0
    assert time.to_load("ort", []) == MIN_LOAD_S and time.left() == pytest.approx(-20.0)
    assert time.to_load("inductor-freezing", []) > READY_S["inductor-freezing"], "nobody is late before what it is known to take"
    assert Allowance(1e6, 0.0, clock=clock).to_load("ort", []) == LOAD_S


def test_getting_ready_is_part_of_a_stream() -> None:
    clock = Clock()
    case = Case("traffic", "t", Model, dict, ("hotfuse", "ort"), trace="lengths")
    time = allowance(case, case.contenders, 40.0, 11, 16.0, clock)
    assert time.reserve_s == 32.0 and time.to_load("ort", []) == pytest.approx(40.0 - 32.0 + 16.0)


def test_rounds_end_with_the_time_but_there_is_a_least_number() -> None:
    clock = Clock()
    time = Allowance(30.0, 0.0, clock=clock)
    done = 0
    while time.another(done, MIN_ROUNDS, 4.0):
        clock.now += 4.0
        done += 1
    assert done == 7 and time.left() == pytest.approx(2.0)
    assert time.another(MIN_ROUNDS - 1, MIN_ROUNDS, 1e9) and not time.another(MIN_ROUNDS, MIN_ROUNDS, 1e9)


def test_streams_are_shortened_before_they_starve_anybody() -> None:
    assert traffic_s(16.0, 100.0, 20.0, 4) == 16.0
    assert traffic_s(16.0, 68.0, 20.0, 4) == pytest.approx(12.0)
    assert traffic_s(16.0, 0.0, 20.0, 4) == MIN_TRAFFIC_S and traffic_s(6.0, 0.0, 20.0, 4) == 6.0


def test_all_cases_fit_into_the_run_that_is_promised() -> None:
    """What each is known to need, as the constants say: within a tenth, which shorter rounds give."""
    from benchmarks.side.__main__ import BUDGET_S, QUICK, QUICK_BUDGET_S

    whole = sum(need_s(c, c.contenders, 11, 16.0) for c in CASES)
    quick = sum(need_s(c, [n for n in c.contenders if n in QUICK], 7, 14.0) for c in CASES if c.quick)
    assert whole < BUDGET_S * 1.1 and quick < QUICK_BUDGET_S * 1.1, (whole, quick)
    assert BUDGET_S < 1200 - 60 and QUICK_BUDGET_S < 180 - 15, "plots and the last case's end come after"


def test_every_contender_has_a_price_and_more_work_costs_more() -> None:
    for case in CASES:
        for name in CONTENDERS:
            assert need_s(case, [name], 5, 1.0) > 0
    one = next(c for c in CASES if c.suite == "models")
    assert need_s(one, ["hotfuse", "ort"], 11, 16.0) > need_s(one, ["hotfuse"], 11, 16.0) > need_s(one, ["hotfuse"], 5, 16.0)
    assert [starts(n) for n in (4, 7, 11, 100)] == [1, 1, 2, 3]


def test_what_is_kept_for_measuring() -> None:
    clock = Clock()
    plain = Case("models", "m", Model, dict, ("hotfuse", "ort"))
    assert 0 < allowance(plain, plain.contenders, 90.0, 11, 16.0, clock).reserve_s <= 30.0
    assert allowance(Case("startup", "s", Model, dict), ["ort"], 90.0, 11, 16.0, clock).reserve_s == 0.0


# --- a whole case, by a clock that contenders move

SCRIPT = """
import json, sys
for line in sys.stdin:
    json.loads(line)
    print(json.dumps({}), flush=True)
"""


class Timed(Process):
    """A contender that takes as long as it is told by that clock, and is ended where that is too long."""

    def __init__(self, name: str, clock: Clock, takes: Mapping[str, float], outputs: Path) -> None:
        super().__init__([sys.executable, "-c", SCRIPT], environment(1, outputs))
        self.name, self.clock, self.takes, self.outputs, self.asked = name, clock, takes, outputs, dict[str, Any]()

    def begin(self, **command: Any) -> None:
        self.asked = command
        super().begin(**command)

    def answer(self, limit_s: float) -> dict[str, Any]:
        super().answer(60.0)
        do = self.asked["do"]
        need = self.takes.get(do, 0.0)
        settled = not (do == "load" and need > self.asked["settle_s"] and self.name == "hotfuse")
        took = need if settled else self.asked["settle_s"]  # ours compiles beside its calls and can come as it is
        if took > limit_s:
            self.clock.now += limit_s
            self.close()
            raise Late(f"no answer after {limit_s:.0f} s")
        self.clock.now += took
        if do == "load":
            import numpy as np

            np.savez(self.outputs / self.name, np.ones(2))
            return {"load_s": 0.1, "first_s": 0.1, "settled_s": took, "settled": settled, "worst_ms": 1.0,
                    "outputs": str(self.outputs / f"{self.name}.npz")}
        return {"round": {"ms": 1.0, "calls": 1}}.get(do, {})


def measured(takes: Mapping[str, Mapping[str, float]], allowed: float, suite: Any = "models") -> tuple[dict[str, Record], float]:
    clock = Clock()
    case = Case(suite, "fake", Model, dict, tuple(takes), "onnx")

    class Fakes(Table):
        def _start(self, name: str, folder: Path) -> Process:
            return Timed(name, clock, takes[name], folder)

    begin = clock.now
    table = Fakes(case, 1, list(takes), rounds=11, seconds=16.0, say=lambda _: None, limit_s=allowed, clock=clock)
    return {r.contender: r for r in table.measure()}, clock.now - begin


def test_one_who_never_gets_ready_costs_the_case_its_own_time_only() -> None:
    found, took = measured({"hotfuse": {"load": 5}, "eager": {"load": 1e9}, "ort": {"load": 0.3}, "inductor": {"load": 1.2}}, 60.0)
    assert {n: r.status for n, r in found.items()} == {"hotfuse": "ok", "eager": "late", "ort": "ok", "inductor": "ok"}
    assert "no answer after" in found["eager"].why and took <= 60.0
    assert all(len(r.times) == 11 for n, r in found.items() if n != "eager")


def test_long_rounds_are_fewer_but_enough() -> None:
    found, took = measured({"hotfuse": {"load": 5, "round": 1.5}, "ort": {"load": 1, "round": 1.5}}, 40.0)
    assert all(MIN_ROUNDS <= len(r.times) < 11 for r in found.values()) and took <= 40.0
    found, _ = measured({"hotfuse": {"round": 50.0}, "ort": {"round": 50.0}}, 40.0)
    assert all(len(r.times) == MIN_ROUNDS for r in found.values()), "an interval of a median takes so many"


def test_who_still_compiles_is_timed_as_it_is_and_said_so() -> None:
    found, took = measured({"hotfuse": {"load": 1e9}, "ort": {"load": 1}}, 60.0)
    ours = found["hotfuse"]
    assert ours.status == "ok" and len(ours.times) == 11 and ours.extra["settled"] is False and took <= 60.0
    assert "still compiling" in report.case_lines(list(found.values()))[1]
    found, _ = measured({"hotfuse": {"load": 1e9}, "ort": {"load": 1}}, 60.0, "compile")
    assert found["hotfuse"].status == "late" and "still compiling after" in found["hotfuse"].why, "there that time is the figure"
    assert found["ort"].status == "ok"


def test_starts_are_repeated_while_they_fit() -> None:
    found, _ = measured({"hotfuse": {"load": 1}, "ort": {"load": 1}}, 60.0, "startup")
    assert [len(r.times) for r in found.values()] == [2, 2]
    found, _ = measured({"hotfuse": {"load": 1}, "ort": {"load": 25}}, 45.0, "startup")
    assert [len(r.times) for r in found.values()] == [1, 1]
