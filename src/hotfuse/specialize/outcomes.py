"""Whether specializations paid, by row and context: the prior of the next proposal.

A row begins with the prior of the table. Every race that one of its attempts won or lost moves it, in this process and, through the
profile store, in the next. How often the bet holds is part of the context: what pays at nine calls in ten need not pay at six. So
are the kind of model and what its calls take: a guard of some microseconds is nothing beside a millisecond.

    row                                  all races of the row, from the table's prior on
    row, share                           those at about that share, from there on
    row, share, family, time             those of such a model, from there on
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum

from hotfuse.analysis.attention import attends
from hotfuse.analysis.convolution import is_convolution
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.graph import Graph
from hotfuse.specialize.table import ROWS, row

DOUBT = 4.0
"""Races that the table's prior counts as."""
SHARES = (("seldom", 1 / 3), ("often", 2 / 3), ("mostly", math.inf))
"""Contexts, by the part of the calls that a bet holds in, up to."""
TIMES = (("under 0.1 ms", 100.0), ("under 1 ms", 1e3), ("under 10 ms", 1e4), ("longer", math.inf))
"""Contexts, by the microseconds that a call takes, up to."""
_PARTS = 4


class ModelFamily(StrEnum):
    """What kind of model a graph is of, as far as that tells what bets are like."""

    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    OTHER = "other"


def family_of(graph: Graph) -> ModelFamily:
    """The family of a graph, by the names of its operators."""
    if attends(graph):
        return ModelFamily.ATTENTION
    return ModelFamily.CONVOLUTION if any(is_convolution(n) for n in graph.nodes) else ModelFamily.OTHER


@dataclass(frozen=True, slots=True)
class BetContext:
    """What a race was held in, or a bet is to be made in."""

    share: float
    """The part of the calls that the bet holds in."""
    family: ModelFamily = ModelFamily.OTHER
    us: float | None = None
    """Microseconds of a call in the plan there is; None where nobody measured it."""

    def name(self, of: str) -> str:
        """What races of a row in this context are kept under."""
        time = "not known" if self.us is None else next(s for s, most in TIMES if self.us < most)
        return f"{self.shared(of)}, {self.family.value}, {time}"

    def shared(self, of: str) -> str:
        """What they are kept under begins so, whatever model it is."""
        return f"{of}, {next(s for s, most in SHARES if self.share < most)}"


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
    """By row and context, as `BetContext.name` writes it."""

    def learn(self, name: str, where: BetContext, before: float, after: float, *, won: bool) -> None:
        """An attempt of a row was raced."""
        found = self.rows.setdefault(where.name(name), RaceCount())
        found.raced, found.won = found.raced + 1, found.won + won
        found.gain += math.log(before / after) if before > 0 and after > 0 else 0.0

    def promise(self, name: str, where: BetContext) -> float:
        """How likely an attempt of a row is to win: the table's prior, then races of the row, then those in this context."""
        found = row(name).prior
        for begins in (f"{name}, ", f"{where.shared(name)}, ", where.name(name)):
            races = [r for context, r in self.rows.items() if context.startswith(begins)]
            found = _moved(found, sum(r.raced for r in races), sum(r.won for r in races))
        return found

    def state(self) -> dict[str, list[float]]:
        """Plain numbers, for a store."""
        return {k: [float(r.raced), float(r.won), r.gain] for k, r in self.rows.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """The reverse of `state`; raises ValueError for what no process wrote. Rows that the table has no more are left out, and
        contexts of programs that told them otherwise.
        """
        known = {f"{r.name}, {s}" for r in ROWS for s, _ in SHARES}
        found: dict[str, RaceCount] = {}
        for name, (raced, won, gain) in state.items():
            if not (0 <= won <= raced and math.isfinite(gain)):
                raise ValueError(f"{won} of {raced} races of {name!r} were won")
            parts = name.split(", ")
            if ", ".join(parts[:2]) in known and len(parts) == _PARTS:
                found[name] = RaceCount(int(raced), int(won), float(gain))
        self.rows = found


def _moved(prior: float, raced: int, won: int) -> float:
    return (DOUBT * prior + won) / (DOUBT + raced)
