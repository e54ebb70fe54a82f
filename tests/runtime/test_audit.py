"""Turns, contests and the audit as values: fed with times that are made up, so that errors can be counted."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from hotfuse.runtime.concurrency import CALLERS_WINDOW, Callers
from hotfuse.runtime.tierup.audit import BUDGET, FIRST, FIRST_BUDGET, Audit, interval
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.lull import QUIET_S, Lull
from hotfuse.runtime.tierup.turns import NEW, OLD, Turns

KEY = (1, (), False)
LOOK_S = 1e-5


class OnTrial:
    """What an audit may be of: anything, as long as it need not be held."""


PLAN = OnTrial()


def audited(
    slower: float, noise: float, calls: int, seed: int = 0, *, heavy: bool = False, takes_s: float = 1e-3, look_s: float = LOOK_S
) -> tuple[int | None, Audit]:
    """The call at which a plan is withdrawn that takes so many times as long as its reference; noise is even, or heavy: now and
    then many times as long.
    """
    rng = np.random.default_rng(seed)

    def more() -> float:
        return float(rng.lognormal(0.0, noise)) if heavy else 1 + noise * rng.random()

    audit = Audit(PLAN, None, 0)
    for number in range(1, calls):
        if number < audit.at:
            audit.note(number, (), takes_s * slower * more(), 1)
            continue
        side = audit.turn(KEY)
        took = takes_s * (slower if side == NEW else 1.0) * more()
        if audit.took(number, KEY, side, took, look_s):
            return number, audit
    return None, audit


@pytest.mark.parametrize(("slower", "noise", "most"), [(7.0, 0.5, 60), (3.0, 0.5, 80), (1.5, 0.2, 100), (1.2, 0.3, 2000)])
def test_what_is_slower_is_withdrawn(slower: float, noise: float, most: int) -> None:
    assert all((audited(slower, noise, most, seed)[0] or most + 1) < most for seed in range(20))


@pytest.mark.parametrize(("slower", "most"), [(3.0, 200), (2.0, 250), (1.5, 800)])
def test_a_slower_plan_of_tiny_calls_lasts_as_few_calls(slower: float, most: int) -> None:
    """Where a look takes twice as long as a call, rounds are paid from what the plan costs while it stays."""
    assert all((audited(slower, 0.3, most, seed, takes_s=15e-6, look_s=30e-6)[0] or most + 1) < most for seed in range(20))


def test_looks_at_tiny_calls_of_what_is_as_fast_stay_within_the_budget() -> None:
    costs = []
    for seed in range(10):
        at, audit = audited(1.0, 0.3, 60_000, seed, takes_s=15e-6, look_s=30e-6)
        found = audit.state()
        assert at is None and found is not None
        costs.append(found.cost)
    assert sorted(costs)[5] < 2 * BUDGET


def beside_others(slower: float, calls: int, seed: int) -> tuple[int | None, Audit]:
    """The same beside other programs: one call in five waits for a core, for five milliseconds or more."""
    rng = np.random.default_rng(seed)

    def takes(times: float) -> float:
        held_up = rng.random() < 0.2
        return 3e-4 * times * (1 + 0.2 * rng.random()) + (held_up and 5e-3 * (1 + 3 * rng.random()))

    audit = Audit(PLAN, None, 0)
    for number in range(1, calls):
        if number < audit.at:
            audit.note(number, (), takes(slower), 1)
            continue
        side = audit.turn(KEY)
        if audit.took(number, KEY, side, takes(slower if side == NEW else 1.0), LOOK_S):
            return number, audit
    return None, audit


def test_what_is_slower_is_withdrawn_beside_programs_that_never_rest() -> None:
    """A reference that was held up is not dear: rounds of a plan that is slower follow each other all the same."""
    gone = sorted(beside_others(3.0, 3_000, seed)[0] or 3_000 for seed in range(40))
    assert gone[20] < 200 and gone[-1] < 1_000
    as_fast = [beside_others(1.0, 5_000, seed) for seed in range(40)]
    assert sum(at is not None for at, _ in as_fast) <= 5


def test_what_is_as_fast_stays_for_long() -> None:
    """False alarms are ten thousand rounds apart on average: of forty plans with some three hundred rounds each, few go."""
    gone = [audited(1.0, 0.5, 20_000, seed) for seed in range(40)]
    assert sum(at is not None for at, _ in gone) <= 5 and sum(a.rounds for _, a in gone) > 40 * 100


def test_where_times_scatter_by_factors_what_is_as_fast_stays_for_long() -> None:
    """Less is asked of rounds that seem lost by far, which chance may show too: alarms are not many more for that."""
    gone = [audited(1.0, 1.0, 20_000, seed, heavy=True) for seed in range(40)]
    assert sum(at is not None for at, _ in gone) <= 8 and sum(a.rounds for _, a in gone) > 40 * 100


@pytest.mark.parametrize("slower", [0.9, 0.5, 0.1])
def test_the_audit_of_what_is_faster_stays_within_its_budget(slower: float) -> None:
    at, audit = audited(slower, 0.2, 60_000)
    found = audit.state()
    assert at is None and found is not None and found.cost < 1.5 * BUDGET
    assert found.low < slower < found.high and abs(found.ratio - slower) < 0.1 * slower


def test_the_first_rounds_of_what_is_much_faster_cost_little_either() -> None:
    calls = 200
    _, audit = audited(0.25, 0.1, calls)
    found = audit.state()
    assert found is not None and audit.rounds >= 2 and found.cost < 1.7 * FIRST_BUDGET
    assert audited(0.95, 0.1, 60)[1].rounds >= FIRST, "what is hardly faster has them at once"


def test_a_plan_that_becomes_slower_after_long_is_noticed() -> None:
    _, audit = audited(0.9, 0.2, 50_000)
    rounds = audit.rounds
    number = audit.at
    while not audit.took(number, KEY, side := audit.turn(KEY), 1e-3 * (1.5 if side == NEW else 1.0), LOOK_S):
        number = max(number + 1, audit.at)
        assert audit.rounds < rounds + 30


def test_a_plan_that_was_much_faster_and_is_much_slower_is_compared_soon() -> None:
    """Rounds of what is a hundred times as fast are ten thousands of calls apart, until calls take as long as those would."""
    _, audit = audited(0.01, 0.1, 30_000)
    number = 30_000
    assert audit.at > number + 5000
    for _ in range(100):
        number += 8
        audit.note(number, (), 3e-3, 8)
        if number >= audit.at - 1:
            break
    assert audit.at <= 30_400


def test_the_interval_of_a_median_holds_it() -> None:
    rng = np.random.default_rng(5)
    outside = 0
    for _ in range(300):
        low, high = interval(sorted(rng.lognormal(0.0, 0.4, 40)))
        outside += not low <= 1.0 <= high
    assert outside <= 300 * 0.1
    assert interval([1.0]) == (0.0, float("inf"))


def test_rounds_are_of_one_thread_and_one_kind() -> None:
    turns = Turns()
    for key in ((1, (3,), False), (2, (3,), False), (1, (4,), False)):
        assert turns.next(key) == NEW and turns.took(key, NEW, 9.0) is None  # cold
    sides = [turns.next((1, (3,), False))]
    assert turns.took((1, (3,), False), sides[0], 1.0) is None
    assert turns.took((2, (3,), False), OLD, 5.0) is None and turns.took((1, (4,), False), NEW, 7.0) is None
    assert turns.next((1, (3,), False)) != sides[0]
    ended = turns.took((1, (3,), False), turns.next((1, (3,), False)), 2.0)
    assert ended is not None and set(ended) == {1.0, 2.0}
    for n in range(1000):
        turns.took((n, (), False), turns.next((n, (), False)), 1.0)
    assert len(turns._warm) <= 256  # pyright: ignore[reportPrivateUsage]


def test_who_goes_first_is_drawn() -> None:
    turns = Turns(3)
    turns.took(KEY, NEW, 1.0)
    first = 0
    for _ in range(200):
        side = turns.next(KEY)
        first += side
        turns.took(KEY, side, 1.0)
        turns.took(KEY, turns.next(KEY), 1.0)
    assert 60 < first < 140


def test_a_reference_is_never_measured_cold() -> None:
    """The call behind every change of sides takes long, and is no part of any round."""
    turns, last, rounds = Turns(7, deployed=True), NEW, 0
    for _ in range(400):
        side = turns.next(KEY)
        ended = turns.took(KEY, side, 1.0 if side == last else 100.0)
        last = side
        if ended is not None:
            rounds += 1
            assert ended == (1.0, 1.0)
            last = NEW  # calls between rounds are the plan's
    assert rounds > 90


def contest(old: float, new: float, noise: float = 0.0, seed: int = 0) -> PlanContest:
    rng, serving, other = np.random.default_rng(seed), object(), object()
    made = PlanContest(serving, other)  # type: ignore[arg-type]
    made._turns = Turns(seed + 1)  # pyright: ignore[reportPrivateUsage] - drawn from its address otherwise
    for _ in range(3000):
        if made.over.is_set():
            break
        side = made.turn(KEY)
        made.took(KEY, side, (old if side == OLD else new) * (1 + noise * rng.random()))
    return made


def trial(made: PlanContest) -> Any:
    assert made.trial is not None and made.over.is_set()
    return made.trial


def test_a_contest_is_decided_by_the_bets_of_a_race() -> None:
    won = trial(contest(1.0, 0.5))
    assert won.won and won.decided and won.rounds == 5 and won.by == "live calls" and won.old_us == 1e6
    lost = trial(contest(1.0, 1.2))
    assert not lost.won and lost.decided and lost.rounds == 5
    badly = trial(contest(1.0, 3.0))
    assert not badly.won and badly.rounds == 2 and not badly.decided, "out at once, and tried again later"


def test_rounds_that_were_lost_by_waiting_for_a_core_end_no_contest() -> None:
    """Beside two busy programs, plans four times as fast were out after two calls that lost their core, for a minute."""
    for computed, rounds in ((0.0005, 5), (0.011, 2), (None, 2)):
        serving, other = object(), object()
        made, held_up = PlanContest(serving, other), 2  # type: ignore[arg-type]
        for _ in range(40):
            if made.over.is_set():
                break
            before, side = made.rounds, made.turn(KEY)
            if side == OLD:
                made.took(KEY, OLD, 0.002, 0.002)
            else:
                made.took(KEY, NEW, 0.011 if made.rounds < held_up else 0.0005, computed)
            assert made.rounds - before in (0, 1)
        assert trial(made).won is (rounds != 2) and made.rounds >= rounds
    slow = PlanContest(object(), object())  # type: ignore[arg-type]
    for _ in range(40):
        if not slow.over.is_set():
            slow.took(KEY, side := slow.turn(KEY), 0.002 if side == OLD else 0.02, 0.002)
    assert not trial(slow).won and trial(slow).decided and slow.rounds == 5, "who waits in every call is slower"


def test_who_is_held_up_twice_by_another_program_is_tried_again() -> None:
    """A plan twice as fast whose first two calls lost the core for 10 ms was refused for good."""
    held_up = contest(0.002, 0.011)
    assert not trial(held_up).won and not trial(held_up).decided and trial(held_up).rounds == 2
    again = contest(0.002, 0.001)
    assert trial(again).won


def test_a_bad_candidate_is_hardly_ever_deployed() -> None:
    """Three times as slow, as slow, and a little slower, in noise of their own size."""
    assert not any(trial(contest(1.0, 3.0, 3.0, seed)).won for seed in range(400))
    assert sum(trial(contest(1.0, 1.0, 1.0, seed)).won for seed in range(200)) <= 10
    assert sum(trial(contest(1.0, 1.1, 1.0, seed)).won for seed in range(200)) <= 4


def test_a_lull_is_a_while_without_calls() -> None:
    now, calls, inside = [0.0], [0], [False]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    lull = Lull(lambda: now[0], lambda: calls[0], lambda: inside[0], sleep)
    assert not lull.lasts()
    now[0] += QUIET_S
    assert lull.lasts() and lull.undisturbed()
    calls[0] += 1
    assert not lull.undisturbed() and not lull.lasts() and lull.disturbed == 1
    assert lull.await_one(1.0) and lull.undisturbed()
    inside[0] = True
    assert not lull.undisturbed() and not lull.await_one(0.5)


def test_the_level_of_callers_changes_when_it_lasts() -> None:
    callers = Callers()

    def window(threads: int) -> None:
        for n in range(CALLERS_WINDOW):
            callers.note(n % threads)

    window(1)
    window(1)
    assert (callers.level, callers.changes) == (1, 0)
    window(8)
    window(1)
    window(1)
    assert callers.changes == 0  # one window is no change
    window(8)
    window(8)
    assert (callers.level, callers.changes) == (4, 1)


@pytest.mark.parametrize(("warm_ups", "won"), [(0, False), (2, True)])
def test_rounds_in_which_a_plan_records_are_not_judged(warm_ups: int, won: bool) -> None:
    """The first three calls of the new plan take ten times as long, all others a half: without warm-ups it is out at once."""
    made = PlanContest(object(), object(), warm_ups=warm_ups)  # type: ignore[arg-type]
    made._turns = Turns()  # pyright: ignore[reportPrivateUsage]
    met = 0
    for _ in range(200):
        side = made.turn(KEY)
        met += side == NEW
        made.took(KEY, side, 1.0 if side == OLD else 10.0 if met <= 3 else 0.5)
        if made.trial is not None:
            break
    assert made.trial is not None and made.trial.won is won


def test_many_threads_and_sizes_have_one_round_at_a_time() -> None:
    """A reference ten times as slow, sixteen threads, three sizes each: rounds stay what their budget allows."""
    audit = Audit(PLAN, None, 0, clock=lambda: number * 1e-4)
    old = number = 0
    for number in range(1, 60_000):
        key = (number % 16, (number // 16 % 3,), False)
        if number < audit.at or not audit.due(number, key):
            audit.note(number, key[1], 1e-3, 1)
            continue
        side = audit.turn(key)
        old += side == OLD
        assert not audit.took(number, key, side, 1e-3 if side == NEW else 1e-2, LOOK_S)
    found = audit.state()
    assert found is not None and found.rounds >= 4 and found.cost < 1.5 * BUDGET and old < 60


def test_a_thread_that_ends_within_a_round_keeps_nobody_from_the_next() -> None:
    now = [0.0]
    audit = Audit(PLAN, None, 0, clock=lambda: now[0])
    gone, other = (1, (), False), (2, (), False)
    assert audit.due(4, gone)
    audit.took(4, gone, audit.turn(gone), 1e-3, LOOK_S)
    assert not audit.due(5, other)
    now[0] += 2.0
    assert audit.due(6, other)


def by_many(threads: int, slower: float, scatter: float, calls: int, seed: int) -> tuple[int, Audit]:
    """The call at which a plan is withdrawn where so many threads call, in an order that is drawn."""
    rng, now = np.random.default_rng(seed), [0.0]
    audit = Audit(PLAN, None, 0, clock=lambda: now[0])
    for number in range(1, calls):
        key = (int(rng.integers(threads)), (), False)
        took = 1e-3 * float(rng.lognormal(0.0, scatter))
        if number < audit.at or not audit.due(number, key):
            now[0] += took * slower / threads
            audit.note(number, (), took * slower, 1)
            continue
        side = audit.turn(key)
        took *= slower if side == NEW else 1.0
        now[0] += took / threads
        if audit.took(number, key, side, took, LOOK_S):
            return number, audit
    return calls, audit


@pytest.mark.parametrize(("threads", "scatter"), [(2, 0.05), (4, 0.05), (16, 0.05), (2, 0.5), (4, 0.5), (16, 0.5)])
def test_a_bad_plan_lasts_few_calls_however_many_threads_call(threads: int, scatter: float) -> None:
    gone = sorted(by_many(threads, 3.0, scatter, 3000, seed)[0] for seed in range(20))
    assert gone[14] < 200 and gone[-1] < 250, gone


def test_what_is_as_fast_stays_for_long_where_many_threads_call() -> None:
    gone = [by_many(16, 1.0, 0.5, 5000, seed) for seed in range(20)]
    assert sum(at < 5000 for at, _ in gone) <= 3 and sum(a.rounds for _, a in gone) > 1000


def test_a_plan_is_not_held_by_its_trial() -> None:
    """A call that was in a plan when that was exchanged may begin its trial once more; nothing would ever end it."""
    plan = OnTrial()
    audit, gone = Audit(plan, None, 0), weakref.ref(plan)
    assert audit.is_of(plan) and not audit.is_of(PLAN)
    del plan
    assert gone() is None and not audit.is_of(PLAN)
    audit.reopen(5)  # and nothing is made of that
    assert audit.state() is None


def test_the_first_call_weighs_no_more_than_others_in_what_a_call_takes() -> None:
    audit = Audit(PLAN, None, 0)
    audit.note(1, (), 1e-3, 1)
    assert audit.typical_us() == pytest.approx(1000)
    for number in range(2, 17):
        audit.note(number, (), 1e-4, 1)
    assert audit.typical_us() == pytest.approx((1000 + 15 * 100) / 16), "a mean at first, in which the cold call is one of sixteen"
    for number in range(17, 200):
        audit.note(number, (), 1e-4, 1)
    assert audit.typical_us() == pytest.approx(100, rel=1e-3)
