"""The time at which launched work is done: on an accelerator a call returns before its kernels have run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

Clock = Callable[[], float]


def being_recorded(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what a call with these inputs launches becomes part of a CUDA graph of the caller's: nothing may wait for it."""
    return any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing()


def clock_of(tensors: Sequence[torch.Tensor]) -> Clock:
    """A clock for calls with these inputs: seconds when all that the calling thread's stream was given is done."""
    device = next((t.device for t in tensors if t.is_cuda), None)
    if device is None:
        return time.perf_counter

    def now() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return now
