"""Static caches on a device: a step of a generation is one replay, which writes its rows behind those that are there.

    pasts are what the last call on a buffer gave -> replay; results are longer views of the buffer
    pasts are anything else                       -> copied into buffers that nobody reads any more, then the same
    no such buffers                               -> they are made and a step on them is recorded, or it runs kernel by kernel

A recording writes at fixed addresses, so buffers are kept with it, and how much of them is filled is counted on the device
(`compile.device.static_caches`). Whether a buffer is still read is asked of its memory: a result that is held,
a view of it, or an array, holds that. Older results keep their values, since only rows behind them are
written; a second continuation of one past is no longer what the buffer gave last, and is copied elsewhere.

Rows behind the filled ones are zeros: what a text left there might not be finite, and attention would multiply it by zero.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hotfuse.backends.device_protocol import MIN_LEFT, RecordingDevice, Replay
from hotfuse.backends.library import meaning
from hotfuse.backends.protocol import Run
from hotfuse.backends.pycode import flat_function
from hotfuse.base.errors import CaptureError
from hotfuse.base.faults import error_text
from hotfuse.base.living import Living
from hotfuse.compile.device.static_caches import StaticCacheGraph, with_static_caches
from hotfuse.ir.graph import Graph
from hotfuse.runtime.serve.kept_memory import KeptMemory

MIN_ROWS = 128
"""Of a buffer; larger ones are twice as large as the next smaller."""
USUAL_ROWS = 512
"""Of buffers that kernels are made for."""
MAX_ROWS = 1 << 17
MAX_SETS = 8
"""Sets of static caches of one plan: as many texts are continued by replays at once."""
MAX_MEMORY = 0.125
"""Part of a device's memory that the buffers and recordings of one plan may hold."""
SHARE, AT_ONCE_S = 0.05, 0.5
"""Part of the time that recording may take, and seconds of it that need no time before them."""
SHORT_S, MAX_WAIT_S = 60.0, 1.0
"""Seconds for which nothing is recorded where memory was short, and that are waited for another thread's replay."""


def capacity_for(rows: int) -> int:
    """The rows of the smallest buffer for so many."""
    return max(MIN_ROWS, 1 << (rows - 1).bit_length())


class _CacheBuffers:
    """One set: a buffer for every cache, how much of them is filled, and the recording of a step on them."""

    def __init__(self, static: StaticCacheGraph, pasts: Sequence[torch.Tensor]) -> None:
        """Outside of inference mode: calls outside of it write here, too."""
        self.static = static
        with torch.inference_mode(False), torch.no_grad():
            self.buffers = [t.new_zeros([static.capacity if d == g.dim else n for d, n in enumerate(t.shape)])
                          for t, g in zip(pasts, static.growths, strict=True)]  # fmt: skip
            self.count = torch.zeros((), dtype=torch.int64, device=pasts[0].device)
        self.filled = 0
        self.recording: Replay | None = None
        self.used = 0.0
        self.given: list[weakref.ref[torch.Tensor]] = []
        """The results of the last call on them."""
        self._memory: KeptMemory | None = None

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.buffers)

    def free(self) -> bool:
        """Whether nobody reads them any more."""
        return self._memory is not None and self._memory.unread()

    def recorded(self, recording: Replay) -> None:
        """They are what a recording writes. References that it has to their memory, if any, are counted as ours."""
        self.recording = recording
        self._memory = KeptMemory(self.buffers)

    def gave(self, pasts: Sequence[torch.Tensor], length: int) -> bool:
        """Whether these are what the last call on them gave, as it was given."""
        return (
            self.filled == length and len(self.given) == len(pasts)
            and all(r() is t and t.data_ptr() == buffer.data_ptr() and t.stride() == buffer.stride()
                    for r, t, buffer in zip(self.given, pasts, self.buffers, strict=True))
        )  # fmt: skip

    def fits(self, pasts: Sequence[torch.Tensor]) -> bool:
        """Whether pasts of these sizes, types and places may lie in them."""
        return all(t.dtype is buffer.dtype and t.device == buffer.device and t.dim() == buffer.dim()
                   and all(a == b for d, (a, b) in enumerate(zip(t.shape, buffer.shape, strict=True)) if d != g.dim)
                   for t, buffer, g in zip(pasts, self.buffers, self.static.growths, strict=True))  # fmt: skip

    def take(self, pasts: Sequence[torch.Tensor], length: int) -> None:
        """Copy pasts into them."""
        self.given, self.filled = [], length
        with torch.no_grad():
            torch._foreach_zero_(self.buffers)  # pyright: ignore[reportPrivateUsage] - one kernel for all of them
            for t, buffer, g in zip(pasts, self.buffers, self.static.growths, strict=True):
                buffer.narrow(g.dim, 0, length).copy_(t)
            self.count.fill_(length)

    def inputs(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the static graph takes."""
        handed = [given[i] for i in self.static.given]
        for k, dim in self.static.long:
            t = handed[k]
            buffer = t.new_zeros([self.static.capacity if d == dim else n for d, n in enumerate(t.shape)])
            buffer.narrow(dim, 0, t.shape[dim]).copy_(t)
            handed[k] = buffer
        return [*handed, *self.buffers, self.count]

    def results(self, outs: Sequence[Any], *, handed_out: bool) -> tuple[Any, ...]:
        """What a call gives, of the static graph's own results and the buffers."""
        self.filled += self.static.rows
        views = [buffer.narrow(g.dim, 0, self.filled) for buffer, g in zip(self.buffers, self.static.growths, strict=True)]
        self.given = [weakref.ref(v) for v in views] if handed_out else []
        rest = iter(outs)
        return tuple(next(rest) if k is None else views[k] for k in self.static.results)


class StaticCacheRun:
    """A plan's run whose steps are replayed on buffers; call it like the plan."""

    def __init__(
        self, plain: Run, static: Callable[[int], tuple[StaticCacheGraph, Run]], device: RecordingDevice,
        differ: Callable[[Sequence[Any], Sequence[Any]], str], in_background: Callable[[], bool], usual: int = MIN_ROWS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`plain` runs any call kernel by kernel. `static` gives the graph on buffers of so many rows, and its kernels; `differ`
        says how results of a replay differ from the kernels'. Shorter texts have `usual` rows: kernels were made for those."""
        self._plain, self._static, self._device, self._differ = plain, static, device, differ
        self._in_background, self._usual, self._clock = in_background, usual, clock
        first, _ = static(MIN_ROWS)
        self._inputs = [(g.input, g.dim) for g in first.growths]
        self._rows = first.rows
        self._made: dict[int, tuple[StaticCacheGraph, Run]] = {}
        self._sets: list[_CacheBuffers] = []
        self._met: dict[Any, int] = {}
        self._begin, self._spent = clock(), 0.0
        self._lock = threading.Lock()
        self.refused = ""
        self.counts = {"replays": 0, "kernel_by_kernel": 0, "recorded": 0, "dropped": 0, "not_recordable": 0, "moved_in": 0}
        _ALL.add(self)

    @property
    def kernel_by_kernel(self) -> Run:
        """What answers where there are no buffers."""
        return self._plain

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Replay, record, or run kernel by kernel."""
        if not self._device.may_record():
            return self._unrecorded(inputs) if self._in_background() else self._plain(*inputs)
        pasts = [inputs[i] for i, _ in self._inputs]
        length = pasts[0].shape[self._inputs[0][1]]
        try:
            with self._lock:
                found = self._found(pasts, length)
                if found is not None:
                    return self._replayed(found, inputs)
        except torch.OutOfMemoryError:  # without buffers there is more
            self.let_go()
        self.counts["kernel_by_kernel"] += 1
        outs = self._plain(*inputs)
        if not self.refused and self._lock.acquire(blocking=False):
            try:
                self._notice(pasts, length, inputs)
            finally:
                self._lock.release()
        return outs

    def _found(self, pasts: Sequence[torch.Tensor], length: int) -> _CacheBuffers | None:
        """Buffers that hold these pasts now."""
        after = length + self._rows
        for each in self._sets:
            if after <= each.static.capacity and each.gave(pasts, length):
                return each
        wanted = self._capacity(after)
        for each in self._sets:
            if wanted <= each.static.capacity <= 2 * wanted and each.fits(pasts) and each.free():
                self._device.enter()
                try:
                    each.take(pasts, length)
                finally:
                    self._device.leave()
                self.counts["moved_in"] += 1
                return each
        return None

    def _replayed(self, found: _CacheBuffers, inputs: Sequence[Any]) -> tuple[Any, ...]:
        recording = found.recording
        assert recording is not None  # sets are kept when they are recorded
        found.used = self._clock()
        self._device.enter()
        try:
            outs = recording.replay(found.inputs(inputs))
        except BaseException:
            found.given = []
            raise
        finally:
            self._device.leave()
        self.counts["replays"] += 1
        return found.results(outs, handed_out=True)

    def _unrecorded(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The same kernels, beside calls: what a plan is proven with."""
        pasts = [inputs[i] for i, _ in self._inputs]
        length = pasts[0].shape[self._inputs[0][1]]
        graph, run = self._graph(self._capacity(length + self._rows))
        here = _CacheBuffers(graph, pasts)
        here.take(pasts, length)
        return here.results(run(*here.inputs(inputs)), handed_out=False)

    def _capacity(self, rows: int) -> int:
        return max(self._usual, capacity_for(rows))

    def _graph(self, rows: int) -> tuple[StaticCacheGraph, Run]:
        if rows not in self._made:
            self._made[rows] = self._static(rows)
        return self._made[rows]

    def _notice(self, pasts: Sequence[torch.Tensor], length: int, inputs: Sequence[Any]) -> None:
        """No buffers were free: they are made where such steps recur, and there is time and memory for it."""
        rows, begin = self._capacity(length + self._rows), self._clock()
        kind = (rows, *[(t.shape[:d], t.shape[d + 1 :], t.dtype) for t, (_, d) in zip(pasts, self._inputs, strict=True)])
        self._met[kind] = self._met.get(kind, 0) + 1
        late = self._spent > AT_ONCE_S + SHARE * (begin - self._begin)
        if self._met[kind] < 2 or late or rows > MAX_ROWS:
            return
        try:
            if self._may_hold(rows, pasts):  # asking a device what is free takes milliseconds: that is time of recording, too
                self._record(rows, pasts, length, inputs)
        except torch.OutOfMemoryError:
            self._spent += SHARE * SHORT_S
        except Exception as e:  # the call has its answer
            self.refused = (e.because or e.what) if isinstance(e, CaptureError) else error_text(e)
            self.counts["not_recordable"] += 1
        self._spent += self._clock() - begin

    def _may_hold(self, rows: int, pasts: Sequence[torch.Tensor]) -> bool:
        """Whether there may be another set; the one that was not used for the longest gives way."""
        more = sum(t.numel() * t.element_size() // max(1, t.shape[d]) * rows for t, (_, d) in zip(pasts, self._inputs, strict=True))
        most = min(MAX_MEMORY * self._device.total(), (self._held() + self._device.free()) / (1 + MIN_LEFT))
        unused = sorted((s for s in self._sets if s.free()), key=lambda s: s.used)
        while self._sets and (len(self._sets) >= MAX_SETS or self._held() + more > most):
            if not unused:
                return False
            self._device.drain()
            self._sets.remove(unused.pop(0))
            self.counts["dropped"] += 1
        return more <= most

    def _record(self, rows: int, pasts: Sequence[torch.Tensor], length: int, inputs: Sequence[Any]) -> None:
        """Make buffers, and record a step on them; a replay is compared with its kernels one by one."""
        graph, run = self._graph(rows)
        made = _CacheBuffers(graph, pasts)
        given = len(graph.given)
        made.take(pasts, length)
        flat = made.inputs(inputs)
        want = [*run(*flat), *[buffer.clone() for buffer in made.buffers]]
        recording = self._device.record(run, flat, range(given, given + len(made.buffers) + 1))
        made.take(pasts, length)
        self._device.enter()
        try:
            got = recording.replay(flat)
        finally:
            self._device.leave()
        if difference := self._differ([*got, *made.buffers], want):
            raise CaptureError("a replay disagrees with the kernels it was recorded from", because=difference)
        del flat
        made.recorded(recording)
        made.used = self._clock()
        self._sets.append(made)
        self.counts["recorded"] += 1

    def let_go(self) -> bool:
        """Memory is short: buffers that nobody reads go, and for a minute there are no others; whether there were any."""
        if not self._sets or not self._lock.acquire(timeout=MAX_WAIT_S):
            return False
        try:
            self._device.drain()
            self.counts["dropped"] += len(self._sets)
            self._sets.clear()
            self._spent += SHARE * SHORT_S
            return True
        finally:
            self._lock.release()

    def _held(self) -> int:
        return sum(s.bytes for s in self._sets) + self._device.held()

    def counters(self) -> dict[str, int]:
        """What it did so far."""
        return {**self.counts, "device_bytes": self._held()}


def static_cache_library(
    graph: Graph, weights: Mapping[str, Any], better: Mapping[int, Run] | None = None
) -> Callable[[int], tuple[StaticCacheGraph, Run]]:
    """A graph on buffers of any size, as calls of torch's operators, or in better kernels where there are some for that size."""
    known = better or {}

    def static(rows: int) -> tuple[StaticCacheGraph, Run]:
        made = with_static_caches(graph, rows)
        return made, _counting(known.get(rows) or flat_function(made.graph, meaning, weights)[0], made.rows)

    return static


def _counting(run: Run, rows: int) -> Run:
    """The same, and the count is raised behind it."""

    def counted(*flat: Any) -> tuple[Any, ...]:
        outs = run(*flat)
        flat[-1].add_(rows)
        return outs

    return counted


def static_cache_sample(static: StaticCacheGraph, call: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A call's inputs, as the static graph takes them."""
    pasts = [call[g.input] for g in static.growths]
    here = _CacheBuffers(static, pasts)
    here.take(pasts, pasts[0].shape[static.growths[0].dim])
    return here.inputs(call)


_ALL: Living[StaticCacheRun] = Living()


def let_go_of_static_caches() -> bool:
    """Drop the static caches of all plans of this process; whether there were any."""
    return any([run.let_go() for run in _ALL])
