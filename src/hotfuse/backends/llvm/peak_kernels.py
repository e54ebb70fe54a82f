"""Measuring what this machine reaches at best, with micro kernels of our own.

All probes take turns; each keeps its best of passes that are spread out over the time given, as machines change speed every few
milliseconds. What is measured last differs from what was measured first in nothing but luck.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hotfuse.backends.llvm import peaks_code
from hotfuse.backends.llvm.runs.abi import entry
from hotfuse.backends.llvm.threads.parallel import runtime
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.lower.common.pack import aligned
from hotfuse.machine.peaks import Bandwidth, Direction, ForkCost, MachinePeaks, Rate
from hotfuse.machine.topology import Topology, topology
from hotfuse.native.jit import Loaded, load_object
from hotfuse.native.target import CpuTarget, host
from hotfuse.native.toolchain import helper_object

BURST_S = 3e-4
"""What one run of a probe takes, about: long against the clock, short against the machine's changes of speed."""
PASSES = 12
PAUSE_S = 0.01
IDLE_S = 0.05
"""By then threads that wait for work have gone to sleep: the OpenMP runtime lets them spin for some milliseconds first."""
MIN_MEMORY = 64 << 20
MAX_MEMORY = 512 << 20
_UNIT = 8 * 64
"""Parts of memory are whole turns of the widest loop."""


@functools.cache
def _functions(target: CpuTarget) -> tuple[Loaded, dict[str, Callable[..., None]]]:
    names = peaks_code.names(target)
    loaded = load_object(helper_object(peaks_code.module_text(target), target), names, runtime().symbols)
    return loaded, {n: entry(loaded, n, 1, 3) for n in names}


@dataclass(slots=True)
class _Probe:
    """One thing to measure: what a run does, counted in the unit of its figure."""

    run: Callable[[int], None]
    """Given repeats."""
    each: float
    """Operations or bytes of one repeat."""
    warm: Callable[[], None]
    """Done before a run: threads are brought to where they wait for work, and what belongs in a cache into it."""
    repeats: int = 1
    times: list[float] = field(default_factory=list[float])

    def choose_repeats(self) -> None:
        """Choose repeats so that one run takes about a burst."""
        self.run(1)
        while True:
            taken = _timed(self.run, self.repeats)
            if taken > BURST_S / 2:
                return
            self.repeats = max(self.repeats * 2, int(self.repeats * BURST_S / max(taken, 1e-7)))

    def once(self) -> None:
        self.warm()
        self.times.append(_timed(self.run, self.repeats))

    def figure(self) -> tuple[float, float]:
        """Units a second at best, and how far the better half of the passes lies from it."""
        ordered = sorted(self.times)
        good = ordered[: max(1, (len(ordered) + 1) // 2)]
        return self.each * self.repeats / good[0], statistics.fmean(good) / good[0] - 1


def _timed(run: Callable[[int], None], repeats: int) -> float:
    start = time.perf_counter()
    run(repeats)
    return time.perf_counter() - start


def _whole(n: int) -> int:
    return max(_UNIT, n // _UNIT * _UNIT)


def level_bytes(top: Topology, threads: int) -> tuple[dict[str, int], dict[str, str]]:
    """Bytes of one thread's part that lie in each level, and why a level is left out."""
    caches = {c.level: c for c in top.caches if c.kind != "instruction"}
    sizes: dict[str, int] = {}
    missing: dict[str, str] = {}
    for level in (1, 2, 3):
        name, cache = f"L{level}", caches.get(level)
        if cache is None:
            missing[name] = "the system does not describe it"
            continue
        inner = caches.get(level - 1)
        part = cache.bytes // 2 // (threads if cache.shared_by > 1 else 1)
        if level == 3 and inner is not None:
            part = min(part, 4 * inner.bytes)  # others may have much of a large cache: what lies well inside is ours
        if inner is not None and part <= inner.bytes:
            missing[name] = f"half of it shared by {threads} is no more than the level before has"
            continue
        sizes[name] = _whole(part)
    largest = max((c.bytes for c in caches.values()), default=0)
    room = min(top.memory_limit_bytes or top.memory_bytes or MIN_MEMORY, top.memory_bytes or MIN_MEMORY) // 8
    total = max(MIN_MEMORY, min(4 * largest, MAX_MEMORY))
    if total <= room:
        sizes["memory"] = _whole(total // threads)
    else:
        missing["memory"] = f"{total >> 20} MiB would be more than an eighth of what there is"
    return sizes, missing


def measure(
    threads: Sequence[int] | None = None,
    *,
    passes: int = PASSES,
    top: Topology | None = None,
    target: CpuTarget | None = None,
) -> MachinePeaks:
    """Measure; a second or two. Counts of threads are 1 and torch's own unless given."""
    start = time.perf_counter()
    top, target = top or topology(), target or host()
    counts = sorted({1, torch.get_num_threads()} if threads is None else set(threads))
    _, run = _functions(target)
    missing: dict[str, str] = {}
    memory = _memory(top, counts)
    base = memory.ctypes.data
    rates: dict[tuple[str, int], _Probe] = {}
    streams: dict[tuple[str, Direction, int, int], _Probe] = {}
    directions: tuple[Direction, ...] = ("read", "write")
    for n in counts:
        wake = functools.partial(run["forks"], 0, 0, 20 if n > 1 else 0, n)
        for dtype in ("f32", "f64", "i8"):
            if f"rate_{dtype}" not in run:
                missing[f"rate of {dtype}"] = f"no instruction for it in {target.name}"
                continue
            call = _call(run[f"rate_{dtype}"], base, peaks_code.accumulators(target) * 64, n)
            rates[dtype, n] = _Probe(call, float(peaks_code.operations(target, dtype) * n), wake)
        sizes, without = level_bytes(top, n)
        missing.update({f"{level} with {n} threads": why for level, why in without.items()})
        for level, part in sizes.items():
            for direction in directions:
                call = _call(run[direction], base, part, n)
                fill = wake if level == "memory" else functools.partial(call, 1)
                streams[level, direction, n, part] = _Probe(call, float(part * n), fill)
    clocks: list[_Probe] = []
    if "clock" in run:
        clocks.append(_Probe(_call(run["clock"], base, 64, 1), float(peaks_code.CHAIN), lambda: None))
    else:
        missing["clock"] = f"no chain of known latency in {target.name}"
    probes = [*rates.values(), *streams.values(), *clocks]
    for p in probes:
        p.choose_repeats()
    for _ in range(passes):
        for p in probes:
            p.once()
        time.sleep(PAUSE_S)
    return MachinePeaks(
        target=target.name,
        rates=tuple(Rate(d, n, *p.figure()) for (d, n), p in rates.items()),
        bandwidths=tuple(Bandwidth(lv, d, n, *p.figure(), part) for (lv, d, n, part), p in streams.items()),
        forks=tuple(_fork(run["forks"], n) for n in counts if n > 1),
        call_ns=_call_ns(run["forks"]),
        at=time.time(),
        seconds=time.perf_counter() - start,
        missing=tuple(sorted(missing.items())),
        hz=next((p.figure()[0] for p in clocks), None),
    )


def _memory(top: Topology, counts: Sequence[int]) -> np.ndarray[Any, Any]:
    """Room for the largest working set, every page touched."""
    need = max(n * max(level_bytes(top, n)[0].values(), default=_UNIT) for n in counts)
    memory = aligned(max(need, 64 * 64 * max(counts)), np.dtype(np.uint8))
    memory[::4096] = 1
    return memory


def _call(function: Callable[..., None], base: int, part: int, threads: int) -> Callable[[int], None]:
    return lambda repeats: function(base, part, repeats, threads)


def _fork(forks: Callable[..., None], threads: int, tries: int = 7) -> ForkCost:
    """Best of many in a row; the middle of some after a rest, as that is no matter of best conditions."""
    found: list[float] = []
    rested: list[float] = []
    for _ in range(tries):
        time.sleep(IDLE_S)
        start = time.perf_counter()
        forks(0, 0, 1, threads)
        rested.append(time.perf_counter() - start)
        found.append(min(_timed(lambda r: forks(0, 0, r, threads), 200) for _ in range(3)) / 200)
    return ForkCost(threads, min(found) * 1e9, statistics.median(rested) * 1e9)


def _call_ns(function: Callable[..., None], calls: int = 2000) -> float:
    """From Python to native code that does nothing and back."""
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(calls):
            function(0, 0, 0, 1)
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e9


class MicroProbe:
    """The probe of `machine.speed_drift`: multiply-adds, reads from the second-level cache, cycles, on one thread.

    Its code is compiled for the first look, which comes half a minute after a model began to serve: a plan that calls wait for
    comes first.
    """

    def __init__(self, top: Topology | None = None, target: CpuTarget | None = None, tries: int = 4) -> None:
        self._target = target or host()
        sizes, _ = level_bytes(top or topology(), 1)
        self._part = sizes.get("L2", 128 << 10)
        self._tries = tries
        self.work = {"fma": float(peaks_code.operations(self._target, "f32")), "l2": float(self._part)}
        """Operations or bytes of one repeat."""
        self._repeats = {"fma": 200, "l2": 8, "clock": 4000}
        if "clock" in peaks_code.names(self._target):
            self.work["clock"] = float(peaks_code.CHAIN)

    @functools.cached_property
    def _memory(self) -> npt.NDArray[np.uint8]:
        memory = aligned(max(self._part, 64 * 64), np.dtype(np.uint8))
        memory[::4096] = 1
        return memory

    @functools.cached_property
    def _runs(self) -> dict[str, Callable[[int], None]]:
        base, (_, run) = self._memory.ctypes.data, _functions(self._target)
        runs = {
            "fma": _call(run["rate_f32"], base, peaks_code.accumulators(self._target) * 64, 1),
            "l2": _call(run["read"], base, self._part, 1),
        }
        return runs | ({"clock": _call(run["clock"], base, 64, 1)} if "clock" in self.work else {})

    def baseline(self, peaks: MachinePeaks) -> dict[str, float]:
        """Seconds the probes take where the machine is as fast as it was measured."""
        at_best = {"fma": peaks.rate("f32"), "l2": peaks.bandwidth("L2"), "clock": peaks.hz}
        at_best = {n: r for n, r in at_best.items() if n in self.work}
        return {n: self.work[n] * self._repeats[n] / r for n, r in at_best.items() if r}

    def __call__(self) -> dict[str, float]:
        """Seconds of each, the best of a few."""
        found: dict[str, float] = {}
        for n, run in self._runs.items():
            run(1)
            found[n] = min(_timed(run, self._repeats[n]) for _ in range(self._tries))
        return found
