"""What holds a partition back, what is proposed against it, and where ways to compute something cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.fusion.crossover import MAX_INTERVALS, Variant, crossovers, refined
from hotfuse.fusion.forecast import Figures
from hotfuse.fusion.kinds import CandidateKind
from hotfuse.hpm.bottleneck import ADDRESSES, Bottleneck, Diagnosis, Ledger, Profile, Strategy, diagnose
from hotfuse.hpm.roofline import Roofline
from hotfuse.hpm.work import Candidate
from hotfuse.ir.text import parse

AT = Roofline(2, 100e9, (32e3, 1e6, 16e6, 64e6), (200e9, 100e9, 40e9, 10e9), 1e-7, 2e-6, True, 2.5e9)


@pytest.mark.parametrize(("profile", "want"), [
    (Profile(1e-3, 90e6, 1e6, 1e6), Bottleneck.COMPUTE),
    (Profile(1e-3, 1e6, 180e6, 20e3), Bottleneck.L1),
    (Profile(1e-3, 1e6, 80e6, 500e3), Bottleneck.L2),
    (Profile(1e-3, 1e6, 30e6, 10e6), Bottleneck.L3),
    (Profile(1e-3, 1e6, 9e6, 200e6), Bottleneck.MEMORY),
    (Profile(1e-3, 1e6, 1e5, 1e5), Bottleneck.LATENCY),
    (Profile(3e-6, 2e5, 1e5, 1e4), Bottleneck.LATENCY),
    (Profile(1e-3, 90e6, 1e6, 1e6, busy_s=(1e-3, 1e-4)), Bottleneck.IMBALANCE),
    (Profile(1e-3, 1e6, 9e6, 200e6, {"L2": 90e6, "memory": 1e6}), Bottleneck.L2),
    (Profile(0.0, 1.0, 1.0, 1.0), Bottleneck.UNKNOWN),
    (Profile(1.0, float("nan"), 1.0, 1.0), Bottleneck.UNKNOWN),
])  # fmt: skip
def test_what_limits_an_execution(profile: Profile, want: Bottleneck) -> None:
    found = diagnose(profile, AT)
    assert found.bottleneck is want and found.because and found.source == "derived"
    assert (want is Bottleneck.UNKNOWN) == (not ADDRESSES[want])


@pytest.mark.parametrize("measured", [True, False])
def test_nothing_uses_more_than_all_of_a_roof(measured: bool) -> None:
    """A roof that is exceeded lies too low: a guess says that it is one."""
    found = diagnose(Profile(1e-3, 1e6, 25e6, 200e6), replace(AT, measured=measured))
    assert found.bottleneck is Bottleneck.MEMORY and found.utilization["memory"] == pytest.approx(2.5)
    assert found.because.startswith("all of memory, 2.50 times the roofline: ") and ("guess" in found.because) is not measured
    assert "%" not in found.because and "guess" not in diagnose(Profile(1e-3, 1e6, 9e6, 200e6), AT).because


def test_every_candidate_is_a_strategy() -> None:
    assert {k.value for k in CandidateKind} - {CandidateKind.PROLOGUE.value} <= {s.value for s in Strategy}
    assert {s for group in ADDRESSES.values() for s in group} == set(Strategy)


def test_strategies_that_helped_come_first() -> None:
    ledger, slow = Ledger(), Diagnosis(Bottleneck.MEMORY, {}, 0.0, 1.0)
    assert [s for s, _ in ledger.propose(slow)] == list(ADDRESSES[Bottleneck.MEMORY])
    for _ in range(5):
        assert not ledger.learn(Bottleneck.MEMORY, Strategy.VERTICAL, 1.0, 1.1)
        assert not ledger.learn(Bottleneck.MEMORY, Strategy.TILING, 1.0, 0.99), "within the noise"
        assert ledger.learn(Bottleneck.MEMORY, Strategy.RECOMPUTE, 1.0, 0.8)
    ranked = [s for s, _ in ledger.propose(slow)]
    assert ranked[0] is Strategy.RECOMPUTE and set(ranked[-2:]) == {Strategy.VERTICAL, Strategy.TILING}
    assert ledger.promise(Bottleneck.MEMORY, Strategy.LIBRARY) == 0.0 < ledger.promise(Bottleneck.COMPUTE, Strategy.LIBRARY)
    other = Ledger()
    other.restore(ledger.state())
    assert other.state() == ledger.state() and other.propose(slow) == ledger.propose(slow)
    with pytest.raises(ValueError, match="outcomes"):
        other.restore({"memory vertical": [1.0, 2.0, 0.0]})


GRAPH = parse("""graph main(%x: f32[M, 64]) where (2 <= M) {
  %y: f32[M, 64] = aten.relu.default(%x)
  return %y
}""")


def _variants() -> list[Variant]:
    return [Variant("library", ((GRAPH, None),)), Variant("kernel", ((GRAPH, kernel_cache().core),))]


def predict(asks: Sequence[Candidate]) -> Figures:
    """The library is quick to call, the kernel quick per row: they cross at M = 100."""
    s = np.array([(1e-6 + 2e-8 * a.sizes["M"]) if a.core is None else (2e-6 + 1e-8 * a.sizes["M"]) for a in asks])
    return Figures(s, s, s, s, s)


SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def test_where_two_ways_cross_there_are_two_plans() -> None:
    found = crossovers(_variants(), "M", SIZES, {}, predict)
    assert [i.variant for i in found.intervals] == [0, 1] and not found.single
    border = found.intervals[0].last
    assert border is not None and 64 <= border <= 256 and found.intervals[1].first == border + 1
    assert found.variant(1) == 0 and found.variant(10**6) == 1 and found.intervals[-1].last is None
    def seconds(variant: int, n: int) -> float:
        return float(predict([Candidate(GRAPH, {"M": n}, _variants()[variant].pieces[0][1])]).seconds[0])

    better = refined(found, seconds, 12)
    assert better.measured and abs((better.intervals[0].last or 0) - 100) <= 8


def test_a_way_that_is_hardly_better_does_not_take_over() -> None:
    def close(asks: Sequence[Candidate]) -> Figures:
        s = np.array([1.0 if a.core is None else 1.01 if a.sizes["M"] < 50 else 0.99 for a in asks])
        return Figures(s, s, s, s, s)

    assert crossovers(_variants(), "M", SIZES, {}, close).single


def test_there_are_only_so_many_ways() -> None:
    def wild(asks: Sequence[Candidate]) -> Figures:
        s = np.array([1.0 + (SIZES.index(a.sizes["M"]) % 2 == (a.core is None)) for a in asks])
        return Figures(s, s, s, s, s)

    found = crossovers(_variants(), "M", SIZES, {}, wild)
    assert 1 <= len(found.intervals) <= MAX_INTERVALS and found.intervals[0].first == 0 and found.intervals[-1].last is None
