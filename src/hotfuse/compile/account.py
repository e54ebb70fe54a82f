"""What became of a graph's units, as a value that stays with the plan made of them; and the process's totals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.partition.change import Diff
from hotfuse.profile.traffic import NOTHING_SEEN, TrafficSeen

COUNTED = ("compiled", "deduplicated", "replaced", "refused", "splits", "fusions", "fusions_tried", "fusions_refused",
           "failed", "dispatched")
"""What is counted per graph: units with a kernel, uses beyond the first, units asked for anew because calls changed, units
without a kernel, cuts, pairs that became one kernel, pairs tried, pairs that stay apart,
units that failed outright, units with several kernels for several sizes."""
RUNS_A_CALL = "runs a call:"
"""What lines about execution frequencies begin with."""
SEEN = "seen:"
"""What lines about the traffic that a plan was made by begin with."""
_lock = threading.Lock()
_totals: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Account:
    """How a graph came to its kernels."""

    history: tuple[Diff, ...]
    """Every change of its partitioning."""
    units: tuple[str, ...]
    """How often nested graphs run, each unit with where it ended, and the pairs that stay apart with the reason: one line each."""
    counts: Mapping[str, int]
    predicted_us: float | None = None
    """What a call was predicted to take, where a model knows this machine."""
    seen: TrafficSeen = NOTHING_SEEN
    """What it was planned by."""
    grouping: str = ""
    """A name for the groups that planning came to, before trials changed them; empty where nobody knows."""

    def to_dict(self) -> dict[str, object]:
        """A plain dict for JSON."""
        return {"history": [d.to_dict() for d in self.history], "units": list(self.units), "counts": dict(self.counts),
                "predicted_us": self.predicted_us, "seen": asdict(self.seen),
                "grouping": self.grouping}  # fmt: skip

    def lines(self) -> list[str]:
        """The account as lines of text."""
        return [*(f"{SEEN} {s}" for s in self.seen.lines()), *(f"partitioning: {d}" for d in self.history),
                *(f"unit: {u}" for u in self.units)]  # fmt: skip


def add_up(counts: Mapping[str, int]) -> None:
    """A graph is done: its counts are part of the process's."""
    with _lock:
        _totals.update({k: v for k, v in counts.items() if k in COUNTED})
        _totals["graphs"] += 1


def totals() -> dict[str, int]:
    """Units of all graphs so far."""
    with _lock:
        return {k: _totals[k] for k in ("graphs", *COUNTED)}
