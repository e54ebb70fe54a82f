"""What a plan must win in to take another's place: time, energy or memory. The trade between all three is shown whichever it is.

| objective | wins |
| --- | --- |
| latency | by time, in a race (`runtime.tierup.race`) |
| energy | the same race with another clock: joules by meters where there are any, else processor time |
| memory | with fewer bytes of its own and no more than `SLOWER` times the time; with as many, by time |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hotfuse.base.events import EvidenceValue
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.settings import Settings
from hotfuse.machine.energy import EnergyMeter, Source, meters, watts_per_core
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.tierup.race import MARGIN, Trial

SLOWER = 1.5
"""What less memory may cost in time."""
TIMED_CALLS = 5
"""Calls that tell the time where a race was about energy."""


@dataclass(frozen=True, slots=True)
class Trade:
    """Before and after, of one call."""

    us: tuple[float, float]
    microjoules: tuple[float, float]
    energy_source: Source
    bytes: tuple[int, int]
    """That plans take beside the model's weights: intermediates and copies of weights."""

    def evidence(self) -> dict[str, EvidenceValue]:
        """For a decision."""
        return {"uj_before": round(self.microjoules[0], 1), "uj_after": round(self.microjoules[1], 1),
                "energy": self.energy_source, "bytes_before": self.bytes[0], "bytes_after": self.bytes[1]}  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"us": [round(t, 1) for t in self.us], "microjoules": [round(j, 1) for j in self.microjoules],
                "energy_source": self.energy_source, "bytes": list(self.bytes)}  # fmt: skip


class CoreSeconds:
    """A clock of energy, in seconds of one busy core: by meters where the processor has some, else by processor time."""

    def __init__(self, given: Sequence[EnergyMeter] | None = None) -> None:
        found = meters()[0] if given is None else given
        self._meters = [m for m in found if m.name.startswith("cpu")]
        self._last = [m.read() for m in self._meters]
        self._joules = 0.0

    @property
    def source(self) -> Source:
        """Whether joules are counted."""
        return "measured" if self._meters else "estimated"

    def __call__(self) -> float:
        """Now."""
        if not self._meters:
            return time.process_time()
        for i, m in enumerate(self._meters):
            now = m.read()
            gone = now - self._last[i]
            self._joules += (gone if gone >= 0 or m.wraps is None else gone + m.wraps) * m.joules
            self._last[i] = now
        return self._joules / watts_per_core()


Race = Callable[..., Trial]


def decide(
    settings: Settings, race: Race, old: Plan, new: Plan, call: Sequence[torch.Tensor], **how: Any
) -> tuple[Trial, Trade]:
    """Race two plans for what the user asked for; the trial's times are wall time whatever it was about."""
    sizes = (_bytes(old, new, settings), _bytes(new, new, settings))
    if settings.objective == "energy":
        clock = CoreSeconds()
        trial = race(old.run, new.run, call, settings.race_s, clock=clock, **how)
        joules = (trial.old_us * watts_per_core(), trial.new_us * watts_per_core())
        before, after = _wall_us(old, call), _wall_us(new, call)
        return replace(trial, old_us=before, new_us=after), Trade((before, after), joules, clock.source, sizes)
    trial = race(old.run, new.run, call, settings.race_s, **how)
    threads = torch.get_num_threads()
    joules = (trial.old_us * watts_per_core() * threads, trial.new_us * watts_per_core() * threads)
    if settings.objective == "memory":
        less, cheap = sizes[1] < MARGIN * sizes[0], trial.new_us <= SLOWER * trial.old_us
        trial = replace(
            trial, won=(less and cheap) or (sizes[1] <= sizes[0] and trial.won), decided=trial.decided or less
        )
    return trial, Trade((trial.old_us, trial.new_us), joules, "estimated", sizes)


def _bytes(plan: Plan, rival: Plan, settings: Settings) -> int:
    """What a plan takes; the intermediates of one without an arena are what ops take one by one.

    Where originals are given back, what counts of copies is by how much they are larger.
    """
    if plan.tier == 0:
        return rival.memory.eager_peak or 0
    released = sum(w.nbytes for k, w in plan.weights.items() if k in plan.unread) if settings.release_weights else 0
    return plan.memory.arena + max(0, plan.memory.constants - released)


def _wall_us(plan: Plan, call: Sequence[torch.Tensor]) -> float:
    times: list[float] = []
    with torch.no_grad():
        for _ in range(TIMED_CALLS):
            begin = time.perf_counter()
            plan.run(*call)
            times.append(time.perf_counter() - begin)
    return sorted(times)[TIMED_CALLS // 2] * 1e6
