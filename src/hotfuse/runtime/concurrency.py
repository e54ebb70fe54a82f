"""How many calls are served at the same time, and whether their threads are more than the cores there are."""

from __future__ import annotations

from typing import Any

import torch

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.cores import usable_cores
from hotfuse.runtime.epochs import epochs

NEWEST = 0.05
"""The weight of a call that is looked at in the average."""


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
