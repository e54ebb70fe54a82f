"""A CUDA device as recordings need it: a memory pool, the order of streams, and which threads may record."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from hotfuse.backends.cuda.free_memory import free_bytes, short_of_memory
from hotfuse.backends.cuda.graph_recording import Recording, Run, pool_bytes, raw_stream
from hotfuse.machine.device_stream import being_recorded_here

_DEFAULT = 0
"""The handle of the default stream."""


class CudaDevice:
    """One device, for the recordings of one plan: replays follow each other, whatever streams they are launched on."""

    def __init__(self, device: torch.device, in_background: Callable[[], bool]) -> None:
        self._device = device
        self._in_background = in_background
        self._pools: list[Any] = []
        """The last one is in use. One whose recordings are all gone cannot be used again, nor one in which a recording failed."""
        self._made: weakref.WeakSet[Recording] = weakref.WeakSet()
        """Recordings in the pool in use."""
        self._stream_of_recordings: torch.cuda.Stream | None = None
        """One for all: libraries keep memory to work in for every stream that they were ever called on."""
        self._done = torch.cuda.Event()
        self._index = torch.empty(0, device=device).device.index
        self._last: int | None = None
        """The stream of the last replay."""

    def record(self, run: Run, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()) -> Recording:
        """Record a run; raises CaptureError where that cannot be."""
        with torch.cuda.device(self._device):
            if self._stream_of_recordings is None:
                self._stream_of_recordings = torch.cuda.Stream(self._device)
            if not len(self._made):
                self._another_pool()
            try:
                made = Recording(run, inputs, self._stream_of_recordings, self._pools[-1], in_place)
            except Exception:
                self._stream_of_recordings = None
                self._another_pool()
                raise
            self._made.add(made)
            return made

    def _another_pool(self) -> None:
        self._pools = [p for p in self._pools if pool_bytes([p])]
        self._pools.append(torch.cuda.graph_pool_handle())
        self._made.clear()

    def may_record(self) -> bool:
        """Whether the calling thread serves a call, on a stream that is not itself being recorded."""
        return not self._in_background() and not being_recorded_here()

    def enter(self) -> None:
        """The caller's stream waits for the last replay, if that was launched on another one: a stream keeps its own order."""
        stream = self._stream()
        if self._last is not None and self._last != stream:
            if self._last == _DEFAULT:
                self._done.record(torch.cuda.default_stream(self._device))
            self._done.wait(torch.cuda.current_stream(self._device))

    def leave(self) -> None:
        """The results of this one are copied when the stream is here. The default stream, which most programs use, lives as
        long as the process, so it is asked only when another one enters."""
        self._last = self._stream()
        if self._last != _DEFAULT:
            self._done.record(torch.cuda.current_stream(self._device))

    def drain(self) -> None:
        """Until the device has done the last replay."""
        if self._last == _DEFAULT:
            torch.cuda.default_stream(self._device).synchronize()
        elif self._last is not None:
            self._done.synchronize()

    def _stream(self) -> int:
        return raw_stream(self._index)

    def held(self) -> int:
        """Bytes of device memory that recordings hold."""
        return pool_bytes(self._pools)

    def total(self) -> int:
        """Bytes of memory that the device has."""
        return torch.cuda.get_device_properties(self._device).total_memory

    def free(self) -> int:
        """Bytes of memory that the program can still have."""
        return free_bytes(self._device)

    def short_of_memory(self) -> str:
        """Why nothing should be recorded: there is little memory; empty where there is enough."""
        return short_of_memory(self._device)

    def random_state(self) -> bytes:
        """The state of the device's own generator of random numbers."""
        return torch.cuda.default_generators[self._index].get_state().numpy().tobytes()
