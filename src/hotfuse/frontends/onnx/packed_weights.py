"""Weights in the order of oneDNN's blocks, kept while the interpreter multiplies with them, and which kernel is faster.

A packed copy makes calls faster and nothing else, so it may go at any time: where nothing has used it for some seconds (compiled
code answers by then), and where the process is idle. All copies of a process together stay within a bound, and making them takes a
part of the time only: a call that packed all the weights of a model would take several times as long as the one before.

Kernels are compared once in a process for all layers of one shape, in as few runs as tell them apart. That, too, may take a part
of the time only: calls of a text recognizer that compared each of its 59 convolutions by itself took 200 to 270 ms instead of 25
(decision 353).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from hotfuse.base.living import Living
from hotfuse.machine.heap import heap

MAX_BYTES = 256 << 20
"""Packed copies in one process."""
UNUSED_S = 5.0
"""What nothing has used for so long goes when background work is done; when idle, all of it."""
SMALL_BYTES, REST = 1 << 20, 2.0
"""Behind the packing of a larger weight no other such is packed for so many times as long as it took."""
ROUNDS, SHORT_S = 3, 5e-4
"""How often candidates are timed behind their first run, at most; longer ones once."""
CLEAR = 1.3
"""A candidate that is so much faster or slower than the best before it is timed no more."""
TRIAL_S = 1e-3
"""Behind a comparison that took longer there is none for `REST` times as long as it took."""
MAX_SHAPES = 1 << 12
"""Layers of which it is remembered which kernel is faster."""
AGREEING = 2
"""Comparisons of layers that are alike with one outcome, after which the others are not compared."""
MARGIN = 1.25
"""By how much one that holds memory has to be faster."""

Run = Callable[[], object]


class PackedWeight:
    """One weight's copy, made when it is first asked for and again behind a release."""

    __slots__ = ("__weakref__", "_make", "_nbytes", "_packed", "_used")

    def __init__(self, make: Callable[[], torch.Tensor], nbytes: int) -> None:
        self._make, self._nbytes = make, nbytes
        self._packed: torch.Tensor | None = None
        self._used = 0.0

    @property
    def bytes(self) -> int:
        """Memory it holds now."""
        return 0 if self._packed is None else self._nbytes

    @property
    def later(self) -> bool:
        """Whether there is room for it, and nothing but time kept it from being packed."""
        return self._packed is None and _STORE.has_room(self._nbytes)

    @property
    def idle_s(self) -> float:
        """How long nothing has used it."""
        return time.monotonic() - self._used

    def get(self) -> torch.Tensor | None:
        """The packed weight; None where there is no room, or no time yet, to pack it."""
        packed = self._packed
        if packed is None and (packed := _STORE.pack(self._make, self._nbytes)) is not None:
            self._packed = packed
            _STORE.holders.add(self)
        self._used = time.monotonic()
        return packed

    def let_go(self) -> int:
        """Free it; the bytes."""
        held, self._packed = self.bytes, None
        return held

    def __deepcopy__(self, memo: object) -> PackedWeight:
        """Nobody writes to it; and the library's tensors cannot be copied so."""
        return self


class _Store:
    """All of a process."""

    def __init__(self) -> None:
        self.holders: Living[PackedWeight] = Living()
        self._lock = threading.Lock()
        self._not_before = 0.0

    def pack(self, make: Callable[[], torch.Tensor], nbytes: int) -> torch.Tensor | None:
        begin, large = time.monotonic(), nbytes > SMALL_BYTES
        if (large and begin < self._not_before) or not self._lock.acquire(blocking=False):
            return None
        try:
            if not self.has_room(nbytes):
                return None
            with torch.no_grad():
                made = make()
            end = time.monotonic()
            if large:
                self._not_before = end + REST * (end - begin)
            return made
        finally:
            self._lock.release()

    def has_room(self, nbytes: int) -> bool:
        return sum(h.bytes for h in self.holders) + nbytes <= MAX_BYTES

    def release(self, unused_s: float) -> int:
        return sum(h.let_go() for h in self.holders if h.idle_s >= unused_s)

    def after_fork(self) -> None:
        self._lock = threading.Lock()


_STORE = _Store()
os.register_at_fork(after_in_child=_STORE.after_fork)
heap.spares(lambda: _STORE.release(0.0))
heap.outlived(lambda: _STORE.release(UNUSED_S))


class KernelTrials:
    """Which of some kernels is the fastest, of all layers of a process."""

    def __init__(self) -> None:
        self._found: dict[Hashable, int] = {}
        """By layer, what it is given, and number of threads: the place of the fastest."""
        self._alike: dict[Hashable, list[int]] = {}
        """Outcomes, by what layers have in common, and number of threads."""
        self._not_before = 0.0

    @property
    def rests(self) -> bool:
        """Whether it is no time to compare."""
        return time.monotonic() < self._not_before

    def fastest(
        self, layer: Hashable, candidates: Sequence[tuple[Run, float]], alike: Hashable = None, *, at_once: bool = False
    ) -> int | None:  # fmt: skip
        """The place of the one that takes least time; each with the margin by which it has to win against those before it. None
        where that is not known and, unless it has to be at once, it is no time to find out."""
        threads = torch.get_num_threads()
        best = self.known(layer, alike)
        if best is None and (at_once or not self.rests):
            begin = time.monotonic()
            best = fastest(candidates)
            took = time.monotonic() - begin
            if took > TRIAL_S:
                self._not_before = begin + (1 + REST) * took
            if len(self._found) >= MAX_SHAPES:
                self._found.clear()
                self._alike.clear()
            self._found[layer, threads] = best
            if alike is not None:
                self._alike.setdefault((alike, threads), []).append(best)
        return best

    def known(self, layer: Hashable, alike: Hashable = None) -> int | None:
        """The same, where it was found before, of this layer or of all that are like it."""
        threads = torch.get_num_threads()
        found = self._found.get((layer, threads))
        if found is None and alike is not None:
            others = self._alike.get((alike, threads), [])
            found = others[0] if len(others) >= AGREEING and len(set(others)) == 1 else None
        return found

    def forget(self) -> None:
        """As if nothing had been compared."""
        self._found.clear()
        self._alike.clear()
        self._not_before = 0.0


trials = KernelTrials()


def fastest(candidates: Sequence[tuple[Run, float]]) -> int:
    """The place of the one that takes least time; each with the margin by which it has to win against those before it."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter  # a core that others use as well says nothing
    best, least = 0, float("inf")
    for place, (run, margin) in enumerate(candidates):
        spent = float("inf")
        for done in range(1 + ROUNDS):
            begin = clock()
            run()
            spent = min(spent, clock() - begin)
            if spent * margin * CLEAR < least < float("inf"):
                break  # faster, with what a library does once for sizes that it has not met
            if done and (spent > SHORT_S or spent * margin > CLEAR * least):
                break
        if spent * margin < least:
            best, least = place, spent
    return best


def usable(x: Any) -> bool:
    """Whether oneDNN may take a tensor in the place of torch's own kernels."""
    return (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and not x.requires_grad
        and torch._C._get_mkldnn_enabled()  # pyright: ignore[reportPrivateUsage]
        and not torch.is_autocast_enabled("cpu")
    )
