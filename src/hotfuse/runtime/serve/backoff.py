"""Exponential backoff of checks: after several checks in a row that failed none is made for some calls, twice as many each time.

A pause is no longer than the price of a check asks for. Where calls take a hundred times as long as a check, each is asked, and
traffic that returns is seen in its first call: 128 calls of half a second were a minute.
"""

from __future__ import annotations

from math import inf, isfinite

from hotfuse.base.lazy_dataclass import dataclass

MAX_SHARE = 0.005
"""Part of the calls' time that checks which fail may take. Pauses that are as long as that asks for need not be longer."""


def pause(calls: int, check_s: float, call_s: float) -> int:
    """A pause of so many calls, or of as many as pay for a check of so many seconds; all of them where a time is not known."""
    if not (isfinite(check_s) and 0 < call_s < inf):
        return calls
    return int(min(calls, check_s / (MAX_SHARE * call_s)))


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

    def missed(self, check_s: float = inf, call_s: float = inf) -> None:
        """A check failed that took so long, in a call that took so long without it; not known of checks that nobody times."""
        self.in_vain += 1
        if self.in_vain >= self.patience:
            self.left = pause(self.first << self.doubled, check_s, call_s)
            self.doubled = min(self.doubled + 1, self.most_doubled)
            self.in_vain = self.patience - 1  # the next failure is enough

    def held(self) -> None:
        """The bet held: patience begins anew."""
        self.in_vain = self.doubled = 0

    def begin(self) -> None:
        """Forget what calls have shown."""
        self.left = self.in_vain = self.doubled = 0
