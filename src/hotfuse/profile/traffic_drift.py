"""Noticing that traffic has changed, with a stated rate of false alarms.

A stream's samples come in blocks. Each block is compared with the first one since the last change, of the same length w, by
the two-sample Kolmogorov–Smirnov distance D. For independent samples of one distribution, whatever it is, and with ties,

    P(D ≥ d) ≤ C · exp(−w·d²)          C = e for every w  (Wei and Dudley 2012: the DKW inequality for two equal samples)

so the alarm is raised at d = sqrt(ln(C / a) / w), where a is the level of one test. All streams of a graph and both lengths
share one level by Bonferroni's rule: **over all streams of a graph together, at most `RATE` false alarms are to be expected per
block of 32 samples** (the mean number of alarms adds up, however the streams depend on each other). Samples of a real stream are
not independent in time; that they are taken far apart, at jittered intervals, is what makes them nearly so.

Short blocks notice a large change soon: one that moves nearly all of the distribution within two short blocks. Long ones notice
a smaller change later.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import field

from hotfuse.base.lazy_dataclass import dataclass

RATE = 1e-3
SHORT, LONG = 32, 128
_C = math.e


def distance(a: list[float], b: list[float]) -> float:
    """The greatest difference between the two samples' distribution functions."""
    a, b = sorted(a), sorted(b)
    worst = 0.0
    for x in {*a, *b}:
        worst = max(worst, abs(bisect_right(a, x) / len(a) - bisect_right(b, x) / len(b)))
    return worst


def threshold(width: int, streams: int, rate: float = RATE) -> float:
    """The distance at which blocks of this width raise an alarm, when so many streams are tested."""
    return math.sqrt(math.log(_C * 2 * max(1, streams) / rate) / width)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A change: how far the block was from the reference, what would still have been chance, after how many samples."""

    distance: float
    threshold: float
    width: int
    n: int


@dataclass(slots=True)
class Stream:
    """One stream of numbers under test."""

    n: int = 0
    """Samples since the last change."""
    references: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    blocks: dict[int, list[float]] = field(default_factory=lambda: {SHORT: [], LONG: []})

    def add(self, x: float, streams: Callable[[], int], rate: float = RATE) -> Alarm | None:
        """One more sample; `streams` says how many are tested together. After an alarm, the new block is the reference."""
        self.n += 1
        for width, block in self.blocks.items():
            block.append(x)
            if len(block) < width:
                continue
            self.blocks[width] = []
            reference = self.references.setdefault(width, block)
            if reference is block:
                continue
            limit = threshold(width, streams(), rate)
            if (found := distance(reference, block)) >= limit:
                alarm = Alarm(found, limit, width, self.n)
                self.n = 0
                self.references = {width: block}
                self.blocks = {SHORT: [], LONG: []}
                return alarm
        return None
