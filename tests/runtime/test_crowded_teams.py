# pyright: reportPrivateUsage=false
"""Library kernels whose team of threads shares its cores with other programs: on one thread where that is quicker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.machine import team_size
from hotfuse.runtime import crowded_teams
from hotfuse.runtime.crowded_teams import COLD_CALLS, CONCERNED, LATEST, STALE_S, CrowdedTeams, TeamChoice


@pytest.fixture(autouse=True)
def two_of_two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(crowded_teams, "usable_cores", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


class Machine:
    """A clock of its own, which calls move on by what they take with the threads that they have."""

    def __init__(self, team_s: float, alone_s: float) -> None:
        self.now, self.team_s, self.alone_s = 0.0, team_s, alone_s
        self.had: list[int] = []

    def call(self, *_: Any, **__: Any) -> str:
        threads = torch.get_num_threads()
        self.had.append(threads)
        self.now += self.alone_s if threads == 1 else self.team_s
        return "answer"


def choices(machine: Machine, calls: int, choice: TeamChoice) -> list[bool]:
    """Whether each of the calls was on one thread."""
    made: list[bool] = []
    for _ in range(calls):
        made.append(choice.next_alone(2))
        choice.took(machine.alone_s if made[-1] else machine.team_s, alone=made[-1])
    return made


def test_a_team_that_others_hold_up_gives_way_to_one_thread_and_comes_back() -> None:
    machine, choice = Machine(0.010, 0.018), TeamChoice()
    assert not any(choices(machine, 100, choice)), "there is nothing to gain, and nothing is tried"
    machine.team_s = 0.115
    crowded = choices(machine, 200, choice)
    assert crowded.count(False) < 12, "tried again rarely, as long as others have the cores"
    machine.team_s = 0.010
    again = choices(machine, 2 * LATEST, choice)
    assert not any(again[LATEST:]) and choice.prefers_one is False


def test_a_team_that_was_crowded_long_ago_is_tried_first() -> None:
    """Calls of an audit are seconds apart: what the plan is held to is the own code with its team, if that has its cores again."""
    machine, choice = Machine(0.010, 0.018), TeamChoice()
    choices(machine, 10, choice)
    machine.team_s = 0.115
    choices(machine, 50, choice)
    assert choice.prefers_one and any(choice.next_alone(2, 1.0) for _ in range(2))
    assert not choice.next_alone(2, 2 * STALE_S)


def test_one_call_that_was_held_up_takes_no_team_away() -> None:
    machine, choice = Machine(0.010, 0.018), TeamChoice()
    had = choices(machine, 20, choice)
    machine.team_s = 1.0
    had += choices(machine, 1, choice)
    machine.team_s = 0.010
    had += choices(machine, 100, choice)
    assert had.count(True) <= 1


def test_the_first_calls_of_a_kind_say_nothing() -> None:
    """They compile, allocate and read files: seconds that later calls do not take, on however many threads."""
    machine, choice = Machine(2.0, 2.0), TeamChoice()
    had = choices(machine, COLD_CALLS, choice)
    machine.team_s, machine.alone_s = 0.010, 0.018
    assert not any(had + choices(machine, 50, choice))


def test_where_one_thread_is_slower_all_the_same_it_is_tried_rarely() -> None:
    machine, choice = Machine(0.010, 0.030), TeamChoice()
    choices(machine, 10, choice)
    machine.team_s = 0.016
    assert choices(machine, 300, choice).count(True) <= 3


def test_short_calls_are_left_alone() -> None:
    machine, choice = Machine(0.0001, 0.0001), TeamChoice()
    choices(machine, 10, choice)
    machine.team_s = 0.0009
    assert not any(choices(machine, 200, choice))


def test_calls_have_one_thread_meanwhile_and_give_it_back() -> None:
    machine = Machine(0.010, 0.018)
    went_to: list[Any] = []
    teams = CrowdedTeams(machine.call, went_to.append, lambda: machine.now)
    x = torch.zeros(64)
    for _ in range(10):
        assert teams.own_code(x) == "answer"
    assert set(machine.had) == {2} and not went_to, "calls that nobody looks at pay for nothing"
    machine.team_s = 0.115
    for _ in range(40):
        teams.own_code(x)
    assert machine.had[-10:].count(1) >= 9 and teams.on_one_thread == machine.had.count(1)
    assert torch.get_num_threads() == 2, "the caller has its threads again"
    assert went_to == [teams.own_code], "now all of them take part"
    machine.team_s = 0.010
    for _ in range(2 * LATEST):
        teams.own_code(x)
    assert went_to == [teams.own_code, machine.call]


def test_short_calls_are_asked_nothing_and_end_what_long_ones_began() -> None:
    machine = Machine(0.0001, 0.0001)
    went_to: list[Any] = []
    teams = CrowdedTeams(machine.call, went_to.append, lambda: machine.now)
    x = torch.zeros(64)
    for _ in range(20):
        teams.own_code(x)
    assert not teams._choices, "no kind of call was looked for"
    machine.team_s, machine.alone_s = 0.010, 0.018
    for k in range(60):
        machine.team_s = 0.010 if k < 10 else 0.2
        teams.own_code(x)
    assert went_to == [teams.own_code]
    machine.team_s = machine.alone_s = 0.0001
    for _ in range(CONCERNED):
        teams.own_code(x)
    assert went_to == [teams.own_code, machine.call] and not teams.concerned


def test_sizes_are_kinds_of_their_own() -> None:
    """What is longer takes longer: that is no crowd."""
    machine = Machine(0.002, 0.004)
    teams = CrowdedTeams(machine.call, lambda _: None, lambda: machine.now)
    for k in range(200):
        machine.team_s, machine.alone_s = (0.002, 0.004) if k % 2 else (0.016, 0.032)
        teams.own_code({"x": [torch.zeros(64 if k % 2 else 1024)]})
    assert set(machine.had) == {2}


@pytest.mark.parametrize("odd", [object(), {"cache": object()}, torch.zeros(4, device="meta")])
def test_calls_whose_size_is_not_known_keep_their_team(odd: object) -> None:
    machine = Machine(0.010, 0.018)
    teams = CrowdedTeams(machine.call, lambda _: None, lambda: machine.now)
    for k in range(100):
        machine.team_s = 0.010 if k < 10 else 0.2
        teams.own_code(torch.zeros(64), odd)
    assert set(machine.had) == {2}


def test_large_teams_leave_cores_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowded_teams, "usable_cores", lambda: team_size.SPARE_FROM)
    machine = Machine(0.010, 0.018)
    teams = CrowdedTeams(machine.call, lambda _: None, lambda: machine.now)
    for k in range(100):
        machine.team_s = 0.010 if k < 10 else 0.2
        teams.own_code(torch.zeros(64))
    assert set(machine.had) == {2}


def test_calls_that_may_be_trained_by_keep_their_team() -> None:
    machine = Machine(0.010, 0.018)
    teams = CrowdedTeams(machine.call, lambda _: None, lambda: machine.now)
    with torch.enable_grad():
        for k in range(100):
            machine.team_s = 0.010 if k < 10 else 0.2
            teams.own_code(torch.zeros(64))
    assert set(machine.had) == {2}


class Crowded(nn.Module):
    """A layer that says how many threads it has, on a machine that others crowd or do not."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.machine = [machine]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.machine[0].call()
        return self.inner(x)


def test_own_code_of_a_served_model_has_one_thread_while_its_team_is_crowded() -> None:
    machine = Machine(0.010, 0.018)
    module, x = Crowded(machine).eval(), torch.randn(4, 8)
    want = module(x)
    fast = hotfuse.jit(module, settings=Settings(capture="off", record=False))
    fast._engine.teams._clock = lambda: machine.now
    with torch.no_grad():
        for _ in range(20):
            fast(x)
        machine.had.clear()
        machine.team_s = 0.115
        for _ in range(60):
            torch.testing.assert_close(fast(x), want)
    assert machine.had.count(1) > 45
    assert fast.explain().to_dict()["on_one_thread"] == machine.had.count(1)
    assert "calls of library kernels had one thread" in fast.explain(full=True).text(full=True)


def test_a_plan_on_the_library_has_one_thread_meanwhile_and_every_call_decides() -> None:
    machine = Machine(0.010, 0.018)
    module, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    with torch.inference_mode(), hotfuse.jit(module, settings=Settings(tiers=0, record=False)) as fast:
        for _ in range(4):
            fast(x)
            assert fast.wait(120)
        engine = fast._engine
        (entry,) = (e for s in engine.sites.values() for e in s.entries)
        run = entry.baseline.run

        def counted(*leaves: torch.Tensor) -> tuple[Any, ...]:
            machine.call()
            return run(*leaves)

        plan = replace(entry.baseline, run=counted)
        entry.plan = entry.baseline = plan
        entry.own_ratio, entry.contest, entry.own = 2.0, None, False
        engine.teams._clock = lambda: machine.now
        engine.teams._choices.clear()
        engine.teams.seen(0.01)
        engine.teams.seen = lambda seconds: None  # by the real clock these calls are short
        for _ in range(400):
            fast(x)
        machine.had.clear()
        machine.team_s = 0.115
        while machine.had[-20:].count(1) < 19 and len(machine.had) < 20_000:
            fast(x)
        machine.had.clear()
        for _ in range(200):
            torch.testing.assert_close(fast(x), module(x))
        assert machine.had.count(1) > 2 * machine.had.count(2), "looked at or not; sampled calls keep their team"
