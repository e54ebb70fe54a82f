"""Noticing that the machine's speed changed: heat, a lower clock, a neighbour on the same core.

A micro-probe of some tens of microseconds runs now and then; its best of a few tries is compared with what it was when the
machine was measured. Every look is recorded, and a change that holds for several looks in a row is told once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from hotfuse.base.faults import is_begun
from hotfuse.base.lazy_dataclass import dataclass

INTERVAL_S = 30.0
THRESHOLD = 1.15
"""A probe that takes so much longer, or shorter, has drifted: well beyond the noise of its best tries."""
IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """One run of one probe."""

    probe: str
    seconds: float
    baseline: float
    at: float
    """Seconds since 1970."""

    @property
    def ratio(self) -> float:
        """Above 1: slower than the baseline."""
        return self.seconds / self.baseline


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """A probe's speed has been another for some looks."""

    probe: str
    ratio: float
    at: float


class DriftWatch:
    """Looks at the machine's speed; `look` is called by a thread of its own, or in idle time."""

    def __init__(
        self,
        probe: Callable[[], Mapping[str, float]],
        baseline: Mapping[str, float],
        record: Callable[[list[ProbeRun]], None],
        changed: Callable[[SpeedChange], None] = lambda change: None,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._probe, self._record, self._changed, self._clock = probe, record, changed, clock
        self.baseline = dict(baseline)
        """Seconds per probe; a probe without one takes its first look's."""
        self.interval_s = interval_s
        self.looks = 0
        self.changes = 0
        """Changes that were told."""
        self.errors: dict[str, int] = {}
        """Kinds of errors of the probe or of recording, and how often."""
        self._recent: dict[str, deque[float]] = {}
        self._level: dict[str, float] = {}
        """The ratio that was told last."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> list[ProbeRun]:
        """Run the probes once, record and judge."""
        at = self._clock()
        found = [ProbeRun(name, s, self.baseline.setdefault(name, s), at) for name, s in self._probe().items() if s > 0]
        self.looks += 1
        self._record(found)
        for one in found:
            self._judge(one)
        return found

    def _judge(self, look: ProbeRun) -> None:
        recent = self._recent.setdefault(look.probe, deque(maxlen=IN_A_ROW))
        recent.append(look.ratio)
        level = self._level.get(look.probe, 1.0)
        if len(recent) < IN_A_ROW:
            return
        up, down = min(recent) / level > THRESHOLD, level / max(recent) > THRESHOLD
        if up or down:
            new = sorted(recent)[len(recent) // 2]
            self._level[look.probe] = new
            self.changes += 1
            self._changed(SpeedChange(look.probe, new, look.at))

    def ratio(self, probe: str) -> float:
        """How much slower a probe is now than its baseline, by the last change that was told."""
        return self._level.get(probe, 1.0)

    # -- a thread of its own

    def start(self) -> None:
        """Look every `interval_s` seconds until `stop`."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="hotfuse-drift", daemon=True)
            self._thread = thread if is_begun(thread) else None

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stop.clear()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self.look()
            except Exception as e:  # this thread must neither end nor disturb calls: it counts
                kind = type(e).__name__
                self.errors[kind] = self.errors.get(kind, 0) + 1
