"""What is known before a race: the pairs of a proof are rounds; and what a plan is proven on and tried for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse.runtime.tierup.attempt_runner as runner_module
import hotfuse.runtime.tierup.proof as proof_module
from hotfuse.api import TorchModel
from hotfuse.base.events import EventLog
from hotfuse.base.settings import Settings
from hotfuse.compile.variants import trial
from hotfuse.ir.graph import Value
from hotfuse.ir.types import DType, TensorType
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.tierup.judge import screen
from hotfuse.runtime.tierup.proof import prove
from hotfuse.runtime.tierup.race import OVERTIME, race
from tests.races import SLOWER_S, new_plans_win, raced
from tests.runtime.test_tiers import Compiler, served

SETTINGS = Settings(capture="inline", hot_calls=2)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Clock:
    """Time that passes only in what is run."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, list[str]()

    def __call__(self) -> float:
        return self.now

    def taking(self, name: str, seconds: float, out: Any = None) -> Callable[..., Any]:
        def run(*_args: Any) -> Any:
            self.order.append(name)
            self.now += seconds
            return out

        return run


def test_rounds_that_were_run_before_count_and_warm_up() -> None:
    clock = Clock()
    old, new = clock.taking("old", 2.0), clock.taking("new", 1.0)
    found = race(old, new, (), 100.0, clock=clock, before=[(2.0, 1.0)] * 3)
    assert found.won and found.decided and found.rounds == 5 and (found.old_us, found.new_us) == (2e6, 1e6)
    assert clock.order == ["new", "old", "old", "new"]  # two rounds, in turns with those before, and no warm-up
    clock.order.clear()
    assert race(old, new, (), 100.0, clock=clock).rounds == 5 and len(clock.order) == 12


def test_rounds_that_were_lost_before_count_as_well() -> None:
    clock = Clock()
    slow, fast = clock.taking("slow", 2.0), clock.taking("fast", 1.0)
    found = race(slow, fast, (), 100.0, clock=clock, before=[(1.0, 2.0)] * 3)
    assert found.rounds > 5  # three lost ones are not made up for by two
    assert not race(fast, slow, (), 100.0, clock=clock, before=[(1.0, 2.0)] * 3).won


def test_slow_calls_have_overtime_where_the_new_one_leads() -> None:
    """One disturbed round of the first five decided nothing, and a plan that is a quarter faster was refused."""
    clock = Clock()
    times = iter([0.8, 0.8, 0.8, 1.3, *[0.8] * 100])

    def disturbed(*_args: Any) -> None:
        clock.now += next(times)

    found = race(clock.taking("old", 1.0), disturbed, (), 4.0, clock=clock)
    assert found.won and found.decided and found.rounds > 5 and clock.now < 2 + 4.0 * OVERTIME + 2

    clock = Clock()
    led = iter([1.0, 1.3, 1.3, *[0.8, 1.3] * 100])  # it never leads: there is no more time than was given
    found = race(clock.taking("old", 1.0), lambda: setattr(clock, "now", clock.now + next(led)), (), 4.0, clock=clock)
    assert not found.won and found.rounds <= 6


def test_a_proof_tells_the_rounds_behind_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(), (torch.ones(3),)
    monkeypatch.setattr(proof_module, "clock_of", lambda _inputs: clock)
    calls = [[torch.zeros(n)] for n in (1, 2, 3, 4)]
    found = prove(clock.taking("new", 0.1, out), clock.taking("old", 0.4, out), calls, 0.0, lambda: lambda *_a: out)
    assert not found.difference and found.inputs == 4
    assert [round(s, 6) for pair in found.rounds for s in pair] == [0.4, 0.1] * 3
    assert clock.order == ["new", "old", "old", "new", "new", "old", "old", "new"]
    other = prove(clock.taking("new", 1.0, (torch.zeros(3),)), clock.taking("old", 4.0, out), calls, 0.0,
                  lambda: lambda *_a: out)  # fmt: skip
    assert other.difference and not other.rounds


@pytest.mark.parametrize(("seconds", "proven"), [(0.4, 3), (0.6, 2), (3.0, 2), (0.01, 5)])
def test_a_proof_ends_when_its_time_is_over_but_not_before_two_calls(
    monkeypatch: pytest.MonkeyPatch, seconds: float, proven: int
) -> None:
    clock, out = Clock(), (torch.ones(3),)
    monkeypatch.setattr(proof_module, "clock_of", lambda _inputs: clock)
    calls = [[torch.zeros(n)] for n in range(5)]
    both = clock.taking("new", seconds, out), clock.taking("old", seconds, out)
    found = prove(*both, calls, 0.0, lambda: lambda *_a: out)
    assert not found.difference and found.inputs == proven and len(found.rounds) == proven - 1


def test_three_rounds_decide_where_the_time_is_halved() -> None:
    clock = Clock()
    found = race(clock.taking("old", 2.1), clock.taking("new", 1.0), (), 100.0, clock=clock)
    assert found.won and found.decided and found.rounds == 3
    one_other = race(clock.taking("old", 2.1), clock.taking("new", 1.0), (), 100.0, clock=clock, before=[(2.0, 1.5)])
    assert one_other.won and one_other.rounds == 5


def test_what_a_proof_took_on_slow_calls_is_glance_enough() -> None:
    """Neither plan runs once more beside the calls that it would hold up."""
    clock = Clock()
    runs = clock.taking("old", 0.0), clock.taking("new", 0.0)
    assert screen(*runs, (), [(0.4, 0.9)]) == (0.4, 0.9) and screen(*runs, (), [(0.4, 1.2), (0.5, 1.1)]) == (0.4, 1.1)
    assert not clock.order
    assert screen(*runs, (), [(0.09, 0.05), (0.03, 0.02), (0.04, 0.03)]) == (0.03, 0.02) and not clock.order, "three show it, too"
    screen(*runs, (), [(0.01, 0.09)])  # what is over at once is looked at again, warm
    assert clock.order == ["old", "new", "new", "old"]
    screen(*runs, (), [(0.001, 0.002)] * 4)  # as is what takes a moment
    assert len(clock.order) == 8


@pytest.mark.parametrize(("objective", "known"), [("latency", True), ("memory", True), ("energy", False)])
def test_a_race_for_tier_1_knows_what_the_proof_timed(monkeypatch: pytest.MonkeyPatch, objective: Any, known: bool) -> None:
    held = raced(monkeypatch, lambda: (SLOWER_S, 0.0))
    engine = served(nn.Linear(4, 4).eval(), Compiler(), SETTINGS.with_(objective=objective, hot_calls=4))
    for _ in range(6):
        engine(torch.randn(3, 4))
    assert len(held) == 1 and bool(held[0].before) is known
    assert all(old > 0 and new > 0 for old, new in held[0].before)


def test_plans_for_some_calls_are_raced_on_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    held = raced(monkeypatch, lambda: (SLOWER_S, 0.0))
    engine = served(nn.Linear(4, 4).eval(), Compiler(), SETTINGS.with_(watch_rate=2))
    for n in [3, 5, 6, 7] + [9] * 120:
        engine(torch.randn(n, 4))
    assert next(iter(engine.sites.values())).entries[0].versions
    assert len(held) >= 2 and held[0].before and not any(h.before for h in held[1:])


@pytest.mark.parametrize(("given", "right"), [(float("nan"), True), (float("inf"), False), (float("-inf"), False)])
def test_what_is_not_finite_must_be_what_float64_says(given: float, right: bool) -> None:
    """Where the new plan differs from the baseline: float64 is the judge of NaN and of either infinity, too."""
    truth = (torch.tensor([1.0, float("nan")], dtype=torch.float64),)
    new, old = (torch.tensor([1.0, given]),), (torch.tensor([2.0, float("nan")]),)
    found = prove(lambda *_a: new, lambda *_a: old, [[torch.ones(2)]], 0.0, lambda: lambda *_a: truth)
    assert (not found.difference) == right and found.judge == "float64"


def test_calls_that_waited_for_a_capture_are_heat() -> None:
    """The capture is held until as many calls have come as make a plan hot: the first call in it starts tier 1."""
    jobs: list[Callable[[], None]] = []
    settings, model = Settings(hot_calls=8), nn.Linear(4, 4).eval()
    compiler: Any = Compiler()
    engine = Engine(TorchModel(model, settings.with_(capture="inline")), lambda g, w: compile_tier0(g, w, settings), jobs.append,
                    settings, EventLog(), compiler)  # fmt: skip
    x = torch.randn(3, 4)
    for _ in range(9):
        engine(x)
    learning, jobs[:] = list(jobs), []
    for job in learning:  # what the cache knows of it, then the capture
        job()
    (entry,) = next(iter(engine.sites.values())).entries
    assert entry.heat == 8 and entry.seconds > 0 and not entry.calls
    engine(x)
    assert entry.improving and jobs
    engine.close()


def test_a_plan_is_proven_on_kinds_of_calls_that_came_while_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    new_plans_win(monkeypatch)
    proven: list[list[int]] = []
    plain = prove

    def noted(new: Any, old: Any, calls: Sequence[Sequence[torch.Tensor]], *more: Any) -> Any:
        proven.append([c[0].shape[0] for c in calls])
        return plain(new, old, calls, *more)

    monkeypatch.setattr(runner_module, "prove", noted)
    made, model = Compiler(), nn.Linear(4, 4).eval()
    engines: list[Engine] = []

    def improve(*args: Any, **more: Any) -> Any:
        for n in (7, 8, 9):
            engines[0](torch.randn(n, 4))
        return made(*args, **more)

    engines.append(served(model, improve, SETTINGS))
    for n in (3, 5, 6, 6):
        engines[0](torch.randn(n, 4))
    (found,) = proven[:1]
    assert len(found) == 4 and set(found) & {7, 8, 9}


@pytest.mark.parametrize("count", [0, 1, 1048573, 1048574, 3 * 1048573 + 5])
def test_large_tensors_of_a_trial_repeat_what_was_drawn(count: int) -> None:
    drawn = 1048573
    made = trial.made_up(Value("x", TensorType(DType.F32, (count,))), {}, torch.Generator().manual_seed(3))
    assert made.shape == (count,) and bool(made.isfinite().all())
    assert torch.equal(made[drawn:], made[: max(0, count - drawn)])
    if count >= drawn:
        assert abs(float(made.mean())) < 0.01 and abs(float(made.std()) - 1) < 0.01
    again = trial.made_up(Value("x", TensorType(DType.F32, (count,))), {}, torch.Generator().manual_seed(3))
    assert torch.equal(made, again)
