"""Whether background work is short of processor time. If that alone delays a model's plans, its `explain()` says who has the
cores.

    used       cores that workers had, of late
    unused     the part of the machine that nobody used
    calls      the part that this process's calls used
    others     the part that other programs used

It is short while requests have waited or run for some seconds, workers had less than half of a core, and no core was idle.
"""

from __future__ import annotations

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.workers.scheduler import NO_IDLE

AFTER_S = 10.0
"""Seconds of work in hand before anything is said of it: first plans come sooner on machines that have a core for them."""
WINDOW_S = 5.0
"""Seconds over which shares are averaged."""
MIN_CORES = 0.5
"""A worker that has as much is not short of time."""
SHORT = "compiling waits for processor time: all cores are in use"
"""The reason, without figures: it is told once however they change."""


@dataclass(slots=True)
class Shortage:
    """Running averages of one stretch of work."""

    cores: int
    seconds: float = 0.0
    """That work has been in hand."""
    used: float = 0.0
    unused: float = 1.0
    calls: float = 0.0
    others: float = 0.0

    def step(self, passed: float, used_s: float, unused: float, calls: float, load: float) -> None:
        """Account for some seconds in which workers used so much CPU time; `load` is what others and this process's calls used."""
        if passed <= 0:
            return
        self.seconds += passed
        weight = passed / min(WINDOW_S, self.seconds) if self.seconds < WINDOW_S else min(1.0, passed / WINDOW_S)
        self.used += weight * (used_s / passed - self.used)
        self.unused += weight * (unused - self.unused)
        self.calls += weight * (calls - self.calls)
        self.others += weight * (max(0.0, load - calls) - self.others)

    def rest(self) -> None:
        """Nothing is in hand any more."""
        self.seconds = 0.0

    @property
    def text(self) -> str:
        """What is told, with its figures; empty where work gets what it needs."""
        if self.seconds < AFTER_S or self.used >= MIN_CORES or self.unused >= NO_IDLE:
            return ""
        return (f"{SHORT} (it had {self.used:.2f} of {self.cores} cores in the last {WINDOW_S:.0f} s, "
                f"this process's calls {self.cores * self.calls:.2f}, other programs {self.cores * self.others:.2f})")  # fmt: skip
