"""A device as its performance model knows it: a name, and what it has and reaches."""

from __future__ import annotations

import torch

from hotfuse.backends.device_code import GpuTarget
from hotfuse.base.settings import Settings
from hotfuse.compile.device.kept_peaks import kept_peaks
from hotfuse.hpm.device.features import DeviceShape, shape_of_device
from hotfuse.machine.device_rates import rates_of

LEAST_CACHE = 1 << 20
"""Bytes of a second-level cache, where torch does not tell."""


def described(device: torch.device, target: GpuTarget, settings: Settings) -> DeviceShape:
    """By what somebody measured of it, else by what it states."""
    stated = torch.cuda.get_device_properties(device)
    cache = max(LEAST_CACHE, int(getattr(stated, "L2_cache_size", 0)))
    peaks = kept_peaks(torch.cuda.get_device_name(device), settings)
    return shape_of_device(int(stated.multi_processor_count), target.shared, cache, peaks, rates_of(device))
