"""Kernels on trial: their results against the library's on real data, and their time on the device, beside serving.

Launching a small kernel from Python takes longer than the kernel, so times are the device's own (`machine.device_clock`). Nothing
is recorded as a graph here: that is for threads that serve (decision 34). The stream is the trial's own; calls go on meanwhile, and
the least of several rounds in turns counts. Where calls keep the device busy most of the time, most rounds are disturbed: the
stream goes before theirs, and no kernel is given up before it had several rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.device.pace import RestingPace
from hotfuse.machine.device_clock import DeviceTimer

Run = Callable[[], Sequence[Any]]
Differ = Callable[[Sequence[Any], Sequence[Any]], str]
"""How results differ from those they should be; empty if they do not."""

ROUNDS = 10
FOR_ALL = 4
"""Rounds in which every kernel is measured."""
BEST = 4
"""Kernels that are measured in the others."""
BEFORE_CALLS = -1
"""The priority of a stream that goes before those of ordinary calls."""
MAX_COMPARED = 1 << 20
"""Elements of a result that are compared in a trial: the first, the last, and some between. All of them are when the whole plan is
proven; here copying them would hold up the copies of calls."""
TIMES = 12
"""Runs of each in a round."""
AHEAD_S = 0.0012
"""What the device waits at least while a round is launched."""


@dataclass(frozen=True, slots=True)
class DeviceTrial:
    """What was found of one group."""

    library_us: float
    us: tuple[float | None, ...]
    """Per kernel; None for one whose results were wrong, or that could not be run."""
    wrong: str = ""
    """How, of the first of these."""

    def chosen_us(self, chosen: int) -> float:
        """What a kernel took, by its number; a negative one is the library's."""
        found = self.us[chosen] if chosen >= 0 else None
        return self.library_us if found is None else found

    @property
    def best(self) -> int:
        """The fastest right kernel; -1 where there is none."""
        right = [(us, i) for i, us in enumerate(self.us) if us is not None]
        return min(right)[1] if right else -1


def sampled(results: Sequence[Any]) -> list[Any]:
    """Results as they are, large tensors as some of their rows: evenly spread ones, and the last."""
    return [_some_rows(r) if isinstance(r, torch.Tensor) and r.numel() > MAX_COMPARED and r.dim() > 1 else r for r in results]


def _some_rows(t: torch.Tensor) -> torch.Tensor:
    rows = t.flatten(0, -2)
    step = -(-2 * t.numel() // MAX_COMPARED)
    last = max(1, rows.shape[0] // step)
    return torch.cat([rows[::step], rows[-last:]])


def _in_turns(runs: Sequence[Run]) -> Run:
    order = itertools.cycle(runs)
    return lambda: next(order)()


def tried(
    library: Sequence[Run], kernels: Sequence[Sequence[Run]], differ: Differ, device: torch.device, pace: RestingPace
) -> DeviceTrial:
    """Run all of them on the device, in turns.

    Each is given as its runs with the weights of several places in the model. A model reads its weights once a call, so between two
    runs they leave the cache, and a kernel that is best on one weight over and over is often not in the model.
    """
    stream = torch.cuda.Stream(device, priority=BEFORE_CALLS)
    stream.wait_stream(torch.cuda.current_stream(device))
    wrong = ""
    with torch.no_grad(), torch.cuda.stream(stream):
        want = sampled(library[0]())
        right: list[int] = []
        for i, run in enumerate(kernels):
            try:
                difference = differ(sampled(run[0]()), want)
            except HotfuseError as e:  # the driver refused this one
                difference = f"{e.what}: {e.because}"
            wrong = wrong or difference
            if not difference:
                right.append(i)
        least: dict[int, float] = {}
        runs = {-1: library, **{i: kernels[i] for i in right}}
        timers = {i: DeviceTimer(_in_turns(r), device, TIMES, AHEAD_S) for i, r in runs.items()}
        for number in range(ROUNDS):
            still = right if number < FOR_ALL else sorted(right, key=lambda i: least[i])[:BEST]
            for i in (-1, *still):
                us = pace(timers[i].seconds) * 1e6
                least[i] = min(us, least.get(i, us))
    torch.cuda.current_stream(device).wait_stream(stream)
    return DeviceTrial(least[-1], tuple(least.get(i) for i in range(len(kernels))), wrong)
