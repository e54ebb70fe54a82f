"""A device as its performance model knows it: what it has, what it reaches, and whether new measurements of it were kept."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from hotfuse.backends.device_code import GpuTarget
from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import Settings
from hotfuse.compile.answer_bodies import DeviceTimesAnswer, received
from hotfuse.compile.device.kept_peaks import kept_peaks
from hotfuse.compile.workers import wire
from hotfuse.hpm.device.features import DeviceShape, shape_of_device
from hotfuse.machine.device_rates import rates_of

MIN_CACHE = 1 << 20
"""Bytes of a second-level cache, where torch does not tell."""


def described(device: torch.device, target: GpuTarget, settings: Settings) -> DeviceShape:
    """By what somebody measured of it, else by what it states."""
    stated = torch.cuda.get_device_properties(device)
    cache = max(MIN_CACHE, int(getattr(stated, "L2_cache_size", 0)))
    peaks = kept_peaks(torch.cuda.get_device_name(device), settings)
    return shape_of_device(int(stated.multi_processor_count), target.shared, cache, peaks, rates_of(device))


def untaught(answer: Future[wire.Message] | None) -> str:
    """Why what kernels took was not kept for the model, as the end of a note; empty where it was, or nobody has answered yet."""
    if answer is None or not answer.done() or answer.cancelled():
        return ""
    try:
        because = received(answer.result(), DeviceTimesAnswer)[0].because
    except HotfuseError as e:
        because = e.because or e.what
    return f"; what they took was not kept: {because}" if because else ""
