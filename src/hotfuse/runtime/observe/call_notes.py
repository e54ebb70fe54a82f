"""What a sampled call shows, written down on the thread that runs it: looks at values, outcomes of branches, trips of loops.

A look that fails is counted and never touches the call.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.profile.records import Batch, Subject
from hotfuse.runtime.observe.watch_points import Point

MAX_CONTROL = 32
"""Outcomes of control nodes noted in one call; a loop around a branch could give any number."""


class RecordValue(Protocol):
    """Adds a value's record to a batch: `backends.llvm.probe_pass.Probes.look`."""

    def __call__(self, t: Any, batch: Batch, s: Subject, item: int, flags: int = 0, keep: int = 1) -> bool:
        """False for what cannot be looked at."""
        ...


@dataclass(slots=True)
class SampledCall:
    """One sampled call while it runs."""

    batch: Batch
    subject: Subject
    times: list[int]
    """Nanoseconds per partition, -1 for one that did not run."""
    clocked: bool = True
    """Whether native runs are timed inside."""
    counting: bool = False
    """Whether native runs count what they store."""
    cost: int = 0
    """Nanoseconds that looks took."""
    outcomes: int = 0
    began: int = 0
    """When the partition that runs began, and what looks had cost by then."""
    cost_before: int = 0


class _Here(threading.local):
    """The sample that each thread is at, if it is at one."""

    sample: SampledCall | None = None


class Noting:
    """Writes records of the calls that are sampled, and nothing for others."""

    def __init__(self, look: RecordValue) -> None:
        self.here = _Here()
        self.failed = 0
        """Looks that raised an error."""
        self._look = look

    def see(self, s: SampledCall, value: Any, item: int, point: Point) -> None:
        """Look at a value."""
        try:
            self._look(value, s.batch, s.subject, item, point.flags, point.keep)
        except Exception:  # whatever went wrong is no reason to fail a call that needs none of this; it is counted
            self.failed += 1

    def outcome(self, item: int, outcome: int, *, loop: bool) -> None:
        """Which way a branch went, or how often a loop ran."""
        s = self.here.sample
        if s is not None and s.outcomes < MAX_CONTROL:
            s.outcomes += 1
            s.batch.control(s.subject, item, outcome, loop=loop)
