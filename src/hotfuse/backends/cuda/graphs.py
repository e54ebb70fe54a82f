"""CUDA graphs by kinds of calls: shapes and strides that recur are recorded, others run kernel by kernel.

The second call of a kind records, on its own thread (`backends.cuda.graph_recording` says why). The third one compares a replay
with the kernels one by one. Both answer with the latter. That takes such calls some milliseconds; all recordings together take at
most a small part of the time. Recordings of one plan share a memory pool, and so they are replayed one at a time: a lock orders the
threads, and an event the streams that they use. When there are too many, the least recently replayed one is dropped first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotfuse.backends.device_protocol import RecordingDevice, Replay, too_large
from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.faults import error_text
from hotfuse.base.living import Living

Run = Callable[..., tuple[Any, ...]]
Kind = tuple[Any, ...]
"""Shapes and strides of a call's inputs."""

MAX_RECORDINGS = 32
MAX_KINDS = 256
"""Kinds of calls that are remembered without a recording; the one not seen for the longest is forgotten."""
SHARE = 0.05
"""Part of the time that recording may take."""
AT_ONCE_S = 0.1
"""Seconds of recording that need no time before them."""
SHORT_S, MAX_WAIT_S = 60.0, 1.0
"""Seconds for which nothing is recorded where memory was short, and that are waited for another thread's replay."""


def kind_of(inputs: Sequence[torch.Tensor]) -> Kind:
    """What a recording is for; a guard has checked types, ranks and devices already."""
    return tuple([(t.shape, t.stride()) for t in inputs])


class GraphRun:
    """A run that replays recordings where it has them."""

    def __init__(
        self, run: Run, device: RecordingDevice, differ: Callable[[tuple[Any, ...], tuple[Any, ...]], str],
        most: int = MAX_RECORDINGS, clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`differ` says how results of a replay differ from those of the kernels; empty if they do not."""
        self._run = run
        self._device = device
        self._differ = differ
        self._most = most
        self._clock = clock
        self._begin = clock()
        self._spent = 0.0
        self._lock = threading.Lock()
        self._recordings: OrderedDict[Kind, Replay] = OrderedDict()
        self._unproven: set[Kind] = set()
        """Kinds whose recordings were not compared yet, and answer nothing before that."""
        self._met: OrderedDict[Kind, bool] = OrderedDict()
        """Kinds that came once; whether they may be recorded."""
        self.refused = ""
        """Why a kind could not be recorded."""
        self.counts = {"replays": 0, "kernel_by_kernel": 0, "recorded": 0, "dropped": 0, "not_recordable": 0}
        _ALL.add(self)

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """Replay, record, or run kernel by kernel."""
        kind = kind_of(inputs)
        may_record = self._device.may_record()
        if may_record and (done := self._answered(kind, inputs)) is not None:
            return done
        self.counts["kernel_by_kernel"] += 1
        outs = self._run(*inputs)
        if may_record and self._lock.acquire(blocking=False):  # else the next call does
            try:
                self._notice(kind, inputs, outs)
            finally:
                self._lock.release()
        return outs

    def replayed(self, *inputs: torch.Tensor) -> tuple[Any, ...] | None:
        """The results of a recording; None where there is none for such inputs. It reads fixed addresses, so it can be launched
        whatever became of the objects that it was recorded with, as long as their memory is held."""
        return self._found(kind_of(inputs), inputs) if self._device.may_record() else None

    def _answered(self, kind: Kind, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
        try:
            return self._found(kind, inputs)
        except torch.OutOfMemoryError:  # for the results: without recordings there is more
            self.let_go()
            return None

    def let_go(self) -> bool:
        """Memory is short: recordings go, and for a minute there are no others; whether there were any."""
        if not self._recordings or not self._lock.acquire(timeout=MAX_WAIT_S):
            return False
        try:
            self._device.drain()
            self.counts["dropped"] += len(self._recordings)
            self._recordings.clear()
            self._unproven.clear()
            self._spent += SHARE * SHORT_S
            return True
        finally:
            self._lock.release()

    def _found(self, kind: Kind, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
        if kind not in self._recordings or kind in self._unproven:
            return None
        with self._lock:
            found = self._recordings.get(kind)
            if found is None or kind in self._unproven:
                return None
            self._recordings.move_to_end(kind)
            self.counts["replays"] += 1
            return self._replayed(found, inputs)

    @property
    def kernel_by_kernel(self) -> Run:
        """What is recorded."""
        return self._run

    def _replayed(self, found: Replay, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        self._device.enter()
        try:
            return found.replay(inputs)
        finally:
            self._device.leave()

    def _notice(self, kind: Kind, inputs: Sequence[torch.Tensor], outs: tuple[Any, ...]) -> None:
        """A call ran kernel by kernel: the second one of its kind is recorded, if there is time for it; the third one proves it."""
        met = self._met.pop(kind, None)
        self._met[kind] = met is not False
        if len(self._met) > MAX_KINDS:
            self._met.popitem(last=False)
        begin = self._clock()
        recorded = kind in self._unproven
        if not recorded and (not met or self._spent > AT_ONCE_S + SHARE * (begin - self._begin)):
            return
        try:
            if recorded:
                self._prove(kind, inputs, outs)
            else:
                self._record(kind, inputs)
        except Exception as e:  # the call has its answer
            self.refused = (e.because or e.what) if isinstance(e, CaptureError) else error_text(e)
            self.counts["not_recordable"] += 1
            self._met[kind] = False
        self._spent += self._clock() - begin

    def _record(self, kind: Kind, inputs: Sequence[torch.Tensor]) -> None:
        if because := self._device.short_of_memory():
            raise CaptureError("a call cannot be recorded", because=because, why=Why.TOO_MUCH_MEMORY)
        made = self._device.record(self._run, inputs)
        if because := too_large(self._device):
            raise CaptureError("a call cannot be recorded", because=because, why=Why.TOO_MUCH_MEMORY)
        self._recordings[kind] = made
        self._unproven.add(kind)
        self.counts["recorded"] += 1
        if len(self._recordings) > self._most:
            self._device.drain()  # which may be in the oldest
            oldest, _ = self._recordings.popitem(last=False)
            self._unproven.discard(oldest)
            self.counts["dropped"] += 1

    def _prove(self, kind: Kind, inputs: Sequence[torch.Tensor], outs: tuple[Any, ...]) -> None:
        """Compare a replay with the kernels of this call; what disagrees is dropped."""
        self._unproven.discard(kind)
        made = self._recordings.pop(kind)
        try:
            difference = self._differ(self._replayed(made, inputs), outs)
            if difference:
                raise CaptureError("a replay disagrees with the kernels it was recorded from", because=difference)
        except Exception:
            self._device.drain()  # which may be in it
            self.counts["dropped"] += 1
            raise
        del self._met[kind]
        self._recordings[kind] = made

    def counters(self) -> dict[str, int]:
        """What it did so far."""
        return {**self.counts, "device_bytes": self._device.held()}


_ALL: Living[GraphRun] = Living()


def let_go_of_recordings() -> bool:
    """Drop the recordings of all plans of this process; whether there were any."""
    return any([run.let_go() for run in _ALL])
