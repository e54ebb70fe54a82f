"""What a candidate is worth under uncertainty, in what the user asked for.

    value = (gain - CAUTION x its standard deviation) x trust x uses

Gains are in seconds, or for other objectives in what stands for a second: a core's joules in it, or a gigabyte less to hold.
"""

from __future__ import annotations

import math

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Objective
from hotfuse.machine.energy import watts_per_core

CAUTION = 0.5
SHARED = 0.97
"""The part of a prediction's error that two variants of the same computation have in common."""
BYTES_OF_A_SECOND = 1e9
TIME_BESIDE_MEMORY = 0.05
"""What a second counts where memory is asked for."""
_WITHIN = 1.2816
"""Standard deviations that four in five lie within."""


@dataclass(frozen=True, slots=True)
class PredictedCost:
    """A piece, or several, as predicted."""

    seconds: float
    deviation: float
    """Standard deviation of the seconds."""
    joules: float
    stored: int
    """Bytes left in memory for others to read."""
    exposed: float = 0.0
    """Seconds more if memory and arithmetic took turns, where the prediction has one hide the other."""

    def __add__(self, other: PredictedCost) -> PredictedCost:
        return PredictedCost(self.seconds + other.seconds, math.hypot(self.deviation, other.deviation), self.joules + other.joules,
                    self.stored + other.stored, self.exposed + other.exposed)

    def times(self, factor: float) -> PredictedCost:
        """The same computation, so many times as long."""
        return PredictedCost(self.seconds * factor, self.deviation * factor, self.joules * factor, self.stored,
                             self.exposed * factor)  # fmt: skip

    @property
    def known(self) -> bool:
        """Whether there was a prediction at all."""
        return math.isfinite(self.seconds)


NOTHING = PredictedCost(0.0, 0.0, 0.0, 0)


def cost(seconds: float, low: float, high: float, joules: float, stored: int, exposed: float = 0.0) -> PredictedCost:
    """A cost from an interval that four in five measurements lie within."""
    spread = math.log(high / low) / 2 / _WITHIN if 0 < low < high else 0.0
    return PredictedCost(seconds, seconds * spread, joules, stored, exposed)


def score(of: PredictedCost, objective: Objective, threads: int) -> float:
    """What counts, in seconds or what stands for them."""
    if objective == "energy":
        return of.joules / (watts_per_core() * threads)
    if objective == "memory":
        return of.stored / BYTES_OF_A_SECOND + TIME_BESIDE_MEMORY * of.seconds
    return of.seconds


@dataclass(frozen=True, slots=True)
class Gain:
    """A gain with its standard deviation."""

    mean: float
    deviation: float

    def discounted(self, trust: float = 1.0) -> float:
        """What is counted on: less where it is uncertain, or where such predictions failed before; losses stay losses."""
        safe = self.mean - CAUTION * self.deviation
        return safe * trust if safe > 0 else safe


def gain(before: PredictedCost, after: PredictedCost, objective: Objective, threads: int) -> Gain:
    """What replacing one by the other brings; most of the two predictions' errors cancel."""
    mean = score(before, objective, threads) - score(after, objective, threads)
    relative = max(c.deviation / c.seconds if c.seconds else 0.0 for c in (before, after))
    rest = (1 - SHARED) * relative * min(score(before, objective, threads), score(after, objective, threads))
    return Gain(mean, math.hypot(relative * mean, rest))


def value(of: Gain, trust: float, uses: int) -> float:
    """Seconds won in a call. Whether a graph is called often enough to be compiled at all is asked before (`compile.value`)."""
    return of.discounted(trust) * uses
