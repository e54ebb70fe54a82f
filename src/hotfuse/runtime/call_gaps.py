"""How far apart calls are: those of a process that slept find cold caches, and Python takes ten times as long there.

What serving takes besides a plan is measured in a loop, where everything is warm (`runtime.path_cost`). Of a ReLU that is called
every 20 ms that is 2 us of some 40, so tier 0 won by 4 us and cost 25. Where calls are rare, each that is looked at is timed from
when it came, and that counts.
"""

from __future__ import annotations

RARE_S = 1e-3
"""Behind such a gap other programs and the kernel have had the core."""
IN_A_ROW = 16
"""Looks that have to agree before calls count as rare, or as frequent again: that opens decisions anew."""


class CallGaps:
    """How often one entry is called, as calls that are looked at show it."""

    def __init__(self) -> None:
        self.rare: bool | None = None
        """None before two calls were looked at."""
        self.changes = 0
        """How often that became otherwise."""
        self._other = 0

    def note(self, seconds: float, calls: int, call_s: float = 0.0) -> None:
        """So many calls came within that time since the last look, each of which took about `call_s`. Calls that follow each other
        are not far apart because they are long.
        """
        now = seconds - (calls - 1) * call_s > max(RARE_S, call_s) * calls
        if self.rare is None:
            self.rare = now
        self._other = self._other + 1 if now is not self.rare else 0
        if self._other >= IN_A_ROW:
            self.rare, self._other = now, 0
            self.changes += 1
