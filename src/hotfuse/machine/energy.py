"""Joules: from the processor's own meters (RAPL, through powercap) and from NVIDIA's library where they are there.

Elsewhere energy is *estimated* from processor time and the power that the system states; every figure says which of the two it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.assumed import assumed_core
from hotfuse.machine.topology import read_text, topology

_POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """Something that counts joules."""

    name: str
    read: Callable[[], int]
    """The count, in units of its own."""
    joules: float
    """Of one unit."""
    wraps: int | None = None
    """The largest count, after which it begins at 0."""


Source = Literal["measured", "estimated"]


def rapl_meters(root: Path = _POWERCAP) -> tuple[list[EnergyMeter], str]:
    """The processor packages' meters and why there are none; parts inside a package are left out, as it counts them."""
    found: list[EnergyMeter] = []
    denied = ""
    for zone in sorted(root.glob("*-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        counter = zone / "energy_uj"
        if read_text(counter) is None:
            denied = f"{counter} may not be read" if counter.exists() else denied
            continue
        wraps = read_text(zone / "max_energy_range_uj")
        name = read_text(zone / "name") or zone.name
        found.append(
            EnergyMeter(f"cpu {name}", lambda c=counter: int(read_text(c) or 0), 1e-6, int(wraps) if wraps else None)
        )
    return found, "" if found else denied or f"there is no RAPL under {root}"


def nvml_meters(library: str = "libnvidia-ml.so.1") -> tuple[list[EnergyMeter], str]:
    """One meter per NVIDIA GPU, and why there are none."""
    try:
        nvml = ctypes.CDLL(library)
        init, count_of, handle_of, total_of = (
            getattr(nvml, n)
            for n in (
                "nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetTotalEnergyConsumption",
            )
        )  # fmt: skip
    except (OSError, AttributeError) as e:
        return [], f"no NVML: {e}"
    if code := init():
        return [], f"NVML does not start: error {code}"
    count = ctypes.c_uint()
    if code := count_of(ctypes.byref(count)):
        return [], f"NVML finds no devices: error {code}"
    found: list[EnergyMeter] = []
    for i in range(count.value):
        handle = ctypes.c_void_p()
        if handle_of(i, ctypes.byref(handle)) == 0 and total_of(handle, ctypes.byref(ctypes.c_ulonglong())) == 0:
            found.append(EnergyMeter(f"gpu {i}", lambda h=handle: _nvml_total(total_of, h), 1e-3))
    return found, "" if found else "no GPU counts its energy"


def _nvml_total(total_of: Callable[..., int], handle: ctypes.c_void_p) -> int:
    value = ctypes.c_ulonglong()
    if code := total_of(handle, ctypes.byref(value)):
        raise OSError(f"NVML: error {code}")
    return int(value.value)


def meters() -> tuple[tuple[EnergyMeter, ...], dict[str, str]]:
    """What counts joules here, and for each kind that does not, why."""
    rapl, no_rapl = rapl_meters()
    gpus, no_gpus = nvml_meters()
    return (*rapl, *gpus), {k: v for k, v in (("rapl", no_rapl), ("nvml", no_gpus)) if v}


@cache
def watts_per_core(root: Path = _POWERCAP) -> float:
    """What a busy core draws: the power that the system states for its packages over their cores, or what is assumed."""
    stated = [read_text(zone / "constraint_0_power_limit_uw") for zone in root.glob("*-rapl:*") if zone.name.count(":") == 1]
    watts = sum(int(text) for text in stated if text and text.isdecimal()) * 1e-6
    top = topology()
    return watts / (top.physical_cores or top.logical_cpus) if watts > 0 else assumed_core().watts
