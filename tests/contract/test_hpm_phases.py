"""Phases in which the machine was slowed while it was calibrated: found, and taken out of what is learned."""

from __future__ import annotations

import numpy as np
import pytest

from hotfuse.hpm import phases

ROWS, STEP_S = 4000, 0.04
"""160 seconds, a batch every two of them."""


def rows(seed: int) -> tuple[phases.Vector, phases.Vector, phases.Whole]:
    """When rows were measured, how far a good model is off, and whose problem's they are: errors are those of problems."""
    r = np.random.default_rng(seed)
    at = 1.7e9 + np.floor(np.arange(ROWS) * STEP_S / 2.0) * 2.0 + r.uniform(0, 0.01, ROWS)
    problem = np.arange(ROWS) // 6
    off = r.normal(0, 0.05, ROWS // 6 + 1)[problem] + r.normal(0, 0.03, ROWS)
    return at, off, problem.astype(np.int64)


def during(at: phases.Vector, *spans: tuple[float, float]) -> np.ndarray:
    since = at - at.min()
    return np.any([(since >= a) & (since < b) for a, b in spans], axis=0)


@pytest.mark.parametrize("seed", range(4))
def test_slow_phases_are_taken_out(seed: int) -> None:
    at, off, problem = rows(seed)
    slow = during(at, (8, 16), (40, 64), (130, 160))
    found = phases.slowed(at, off + 0.14 * slow, problem)
    assert np.abs(found[slow] - 0.14).mean() < 0.04 and np.median(found[slow]) == pytest.approx(0.14, abs=0.03)
    assert np.abs(found[~slow]).mean() < 0.012


@pytest.mark.parametrize("seed", range(4))
def test_a_quiet_machine_is_left_alone(seed: int) -> None:
    found = phases.slowed(*rows(seed))
    assert found.mean() < 0.01 and found.max() < 0.08


def test_a_machine_that_is_slower_for_good_is_what_it_is_now() -> None:
    at, off, problem = rows(1)
    both = np.concatenate([problem, problem + problem.max() + 1])
    found = phases.slowed(np.concatenate([at, at + 86_400]), np.concatenate([off, off + 0.5]), both)
    assert found.mean() < 0.01


def test_few_rows_or_problems_say_nothing() -> None:
    at, off, problem = rows(2)
    slow = during(at, (40, 60))
    assert not phases.slowed(at[::40], (off + 0.3 * slow)[::40], problem[::40]).any(), "one row in a while, as serving measures"
    one = np.where(slow, 0, problem)
    assert not phases.slowed(at, off + 0.3 * slow, one)[slow].any(), "one problem, which the model may miss"
    assert phases.slowed(np.zeros(0), np.zeros(0), np.zeros(0, np.int64)).shape == (0,)


def test_windows_end_with_pauses_and_are_short() -> None:
    at = np.concatenate([np.linspace(0, 1, 40), np.linspace(2, 3, 40), np.linspace(3.1, 3.2, 3), np.linspace(20, 40, 201)])
    found = phases.windows(at[::-1])[::-1]
    assert len(set(found[:40].tolist())) == 1 and found[0] != found[40] == found[82]
    spans = [np.ptp(at[found == w]) for w in np.unique(found)]
    assert max(spans) <= phases.MAX_S
