"""Counters that many threads bump without a lock: one set per thread, added up when asked."""

from __future__ import annotations

import threading


class Counts:
    """One thread's counters."""

    __slots__ = ("calls", "deopts", "guard_misses", "looked_at", "module_calls", "tier0_calls", "tier1_calls", "tier2_calls")

    def __init__(self) -> None:
        self.calls = self.module_calls = self.tier0_calls = self.tier1_calls = self.tier2_calls = 0
        self.guard_misses = self.deopts = self.looked_at = 0


class Tally(threading.local):
    """`tally.mine` is the calling thread's counters; `total` adds up everybody's."""

    def __init__(self, everyone: list[Counts]) -> None:
        self.mine = Counts()
        everyone.append(self.mine)


def total(everyone: list[Counts]) -> dict[str, int]:
    """The sum over all threads that ever called."""
    found = {name: sum(getattr(c, name) for c in list(everyone)) for name in Counts.__slots__}
    return {**found, "graph_calls": found["tier0_calls"] + found["tier1_calls"] + found["tier2_calls"]}
