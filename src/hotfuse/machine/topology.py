"""Cores, caches and memory as the system describes them, and what of them this process may use.

All figures come from /sys, /proc and the control group; one that the system does not give is None or
absent, never guessed.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.assumed import assumed_core
from hotfuse.machine.cores import allowed, quota

_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache as CPU 0 sees it."""

    level: int
    kind: str
    """`data`, `instruction` or `unified`."""
    bytes: int
    line: int
    shared_by: int
    """How many logical CPUs share it."""


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """Memory as a target sees it."""

    name: str
    """`L1`, `L2`, …, `memory`; `shared` of a GPU's block."""
    bytes: int | None
    """None where the system does not say."""
    shared_by: int = 1
    """How many cores (or a GPU's processors) share it."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The machine, and the share of it that is ours."""

    cpu: str
    arch: str
    os: str
    kernel: str
    logical_cpus: int
    physical_cores: int | None
    packages: int | None
    numa_nodes: int | None
    usable_cpus: int
    """CPUs this process may run on (affinity)."""
    cpu_quota: float | None
    """CPUs' worth of time the control group allows; None is unlimited."""
    caches: tuple[Cache, ...]
    memory_bytes: int | None
    memory_limit_bytes: int | None
    """The control group's limit; None is unlimited."""
    max_mhz: int | None = None
    """The highest clock that the system may choose."""

    def to_dict(self) -> dict[str, object]:
        """A plain dict for JSON."""
        return asdict(self)

    @property
    def levels(self) -> tuple[MemoryLevel, ...]:
        """The memory that data of one core passes through, nearest first."""
        data = sorted((c for c in self.caches if c.kind != "instruction"), key=lambda c: c.level)
        caches = tuple(MemoryLevel(f"L{c.level}", c.bytes, c.shared_by) for c in data)
        return (*caches, MemoryLevel("memory", self.memory_bytes, self.logical_cpus))


def read_text(path: Path) -> str | None:
    """A small system file's text, or None where it is absent or forbidden."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def parse_size(text: str) -> int:
    """`48K` -> 49152."""
    return int(text[:-1]) * _SIZES[text[-1]] if text[-1:] in _SIZES else int(text)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` -> (0, 1, 2, 3, 8)."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def _caches(root: Path) -> tuple[Cache, ...]:
    found: list[Cache] = []
    for index in sorted(root.glob("devices/system/cpu/cpu0/cache/index[0-9]*")):
        level, kind, size = (read_text(index / name) for name in ("level", "type", "size"))
        if level is None or kind is None or size is None:
            continue
        line = read_text(index / "coherency_line_size") or "0"
        shared = parse_cpu_list(read_text(index / "shared_cpu_list") or "0")
        found.append(Cache(int(level), kind.lower(), parse_size(size), int(line), len(shared)))
    return tuple(found)


def _cores(root: Path) -> tuple[int | None, int | None]:
    """Physical cores and packages."""
    cores: set[tuple[str, str]] = set()
    for cpu in root.glob("devices/system/cpu/cpu[0-9]*/topology"):
        package, core = read_text(cpu / "physical_package_id"), read_text(cpu / "core_id")
        if package is not None and core is not None:
            cores.add((package, core))
    return (len(cores), len({p for p, _ in cores})) if cores else (None, None)


def _cpu_name(root: Path) -> str:
    text = read_text(root / "cpuinfo") or ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Processor", "cpu model"):
            return value.strip()
    return platform.processor() or "unknown"


@cache
def stated_hz(root: Path = Path("/sys"), proc: Path = Path("/proc")) -> float:
    """Cycles a second of a core as the system states them, for rooflines nobody has measured; an assumption where it does not."""
    if (mhz := _max_mhz(root)) is not None:
        return mhz * 1e6
    stated = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", read_text(proc / "cpuinfo") or "", re.MULTILINE)
    return max(float(m) for m in stated) * 1e6 if stated else assumed_core().hz


def _max_mhz(root: Path) -> int | None:
    text = read_text(root / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    return int(text) // 1000 if text and text.isdecimal() else None


def _memory(proc: Path) -> int | None:
    for line in (read_text(proc / "meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return None


def _memory_limit(root: Path, total: int | None) -> int | None:
    text = read_text(root / "fs/cgroup/memory.max") or read_text(root / "fs/cgroup/memory/memory.limit_in_bytes")
    limit = int(text) if text and text != "max" else None
    # Version 1 control groups write "no limit" as a number near the largest.
    return None if limit is None or (total is not None and limit > total) else limit


def topology(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> Topology:
    """Read the machine's description; the roots are parameters so that tests can bring their own machine."""
    cores, packages = _cores(sys_root)
    nodes = len(list(sys_root.glob("devices/system/node/node[0-9]*"))) or None
    total = _memory(proc_root)
    logical = os.cpu_count() or 1
    return Topology(
        cpu=_cpu_name(proc_root),
        arch=platform.machine(),
        os=platform.system(),
        kernel=platform.release(),
        logical_cpus=logical,
        physical_cores=cores,
        packages=packages,
        numa_nodes=nodes,
        usable_cpus=len(allowed()) or logical,
        cpu_quota=quota(sys_root, proc_root),
        caches=_caches(sys_root),
        memory_bytes=total,
        memory_limit_bytes=_memory_limit(sys_root, total),
        max_mhz=_max_mhz(sys_root),
    )
