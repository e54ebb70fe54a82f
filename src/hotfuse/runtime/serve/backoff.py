"""Exponential backoff of checks: after several checks in a row that failed none is made for some calls, twice as many each time."""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass


@dataclass(slots=True)
class Backoff:
    """The backoff of one plan that asks each call whether its bet holds. Takes no lock: a lost update moves one check."""

    patience: int = 8
    """Failed checks in a row that begin a pause."""
    first: int = 8
    """Calls of the first pause."""
    most_doubled: int = 4
    left: int = 0
    """Calls of this pause that are still to come: the caller counts them down."""
    in_vain: int = 0
    doubled: int = 0

    def missed(self) -> None:
        """A check failed."""
        self.in_vain += 1
        if self.in_vain >= self.patience:
            self.left = self.first << self.doubled
            self.doubled = min(self.doubled + 1, self.most_doubled)
            self.in_vain = self.patience - 1  # the next failure is enough

    def held(self) -> None:
        """The bet held: patience begins anew."""
        self.in_vain = self.doubled = 0

    def begin(self) -> None:
        """Forget what calls have shown."""
        self.left = self.in_vain = self.doubled = 0
