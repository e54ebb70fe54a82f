"""The policy: when a plan has earned a better one. Pure functions of counts, so tests need no clock.

| from | to | when |
| --- | --- | --- |
| the model's own code | 0 library kernels | the first call of its kind: capture runs beside |
| 0 | 1 generated, generic in its sizes | calls exceed a threshold that grows with the code, or time enough went by in it |
| 1 | 2 specialized | a size or a branch recurs in so many of many calls that betting on it is likely to pay |
| 2 | 1 | the bet misses too often, or measures slower than it did |
| 1, 2 | 0 | weights changed under it, or it raised an error |
"""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.specialize.table import SIZES, row

NODES_PER_STEP = 256
"""A graph of so many nodes doubles the number of calls it must serve before it is compiled."""
HOT_S = 0.2
"""Seconds spent in a plan after which it is hot, however few the calls."""
MANY_CALLS, LOOKS_PER_S = 4096, 256
"""Calls of a plan after which so many looks a second are enough."""
LOOKS_SHARE = 0.005
"""Part of the calls' time that looks may take, once calls are many."""
MIN_SAMPLES = 24
"""Sampled calls without which nothing is said to recur; and, of a plan with many calls, one look in so many weighs what may pay.
Weighing takes several times as long as all else that a look does, and what it rests on (what was sampled, calls that were kept,
outcomes of races) changes twice a second."""


def threshold(hot_calls: int, nodes: int) -> int:
    """Calls after which a plan of so many nodes is hot."""
    return hot_calls * (1 + nodes // NODES_PER_STEP)


def is_hot(calls: int, seconds: float, hot_calls: int, nodes: int) -> bool:
    """Whether a tier-0 plan is worth compiling."""
    return calls >= threshold(hot_calls, nodes) or (calls >= hot_calls and seconds >= HOT_S)


def interval(calls: int, steady: int, seconds: float = 1.0, look_s: float = 0.0) -> int:
    """How many calls until the next one is looked at: every one at first, 1 in `steady` later.

    Calls that take `seconds`, microseconds say, are looked at no more often than anybody has use for once they are many, and than
    looks that take `look_s` besides may cost.
    """
    if calls >= MANY_CALLS:
        seconds = max(seconds, 1e-7)
        return max(steady, int(1 / (LOOKS_PER_S * seconds)), int(look_s / (LOOKS_SHARE * seconds)))
    return 1 if calls < 8 else min(steady, max(2, calls // 8))


def weighs(calls: int, looks: int) -> bool:
    """Whether this look, the last of so many at a plan of so many calls, weighs what may pay: every one at first."""
    return calls < MANY_CALLS or looks % MIN_SAMPLES == 0


@dataclass(frozen=True, slots=True)
class Assumption:
    """What a specialized plan would assume."""

    kind: str
    """`sizes` or `branch`."""
    value: tuple[int, ...]
    share: float
    samples: int


def recurring(shares: dict[tuple[int, ...], float], samples: int, limit: int) -> list[Assumption]:
    """The sizes worth a plan of their own, the commonest first, at most `limit`."""
    if samples < MIN_SAMPLES:
        return []
    return [Assumption("sizes", s, share, samples) for s, share in shares.items() if share >= row(SIZES).share][:limit]
