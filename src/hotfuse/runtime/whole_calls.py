"""Blocks of whole calls: they test whether a plan that won its race is faster than the model's own code in use, too.

A race times single calls, each between two looks. A look evicts data from the caches, and Python takes half as long again behind
it. The overhead of serving is measured in a loop in which everything is warm (`runtime.path_cost`). For a small model with much
around it (state, objects) both effects exceed the difference between the sides: a module that counts its calls won by 1.3 in its
race and ran 0.5 to 0.8 times as fast as eager in use.

Where an audit (`tierup.audit`) does not show that a plan is far ahead, blocks of calls in the plan and in the own code take turns.
No look happens within a block, so the time between the looks around it is all that its calls take. The caller's own work between
calls is the same on both sides; where it dominates, nothing is decided and the plan stays.

    look  16 calls in the plan  look  16 calls in the own code  look  16 calls in the plan  …
"""

from __future__ import annotations

import weakref
from statistics import median

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.runtime.tierup.race import growth

WHOLE_BELOW_S = 2e-4
"""Plans that take longer are compared well enough one by one."""
BLOCK = 16
"""Calls of a block."""
FIRST_ROUNDS, IN_DOUBT = 4, 1 / 3
"""Of a plan's audit before it is compared so, and the part of the own code's time from which on it is not far ahead."""
MAX_ROUNDS, MAX_BROKEN = 24, 48
"""Rounds without a result behind which the plan stays, and blocks that something came between."""
WITHDRAWN_AT, KEPT_AT = 100.0, 20.0
"""How much a stake on one side must have grown (`tierup.race.growth`): a plan that loses eight rounds of eight goes."""
WORTH_S = 1e-6
"""What a call must take longer for its plan to go."""


@dataclass(frozen=True, slots=True)
class SlowerInUse:
    """A plan lost: seconds of a whole call, with what its caller does, and the rounds."""

    plan_s: float
    own_s: float
    rounds: int


@dataclass(frozen=True, slots=True)
class _Begun:
    """A block under way."""

    own: bool
    thread: int
    at: float
    number: int
    """Of the entry's call before it."""
    answered: int
    """Calls that the own code had answered on that thread."""


class WholeCalls:
    """One deployed plan beside the own code."""

    def __init__(self, plan: object, *, ended: bool) -> None:
        self._plan = weakref.ref(plan)
        self._begun: _Begun | None = None
        self._plan_s = 0.0
        """A call of the last block in the plan; 0 while the next block is one."""
        self._rounds: list[tuple[float, float]] = []
        self._broken = 0
        self.ended = ended

    def is_of(self, plan: object) -> bool:
        """Whether this plan is the one that is compared."""
        return self._plan() is plan

    @property
    def under_way(self) -> bool:
        """Whether a block has begun."""
        return self._begun is not None

    @property
    def by_own_code(self) -> bool:
        """Whether the next block, or the one under way, is the own code's."""
        return self._plan_s > 0

    def begins(self, number: int, thread: int, answered: int, now: float) -> None:
        """A look ends, and a block begins."""
        self._begun = _Begun(self.by_own_code, thread, now, number, answered)

    def arrived(self, number: int, thread: int, answered: int, now: float) -> SlowerInUse | None:
        """A look begins: the block ends with it, if nothing else came between; the result where the plan has lost."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        by_own = BLOCK if begun.own else 0
        if (number - begun.number - 1, answered - begun.answered, thread) != (BLOCK - by_own, by_own, begun.thread):
            self._broken += 1
            self.ended = self._broken >= MAX_BROKEN
            return None
        seconds = (now - begun.at) / BLOCK
        if not begun.own:
            self._plan_s = seconds
            return None
        plan_s, self._plan_s = self._plan_s, 0.0
        self._rounds.append((plan_s, seconds))
        return self._judged()

    def _judged(self) -> SlowerInUse | None:
        rounds = len(self._rounds)
        lost = sum(plan_s > own_s for plan_s, own_s in self._rounds)
        plan_s, own_s = (median(r[side] for r in self._rounds) for side in (0, 1))
        self.ended = rounds >= MAX_ROUNDS or growth(rounds - lost, rounds) >= KEPT_AT
        if growth(lost, rounds) < WITHDRAWN_AT or plan_s - own_s < WORTH_S:
            return None
        self.ended = True
        return SlowerInUse(plan_s, own_s, rounds)
