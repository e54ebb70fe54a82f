"""Packed weights in place of the originals, where the user allows it (`Settings.release_weights`).

A plan with generated kernels reads packed copies of most weights; the originals are read only when a call falls back, when a plan
is made, or by the user. After such a plan is deployed, the memory of the originals that it does not read is given back to the
system (`machine.pages`): a later read, for whatever reason, finds them bit by bit as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hotfuse.base.events import Action, EventLog, Why
from hotfuse.machine import pages
from hotfuse.machine.pages import Range
from hotfuse.runtime.plan import Plan

MIN_BYTES = 16 * pages.PAGE
"""Weights smaller than this stay where they are."""


class Released:
    """What was given back of one model's weights."""

    def __init__(self, folder: Path, name: str, log: EventLog) -> None:
        self._folder = folder / "released"
        self._name, self._log = name, log
        self._lock = threading.Lock()
        self._ranges: list[Range] = []
        self._owners: list[torch.Tensor] = []
        """Whose memory the ranges are: it must not become somebody else's while it counts as released."""

    @property
    def bytes(self) -> int:
        """Memory given back."""
        return sum(b - a for a, b in self._ranges)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Memory that was given back."""
        with self._lock:
            return tuple(self._ranges)

    def resident(self) -> int:
        """What of it came back because somebody read or wrote it."""
        return pages.resident(self._ranges)

    def after(self, plans: Sequence[Plan], weights: Mapping[str, torch.Tensor]) -> None:
        """Some plans serve on these weights: give back what none of them reads. For the background: it writes a file."""
        try:
            with self._lock:
                self._after(plans, weights)
        except OSError as e:
            self._log.decide(Action.REFUSE, Why.NOT_RELEASED, self._name, because=str(e))

    def forget(self) -> None:
        """The model is another one, or is no longer served."""
        with self._lock:
            self._ranges, self._owners = [], []

    def _after(self, plans: Sequence[Plan], weights: Mapping[str, torch.Tensor]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if why := pages.unavailable(self._folder):
            self._log.decide(Action.REFUSE, Why.NOT_RELEASED, self._name, because=why)
            return
        every = {**{k: t for p in plans for k, t in p.weights.items()}, **weights}
        read = [_range(t) for p in plans for k, t in p.weights.items() if _reads(p, k) and _plain(t)]
        idle = [t for k, t in every.items() if _plain(t) and t.nbytes >= MIN_BYTES and not any(_reads(p, k) for p in plans)]
        versions = [t._version for t in idle if not t.is_inference()]
        wanted = pages.whole_pages([_range(t) for t in idle], read)
        pages.release_unwritten([r for r in self._ranges if r in wanted])
        fresh = [r for r in wanted if not any(a < r[1] and r[0] < b for a, b in self._ranges)]
        done = pages.release(fresh, self._folder)
        if not done:
            return
        self._ranges += done
        self._owners += idle
        moved = versions != [t._version for t in idle if not t.is_inference()]
        self._log.decide(Action.DROP, Why.PACKED, self._name, bytes=sum(b - a for a, b in done), tensors=len(idle),
                         written_meanwhile=moved)


def _reads(plan: Plan, key: str) -> bool:
    """Whether a plan reads a weight where it lies, as far as it says."""
    return not plan.weights or (key in plan.weights and key not in plan.unread)


def _plain(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and t.device.type == "cpu" and not t.is_shared() and t.numel() > 0


def _range(t: torch.Tensor) -> Range:
    """All memory of a tensor's storage: views of it lie in there."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
