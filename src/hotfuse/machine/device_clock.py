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
LONGEST_SLEEP_S = 0.05


def device_seconds(run: Callable[[], object], device: torch.device, ahead_s: float, times: int = 1) -> float:
    """What a device alone takes for what a run launches. Launching may take longer than that, so the calling thread's stream first
    sleeps on the device, for about as long as launching takes, and events around what queues up behind tell."""
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(CYCLES_A_SECOND * min(ahead_s, LONGEST_SLEEP_S)))  # pyright: ignore[reportPrivateUsage]
    begin.record(stream)
    for _ in range(times):
        run()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / times
