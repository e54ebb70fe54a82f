"""Whether specializations paid, by row and by how much of the calls they were for: the prior of the next proposal.

A row begins with the prior of the table. Every race that one of its attempts won or lost moves it, in this process and, through the
profile store, in the next. How often the bet holds is part of the context: what pays at nine calls in ten need not pay at six.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.specialize.table import ROWS, row

DOUBT = 4.0
"""Races that the table's prior counts as."""
SHARES = (("seldom", 1 / 3), ("often", 2 / 3), ("mostly", math.inf))
"""Contexts, by the part of the calls that a bet holds in, up to."""


@dataclass(slots=True)
class RaceCount:
    """Races of one row in one context."""

    raced: int = 0
    won: int = 0
    gain: float = 0.0
    """Sum of log(before / after)."""


@dataclass(slots=True)
class SpecializationOutcomes:
    """What came of specializations."""

    rows: dict[str, RaceCount] = field(default_factory=dict[str, RaceCount])
    """By row and context, as `context` writes it."""

    def learn(self, name: str, share: float, before: float, after: float, *, won: bool) -> None:
        """An attempt of a row was raced."""
        found = self.rows.setdefault(context(name, share), RaceCount())
        found.raced, found.won = found.raced + 1, found.won + won
        found.gain += math.log(before / after) if before > 0 and after > 0 else 0.0

    def promise(self, name: str, share: float) -> float:
        """How likely an attempt of a row is to win: the table's prior, then races of the row, then those in this context."""
        every = [self.rows[c] for s, _ in SHARES if (c := f"{name}, {s}") in self.rows]
        whole = _moved(row(name).prior, sum(r.raced for r in every), sum(r.won for r in every))
        here = self.rows.get(context(name, share), RaceCount())
        return _moved(whole, here.raced, here.won)

    def state(self) -> dict[str, list[float]]:
        """Plain numbers, for a store."""
        return {k: [float(r.raced), float(r.won), r.gain] for k, r in self.rows.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """The reverse of `state`; raises ValueError for what no process wrote. Rows that the table has no more are left out."""
        known = {f"{r.name}, {s}" for r in ROWS for s, _ in SHARES}
        found: dict[str, RaceCount] = {}
        for name, (raced, won, gain) in state.items():
            if not (0 <= won <= raced and math.isfinite(gain)):
                raise ValueError(f"{won} of {raced} races of {name!r} were won")
            if name in known:
                found[name] = RaceCount(int(raced), int(won), float(gain))
        self.rows = found


def context(name: str, share: float) -> str:
    """A row and how often its bet holds, as one name."""
    return f"{name}, {next(s for s, most in SHARES if share < most)}"


def _moved(prior: float, raced: int, won: int) -> float:
    return (DOUBT * prior + won) / (DOUBT + raced)
