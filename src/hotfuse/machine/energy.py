"""Joules: from the processor's own meters (RAPL, through powercap) and from NVIDIA's library where they are there.

Elsewhere energy is *estimated* from processor time, and every figure says which of the two it is.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from hotfuse.machine.topology import read_text

WATTS_PER_CORE = 5.0
"""What a busy server core draws, roughly: only good for comparing one estimate with another."""
JOULES_PER_BYTE = 100e-12
"""What a byte to or from memory takes beside the core's time: an estimate of the same worth."""
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


@dataclass(frozen=True, slots=True)
class MeteredJoules:
    """Joules of one meter, or estimated from processor time where the processor has none."""

    name: str
    joules: float
    source: Source


@dataclass(frozen=True, slots=True)
class Joules:
    """What work took."""

    parts: tuple[MeteredJoules, ...]
    seconds: float

    @property
    def total(self) -> float:
        """Of all parts; they do not overlap."""
        return sum(p.joules for p in self.parts)

    @property
    def source(self) -> Source:
        """`measured` only where every part was."""
        return "measured" if all(p.source == "measured" for p in self.parts) else "estimated"


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


class Energy:
    """Joules of a piece of work: `with Energy() as e: work()`, then `e.joules`. Meters count the whole machine."""

    def __init__(self, given: Sequence[EnergyMeter] | None = None, watts_per_core: float = WATTS_PER_CORE) -> None:
        self._meters = tuple(meters()[0] if given is None else given)
        self._watts = watts_per_core
        self.joules: Joules | None = None
        self._first: list[int] = []
        self._wall = self._cpu = 0.0

    def __enter__(self) -> Energy:
        self._first = [m.read() for m in self._meters]
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        parts = [
            MeteredJoules(m.name, _taken(m, a) * m.joules, "measured") for m, a in zip(self._meters, self._first, strict=True)
        ]
        if not any(m.name.startswith("cpu") for m in self._meters):
            parts.append(MeteredJoules("cpu", cpu * self._watts, "estimated"))
        self.joules = Joules(tuple(parts), wall)


def _taken(meter: EnergyMeter, first: int) -> int:
    """Units since the first look; a counter that wrapped has gone once through its whole range."""
    now = meter.read()
    return now - first if now >= first or meter.wraps is None else now + meter.wraps - first
