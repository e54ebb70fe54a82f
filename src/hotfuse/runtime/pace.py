"""Watching that a deployed plan stays as fast as it was.

Sampled times of calls of one signature are compared with those of its first samples. A cumulative sum weighs "slow in nine of
ten samples" against "slow in half of them"; by Lorden's bound its false alarms are RUN samples apart on average even where half
of all samples are slow, and a plan that really slowed down is noticed after some fifteen. An alarm withdraws nothing by itself: the
plan is raced again, because the whole machine may have slowed down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from statistics import median

FIRST = 8
"""Samples that make the reference."""
SLOWER = 1.2
"""What counts as slower: beyond this multiple of the reference."""
RUN = 10_000
"""Samples between two false alarms, at least, on average."""
_UP, _DOWN = log(0.9 / 0.5), log(0.1 / 0.5)
MOST = 32
"""Signatures watched."""


@dataclass(slots=True)
class _Watched:
    first: list[float] = field(default_factory=list[float])
    reference: float = 0.0
    evidence: float = 0.0
    seen: int = 0


class Pace:
    """The times of one plan."""

    def __init__(self) -> None:
        self._by: dict[tuple[int, ...], _Watched] = {}

    def note(self, signature: tuple[int, ...], seconds: float) -> tuple[float, float] | None:
        """Add a time; the reference and this time in microseconds if the plan has become slower."""
        w = self._by.get(signature)
        if w is None:
            if len(self._by) >= MOST:
                return None
            w = self._by[signature] = _Watched()
        if len(w.first) < FIRST:
            w.first.append(seconds)
            w.reference = median(w.first)
            return None
        w.seen += 1
        w.evidence = max(0.0, w.evidence + (_UP if seconds > SLOWER * w.reference else _DOWN))
        return (w.reference * 1e6, seconds * 1e6) if w.evidence >= log(RUN) else None

    def typical_us(self) -> float | None:
        """The reference of the signature seen most, in microseconds."""
        if not self._by:
            return None
        return max(self._by.values(), key=lambda w: w.seen + len(w.first)).reference * 1e6

    def forget(self) -> None:
        """Begin anew: what was slow is the pace now."""
        self._by.clear()
