"""What `benchmarks.adapt` makes of the calls it measured: speed over time, when it was steady, how bad the worst call was."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WINDOW_S = 1.0
STEADY_SHARE = 0.95
"""Steady is within 5%."""
LASTING = 5
"""Seconds over which it must be so."""
FIRST_S = 30.0
Calls = Sequence[Sequence[float]]
"""[begin, length, seconds] each."""


class Curve:
    """What eager takes by length: the median of its own calls of about that length, in the same traffic."""

    def __init__(self, calls: Calls, fewest: int = 9) -> None:
        self._calls = sorted((int(n), taken) for _, n, taken in calls)
        self._fewest = fewest
        self._known: dict[int, float] = {}

    def __call__(self, length: int) -> float:
        """Seconds. Lengths near by stand in where there are few of this one, scaled by the line through the whole."""
        if length not in self._known:
            near = sorted(self._calls, key=lambda c: abs(c[0] - length))
            cut = abs(near[min(self._fewest, len(near)) - 1][0] - length)
            scaled = (t * self._line(length) / self._line(n) for n, t in near if abs(n - length) <= cut)
            self._known[length] = statistics.median(scaled)
        return self._known[length]

    def _line(self, length: int) -> float:
        """A straight line through the medians of the shorter and the longer half."""
        half = len(self._calls) // 2
        halves = self._calls[:half], self._calls[half:]
        (a, ta), (b, tb) = ((statistics.median(c[i] for c in part) for i in (0, 1)) for part in halves)
        slope = max(0.0, (tb - ta) / (b - a)) if b > a else 0.0
        return max(ta + slope * (length - a), ta / 4)


def speeds(calls: Calls, curve: Curve, seconds: float) -> list[float]:
    """Per second of the run: eager's time for the calls served in it over the time they took; 0 where none were."""
    count = math.ceil(seconds / WINDOW_S)
    work, spent = [0.0] * count, [0.0] * count
    for begin, length, taken in calls:
        first, last = int(begin / WINDOW_S), min(int((begin + taken) / WINDOW_S), count - 1)
        for w in range(first, last + 1):  # a call that spans windows did part of its work in each
            part = max(0.0, min(begin + taken, (w + 1) * WINDOW_S) - max(begin, w * WINDOW_S))
            work[w] += curve(int(length)) * part / taken
            spent[w] += part
    return [w / s if s else 0.0 for w, s in zip(work, spent, strict=True)]


def settled(found: Sequence[float]) -> tuple[float, float]:
    """(seconds until steady, steady speed): steady is the median of the last third. Whoever is within 5% of it in a second, and in
    the median of the five from that one on, has got there.
    """
    steady = statistics.median(found[-max(3, len(found) // 3) :])
    for i, s in enumerate(found):
        if min(s, statistics.median(found[i : i + LASTING])) >= STEADY_SHARE * steady:
            return i * WINDOW_S, steady
    return len(found) * WINDOW_S, steady


@dataclass(frozen=True, slots=True)
class Row:
    """One contender."""

    calls: int
    calls_first_30s: int
    time_to_steady_s: float
    steady: float
    """Speed before the shift; eager is 1."""
    recovery_s: float
    after: float
    """Speed after the shift."""
    lowest_after: float
    """The slowest second after the shift."""
    worst_call: float
    """The worst call, as a multiple of eager's median for its length."""
    worst_after_first: float
    """The same, the first call left out."""


def row(calls: Calls, curve: Curve, seconds: float, shift: float) -> tuple[Row, list[float]]:
    """What a contender's calls say. One that is not steady when the traffic shifts is judged over the whole run."""
    found, cut = speeds(calls, curve, seconds), int(shift / WINDOW_S)
    to_steady, steady = settled(found[:cut])
    if to_steady > 2 / 3 * shift or steady < statistics.median(found[cut:]) / 2:
        to_steady, steady = settled(found)
    recovery, after = settled(found[cut:])
    ratios = [t / curve(int(n)) for _, n, t in calls]
    return Row(
        len(calls), sum(b + t <= FIRST_S for b, _, t in calls), to_steady, steady, recovery, after,
        min(found[cut:-1], default=math.nan), max(ratios), max(ratios[1:], default=math.nan),
    ), found  # fmt: skip


def table(rows: Mapping[str, Row]) -> list[str]:
    """All contenders."""
    columns = ("calls", "calls_first_30s", "time_to_steady_s", "steady", "recovery_s", "after", "lowest_after", "worst_call",
               "worst_after_first")  # fmt: skip
    out = [f"| contender | {' | '.join(c.replace('_', ' ') for c in columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for name, r in rows.items():
        values = asdict(r)
        out.append(
            f"| {name} | "
            + " | ".join(f"{v:.2f}" if isinstance(v := values[c], float) else str(v) for c in columns)
            + " |"
        )
    return out


def plot(path: Path, found: Mapping[str, Sequence[float]], shift: float) -> None:
    """Speed over time, one line a contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for name, values in found.items():
        axes.plot(
            [i * WINDOW_S for i in range(len(values))], values, label=name, linewidth=2.2 if name == "hotfuse" else 1.2
        )
    axes.axvline(shift, color="grey", linestyle=":", label="lengths change")
    axes.set(xlabel="seconds since the first call", ylabel="speed (eager's median = 1)", ylim=(0, None),
             title="BERT-base, one request after another, random lengths")  # fmt: skip
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path)
