"""Looks at what predictions leave undecided: worth their time, within a budget, decided by measurement alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.fusion_cases import KINDS, graph_of
from hotfuse.analysis.resources import CorePeaks
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.fusion import exploration
from hotfuse.fusion.decision_lines import lines
from hotfuse.fusion.forecast import RooflinePredictor
from hotfuse.fusion.fusion_engine import FusionChoice, FusionPlanner, Planned
from hotfuse.fusion.group_steps import Side
from hotfuse.fusion.groups import group
from hotfuse.fusion.kinds import CandidateKind
from hotfuse.fusion.worth import Gain, PredictedCost, gain

WIDE = {"R": 2048, "C": 64, "D": 512}


class Verdict:
    """A contest that ends as a test says, and counts."""

    def __init__(self, saved: float) -> None:
        self.saved, self.held = saved, 0

    def __call__(self, old: Sequence[Side], new: Sequence[Side]) -> tuple[str, float]:
        self.held += 1
        return ("" if self.saved > 0 else f"measured {1e6 * -self.saved:.1f} us more"), self.saved


def planned(sizes: dict[str, int], contest: Verdict | None, **changes: Any) -> Planned:
    text, _ = KINDS["tiling"]["mlp"]
    graph = graph_of(text, sizes)
    core = replace(kernel_cache().core, l2=CorePeaks().l2)
    ready = FusionPlanner(RooflinePredictor(CorePeaks()), core, kinds=frozenset({CandidateKind.TILING}), contest=contest, **changes)
    return ready.plan(graph, group(graph), {})


def tiling(found: Planned) -> list[FusionChoice]:
    return [c for c in found.choices if c.kind is CandidateKind.TILING and c.before.known]


def test_rooflines_see_no_gain_in_blocks_of_rows_and_a_look_decides() -> None:
    """Arithmetic hides the intermediate's way through memory, on paper."""
    (alone,) = tiling(planned(WIDE, None))
    assert not alone.accepted and not alone.looked and alone.gain.mean < 0
    won, lost = Verdict(1e-4), Verdict(-1e-4)
    (taken,), (left,) = tiling(planned(WIDE, won)), tiling(planned(WIDE, lost))
    assert won.held == lost.held == 1, "once is enough"
    assert taken.accepted and taken.looked and "saves 100.0 us, measured" in taken.because
    assert left.looked and not left.accepted and "a look can: measured 100.0 us more" in left.because
    assert len(planned(WIDE, won).groups) > 2 and len(planned(WIDE, lost).groups) == 2


def test_what_was_looked_at_is_shown_before_other_refusals() -> None:
    found = planned(WIDE, Verdict(-1e-4))
    better = replace(tiling(found)[0], looked=False, gain=Gain(1.0, 0.0))
    assert "a look can" in lines(replace(found, choices=(better, *found.choices)), 1)[1]


def test_looks_end_with_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exploration, "BUDGET_S", exploration.CONTEST_S / 2)
    contest = Verdict(1e-4)
    (choice,) = tiling(planned(WIDE, contest))
    assert not contest.held and not choice.accepted and "no time is left for a look" in choice.because


def test_looks_that_calls_never_pay_back_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exploration, "PAYBACK_CALLS", 10)
    contest = Verdict(1e-4)
    (choice,) = tiling(planned(WIDE, contest))
    assert not contest.held and not choice.looked and not choice.accepted


def test_what_cannot_be_built_is_not_looked_at() -> None:
    contest = Verdict(1e-4)
    (choice,) = tiling(planned(WIDE, contest, lowers=lambda _: "there is no such kernel"))
    assert not contest.held and not choice.accepted and "no such kernel" in choice.because


def test_outcomes_of_looks_are_remembered_apart_from_promises() -> None:
    ready = FusionPlanner(RooflinePredictor(CorePeaks()), kernel_cache().core)
    planned(WIDE, Verdict(-1e-4), bandit=ready.bandit)
    assert list(ready.bandit.arms) == [exploration.arm("tiling")] and ready.bandit.trust(exploration.arm("tiling")) < 1
    assert ready.bandit.trust("tiling") == 1


def test_hope_is_the_best_reading_of_a_prediction() -> None:
    before, after = PredictedCost(1e-3, 0.0, 0.0, 0, exposed=3e-4), PredictedCost(1.05e-3, 0.0, 0.0, 0, exposed=1e-4)
    won = gain(before, after, "latency", 1)
    assert exploration.hope(before, after, won) == pytest.approx(1.5e-4), "what memory takes, if nothing hides it"
    assert exploration.hope(replace(before, exposed=0.0), replace(after, exposed=0.0), won) == pytest.approx(-0.5e-4)
    unsure = Gain(won.mean, 1e-4)
    assert exploration.hope(before, after, unsure) == pytest.approx(1.5e-4 + exploration.LUCK * 1e-4)


@pytest.mark.parametrize(("best", "uses", "cost_s", "want"), [
    (1e-4, 1, 0.12, True),
    (1e-5, 1, 0.01, False),  # a contest would not tell it from noise
    (1e-4, 1, 2.0, False),  # 20,000 calls until it is paid
    (1e-4, 4, 2.0, True),
])  # fmt: skip
def test_a_look_is_worth_its_time(best: float, uses: int, cost_s: float, want: bool) -> None:
    assert exploration.undecided(best, uses, 1e-3, cost_s) is want
