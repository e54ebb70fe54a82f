"""Who this machine is, in two parts.

The *identity* is what compiled code relies on: architecture, operating system, features that execute. It is in
cache keys, so it holds nothing that changes with a reboot, a kernel update or the number of CPUs lent to a
container. The *tuning* part describes the machine for performance models: hints, which never make a key miss. What is measured
(peaks, drift) changes from day to day and is kept beside both, under the machine's number in the profile store.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.probe import usable_features
from hotfuse.machine.topology import Topology, topology


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Both parts as plain sorted pairs."""

    identity: tuple[tuple[str, str], ...]
    tuning: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        """A short name of the identity, for cache keys."""
        return _digest(self.identity)

    @property
    def tuning_key(self) -> str:
        """A short name of the tuning part, for rows of measurements."""
        return _digest(self.tuning)

    def to_dict(self) -> dict[str, object]:
        """A plain dict for JSON."""
        return {
            "key": self.key,
            "tuning_key": self.tuning_key,
            "identity": dict(self.identity),
            "tuning": dict(self.tuning),
        }


def _digest(pairs: tuple[tuple[str, str], ...]) -> str:
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


def make_fingerprint(top: Topology, usable: frozenset[str]) -> Fingerprint:
    """A fingerprint from its ingredients."""
    identity = {"arch": top.arch, "os": top.os, "features": " ".join(sorted(usable))}
    caches = " ".join(f"L{c.level}{c.kind[0]}={c.bytes}/{c.shared_by}" for c in top.caches)
    memory = "" if top.memory_bytes is None else f"{round(top.memory_bytes / (1 << 30))} GiB"
    tuning = {
        "cpu": top.cpu,
        "cores": str(top.physical_cores or top.logical_cpus),
        "usable_cpus": str(top.usable_cpus),
        "cpu_quota": "" if top.cpu_quota is None else f"{top.cpu_quota:g}",
        "numa_nodes": str(top.numa_nodes or 1),
        "caches": caches,
        "memory": memory,
        "max_mhz": "" if top.max_mhz is None else str(top.max_mhz),
    }
    return Fingerprint(tuple(sorted(identity.items())), tuple(sorted(tuning.items())))


_CACHE = re.compile(r"L(\d)([a-z])=(\d+)/")


def caches_of(tuning: Mapping[str, str]) -> dict[str, int]:
    """Bytes of a machine's data caches by level, `L1`, `L2`, …, as `make_fingerprint` wrote them down."""
    found = _CACHE.findall(tuning.get("caches", ""))
    return {f"L{level}": int(size) for level, kind, size in found if kind != "i"}


def hz_of(tuning: Mapping[str, str]) -> float | None:
    """Its highest clock, where the system stated one."""
    text = tuning.get("max_mhz", "")
    return float(text) * 1e6 if text.isdigit() and int(text) else None


def fingerprint() -> Fingerprint:
    """This machine's."""
    return make_fingerprint(topology(), usable_features())
