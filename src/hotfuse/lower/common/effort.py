"""How much work one lowering may take: every element that is followed one step back counts.

A group costs about as many steps as it has nodes, times the arrangements of its loops that are tried. What follows the same
elements to ever more places (windows of windows, pieces of pieces) costs more than any kernel is worth, so lowering ends with a
reason. Steps are counted rather than seconds: the same group is refused on every machine, however busy.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.lower.common.errors import CannotLower

MAX_STEPS = 40_000
"""Steps of one lowering: a second or two of Python."""
REQUEST_STEPS = 2_000_000
"""Steps of all that one request lowers."""


@dataclass(slots=True)
class Effort:
    """Steps that a lowering may take and has taken, or a request that lowers many groups."""

    most: int = MAX_STEPS
    outer: Effort | None = None
    spent: int = 0

    def spend(self) -> None:
        """One more step; raises CannotLower where none is left, then and ever after."""
        self.spent += 1
        if self.outer is not None:
            if self.outer.spent >= self.outer.most:
                raise OutOfSteps(f"the request has taken the {self.outer.most} steps that it may")
            self.outer.spend()
        if self.spent > self.most:
            raise CannotLower("following its elements to where they come from takes too many steps")


class OutOfSteps(CannotLower):
    """No fault of the group: what was lowered before it took all that the request may take."""


_in_hand: ContextVar[Effort | None] = ContextVar("effort", default=None)


def effort() -> Effort:
    """That of the lowering in hand; one of its own for what is asked outside of any."""
    return _in_hand.get() or Effort()


@contextmanager
def limited(steps: int = MAX_STEPS) -> Generator[Effort]:
    """While one group is lowered, or one request answered: what is inside counts for what is around it too."""
    own = Effort(steps, _in_hand.get())
    before = _in_hand.set(own)
    try:
        yield own
    finally:
        _in_hand.reset(before)
