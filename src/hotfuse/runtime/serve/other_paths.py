"""Calls that take another way through a model's code than its graph has: what they cost, and when not to try.

A call that takes a way which nobody traced computes the graph in vain, and the model's own code answers it (decision 160). Whether
that pays is counted: `n` calls of which `missed` did so are served in `n * plan + missed * own` seconds, against `n * own` without
a graph. Where that is more, the model's own code answers for a while, twice as long each time.
"""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.frontends.paths.reads import Path

WINDOW = 32
"""Calls that are weighed together."""
MAX_DOUBLED = 6
FIRST_MISSES, MIN_PART = 3, 1 / 16
"""Misses, and which part of the calls, from which on a further way is worth a capture."""


@dataclass(slots=True)
class PathBalance:
    """Of one entry. Takes no lock: a lost update moves one rest."""

    ways: int = 1
    """That the graph has."""
    paths: tuple[Path, ...] = ()
    """Them, where they were recorded in this process."""
    missed: int = 0
    """Calls that took another one, in all."""
    rested: int = 0
    """Calls that the model's own code answered because that is better."""
    begin: int = 0
    """The call that the window begins with."""
    in_window: int = 0
    own_s: float = 0.0
    """What the model's own code took for those, in all."""
    doubled: int = 0

    def miss(self, calls: int, own_s: float, plan_s: float) -> int:
        """A call took another way, and the model's own code `own_s`; a call in the plan takes `plan_s`. How many calls the model's
        own code is to answer from here on."""
        self.missed += 1
        self.in_window += 1
        self.own_s += own_s
        count = calls - self.begin
        if count < WINDOW and self.in_window < WINDOW // 2:
            return 0
        each = self.own_s / self.in_window
        pays = count * plan_s + self.in_window * each < count * each
        self.begin, self.in_window, self.own_s = calls, 0, 0.0
        if pays:
            self.doubled = 0
            return 0
        rest = WINDOW << self.doubled
        self.doubled = min(self.doubled + 1, MAX_DOUBLED)
        self.rested += rest
        return rest

    def wants_another(self, calls: int) -> bool:
        """Whether another way should be captured: at the third miss, the sixth, ... where they are not rare."""
        several = self.missed >= FIRST_MISSES and (self.missed // FIRST_MISSES).bit_count() == 1 and not self.missed % FIRST_MISSES
        return several and self.missed >= MIN_PART * calls

    def text(self, calls: int) -> str:
        """What became of it, for `explain()`; empty where every call took a way that the graph has."""
        if not self.missed:
            return ""
        rested = f", {self.rested} more were not tried, since that would have cost more than it saved" if self.rested else ""
        return (f"{self.missed} of {calls} calls took another way through code that reads their data than the {self.ways} that the "
                f"graph has, and the model's own code answered them{rested}")  # fmt: skip
