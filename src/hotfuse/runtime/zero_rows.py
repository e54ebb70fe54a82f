"""What becomes of a plan whose kernels may leave rows of zeros out: when they stop looking for such rows, and begin again.

A state that turned no call for long is turned off, which costs nothing, and on again when sampled calls show zeros; each time in
vain makes the next wait twice as long.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from hotfuse.lower.run.kernel_state import NEVER, KernelState

MAX_DENSE_CALLS = 64
"""Calls of a product without rows of zeros after which it stops looking for them."""
MAX_PATIENCE = 10


class Sides:
    """The states of one plan: what their products did, and when to stop looking and to begin again."""

    def __init__(self, states: Sequence[KernelState], products: Mapping[int, int] | None = None) -> None:
        self.states = tuple(states)
        self.products = products or {}
        """By the address of a state, how many products of the plan have its kernel; one where that is not known."""
        self._lock = threading.Lock()
        self._from: dict[int, tuple[int, int]] = {}
        self._begun: dict[int, tuple[int, int]] = {}
        self._patience = 0
        self._asked = 0
        self.begin()

    def begin(self) -> None:
        """Count from now on: calls that proved and raced a plan are none of its traffic."""
        with self._lock:
            self._from = {d.address: (d.skipped, d.dense) for d in self.states}
            self._begun = dict(self._from)

    def one_sided(self) -> int:
        """Switch off states whose products found nothing to leave out in many calls; how many these are."""
        with self._lock:
            gone = 0
            for d in self.states:
                skipped, dense = self._from[d.address]
                if not d.on:
                    continue
                if d.skipped > skipped:
                    self._from[d.address] = (d.skipped, d.dense)
                    self._patience = 0
                elif d.dense - dense >= MAX_DENSE_CALLS:
                    d.limit = NEVER
                    gone += 1
            if gone:
                self._asked = 0
                self._patience = min(self._patience + 1, MAX_PATIENCE)
            return gone

    def may_look_again(self) -> bool:
        """Whether states are off, and were for long enough; every question counts."""
        with self._lock:
            if all(d.on for d in self.states):
                return False
            self._asked += 1
            return self._asked >= MAX_DENSE_CALLS << max(0, self._patience - 1)

    def look_again(self) -> int:
        """Switch on those that are off; how many these are."""
        with self._lock:
            off = [d for d in self.states if not d.on]
            for d in off:
                d.limit = d.first
                self._from[d.address] = (d.skipped, d.dense)
            self._asked = 0
            return len(off)

    def of_calls(self) -> tuple[int, int]:
        """In how many calls zeros were left out, and in how many not, since the plan began to serve. Products decide by themselves,
        so it is the part of them that did; calls are those of the kernel that has most, and not those that nothing looked in.
        """
        skipped, dense, calls = 0, 0, 0.0
        for d in self.states:
            some, all_ = (now - begun for now, begun in zip((d.skipped, d.dense), self._begun[d.address], strict=True))
            skipped, dense = skipped + some, dense + all_
            calls = max(calls, (some + all_) / self.products.get(d.address, 1))
        held = round(calls * skipped / max(1, skipped + dense))
        return held, round(calls) - held

    def counts(self) -> dict[str, int]:
        """How often which side ran, for `stats()` and `explain()`."""
        return {"calls_skipping_rows": sum(d.skipped for d in self.states),
                "calls_with_all_rows": sum(d.dense for d in self.states),
                "products_not_looking": sum(not d.on for d in self.states)}  # fmt: skip
