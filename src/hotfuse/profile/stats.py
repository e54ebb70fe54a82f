"""Statistics that forget: each sample weighs a little less with every one that follows.

With a decay of 0.99 a sample's weight halves after 69 more, so a snapshot speaks of the last few hundred samples, and old traffic
fades instead of being cut off.
"""

from __future__ import annotations

import math
from dataclasses import field

from hotfuse.base.lazy_dataclass import dataclass

DECAY = 0.99
PER_OCTAVE = 16
"""Bins per doubling in a histogram of sizes or times."""


@dataclass(slots=True)
class Decayed:
    """Mean and variance of the recent past."""

    n: int = 0
    weight: float = 0.0
    mean: float = 0.0
    var: float = 0.0

    def add(self, x: float) -> None:
        """One more sample; what is not finite is left out."""
        if not math.isfinite(x):
            return
        self.n += 1
        self.weight = DECAY * self.weight + 1
        share = 1 / self.weight
        off = x - self.mean
        self.mean += share * off
        self.var = (1 - share) * (self.var + share * off * off)


@dataclass(slots=True)
class Fractions:
    """A number between 0 and 1: mean and variance."""

    of: Decayed = field(default_factory=Decayed)

    def add(self, x: float) -> None:
        """One more sample."""
        if 0 <= x <= 1:
            self.of.add(x)


@dataclass(slots=True)
class Sizes:
    """A positive number over many orders of magnitude: mean, and quantiles to a sixteenth of an octave."""

    of: Decayed = field(default_factory=Decayed)
    bins: dict[int, float] = field(default_factory=dict[int, float])
    scale: float = 1.0

    def add(self, x: float) -> None:
        """One more sample."""
        self.of.add(x)
        self.scale /= DECAY  # newer samples weigh more, rather than all older ones less
        at = round(PER_OCTAVE * math.log2(x)) if x > 0 else -1
        self.bins[at] = self.bins.get(at, 0.0) + self.scale
        if self.scale > 1e12:
            self.bins = {k: w / self.scale for k, w in self.bins.items() if w > self.scale * 1e-6}
            self.scale = 1.0

    def quantile(self, q: float) -> float:
        """The size below which a share q of the samples lies; 0 when there are none."""
        left = q * sum(self.bins.values())
        for at in sorted(self.bins):
            left -= self.bins[at]
            if left <= 0:
                return 0.0 if at < 0 else 2 ** (at / PER_OCTAVE)
        return 0.0


@dataclass(slots=True)
class RecentRange:
    """The least and the greatest number of the recent past: of the samples of this epoch and the one before."""

    epoch: int = 256
    n: int = 0
    now: tuple[float, float] = (math.inf, -math.inf)
    before: tuple[float, float] = (math.inf, -math.inf)

    def add(self, low: float, high: float) -> None:
        """One more sample's range."""
        if self.n and self.n % self.epoch == 0:
            self.before, self.now = self.now, (math.inf, -math.inf)
        self.n += 1
        self.now = (min(self.now[0], low), max(self.now[1], high))

    @property
    def low(self) -> float:
        """The least."""
        return min(self.now[0], self.before[0])

    @property
    def high(self) -> float:
        """The greatest."""
        return max(self.now[1], self.before[1])


@dataclass(slots=True)
class Outcomes:
    """Which of a few outcomes occurred, and how often of late; the rarest give way when there are too many."""

    limit: int = 64
    n: int = 0
    weights: dict[int, float] = field(default_factory=dict[int, float])

    def add(self, outcome: int) -> None:
        """One more."""
        self.n += 1
        for k in self.weights:
            self.weights[k] *= DECAY
        self.weights[outcome] = self.weights.get(outcome, 0.0) + 1
        if len(self.weights) > self.limit:
            del self.weights[min(self.weights, key=lambda k: self.weights[k])]

    def shares(self) -> list[tuple[int, float]]:
        """Outcomes with their shares, the most frequent first."""
        total = sum(self.weights.values()) or 1.0
        return sorted(((k, w / total) for k, w in self.weights.items()), key=lambda kw: -kw[1])
