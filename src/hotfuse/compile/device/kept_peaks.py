"""Measured peaks of a device, for processes that come later: `hotfuse calibrate --device cuda:0` keeps them, signed like code."""

from __future__ import annotations

import torch

from hotfuse.base.clock import is_recent
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address, digest, versions
from hotfuse.cache.place import folder_of
from hotfuse.machine.device_peaks import DevicePeaks, peaks_from
from hotfuse.machine.device_rates import DeviceRates, rates_of

BELIEVED_S = 30 * 86_400.0
"""A device's peaks are those of its kind; a driver or a cooling that changed shows within a month."""


def keep_peaks(peaks: DevicePeaks, settings: Settings) -> bool:
    """For later processes; whether there is a place for it."""
    folder = folder_of(settings)
    if folder is None:
        return False
    folder.put(_address(peaks.name), peaks.to_dict())
    return True


def kept_peaks(name: str, settings: Settings) -> DevicePeaks | None:
    """What was measured of a device of this name; None where nothing was, or long ago."""
    folder = folder_of(settings)
    found = None if folder is None else folder.get(_address(name))
    if found is None:
        return None
    try:
        peaks = peaks_from(found[0])
    except ValueError:  # of another version of ours: it is measured again
        return None
    return peaks if is_recent(peaks.at, BELIEVED_S) else None


def known_rates(device: torch.device, settings: Settings) -> DeviceRates:
    """A device's rates: measured where somebody calibrated it, else as it states them."""
    peaks = kept_peaks(torch.cuda.get_device_name(device), settings) if device.type == "cuda" else None
    if peaks is None or "f32" not in peaks.products:
        return rates_of(device)
    return measured_rates(peaks)


def measured_rates(peaks: DevicePeaks) -> DeviceRates:
    """What predictions are made of. Nodes cost what a recorded one was measured to, and the part of a small kernel beyond that."""
    node = peaks.node_s if peaks.node_s is not None else peaks.kernel_s
    return DeviceRates(peaks.products["f32"], peaks.memory, peaks.to_device, peaks.from_device, node_s=node, measured=True)


def _address(name: str) -> Address:
    return Address("device peaks", digest(name), dict(versions()))
