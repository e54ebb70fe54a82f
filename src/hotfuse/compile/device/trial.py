"""Kernels on trial: their results against the library's on real data, and their time on the device, beside serving.

Launching a small kernel from Python takes longer than the kernel, so times are the device's own (`machine.device_clock`). Nothing
is recorded as a graph here: that is for threads that serve (decision 34). The stream is the trial's own; calls go on meanwhile, and
the least of several rounds in turns counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotfuse.base.errors import HotfuseError
from hotfuse.machine.device_clock import device_seconds

Run = Callable[[], Sequence[Any]]
Differ = Callable[[Sequence[Any], Sequence[Any]], str]
"""How results differ from those they should be; empty if they do not."""

ROUNDS = 3
TIMES = 12
"""Runs of each in a round."""
AHEAD_S = 0.0012
"""What the device waits while a round is launched."""


@dataclass(frozen=True, slots=True)
class DeviceTrial:
    """What was found of one group."""

    library_us: float
    us: tuple[float | None, ...]
    """Per kernel; None for one whose results were wrong, or that could not be run."""
    wrong: str = ""
    """How, of the first of these."""

    @property
    def best(self) -> int:
        """The fastest right kernel; -1 where there is none."""
        right = [(us, i) for i, us in enumerate(self.us) if us is not None]
        return min(right)[1] if right else -1


def _in_turns(runs: Sequence[Run]) -> Run:
    order = itertools.cycle(runs)
    return lambda: next(order)()


def tried(library: Sequence[Run], kernels: Sequence[Sequence[Run]], differ: Differ, device: torch.device) -> DeviceTrial:
    """Run all of them on the device, in turns.

    Each is given as its runs with the weights of several places in the model. A model reads its weights once a call, so between two
    runs they leave the cache, and a kernel that is best on one weight over and over is often not in the model.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    wrong = ""
    with torch.no_grad(), torch.cuda.stream(stream):
        want = library[0]()
        right: list[int] = []
        for i, run in enumerate(kernels):
            try:
                difference = differ(run[0](), want)
            except HotfuseError as e:  # the driver refused this one
                difference = f"{e.what}: {e.because}"
            wrong = wrong or difference
            if not difference:
                right.append(i)
        least: dict[int, float] = {}
        for _ in range(ROUNDS):
            for i in (-1, *right):
                us = device_seconds(_in_turns(library if i < 0 else kernels[i]), device, AHEAD_S, TIMES) * 1e6
                least[i] = min(us, least.get(i, us))
    torch.cuda.current_stream(device).wait_stream(stream)
    return DeviceTrial(least[-1], tuple(least.get(i) for i in range(len(kernels))), wrong)
