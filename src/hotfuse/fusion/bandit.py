"""Which candidates to measure: Thompson sampling over kinds of predictions, under a budget of seconds.

An arm is a kind of candidate in a family of kernels. What it remembers is how much of a predicted gain came true: 1 where
measurements agreed, below 0 where the candidate made things worse. Drawing from that memory instead of taking its mean gives
arms that few measurements speak of their turn; what a candidate may cost is taken from one budget that all of them share.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Generic, TypeVar

from hotfuse.base.lazy_dataclass import dataclass

PRIOR = 1.0
"""What an arm that was never measured is thought to keep of a predicted gain."""
STRENGTH = 4.0
"""Measurements that the prior counts as."""
SPREAD = 0.5
"""How far single outcomes lie from their arm's mean, before there are any."""
MIN_OUTCOME, MAX_OUTCOME = -1.0, 2.0
"""Outcomes beyond these say no more than these."""
NEW = 3
"""Arms with fewer outcomes than this are new."""
SHARE_FOR_NEW = 0.1
"""The part of a budget that only new arms may use."""

T = TypeVar("T")


@dataclass(slots=True)
class Arm:
    """Outcomes of one kind of prediction."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        """The expected part of a prediction that comes true."""
        return (STRENGTH * PRIOR + self.total) / (STRENGTH + self.count)

    @property
    def spread(self) -> float:
        """The standard deviation of that mean."""
        seen = self.squares - self.total**2 / self.count if self.count > 1 else 0.0
        one = math.sqrt((STRENGTH * SPREAD**2 + max(0.0, seen)) / (STRENGTH + self.count))
        return one / math.sqrt(STRENGTH + self.count)

    def learn(self, kept: float) -> None:
        """Another outcome: measured gain over predicted gain."""
        kept = min(MAX_OUTCOME, max(MIN_OUTCOME, kept))
        self.count, self.total, self.squares = self.count + 1, self.total + kept, self.squares + kept**2


@dataclass(slots=True)
class Budget:
    """Seconds that may be spent on measuring, and what was spent."""

    seconds: float
    spent: float = 0.0

    @property
    def left(self) -> float:
        """What may still be spent."""
        return max(0.0, self.seconds - self.spent)

    def spend(self, seconds: float) -> None:
        """So much was used."""
        self.spent += seconds


@dataclass(frozen=True, slots=True)
class Option(Generic[T]):
    """Something that could be measured."""

    what: T
    arm: str
    value: float
    """What it is worth if the prediction holds."""
    cost_s: float
    """What building and measuring it takes."""


@dataclass(slots=True)
class Bandit:
    """All arms, and the choice among options."""

    arms: dict[str, Arm] = field(default_factory=dict[str, Arm])
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def trust(self, arm: str) -> float:
        """The part of this kind's predicted gains that came true so far, between 0 and 1."""
        found = self.arms.get(arm)
        return 1.0 if found is None else min(1.0, max(0.0, found.mean))

    def choose(self, options: Sequence[Option[T]], budget: Budget) -> list[Option[T]]:
        """What to measure, in this order; what it costs together is within the budget, whose account the caller keeps."""
        drawn = [(self._draw(o.arm) * o.value / max(o.cost_s, 1e-6), n) for n, o in enumerate(options)]
        ranked = [n for worth, n in sorted(drawn, key=lambda d: (-d[0], d[1])) if worth > 0]
        left = budget.left
        fresh = {n for n in ranked if self._is_new(options[n].arm)}
        kept_back = SHARE_FOR_NEW * left
        if not any(options[n].cost_s <= kept_back for n in fresh):
            kept_back = 0.0  # nobody could use it
        picked: list[int] = []
        for n in ranked:
            cost = options[n].cost_s
            if cost <= left - (0.0 if n in fresh else kept_back):
                picked.append(n)
                left -= cost
                kept_back = max(0.0, kept_back - cost) if n in fresh else kept_back
        return [options[n] for n in picked]

    def learn(self, arm: str, predicted: float, measured: float) -> None:
        """A candidate that was predicted to gain so much gained so much; predictions of nothing teach nothing."""
        if predicted > 0 and math.isfinite(measured):
            self.arms.setdefault(arm, Arm()).learn(measured / predicted)

    def state(self) -> dict[str, list[float]]:
        """Plain numbers per arm, for a store."""
        return {name: [float(a.count), a.total, a.squares] for name, a in self.arms.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """The reverse of `state`; raises ValueError for numbers that no arm can have."""
        found: dict[str, Arm] = {}
        for name, (count, total, squares) in state.items():
            if count < 0 or not all(map(math.isfinite, (count, total, squares))):
                raise ValueError(f"arm {name!r} has {count} outcomes of {total}")
            found[name] = Arm(int(count), float(total), float(squares))
        self.arms = found

    def _is_new(self, arm: str) -> bool:
        return arm not in self.arms or self.arms[arm].count < NEW

    def _draw(self, arm: str) -> float:
        found = self.arms.get(arm) or Arm()
        return self.rng.gauss(found.mean, found.spread)
