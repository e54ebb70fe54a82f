"""Errors are held against what numbers are: masked scores hide nothing, sums near zero are forgiven, infinities have signs."""

from __future__ import annotations

import pytest
import torch

from hotfuse.analysis.closeness import OUTLIER, relative_error, same_specials, units
from hotfuse.base.errors import InternalError
from hotfuse.compile.variants.trial import agree
from hotfuse.runtime.tierup.agreement import disagreement

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float32).min, 3e38])
def test_a_masked_score_hides_no_error_beside_it(mask: float) -> None:
    want = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    want[:, 50:] = mask
    got = want.clone()
    assert not disagreement([got], [want], 1e-4)
    got[3, 4] += 0.1
    assert "relative error" in disagreement([got], [want], 1e-4)
    with pytest.raises(InternalError):
        agree(got, want)
    got = want.clone()
    got[3, 60] *= 1 - 1e-3  # and is held against its like
    assert "relative error" in disagreement([got], [want], 1e-4)


def test_a_sum_near_zero_is_held_against_the_whole() -> None:
    want = torch.tensor([1e-7, 100.0, -50.0, 0.0])
    got = want + torch.tensor([1e-3, 0.0, 0.0, 1e-3])
    assert not disagreement([got], [want], 1e-4)
    assert relative_error(got.double(), want.double()) == pytest.approx(1e-5, rel=1e-3)


def test_what_should_be_zero_is() -> None:
    zeros = torch.zeros(5)
    assert relative_error(zeros, zeros) == 0.0 and relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_error(zeros + 1e-30, zeros) == INF
    assert disagreement([zeros + 1e-30], [zeros], 1e-2)


@pytest.mark.parametrize(
    ("got", "same"), [([INF, -INF, NAN, 1.0], True), ([INF, INF, NAN, 1.0], False), ([-INF, -INF, NAN, 1.0], False),
                      ([INF, -INF, INF, 1.0], False), ([NAN, -INF, NAN, 1.0], False), ([INF, -INF, NAN, NAN], False)],
)  # fmt: skip
def test_nan_and_infinities(got: list[float], same: bool) -> None:
    want = torch.tensor([INF, -INF, NAN, 1.0])
    assert same_specials(torch.tensor(got), want) is same
    assert (not disagreement([torch.tensor(got)], [want], 1e-4)) is same


def test_complex_numbers_are_compared_by_magnitude() -> None:
    want = torch.tensor([complex(INF, 0), complex(3, 4), complex(NAN, 1)])
    assert not disagreement([want.clone()], [want], 1e-4)
    assert disagreement([want + torch.tensor([0, 0.1, 0])], [want], 1e-4)


def test_units_are_those_of_the_median_though_it_is_not_looked_for() -> None:
    """Counting what lies near the largest number must say what comparing with the median says, zeros and few numbers included."""
    torch.manual_seed(7)
    for n in (1, 2, 3, 8, 31):
        for _ in range(200):
            want = torch.randn(n, dtype=torch.float64) * 10.0 ** torch.randint(-8, 9, (n,)).double()
            want[torch.rand(n) < 0.2] = 0
            magnitude = want.abs()
            expected = magnitude
            if bool(magnitude.any()):
                ordinary = magnitude <= OUTLIER * magnitude[magnitude > 0].median()
                expected = torch.where(ordinary, magnitude[ordinary].max(), magnitude.max())
            assert torch.equal(units(want).expand(n), expected)
