"""The order of candidates: pairs by how far they lie apart, what labels allow, and what tells ways of one problem apart."""

from __future__ import annotations

import math

import numpy as np

from benchmarks import hpm_selection
from benchmarks.hpm_selection import PairOrder, SelectionTrial
from hotfuse.hpm import tiling_residuals


def choice(predicted: list[float], first: list[float], second: list[float]) -> SelectionTrial:
    return SelectionTrial(np.array(predicted), np.array(first), np.array(second))


def test_pairs_are_told_apart_by_their_difference() -> None:
    found = hpm_selection.orders([choice([1.0, 1.1, 2.0], [1.0, 1.05, 2.0], [1.0, 1.04, 2.1])])
    assert found == {0.03: PairOrder(1, 1), 0.06: PairOrder(), 0.12: PairOrder(), 0.3: PairOrder(2, 2)}
    near = hpm_selection.orders([choice([1.0, 2.0], [1.0, 1.03], [1.0, 1.5])])
    assert not sum(near.values(), PairOrder()).pairs, "what lies within 3% has no order"


def test_a_pair_that_labels_turn_is_not_judged_and_lowers_what_can_be_reached() -> None:
    turned = choice([1.0, 2.0], [1.0, 1.05], [1.05, 1.0])
    wrong, right = choice([2.0, 1.0], [1.0, 1.05], [1.0, 1.05]), choice([1.0, 2.0], [1.0, 1.05], [1.0, 1.05])
    every = sum(hpm_selection.orders([turned, wrong, right, right, right]).values(), PairOrder())
    assert every == PairOrder(4, 3, 1) and every.accuracy == 0.75 == hpm_selection.pair_accuracy(
        [turned, wrong, right, right, right]
    )
    assert every.ceiling == 1 - 0.5 / 4
    assert sum(hpm_selection.orders([turned] * 3 + [right]).values(), PairOrder()).ceiling == 0.5
    assert math.isnan(PairOrder().accuracy) and math.isnan(PairOrder().ceiling)


def test_quiet_rows_decide_what_a_problem_takes() -> None:
    """A label that was disturbed does not move the mean that the others are held against."""
    values, cell, weight = np.array([0.0, 0.4, 1.0, 3.0]), np.array([0, 0, 7, 7]), np.array([3.0, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(tiling_residuals.centered(values, cell, weight), [-0.1, 0.3, -1.0, 1.0])


def test_the_error_within_problems_is_that_of_quiet_rows() -> None:
    cell, ones = np.array([0, 0, 1, 1, -1]), np.ones(5)
    predicted = np.array([1.0, 1.0, 1.0, math.e, 100.0])
    loud = np.array([1.0, 1.0, 1e-9, 1e-9, 1.0])
    assert math.isclose(tiling_residuals.error(ones, predicted, cell, ones), 0.25)
    assert tiling_residuals.error(ones, predicted, cell, loud) < 1e-6
    assert math.isnan(tiling_residuals.error(ones, predicted, np.full(5, -1), ones))
