"""This machine as compilation sees it: the core that kernels are cut for, and the roofs that they are held against."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hotfuse.backends.llvm import peaks as llvm_peaks
from hotfuse.backends.llvm.emission.matrix_unit import has_tiles
from hotfuse.base.settings import Precision
from hotfuse.hpm.roofline import Roofline, roof
from hotfuse.lower.cpu.tiling import Core, core_for
from hotfuse.machine import peaks as machine_peaks
from hotfuse.machine.fingerprint import fingerprint
from hotfuse.machine.topology import topology
from hotfuse.native.target import CpuTarget, host
from hotfuse.profile.store import Store


def host_core(target: CpuTarget, precision: Precision = "fp32") -> Core:
    """What tiling needs to know of this machine; a precision that it has no instructions for is not taken up."""
    caches = {(c.level, c.kind): c.bytes for c in topology().caches}
    l1, l2 = caches.get((1, "data")), caches.get((2, "unified"))
    core = core_for(target.lanes, many_registers=target.name in ("avx512", "neon"), l1=l1, l2=l2,
                    precision=precision if target.has("avx512bf16") else "fp32")  # fmt: skip
    return replace(core, tiles=core.precision == "bf16" and has_tiles(target))


@dataclass(frozen=True, slots=True)
class Host:
    """The machine as calibration sees it."""

    machine: int
    core: Core
    at: Roofline


def this_host(store: Store, threads: int = 1, measure_peaks: bool = True) -> Host:
    """This machine with its peaks: those in the store, or measured now."""
    number = store.machine(fingerprint())
    known = store.peaks(number)
    try:
        peaks = machine_peaks.from_dict(known) if known is not None else None
    except ValueError:
        peaks = None
    if measure_peaks and (peaks is None or peaks.rate("f32", threads) is None):
        peaks = llvm_peaks.measure(sorted({1, threads}))
        store.machine(fingerprint(), peaks.to_dict())
    core = host_core(host())
    return Host(number, core, roof(peaks, topology(), core.lanes, threads))
