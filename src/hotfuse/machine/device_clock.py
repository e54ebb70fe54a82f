"""The time at which launched work is done: on an accelerator a call returns before its kernels have run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from hotfuse.machine.device_stream import being_recorded_here

Clock = Callable[[], float]


def being_recorded(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what a call with these inputs launches becomes part of a CUDA graph of the caller's: nothing may wait for it."""
    return any(t.is_cuda for t in tensors) and being_recorded_here()


def clock_of(tensors: Sequence[torch.Tensor]) -> Clock:
    """A clock for calls with these inputs: seconds when all that the calling thread's stream was given is done."""
    device = next((t.device for t in tensors if t.is_cuda), None)
    if device is None:
        return time.perf_counter

    def now() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return now


CYCLES_A_SECOND = 2e9
"""At least as many as a device has, so that it sleeps at least as long as it is asked to."""
MAX_SLEEP_S = 0.05
SLEEP_PER_LAUNCH = 1.3
"""What the device sleeps, times what launching takes: kernels with tensor descriptors take longer to launch than others."""


def device_seconds(run: Callable[[], object], device: torch.device, ahead_s: float, times: int = 1) -> float:
    """What a device alone takes for what a run launches. Launching may take longer than that, so the calling thread's stream first
    sleeps on the device, for about as long as launching takes, and events around what queues up behind tell."""
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(CYCLES_A_SECOND * min(ahead_s, MAX_SLEEP_S)))  # pyright: ignore[reportPrivateUsage]
    begin.record(stream)
    for _ in range(times):
        run()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / times


class DeviceTimer:
    """What a device alone takes for one kind of run, in several rounds. The device sleeps for as long as launching takes a thread
    that nobody keeps waiting: a program that waits for the whole device waits for that, too (20 ms where the interpreter lock was
    fought for). A round whose launching took longer reads too much; the least of several counts anyway."""

    def __init__(self, run: Callable[[], object], device: torch.device, times: int = 1, least_ahead_s: float = 0.0) -> None:
        """So many runs a round."""
        self._run, self._device, self._times, self._least_s = run, device, times, least_ahead_s
        self._launching_s = float("inf")

    def seconds(self) -> float:
        """One round's, per run."""
        if self._launching_s == float("inf"):
            self._launch()
        ahead = max(self._least_s, SLEEP_PER_LAUNCH * self._launching_s)
        return device_seconds(self._launch, self._device, ahead) / self._times

    def _launch(self) -> None:
        begin = time.thread_time()
        for _ in range(self._times):
            self._run()
        self._launching_s = min(self._launching_s, time.thread_time() - begin)
