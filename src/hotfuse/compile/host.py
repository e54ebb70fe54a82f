"""This machine as compilation sees it: the core that kernels are cut for, and the roofline that they are held against."""

from __future__ import annotations

from hotfuse.backends import registry
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.roofline import Roofline, machine_roofline
from hotfuse.lower.cpu.host_core import host_core
from hotfuse.lower.cpu.tiling import Core
from hotfuse.machine import peaks as machine_peaks
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.machine.topology import topology
from hotfuse.native.target import host
from hotfuse.profile.store import Store


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as calibration sees it."""

    machine: int
    core: Core
    at: Roofline


def this_host(store: Store, threads: int = 1, *, measure_peaks: bool = True) -> Host:
    """This machine with its peaks: those in the store, or measured now."""
    number = store.machine(fingerprint())
    known = store.peaks(number)
    try:
        peaks = machine_peaks.from_dict(known) if known is not None else None
    except ValueError:
        peaks = None
    if measure_peaks and (peaks is None or not peaks.measured(threads)):
        before = set[int]() if peaks is None else {r.threads for r in peaks.rates}
        peaks = registry.host().measure_peaks(sorted({1, threads} | before))
        store.machine(fingerprint(), peaks.to_dict())
    core = host_core(host())
    return Host(number, core, machine_roofline(peaks, topology(), core.lanes, threads))
