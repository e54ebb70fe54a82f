"""Exploration: which candidates that predictions leave undecided are worth a measurement.

    reading   predictions miss two variants of a thing alike, and rooflines have arithmetic hide what memory takes; where the two
              take turns instead, bytes that no longer travel are won although a roofline says that they cost nothing
    worth     at best a candidate saves more than a contest can tell from noise, and enough calls pay the measurement back
    budget    the time of all measurements of one graph; a bandit says which come first: kinds that often won, much for little

A predictor that does well needs no exploration: it happens only where contests are held anyway.
"""

from __future__ import annotations

from hotfuse.fusion.bandit import Budget
from hotfuse.fusion.worth import Gain, PredictedCost

MIN_GAIN = 0.02
"""A candidate that measured better by less is not better."""
LUCK = 2.0
"""Standard deviations that a candidate may turn out better: one in forty does."""
PAYBACK_CALLS = 10_000
"""Calls within which a measurement has to be paid back by what a candidate saves at best."""
CONTEST_S = 0.12
"""What a contest takes, beside building what it needs."""
BUDGET_S = 0.3
"""Seconds of measurements for one graph."""


def budget() -> Budget:
    """For one graph."""
    return Budget(BUDGET_S)


def arm(kind: str) -> str:
    """What a bandit remembers the outcomes of explorations by: they are no promises."""
    return f"{kind}, a look"


def hope(before: PredictedCost, after: PredictedCost, won: Gain) -> float:
    """Seconds that a candidate saves in the best reading of what is predicted."""
    by_turns = won.mean + before.exposed - after.exposed
    return max(won.mean, by_turns) + LUCK * won.deviation


def undecided(best: float, uses: int, before: float, cost_s: float) -> bool:
    """Whether a candidate that is not taken by prediction may be one that a contest takes, and pays for it."""
    return best > MIN_GAIN * before and cost_s <= best * uses * PAYBACK_CALLS
