"""The core that kernels are cut for: a target's lanes, registers and caches."""

from __future__ import annotations

from dataclasses import replace

from hotfuse.base.settings import Precision
from hotfuse.lower.cpu.tiling import Core, core_for
from hotfuse.native.target import CpuTarget


def host_core(target: CpuTarget, precision: Precision = "fp32") -> Core:
    """What tiling needs to know of this machine; a precision that it has no instructions for is not taken up."""
    caches = {m.name: m.bytes for m in target.memory}
    core = core_for(target.lanes, many_registers=target.registers >= 32, l1=caches.get("L1"), l2=caches.get("L2"),
                    precision=precision if target.has("avx512bf16") else "fp32")  # fmt: skip
    return replace(core, dots_bytes=target.dots_bytes, tiles=core.precision == "bf16" and target.matrix_unit)
