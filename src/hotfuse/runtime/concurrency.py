"""How many threads call, how many calls are served at the same time, and whether they ask for more cores than there are."""

from __future__ import annotations

from typing import Any

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.cores import usable_cores
from hotfuse.runtime.epochs import epochs

NEWEST = 0.05
"""The weight of a call that is looked at in the average."""
CALLERS_WINDOW = 128
"""Calls looked at that a level of callers is of."""


def calls_in_flight() -> int:
    """Threads of this process that are inside a call of a served model now, as far as can be seen without a lock."""
    return epochs.in_flight()


@dataclass(slots=True)
class Concurrency:
    """Calls in flight whenever a call of one model was looked at, that one included."""

    mean: float = 0.0
    most: int = 0

    def note(self, in_flight: int) -> None:
        """One more look; threads that look at the same time may lose one."""
        self.mean = self.mean + NEWEST * (in_flight - self.mean) if self.most else float(in_flight)
        self.most = max(self.most, in_flight)

    def demand(self, threads: int) -> float:
        """Cores that calls ask for at the same time, each on so many threads."""
        return self.mean * threads

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `explain()`."""
        threads, cores = torch.get_num_threads(), usable_cores()
        return {"calls_in_flight": round(self.mean, 2), "most": self.most, "threads_each": threads, "cores": cores,
                "oversubscribed": self.demand(threads) > 1.1 * cores}  # fmt: skip


class Callers:
    """How many threads call, as calls that are looked at show it: a plan that won with one caller may lose with eight.

    A level doubles with the number of threads; it changes when two windows in a row agree on another one.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._looks = self._before = 0
        self.level = 0
        """0 before anything is known; 1: one thread, 2: two or three, 3: four to seven."""
        self.changes = 0
        """How often a level took the place of another one."""

    def note(self, thread: int) -> None:
        """A call of that thread was looked at."""
        self._seen.add(thread)
        self._looks += 1
        if self._looks < CALLERS_WINDOW:
            return
        now = len(self._seen).bit_length()
        if now == self._before and now != self.level:
            self.changes += bool(self.level)
            self.level = now
        self._before = now
        self._seen, self._looks = set(), 0
