"""What recordings and comparisons use for the first time in a process: loaded where a model is taken, not in the call that records.

The first stream, the first recording and the kernels that compare bytes are loaded or set up when they are first used. On an H200
that is 4, 15 and 70 ms, once in a process, and the call that records takes 10 ms otherwise.
"""

from __future__ import annotations

import functools

import torch

from hotfuse.backends.cuda.device import CudaDevice
from hotfuse.machine.device_stream import being_recorded_here


def prepare(device: torch.device, copied_bytes: int) -> None:
    """Record, replay and compare more than `copied_bytes`, once per device; nothing where the calling thread records or memory is
    short."""
    if not being_recorded_here():
        with torch.cuda.device(device):
            _prepare(torch.cuda.current_device(), copied_bytes)


@functools.cache
def _prepare(index: int, copied_bytes: int) -> None:
    device = torch.device("cuda", index)
    made = CudaDevice(device, lambda: False)
    if made.short_of_memory():
        return
    with torch.no_grad():
        data = torch.zeros(copied_bytes + 1, dtype=torch.uint8, device=device)
        (copy,) = made.record(_copied, [data]).replay([data])
        torch.equal(copy, data)
        copy[:copied_bytes].cpu()
    made.drain()


def _copied(data: torch.Tensor) -> tuple[torch.Tensor]:
    return (data.clone(),)
