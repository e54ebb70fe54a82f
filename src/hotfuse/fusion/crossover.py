"""Where no candidate is best for all sizes of a call: which one from where on.

    found = crossovers(variants, "M", [1, 2, 4, ...], {}, predict)          library up to M = 6, one kernel up to 300, two beyond

Predictions give the first intervals. Measurements at their ends move them: `refined` asks for a few sizes around each breakpoint
and bisects.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

import numpy as np

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.fusion.forecast import Predictor
from hotfuse.hpm.work import Candidate, CoreShape
from hotfuse.ir.graph import Graph

MARGIN = 0.03
"""A variant takes over only where it is better by this part: two plans cost memory and a comparison."""
MAX_INTERVALS = 4
"""Intervals of one site; more would crowd its inline cache."""


def nothing(_size: int) -> float:
    """No time at all."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a piece: closed graphs that run one after another, each for a core or by the library."""

    name: str
    pieces: tuple[tuple[Graph, CoreShape | None], ...]
    waste: Callable[[int], float] = nothing
    """Seconds at a size on top of what a predictor says, which knows the work but not every way to do it."""
    threads: int = 0
    """Threads that it runs on; 0 for as many as calls have."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Sizes from `first` to `last`, both included, None for no end; and the variant that is best there."""

    first: int
    last: int | None
    variant: int


@dataclass(frozen=True, slots=True)
class Crossovers:
    """A partition of a symbol's sizes."""

    symbol: str
    intervals: tuple[Interval, ...]
    measured: bool = False

    @property
    def single(self) -> bool:
        """Whether one variant is best everywhere."""
        return len(self.intervals) == 1

    def variant(self, size: int) -> int:
        """The variant for a size."""
        return next(i.variant for i in reversed(self.intervals) if size >= i.first or i is self.intervals[0])


def crossovers(
    variants: Sequence[Variant], symbol: str, sizes: Sequence[int], fixed: Mapping[str, int], predict: Predictor, threads: int = 1,
    env: Callable[[int], Mapping[str, int]] | None = None,
) -> Crossovers:  # fmt: skip
    """The predicted best variant over sizes, which must rise; a breakpoint lies in the middle of two sizes that were predicted.

    `env` says what a size means for the symbols of the pieces, where it is not one of them.
    """
    given = env or (lambda n: {symbol: n})
    envs = [{**fixed, **given(n)} for n in sizes]  # one for all variants: what they compute is counted once
    asks = [Candidate(g, env, core, v.threads or threads) for env in envs for v in variants for g, core in v.pieces]
    seconds = iter(predict(asks).seconds.tolist())
    table = np.array([[sum(next(seconds) for _ in w.pieces) + w.waste(n) for w in variants] for n in sizes])
    return Crossovers(symbol, _intervals(sizes, table))


def _intervals(sizes: Sequence[int], table: np.ndarray) -> tuple[Interval, ...]:
    """Runs of sizes with the same best variant; one that is only a little better does not take over."""
    table = np.where(np.isnan(table), np.inf, table)
    chosen: list[int] = []
    for row in table:
        best = int(row.argmin())
        keeps = chosen and row[chosen[-1]] <= row[best] * (1 + MARGIN)
        chosen.append(chosen[-1] if keeps else best)
    chosen = _few(table, chosen)
    made: list[Interval] = []
    first = 0
    for n in range(1, len(sizes) + 1):
        if n == len(sizes) or chosen[n] != chosen[n - 1]:
            last = None if n == len(sizes) else (sizes[n - 1] + sizes[n]) // 2
            made.append(Interval(first, last, chosen[n - 1]))
            first = 0 if last is None else last + 1
    return tuple(made)


def _few(table: np.ndarray, chosen: list[int]) -> list[int]:
    """At most MAX_INTERVALS runs: the run whose loss is least takes over its neighbour's variant, again and again."""
    while True:
        starts = [n for n in range(len(chosen)) if n == 0 or chosen[n] != chosen[n - 1]]
        if len(starts) <= MAX_INTERVALS:
            return chosen
        ends = [*starts[1:], len(chosen)]
        losses: list[tuple[float, int, int]] = []
        for k, (a, b) in enumerate(zip(starts, ends, strict=True)):
            for other in {chosen[a - 1] if k else chosen[a], chosen[b] if b < len(chosen) else chosen[a]} - {chosen[a]}:
                losses.append((float((table[a:b, other] / table[a:b, chosen[a]]).sum()), k, other))
        _, k, other = min(losses)
        chosen = [*chosen[: starts[k]], *[other] * (ends[k] - starts[k]), *chosen[ends[k] :]]


@dataclass(slots=True)
class Shifts:
    """How far measured breakpoints lay from predicted ones, by the variants that meet: what the next prediction begins with."""

    seen: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict[tuple[str, str], tuple[float, int]])

    def learn(self, variants: tuple[str, str], predicted: int, measured: int) -> None:
        """A breakpoint was measured; its distance counts as a factor."""
        total, count = self.seen.get(variants, (0.0, 0))
        self.seen[variants] = (total + math.log(max(measured, 1) / max(predicted, 1)), count + 1)

    def factor(self, variants: tuple[str, str]) -> float:
        """What to multiply a predicted breakpoint by: shrunk towards 1 while little has been seen."""
        total, count = self.seen.get(variants, (0.0, 0))
        return math.exp(total / (count + 1))

    def corrected(self, found: Crossovers, names: Sequence[str]) -> Crossovers:
        """Predicted breakpoints where such were measured before; they stay in order."""
        made = list(found.intervals)
        for n, (left, right) in enumerate(itertools.pairwise(found.intervals)):
            assert left.last is not None
            edge = round(left.last * self.factor((names[left.variant], names[right.variant])))
            least = made[n].first + (0 if n == 0 else 1)
            edge = max(least, edge if right.last is None else min(edge, right.last - 1))
            made[n], made[n + 1] = replace(made[n], last=edge), replace(made[n + 1], first=edge + 1)
        return replace(found, intervals=tuple(made))


def refined(found: Crossovers, measure: Callable[[int, int], float], most: int = 6, limit: int | None = None) -> Crossovers:
    """Breakpoints moved to where measurements (`measure(variant, size)`, seconds) cross; each has at most so many sizes measured.

    Where no breakpoint follows, one may move out as far as `limit`, by doubling.
    """
    made = list(found.intervals)
    for n in range(len(made) - 1):
        left, right = made[n], made[n + 1]
        edge = left.last if left.last is not None else left.first
        lo, hi = left.first, right.last
        for _ in range(most):
            if hi is not None and hi - lo <= max(1, edge // 16):
                break
            if measure(left.variant, edge) > measure(right.variant, edge):
                hi = edge
            elif limit is not None and edge >= limit:
                break
            else:
                lo = edge
            edge = (lo + hi) // 2 if hi is not None else max(2 * edge, 1)
            edge = edge if limit is None else min(edge, max(limit, left.first))
        made[n] = Interval(left.first, edge, left.variant)
        made[n + 1] = Interval(edge + 1, right.last, right.variant)
    return Crossovers(found.symbol, tuple(made), measured=True)
