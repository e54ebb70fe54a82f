# pyright: reportPrivateUsage=false
"""Never worse, and noticed when it is: real races on live calls, the model's own code as the baseline, the audit.

Every plan here is as slow as its sleep: no machine is so busy that the order changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import hotfuse.runtime.site as site_module
import hotfuse.runtime.tierup.judge as judge_module
from hotfuse.api import engine_stats
from hotfuse.base.events import Action, Why
from hotfuse.explain import explain_engine
from hotfuse.runtime.tierup.attempt import exchange
from hotfuse.runtime.tierup.race import Trial
from hotfuse.specialize.table import TIER1
from tests.runtime.live import SETTINGS, Live, asleep

LIVE, PAUSED = "live calls", "rounds while nobody called"


@pytest.fixture(autouse=True)
def no_grad(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(judge_module, "SUSPECT_S", 0.3)
    with torch.no_grad():
        yield


def test_live_calls_deploy_what_is_faster_than_tier_0_and_own_code() -> None:
    with Live(own_s=0.008, tier0_s=0.004) as live:
        live.calls_until(lambda: bool(live.said(Action.DEPLOY, Why.FASTER, 1)))
        (won,) = live.said(Action.DEPLOY, Why.FASTER, 1)
        assert won.evidence["race"] == LIVE and won.evidence["us_before"] > won.evidence["us_after"]
        (zero,) = live.said(Action.KEEP, Why.FASTER, 0)
        assert zero.evidence["race"] == LIVE and zero.evidence["against"] == "the model's own code"
        live.call()
        assert live.entry.plan.tier == 1 and not live.entry.own


def test_live_calls_refuse_what_is_slower() -> None:
    """Not so slow that it would be kept off live calls: those decide."""
    with Live(own_s=0.009, tier0_s=0.004, tier1_s=lambda: 0.006) as live:
        live.calls_until(lambda: bool(live.said(Action.REFUSE, Why.NOT_FASTER, 1)))
        (lost,) = live.said(Action.REFUSE, Why.NOT_FASTER, 1)
        assert lost.evidence["race"] == LIVE and lost.evidence["us_before"] < lost.evidence["us_after"]
        assert live.entry.plan is live.entry.baseline and TIER1 in live.entry.refused and live.made == 1


def test_what_takes_three_times_as_long_never_meets_a_live_call() -> None:
    with Live(own_s=0.009, tier0_s=0.003, tier1_s=lambda: 0.012) as live:
        live.calls_until(lambda: bool(live.said(Action.REFUSE, Why.NOT_MEASURED, 1)))
        assert engine_stats(live.engine)["calls_per_tier"]["1"] == 0
        assert "us_after" not in live.said(Action.REFUSE, Why.NOT_MEASURED, 1)[0].evidence
        assert TIER1 in live.entry.refused and TIER1 in live.entry.retries  # nobody measured it: it is tried again later


def test_what_is_slow_for_callers_alone_is_out_after_a_few_of_them() -> None:
    """Fast beside, where it is glanced at, and slow on the thread that calls: as two teams on the same cores may be."""
    caller = threading.get_ident()
    with Live(own_s=0.009, tier0_s=0.003, tier1_s=lambda: 0.03 if threading.get_ident() == caller else 0.0) as live:
        live.calls_until(lambda: bool(live.said(Action.REFUSE, Why.NOT_FASTER, 1)))
        # two rounds where the thread has its core; five where that is taken away meanwhile (decision 432), and those under way
        assert 0 < engine_stats(live.engine)["calls_per_tier"]["1"] <= 8
        assert live.said(Action.REFUSE, Why.NOT_FASTER, 1)[0].evidence["race"] == LIVE


def test_own_code_answers_where_tier_0_is_slower() -> None:
    with Live(own_s=0.002, tier0_s=0.006, tier1_s=lambda: 0.003) as live:
        live.calls_until(lambda: bool(live.said(Action.REFUSE, Why.NOT_FASTER, 0)))
        (lost,) = live.said(Action.REFUSE, Why.NOT_FASTER, 0)
        assert lost.evidence["us_before"] < lost.evidence["us_after"] and live.entry.own
        live.calls_until(lambda: bool(live.said(Action.REFUSE, Why.NOT_FASTER, 1)))  # it was tried all the same
        before = engine_stats(live.engine)["calls_per_tier"]
        for _ in range(40):
            live.call()
        after = engine_stats(live.engine)["calls_per_tier"]
        assert after["module"] == before["module"] + 40 and after["0"] == before["0"]
        shown = explain_engine(live.engine, full=True)
        assert shown.to_dict()["sites"][0]["plans"][0]["own_code"]["answers"] and "own code takes" in str(shown)


def test_tier_1_has_to_beat_own_code_where_tier_0_lost() -> None:
    with Live(own_s=0.002, tier0_s=0.012, tier1_s=lambda: 0.0035) as live:  # better than tier 0, and not good enough
        live.calls_until(lambda: bool(live.said(Action.REFUSE, Why.NOT_FASTER, 1)))
        assert live.said(Action.REFUSE, Why.NOT_FASTER, 1)[0].evidence["against"] == "the model's own code"
        assert live.entry.own and live.entry.plan is live.entry.baseline
    with Live(own_s=0.005, tier0_s=0.009) as live:
        live.calls_until(lambda: bool(live.said(Action.DEPLOY, Why.FASTER, 1)))
        assert live.said(Action.DEPLOY, Why.FASTER, 1)[0].evidence["against"] == "the model's own code"
        assert live.entry.plan.tier == 1


def test_a_ratio_that_a_few_calls_got_wrong_keeps_no_plan_off_live_calls() -> None:
    """Tier 0's first live calls take twenty times as long as later ones: two rounds show that the own code is as much faster."""
    caller, slow = threading.get_ident(), iter([0.6] * 3)
    with Live(own_s=0.03, tier0_s=lambda _rows: next(slow, 0.035) if threading.get_ident() == caller else 0.035,
              tier1_s=lambda: 0.008) as live:  # fmt: skip
        live.calls_until(lambda: bool(live.said(Action.DEPLOY, Why.FASTER, 1)))
        first, *_ = live.said(Action.REFUSE, Why.NOT_FASTER, 0)
        assert first.evidence["us_after"] > first.evidence["us_before"]
        assert not live.said(Action.REFUSE, Why.NOT_FASTER, 1) and live.made == 1


def test_a_ratio_that_a_few_calls_got_wrong_refuses_nothing_while_nobody_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where calls pause before the plan is raced: they show the ratio once more, and then it is believed."""
    monkeypatch.setattr(site_module, "RETRY_S", 0.2)
    caller, slow = threading.get_ident(), [0.3]
    with Live(own_s=0.03, tier0_s=lambda _rows: slow[0] if slow and threading.get_ident() == caller else 0.035,
              tier1_s=lambda: 0.015) as live:  # fmt: skip
        live.calls_until(lambda: live.captured and live.entry.own)
        slow.clear()
        assert live.entry.own_ratio is not None and live.entry.own_ratio < 0.2
        until = time.monotonic() + 30
        while not live.said(Action.REFUSE, Why.NOT_FASTER, 1) and time.monotonic() < until:
            time.sleep(0.01)  # nobody calls
        (lost,) = live.said(Action.REFUSE, Why.NOT_FASTER, 1)
        assert lost.evidence["race"] == PAUSED and TIER1 in live.entry.retries
        live.calls_until(lambda: bool(live.said(Action.DEPLOY, Why.FASTER, 1)))
        assert live.entry.own_ratio > 0.5


def test_a_ratio_that_calls_showed_twice_is_believed() -> None:
    with Live(own_s=0.002, tier0_s=0.006, tier1_s=lambda: 0.003) as live:
        live.calls_until(lambda: live.captured and live.entry.own and TIER1 in live.entry.refused)
        judge, entry = judge_module.Judge(live.engine.plans), live.entry
        entry.own_doubted, entry.contest = False, None
        by_ratio, by_itself = Trial(600.0, 900.0, 9, won=False), Trial(600.0, 9000.0, 9, won=False)
        assert judge._doubted(entry, by_itself, 0.1) is by_itself and entry.contest is None
        assert not judge._doubted(entry, by_ratio, 0.1).decided and entry.contest is not None
        entry.contest = None
        assert judge._doubted(entry, by_ratio, 0.1) is by_ratio


def test_calls_that_are_rare_leave_the_race_to_their_pauses() -> None:
    with Live(own_s=0.006, tier0_s=0.003) as live:
        live.calls_until(lambda: bool(live.said(Action.DEPLOY, Why.FASTER, 1)), pause_s=0.25)
        assert live.said(Action.DEPLOY, Why.FASTER, 1)[0].evidence["race"] == PAUSED
    with Live(own_s=0.009, tier0_s=0.003, tier1_s=lambda: 0.009) as live:
        live.calls_until(lambda: bool(live.said(Action.REFUSE, Why.NOT_FASTER, 1)), pause_s=0.25)
        assert live.said(Action.REFUSE, Why.NOT_FASTER, 1)[0].evidence["race"] == PAUSED
        assert "tier 1" not in live.entry.retries  # that is certain


def test_threads_and_sizes_have_rounds_of_their_own() -> None:
    """Two threads call with four sizes, which take from 1 to 8 times as long: only rounds of one kind compare anything."""
    with Live(own_s=0.02, tier0_s=lambda rows: 0.002 * (rows - 2), tier1_s=lambda: lambda rows: 0.001 * (rows - 2)) as live:
        stop, problems = threading.Event(), list[BaseException]()

        def caller(rows: tuple[int, ...]) -> None:
            try:
                with torch.no_grad():
                    while not stop.is_set():
                        for n in rows:
                            live.call(n)
            except BaseException as e:
                problems.append(e)

        threads = [threading.Thread(target=caller, args=(rows,)) for rows in ((3, 10, 4, 6), (6, 3, 10, 4))]
        for t in threads:
            t.start()
        until = time.monotonic() + 60
        while not (won := live.said(Action.DEPLOY, Why.FASTER, 1)) and time.monotonic() < until:
            time.sleep(0.05)
        stop.set()
        for t in threads:
            t.join(60)
        assert not problems and won and won[0].evidence["race"] == LIVE and won[0].evidence["rounds"] <= 60


def forced(live: Live, factor: float) -> int:
    """Calls until a plan that was forced in is gone again."""
    live.calls_until(lambda: live.captured and live.entry.own_ratio is not None and TIER1 in live.entry.refused)
    plan = live._tier1(live.entry.baseline.graph, live.entry.weights, ())
    slow = replace(plan, run=asleep(plan.run, lambda: factor * 0.002))
    exchange(live.entry, slow)
    return live.calls_until(lambda: live.entry.plan is live.entry.baseline)


@pytest.mark.parametrize("own_s", [0.006, 0.001])
def test_a_slow_plan_that_was_forced_in_is_withdrawn(own_s: float) -> None:
    """By the audit alone, against the better of tier 0 and the own code; it may be tried again later."""
    with Live(own_s=own_s, tier0_s=0.002, tier1_s=lambda: 0.003) as live:
        assert forced(live, 3.0) < 200
        (gone,) = live.said(Action.DROP, Why.REGRESSED, 1)
        assert gone.evidence["ratio"] > 2 and gone.evidence["against"] == ("tier 0" if own_s > 0.002 else "the model's own code")
        assert TIER1 in live.entry.refused and TIER1 in live.entry.retries
        live.entry.retry(time.monotonic() + 1e5)
        assert TIER1 not in live.entry.refused


def test_a_plan_that_becomes_slow_is_withdrawn_and_the_audit_shows_why() -> None:
    slow: list[float] = []
    with Live(own_s=0.009, tier0_s=0.003, tier1_s=lambda: slow[0] if slow else 0.0) as live:
        live.calls_until(lambda: live.captured and live.entry.plan.tier == 1)
        live.calls_until(lambda: bool(live.entry.audits) and live.entry.audits[None].state() is not None)
        shown = explain_engine(live.engine, full=True)
        (audit,) = shown.to_dict()["sites"][0]["plans"][0]["audits"]
        assert audit["ratio"] < 1 and audit["against"] == "tier 0" and "audit: " in str(shown)
        slow.append(0.01)
        live.calls_until(lambda: live.entry.plan is live.entry.baseline)
        assert live.said(Action.DROP, Why.REGRESSED, 1)


def test_tier_0_that_becomes_slower_than_own_code_is_withdrawn_too() -> None:
    with Live(own_s=0.004, tier0_s=0.0, tier1_s=lambda: 0.003) as live:
        live.calls_until(lambda: live.captured and live.entry.own_ratio is not None and TIER1 in live.entry.refused)
        assert not live.entry.own
        live.tier0_s = 0.012
        live.calls_until(lambda: live.entry.own)
        assert live.said(Action.DROP, Why.REGRESSED, 0)


def test_weights_that_change_during_a_race_on_live_calls_end_it() -> None:
    """The candidate has copies of older weights: not one call may be answered by it from then on."""
    with Live(own_s=0.009, tier0_s=0.004, tier1_s=lambda: 0.0035) as live:
        live.calls_until(lambda: live.captured and live.entry.contest is not None and live.entry.contest.new.tier == 1)
        live.model.inner.weight.mul_(2)
        for _ in range(30):
            live.call()  # compares with the model as it is now


def test_weights_written_unseen_during_a_race_on_live_calls_are_noticed() -> None:
    """The candidate is no deployed plan yet; what it has copies of is compared with its checksums all the same."""
    with Live(own_s=0.009, tier0_s=0.004, tier1_s=lambda: 0.0039) as live:
        live.calls_until(lambda: live.captured and live.entry.contest is not None and live.entry.contest.new.tier == 1)
        live.calls_until(lambda: live.engine.plans.originals.bytes > 0 or live.entry.contest is None)
        if live.entry.contest is None:
            pytest.skip("the race was over before anything could be written")
        live.model.inner.weight.data.numpy()[:] *= 2
        x = torch.randn(3, 4)
        until = time.monotonic() + 10
        while not [d for d in live.engine.log.decisions if d.why is Why.WEIGHTS_WRITTEN_UNSEEN] and time.monotonic() < until:
            live.engine(x)
        assert [d for d in live.engine.log.decisions if d.why in (Why.WEIGHTS_WRITTEN_UNSEEN, Why.WEIGHTS_CHANGED)]
        for _ in range(20):
            live.call()


def _refused(live: Live, tier: int) -> int:
    return sum(d.action is Action.REFUSE and d.evidence.get("tier") == tier for d in live.engine.log.decisions)


def test_circumstances_open_decisions_again() -> None:
    with Live(own_s=0.009, tier0_s=0.003, tier1_s=lambda: 0.005) as live:
        live.calls_until(lambda: bool(live.said(Action.REFUSE, Why.NOT_FASTER, 1)))
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            # as slower, or undecided where a busy machine made it look too slow for live calls
            live.calls_until(lambda: _refused(live, tier=1) > 1)
        finally:
            torch.set_num_threads(threads)
        notices = [d for d in live.engine.log.decisions if d.why is Why.CIRCUMSTANCES]
        assert notices and notices[0].evidence["changed"] == "threads" and live.made == 2


def test_without_background_nothing_is_audited_and_it_says_so() -> None:
    with Live(own_s=0.001, tier0_s=0.003, settings=SETTINGS.with_(release_weights=True)) as live:
        live.calls_until(lambda: live.captured)
        assert "give their memory back" in str(explain_engine(live.engine, full=True))


def test_a_better_plan_does_not_wait_until_two_equals_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own code and tier 0 take the same time: no number of rounds decides between them."""
    monkeypatch.setattr(judge_module, "BASELINE_S", 60.0)  # so that only rounds can end the wait
    with Live(own_s=0.006, tier0_s=0.006) as live:
        live.calls_until(lambda: bool(live.said(Action.DEPLOY, Why.FASTER, 1)))
        zero = [d for d in live.engine.log.decisions if d.evidence.get("tier") == 0 and d.why in (Why.FASTER, Why.NOT_FASTER)]
        assert zero and zero[0].evidence["rounds"] >= judge_module.BASELINE_ROUNDS
        assert live.entry.own_ratio is not None  # what was seen so far is what the better plan had to beat
