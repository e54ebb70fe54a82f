"""Counters that many threads bump without a lock: one set per thread, added up when asked."""

from __future__ import annotations

import threading


class Counts:
    """One thread's counters."""

    __slots__ = ("calls", "deopts", "graph_calls", "guard_misses", "module_calls", "native_calls")

    def __init__(self) -> None:
        self.calls = self.graph_calls = self.module_calls = self.guard_misses = self.deopts = self.native_calls = 0


class Tally(threading.local):
    """`tally.mine` is the calling thread's counters; `total` adds up everybody's."""

    def __init__(self, everyone: list[Counts]) -> None:
        self.mine = Counts()
        everyone.append(self.mine)


def total(everyone: list[Counts]) -> dict[str, int]:
    """The sum over all threads that ever called."""
    return {name: sum(getattr(c, name) for c in list(everyone)) for name in Counts.__slots__}
