"""Which CPU features really execute.

Some machines advertise instructions that trap when used (seen: AMX in a virtual machine). A feature is therefore
believed only when it is advertised *and* an instruction of it ran in a throw-away process: `machine.probe_child` forks one
child per feature, so a trap kills only that child. The whole probe takes about a tenth of a second. Its result is kept for the
life of the process, and noted for others during the same boot (`remember_with`): what executed once does so again there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.cpu_features import RETURNS, Feature, known_features

_TRIAL = Path(__file__).with_name("probe_child.py")
_SECONDS = 120
LIMIT = "HOTFUSE_FEATURES"
"""Features that this process and its workers may use, between blanks, where code is made for a machine that executes less.
Only fewer can be asked for; set before anything is compiled."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a feature's trial showed."""

    name: str
    advertised: bool
    executes: bool
    detail: str
    """How the trial ended: `ran`, `killed by SIGILL`, ..."""

    @property
    def usable(self) -> bool:
        """Advertised and executed: the only features code may be compiled for."""
        return self.advertised and self.executes

    def to_dict(self) -> dict[str, object]:
        """A plain dict for JSON."""
        return {
            "name": self.name,
            "advertised": self.advertised,
            "executes": self.executes,
            "usable": self.usable,
            "detail": self.detail,
        }


def advertised_flags(cpuinfo: str | None = None) -> frozenset[str]:
    """The words the kernel lists as this CPU's features; empty where the system does not say."""
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text(errors="replace") if path.exists() else ""
    for line in cpuinfo.splitlines():
        key, _, words = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return frozenset(words.split())
    return frozenset()


def probe(features: Sequence[Feature], flags: frozenset[str]) -> tuple[Probed, ...]:
    """Run the code of each feature in a process of its own and report how it ended."""
    if not features:
        return ()
    if sys.platform != "linux":
        return tuple(Probed(f.name, f.flag in flags, executes=False, detail="not probed: needs Linux") for f in features)
    request = json.dumps([{"code": f.code.hex(), "tiles": f.tiles} for f in features])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_TRIAL)],
            input=request,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
        answers: list[dict[str, int | None]] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        stderr = getattr(e, "stderr", None) or ""
        raise InternalError("the feature probe's process failed", because=f"{e} {stderr}".strip()) from e
    return tuple(_judge(f, flags, a) for f, a in zip(features, answers, strict=True))


def _judge(feature: Feature, flags: frozenset[str], answer: dict[str, int | None]) -> Probed:
    returned, killer = answer["returned"], answer["signal"]
    if killer:
        detail = f"killed by {signal.Signals(killer).name}"
    elif returned == RETURNS:
        detail = "ran"
    elif returned == 255 and feature.tiles:
        detail = "the kernel refuses tile state"
    else:
        detail = f"returned {returned}"
    return Probed(feature.name, feature.flag in flags, detail == "ran", detail)


class ProbeMemory(Protocol):
    """Where trials are noted for later processes."""

    def recall(self, name: str, circumstances: str, /) -> Any:
        """What was noted in the same circumstances; None where nothing was."""
        ...

    def keep(self, name: str, circumstances: str, value: Any, /) -> None:
        """Note it."""
        ...


_memory: ProbeMemory | None = None


def remember_with(memory: ProbeMemory | None) -> None:
    """Note trials for later processes; the last call decides."""
    global _memory
    _memory = memory


@functools.cache
def features() -> tuple[Probed, ...]:
    """Every known feature of this machine's architecture: probed once per process, or by an earlier one during the same boot."""
    known, memory = known_features(), _memory
    where = "" if memory is None else circumstances(known)
    if memory is not None and where and (noted := _from_note(memory.recall("features", where), known)) is not None:
        return noted
    found = probe(known, advertised_flags())
    if memory is not None and where:
        memory.keep("features", where, [[p.name, p.advertised, p.executes, p.detail] for p in found])
    return found


def _from_note(noted: Any, known: Sequence[Feature]) -> tuple[Probed, ...] | None:
    """Trials as they were noted; None where that is not what was asked."""
    try:
        found = tuple(Probed(str(n), bool(a), bool(e), str(d)) for n, a, e, d in noted)
    except (TypeError, ValueError):
        return None
    return found if [p.name for p in found] == [f.name for f in known] else None


def circumstances(known: Sequence[Feature]) -> str:
    """What trials depend on: the boot, the host or container, the kind of core, and what is tried. Empty where nobody can tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        cpu, _, _ = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")
        trial = _TRIAL.read_bytes()
    except OSError:
        return ""
    moving = ("cpu MHz", "bogomips", "BogoMIPS", "processor", "apicid", "initial apicid", "core id", "physical id")
    core = [line for line in cpu.splitlines() if line.partition(":")[0].strip() not in moving]
    parts = (boot, os.uname().nodename, os.uname().release, *core, *(f"{f.name} {f.code.hex()}" for f in known))
    return hashlib.sha256("\n".join(parts).encode() + trial).hexdigest()


def usable_features() -> frozenset[str]:
    """The names of the features code may be compiled for: those that execute, or of them what this process was limited to."""
    found = frozenset(p.name for p in features() if p.usable)
    allowed = os.environ.get(LIMIT)
    return found if allowed is None else found & set(allowed.split())
