"""Online corrections: what changed is found from few samples, what did not is left alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hotfuse.hpm.drifting import MIN_SAMPLES, PROBLEMS
from hotfuse.hpm.online import WINDOW, Online
from hotfuse.hpm.work import FAMILIES

Residual = tuple[int, int, float]
Truth = Callable[[int, int], float]
CONTRACTION, REDUCTION, CONVOLUTION = (FAMILIES.index(n) for n in ("contraction", "reduction", "convolution"))
WIDTH = (0.08, 0.08, 0.18, 0.04, 0.1, 0.06)
"""Of errors, by family: some are predicted far better than others."""


def residuals(r: np.random.Generator, n: int) -> list[Residual]:
    """As the model misses kernels; one in fifteen by far."""
    found: list[Residual] = []
    for _ in range(n):
        family = int(r.choice(6, p=(0.13, 0.11, 0.2, 0.44, 0.09, 0.03)))
        wide = WIDTH[family] * (5 if r.random() < 1 / 15 else 1)
        found.append((family, int(r.choice((-1, 1, 2, 3), p=(0.7, 0.05, 0.2, 0.05))), float(r.normal(0, wide))))
    return found


def moved(some: list[Residual], true: Truth) -> list[Residual]:
    return [(f, b, off + true(f, b)) for f, b, off in some]


def left(online: Online, true: Truth) -> float:
    """The mean error that a correction leaves of a drift."""
    some = residuals(np.random.default_rng(7), 400)
    family, level = np.array([s[0] for s in some]), np.array([s[1] for s in some])
    want = np.array([true(f, b) for f, b, _ in some])
    return float(np.abs(online.shift(family, level) - want).mean())


DRIFTS: dict[str, Truth] = {
    "everything": lambda f, b: 0.47,
    "a family": lambda f, b: 0.47 * (f == CONTRACTION),
    "a level": lambda f, b: 0.47 * (b == 2),
    "everything, faster": lambda f, b: -0.4,
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("before", [0, 100])
@pytest.mark.parametrize("name", DRIFTS)
def test_a_change_is_learned_within_fifty_samples(name: str, before: int, seed: int) -> None:
    """From the beginning, or in a machine that had been as it was calibrated for long."""
    true, r = DRIFTS[name], np.random.default_rng(seed)
    online = Online()
    online.observe_all(residuals(r, before))
    for some in moved(residuals(r, 50), true):
        online.observe_all([some])
    assert online.drifted.any
    assert left(online, true) < 0.05, online.drifted


@pytest.mark.parametrize("seed", range(4))
def test_samples_at_once_teach_what_they_teach_one_by_one(seed: int) -> None:
    """Another process reads them all from the store."""
    r, true = np.random.default_rng(seed), DRIFTS["everything"]
    online = Online()
    online.observe_all([*residuals(r, 60), *moved(residuals(r, 40), true)])
    assert left(online, true) < 0.05, online.drifted


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_that_did_not_change_is_left_alone(seed: int) -> None:
    online, some = Online(), residuals(np.random.default_rng(seed), 150)
    for at in range(0, 150, 3):
        online.observe_all(some[at : at + 3])
        assert left(online, lambda f, b: 0.0) < 0.02, online.drifted


def test_what_goes_back_is_forgotten() -> None:
    r, online = np.random.default_rng(3), Online()
    online.observe_all(moved(residuals(r, 60), DRIFTS["everything"]))
    assert online.drifted.everything > 0.4
    for some in residuals(r, 40):
        online.observe_all([some])
    assert not online.drifted.any, online.drifted


def test_one_problem_in_several_ways_does_not_correct_its_family() -> None:
    """However often it was measured; as many others that are missed alike do."""
    online = Online()
    online.observe_all([(n % 4, -1, 0.0) for n in range(3 * MIN_SAMPLES)])
    online.observe_all([(CONVOLUTION, -1, 0.4)] * 20, ["the same"] * 20)
    assert not online.drifted.any
    online.observe_all([(CONVOLUTION, -1, 0.4)] * 8)
    assert list(online.drifted.family) == ["convolution"]


def test_a_model_of_few_kernels_does_not_correct_the_machine() -> None:
    few = int(PROBLEMS[1]) - 1
    online = Online()
    online.observe_all([(CONTRACTION, -1, 0.6)] * 40, [n % few for n in range(40)])
    assert not online.drifted.any
    online.observe_all([(CONTRACTION, -1, 0.6)] * 40, [n % 8 for n in range(40)])
    assert online.drifted.any


def test_precise_families_tell_of_a_level_that_wide_ones_hide() -> None:
    """Two products say that the third level is slower, and reductions that happen to lie high do not hide it."""
    r, online = np.random.default_rng(0), Online()
    online.observe_all([(CONTRACTION, -1, float(r.normal(0, 0.03))) for _ in range(20)])
    online.observe_all([(REDUCTION, -1, float(r.normal(0.1, 0.2))) for _ in range(10)])
    online.observe_all([(CONTRACTION, 2, 0.47), (CONTRACTION, 2, 0.46), (REDUCTION, 2, 0.5)])
    assert list(online.drifted.level) == ["L3"] and not online.drifted.family, online.drifted


def test_a_level_that_nobody_met_lately_stays_corrected() -> None:
    """Also where the one sample of it among the newest is a hiccup; more of them take the correction back."""
    online = Online()
    online.observe_all([(n % 6, 2 if n % 2 else -1, 0.47 if n % 2 else 0.0) for n in range(40)])
    assert list(online.drifted.level) == ["L3"]
    online.observe_all([(n % 6, 2 if n == 20 else -1, 0.0) for n in range(80)])
    assert list(online.drifted.level) == ["L3"] and online.drifted.level["L3"] > 0.4
    online.observe_all([(n % 6, 2, 0.0) for n in range(80)])
    assert not online.drifted.any


def test_few_samples_correct_nothing_and_hiccups_are_bounded() -> None:
    online = Online()
    for _ in range(MIN_SAMPLES - 1):
        online.observe(0, 0, 1e-6, 2e-6)
    assert not online.drifted.any
    online.observe(0, 0, 1e-6, 0.0)
    online.observe(0, 0, 0.0, 1e-6)
    assert online.seen == MIN_SAMPLES - 1
    online.observe(0, 0, 1e-6, 2e-6)
    assert np.exp(online.shift(np.array([0]), np.array([0])))[0] == pytest.approx(2.0, rel=0.01)


def test_no_more_samples_are_kept_than_count() -> None:
    online = Online()
    online.observe_all(residuals(np.random.default_rng(1), 3 * WINDOW))
    assert online.drifted.samples <= WINDOW and online.seen == 3 * WINDOW
