"""Where no candidate is best for all sizes of a call: which one from where on, and that decision as predicates over sizes.

    found = crossovers(ways, "M", [1, 2, 4, ...], {}, predict)          library up to M = 6, one kernel up to 300, two beyond
    found.facts("t0.0")                                                 (M <= 6), (7 <= M, M <= 300), (301 <= M)

Predictions give the first intervals. Measurements at their ends move them: `refined` asks for a few sizes around each border and
bisects. Plans guarded by the predicates share one native decision (`analysis.decision`), so a call pays a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotfuse.analysis.call_facts import Holds
from hotfuse.fusion.forecast import Predictor
from hotfuse.hpm.work import Candidate, Core
from hotfuse.ir.dims import Dim, Sym, expr, sym
from hotfuse.ir.graph import Graph

MARGIN = 0.03
"""A way takes over only where it is better by this part: two plans cost memory and a comparison."""
MAX_WAYS = 4
"""Intervals of one site; more would crowd its inline cache."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a piece: closed graphs that run one after another, each for a core or by the library."""

    name: str
    pieces: tuple[tuple[Graph, Core | None], ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """Sizes from `first` to `last`, both included, None for no end; and the way that is best there."""

    first: int
    last: int | None
    way: int


@dataclass(frozen=True, slots=True)
class Crossovers:
    """A partition of a symbol's sizes."""

    symbol: str
    intervals: tuple[Interval, ...]
    measured: bool = False

    @property
    def single(self) -> bool:
        """Whether one way is best everywhere."""
        return len(self.intervals) == 1

    def way(self, size: int) -> int:
        """The way for a size."""
        return next(i.way for i in reversed(self.intervals) if size >= i.first or i is self.intervals[0])

    def facts(self, place: str | None = None) -> list[tuple[int, tuple[Holds, ...]]]:
        """Per interval its way and what a call has to fulfil; `place` is the symbol's name among facts of calls (`t0.1`)."""
        return [(i.way, tuple(Holds(p) for p in _within(sym(place or self.symbol), i))) for i in self.intervals]


def _within(size: Dim, i: Interval) -> list[Sym]:
    found = [expr("<=", i.first, size)] if i.first > 0 else []
    found += [expr("<=", size, i.last)] if i.last is not None else []
    return [p for p in found if isinstance(p, Sym)]


def guarded(graph: Graph, found: Crossovers) -> list[tuple[int, Graph]]:
    """The graph once for each interval, with the interval among its guards: plans of these graphs share one native decision."""
    made: list[tuple[int, Graph]] = []
    for i in found.intervals:
        guards = dict.fromkeys((*graph.guards, *_within(sym(found.symbol), i)))
        made.append((i.way, replace(graph, guards=tuple(guards))))
    return made


def crossovers(
    ways: Sequence[Way], symbol: str, sizes: Sequence[int], fixed: Mapping[str, int], predict: Predictor, threads: int = 1
) -> Crossovers:
    """The predicted best way over sizes, which must rise; a border lies in the middle of two sizes that were looked at."""
    asks = [Candidate(g, {**fixed, symbol: n}, core, threads) for n in sizes for w in ways for g, core in w.pieces]
    seconds = iter(predict(asks).seconds.tolist())
    table = np.array([[sum(next(seconds) for _ in w.pieces) for w in ways] for _ in sizes])
    return Crossovers(symbol, _intervals(sizes, table))


def _intervals(sizes: Sequence[int], table: np.ndarray) -> tuple[Interval, ...]:
    """Runs of sizes with the same best way; a way that is only a little better does not take over."""
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
    """At most MAX_WAYS runs: the run whose loss is least takes over its neighbour's way, again and again."""
    while True:
        starts = [n for n in range(len(chosen)) if n == 0 or chosen[n] != chosen[n - 1]]
        if len(starts) <= MAX_WAYS:
            return chosen
        ends = [*starts[1:], len(chosen)]
        losses: list[tuple[float, int, int]] = []
        for k, (a, b) in enumerate(zip(starts, ends, strict=True)):
            for other in {chosen[a - 1] if k else chosen[a], chosen[b] if b < len(chosen) else chosen[a]} - {chosen[a]}:
                losses.append((float((table[a:b, other] / table[a:b, chosen[a]]).sum()), k, other))
        _, k, other = min(losses)
        chosen = [*chosen[: starts[k]], *[other] * (ends[k] - starts[k]), *chosen[ends[k] :]]


def refined(found: Crossovers, measure: Callable[[int, int], float], most: int = 6) -> Crossovers:
    """Borders moved to where measurements (`measure(way, size)`, seconds) cross; at most so many sizes are measured for each."""
    made = list(found.intervals)
    for n in range(len(made) - 1):
        left, right = made[n], made[n + 1]
        border = left.last if left.last is not None else left.first
        lo = left.first
        hi = right.last if right.last is not None else max(4 * border, border + 2)
        for _ in range(most):
            if hi - lo <= max(1, border // 16):
                break
            if measure(left.way, border) <= measure(right.way, border):
                lo = border
            else:
                hi = border
            border = (lo + hi) // 2
        made[n] = Interval(left.first, border, left.way)
        made[n + 1] = Interval(border + 1, right.last, right.way)
    return Crossovers(found.symbol, tuple(made), True)
