"""Medians with confidence intervals that assume nothing about how times are distributed."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and the interval it lies in, with 95% confidence where there are enough samples (6), else all of them."""

    median: float
    low: float
    high: float
    samples: int

    def to_dict(self) -> dict[str, float]:
        """A plain dict for JSON."""
        return asdict(self)

    @property
    def noise(self) -> float:
        """Half the interval's width as a part of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def estimate(samples: Sequence[float]) -> Estimate:
    """The median, and the order statistics between which it lies: how many of n samples fall below it is binomial."""
    ordered, n = sorted(samples), len(samples)
    if not n:
        raise ValueError("no samples")
    rank, below = 0, 0.0
    while rank < n // 2:
        below += math.comb(n, rank) / 2**n
        if below > (1 - CONFIDENCE) / 2:
            break
        rank += 1
    rank = max(rank - 1, 0)
    return Estimate(statistics.median(ordered), ordered[rank], ordered[n - 1 - rank], n)


def of_blocks(samples: Sequence[float], blocks: int = 10, draws: int = 400) -> Estimate:
    """The *mean* of a long series and its interval, by drawing blocks of neighbours: what comes together stays together."""
    size = max(1, len(samples) // blocks)
    parts = [samples[i : i + size] for i in range(0, len(samples), size)]
    rng = random.Random(0)
    means: list[float] = []
    for _ in range(draws):
        drawn = [x for _ in parts for x in rng.choice(parts)]
        means.append(statistics.fmean(drawn))
    means.sort()
    cut = int(draws * (1 - CONFIDENCE) / 2)
    return Estimate(statistics.fmean(samples), means[cut], means[-1 - cut], len(samples))


def quotient(a: Estimate, b: Estimate) -> Estimate:
    """Of two figures that were not taken in rounds."""
    return Estimate(a.median / b.median, a.low / b.high, a.high / b.low, min(a.samples, b.samples))


def ratios(theirs: Sequence[float], ours: Sequence[float]) -> Estimate:
    """How many times longer theirs took, round by round: what changes from one round to the next cancels out."""
    return estimate([t / o for t, o in zip(theirs, ours, strict=False)])


def geomean(numbers: Sequence[float]) -> float:
    """Of ratios."""
    return math.exp(statistics.fmean(math.log(x) for x in numbers))
