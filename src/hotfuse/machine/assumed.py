"""What is taken for granted of a machine that neither states nor measures it, stated for each architecture in one place.

Estimates made of these are compared with estimates alone, and every figure made of one says that it is estimated.
"""

from __future__ import annotations

import platform
from functools import cache

from hotfuse.base.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class AssumedCore:
    """A core of an architecture, as its servers usually are."""

    hz: float
    """Cycles a second when all cores are busy."""
    watts: float
    """What a busy core draws, its part of the package included."""
    joules_per_byte: float
    """Of memory, which no meter counts apart: it ranks what moves more against what computes more."""


_CORES = {
    "x86_64": AssumedCore(hz=2.5e9, watts=5.0, joules_per_byte=100e-12),  # such as 64 cores in 320 W and 12 pJ a bit
    "aarch64": AssumedCore(hz=2.6e9, watts=2.5, joules_per_byte=80e-12),  # such as 80 cores in 200 W and 10 pJ a bit
}
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}


@cache
def assumed_core(machine: str = "") -> AssumedCore:
    """For an architecture as `platform.machine()` names it, by default this machine's; unknown ones count as x86-64."""
    name = (machine or platform.machine()).lower()
    return _CORES.get(_SAME.get(name, name), _CORES["x86_64"])
