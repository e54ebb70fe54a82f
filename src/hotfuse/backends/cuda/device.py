"""A CUDA device as recordings need it: a memory pool, the order of streams, and which threads may record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hotfuse.backends.cuda.record import Recording, Run, pool_bytes


class CudaDevice:
    """One device, for the recordings of one plan: replays follow each other, whatever streams they are launched on."""

    def __init__(self, device: torch.device, in_background: Callable[[], bool]) -> None:
        self._device = device
        self._in_background = in_background
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()

    def record(self, run: Run, inputs: Sequence[torch.Tensor]) -> Recording:
        """Record a run; raises CaptureError where that cannot be."""
        with torch.cuda.device(self._device):
            return Recording(run, inputs, self._device, self._pool)

    def may_record(self) -> bool:
        """Whether the calling thread serves a call, on a stream that is not itself being recorded."""
        return not self._in_background() and not torch.cuda.is_current_stream_capturing()

    def enter(self) -> None:
        """The caller's stream waits for the last replay."""
        self._done.wait(torch.cuda.current_stream(self._device))

    def leave(self) -> None:
        """The results of this one are copied when the caller's stream is here."""
        self._done.record(torch.cuda.current_stream(self._device))

    def drain(self) -> None:
        """Until the device has done the last replay."""
        self._done.synchronize()

    def held(self) -> int:
        """Bytes of device memory that recordings hold."""
        return pool_bytes(self._pool)
