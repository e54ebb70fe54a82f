"""CUDA devices as a back end: runs of library kernels, or of generated ones among them, recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotfuse.backends.cuda.device import CudaDevice
from hotfuse.backends.cuda.first_use import prepare
from hotfuse.backends.cuda.free_memory import short_of_memory
from hotfuse.backends.cuda.graphs import GraphRun, Run, let_go_of_recordings


class CudaBackend:
    """One for all CUDA devices of a process."""

    kind = "cuda"
    records = "CUDA graphs"

    def recorded(
        self, run: Run, device: torch.device, in_background: Callable[[], bool],
        differ: Callable[[tuple[Any, ...], tuple[Any, ...]], str],
    ) -> GraphRun:  # fmt: skip
        """A run whose calls are replayed where they recur."""
        return GraphRun(run, self.recorder(device, in_background), differ)

    def recorder(self, device: torch.device, in_background: Callable[[], bool]) -> CudaDevice:
        """A device with a memory pool of its own."""
        return CudaDevice(device, in_background)

    def prepare(self, device: torch.device, copied_bytes: int) -> None:
        """Load what recordings and comparisons need for the first time in a process."""
        prepare(device, copied_bytes)

    def short_of_memory(self, device: torch.device) -> str:
        """Why nothing should be computed beside calls; empty where there is memory enough."""
        return short_of_memory(device)

    def let_go(self) -> bool:
        """Let go of all recordings of plans: the device has no memory left; whether there were any."""
        return let_go_of_recordings()
