"""The resource scheduler: how much of the machine background work may take while calls are served.

Workers run at the lowest priority, which already gives inference the cores it asks for. What priority does not give is a bound:
on a machine that calls use wholly, workers would still take cache and memory bandwidth. So their CPU time comes out of a
bucket that fills with what inference leaves idle plus a small share of the whole; while it is empty, workers are stopped where
they are and no new request begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BURST_S = 0.5
"""CPU seconds per core that may be saved up."""
RESUME_S = 0.02
"""CPU seconds per core that must be in the bucket before workers go on."""

Load = Callable[[], float]
"""The part of all cores' time, 0 to 1, that work of ordinary priority took since it was last asked."""


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """How many worker processes a machine gets unless the settings say otherwise: half its cores."""
    return max(1, usable_cores() // 2)


@dataclass(frozen=True, slots=True)
class _Times:
    busy: float
    total: float
    own: float
    at: float


class Meter:
    """The load, from the system's own accounts and this process's: the larger of the two counts."""

    def __init__(self, stat: Path = Path("/proc/stat"), clock: Callable[[], float] = time.monotonic) -> None:
        self._stat = stat
        self._clock = clock
        self._cores = usable_cores()
        self._last = self._read()

    def __call__(self) -> float:
        """The load since the last call."""
        was, now = self._last, self._read()
        passed, total = now.at - was.at, now.total - was.total
        self._last = now
        machine = (now.busy - was.busy) / total if total > 0 else 0.0
        own = (now.own - was.own) / (passed * self._cores) if passed > 0 else 0.0
        return min(1.0, max(machine, own, 0.0))

    def _read(self) -> _Times:
        """Niced time, which is the workers', is not busy; time stolen by the host is."""
        own, at = time.process_time(), self._clock()
        try:
            with self._stat.open() as f:
                fields = [int(x) for x in f.readline().split()[1:9]]
        except (OSError, ValueError):
            return _Times(0.0, 0.0, own, at)
        fields += [0] * (8 - len(fields))
        user, nice, system, idle, wait, irq, soft, steal = fields
        busy = user + system + irq + soft + steal
        return _Times(busy, busy + nice + idle + wait, own, at)


class Governor:
    """The bucket: filled by time and idleness, emptied by what workers use."""

    def __init__(self, share: float, cores: int | None = None) -> None:
        self.share = share
        """The part of all cores that workers may take however busy the machine is."""
        self.cores = cores or usable_cores()
        self._held = BURST_S * self.cores
        self.paused = False
        self.pauses = 0

    def step(self, passed: float, used: float, load: float) -> bool:
        """Account for some seconds in which workers used so much CPU time; whether they must stand still now."""
        income = self.cores * (max(0.0, 1.0 - load) + self.share) * passed
        self._held = min(BURST_S * self.cores, self._held + income) - used
        if self.paused:
            self.paused = self._held < RESUME_S * self.cores
        elif self._held < 0:
            self.paused = True
            self.pauses += 1
        return self.paused
