"""What a device promises and what copies to it take: enough to say beforehand whether a model on the host is worth a try there."""

from __future__ import annotations

import functools
import time

import torch

from hotfuse.base.lazy_dataclass import dataclass

COPIED_BYTES = 1 << 22
ROUNDS = 3
FLOPS_A_CYCLE = 256
"""Of fp32, of one multiprocessor: 128 lanes, each one multiply-add."""
USED = 0.5
"""Part of its peaks that a model of many kernels reaches."""
NODE_S = 3e-6
"""A node of a graph that is replayed."""
COPY_S = 15e-6
"""What one copy takes besides its bytes."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Operations and bytes a second."""

    flops: float
    memory: float
    to_device: float
    from_device: float
    node_s: float = NODE_S
    measured: bool = False
    """Whether somebody calibrated the device; else they are what it states."""

    def seconds(self, flops: float, moved: float, nodes: int) -> float:
        """What a graph takes there, of what it computes and moves; launches are those of a replay."""
        return max(flops / (USED * self.flops), moved / (USED * self.memory)) + self.node_s * nodes

    def transfer_s(self, to: float, back: float, copies: int) -> float:
        """What copies take, of the bytes of inputs and results."""
        return to / self.to_device + back / self.from_device + COPY_S * copies


@functools.cache
def rates_of(device: torch.device) -> DeviceRates:
    """A CUDA device's: peaks as it states them, copies measured once, in some milliseconds. For the background."""
    stated = torch.cuda.get_device_properties(device)
    clock = float(getattr(stated, "clock_rate", 1_500_000)) * 1e3
    lines = float(getattr(stated, "memory_clock_rate", 1_500_000)) * 1e3 * 2 * getattr(stated, "memory_bus_width", 2048) / 8
    here = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    there = here.to(device)
    took = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize(device)
        between = time.perf_counter()
        here.copy_(there)
        took = [min(took[0], between - begin), min(took[1], time.perf_counter() - between)]
    return DeviceRates(stated.multi_processor_count * FLOPS_A_CYCLE * clock, lines, COPIED_BYTES / took[0], COPIED_BYTES / took[1])
