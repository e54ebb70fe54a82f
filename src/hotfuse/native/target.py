"""What machine code is made for: an instruction-set level, and nothing beyond what was seen to execute.

Levels differ in vector width and in the features LLVM may use. The features of this machine's levels come from
`machine.probe` (advertised *and* executed); the name of the CPU only tunes scheduling, it never allows an instruction.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Set as AbstractSet

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.machine.probe import usable_features
from hotfuse.machine.topology import MemoryLevel, topology

_X86 = "x86_64-unknown-linux-gnu"
_ARM = "aarch64-unknown-linux-gnu"
_OPTIONAL = {
    "avx512": ("avx512vnni", "avx512bf16", "f16c", "amx-tile", "amx-bf16"),
    "avx2": ("avx-vnni", "f16c"),
    "neon": (),
    "generic": (),
}
_NEEDS = {
    "avx512": ("sse4.2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx2": ("sse4.2", "avx", "avx2", "fma"),
    "neon": ("neon",),
    "generic": (),
}
_BYTES = {"avx512": 64, "avx2": 32, "neon": 16, "generic": 16}
_REGISTERS = {"avx512": 32, "avx2": 16, "neon": 32, "generic": 16}
_LLVM = {"avx-vnni": "avxvnni"}
"""Features that LLVM spells otherwise than the probe."""
_ORDER = ("avx512", "avx2", "neon", "generic")


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """Everything code generation needs to know of a machine; equal targets make equal code."""

    triple: str
    cpu: str
    """LLVM's base model: a baseline, never the host's own name, which would allow what was not probed."""
    features: tuple[str, ...]
    """The probe's names of features, all of which must execute."""
    vl_bytes: int
    """Bytes of one vector register that code should fill."""
    name: str
    tuned: bool = False
    """Whether to schedule for this machine's own CPU; otherwise that is left to LLVM. A hint: no key may depend on it."""

    @property
    def tune(self) -> str:
        """LLVM's name of the CPU to schedule for; asking loads LLVM."""
        if not self.tuned:
            return ""
        from hotfuse.native.host_cpu import host_cpu

        return host_cpu()

    @property
    def lanes(self) -> int:
        """How many fp32 numbers a vector holds; every dtype is cut into as many lanes, so that casts stay lane by lane."""
        return self.vl_bytes // 4

    @property
    def device(self) -> str:
        """torch's name of the kind of device."""
        return "cpu"

    @property
    def registers(self) -> int:
        """Vector registers that the instruction set names."""
        return _REGISTERS[self.name]

    @property
    def memory(self) -> tuple[MemoryLevel, ...]:
        """The memory levels of this machine, nearest first: a hint for cutting loops, whatever target the code is made for."""
        return topology().levels

    @property
    def matrix_unit(self) -> bool:
        """Whether products of bf16 may be made block by block."""
        return self.has("amx-tile") and self.has("amx-bf16")

    @property
    def dots_bytes(self) -> bool:
        """Whether four products of bytes, added to 32 bits, are one instruction."""
        return self.has("avx512vnni") or self.has("avx-vnni")

    def has(self, feature: str) -> bool:
        """Whether code may use a feature."""
        return feature in self.features

    @property
    def fma(self) -> bool:
        """Whether fused multiply-add is an instruction; without it, LLVM would call a slow library function."""
        return self.name == "neon" or self.has("fma")

    @property
    def feature_text(self) -> str:
        """LLVM's feature string; wide vectors are wanted whatever the tuning says."""
        wide = ("-prefer-256-bit",) if self.name == "avx512" else ()
        return ",".join((*(f"+{_LLVM.get(f, f)}" for f in self.features), *wide))


def level(name: str, usable: AbstractSet[str], *, tuned: bool = False) -> CpuTarget:
    """The target of a level on a machine that executes `usable`; raises where the machine lacks what it needs."""
    if name not in _NEEDS:
        raise InternalError(f"there is no instruction-set level {name!r}", hint=f"one of {', '.join(_ORDER)}")
    missing = [f for f in _NEEDS[name] if f not in usable]
    if missing:
        raise InternalError(f"level {name} needs {', '.join(missing)}", because="the machine does not execute it")
    features = (*_NEEDS[name], *(f for f in _OPTIONAL[name] if f in usable))
    if name == "neon":
        return CpuTarget(_ARM, "generic", features, _BYTES[name], name, tuned)
    return CpuTarget(_X86, "x86-64", features, _BYTES[name], name, tuned)


def level_features(name: str) -> tuple[str, ...] | None:
    """What every machine of a level executes, and half-precision conversions, which all of them have had since AVX2; None where
    there is no such level."""
    return (*_NEEDS[name], *(f for f in _OPTIONAL[name] if f == "f16c")) if name in _NEEDS else None


def level_of(features: str) -> str:
    """The best level among names of features that execute, as a machine's row in a database has them."""
    return next(name for name in _ORDER if set(_NEEDS[name]) <= set(features.split()))


def cross_neon() -> CpuTarget:
    """AArch64 with its baseline vectors, for compiling on another machine."""
    return level("neon", {"neon"})


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


@functools.cache
def host_levels() -> tuple[CpuTarget, ...]:
    """The levels that this machine executes, best first; the last is the architecture's baseline."""
    usable = usable_features()
    if _is_x86():
        names = [n for n in ("avx512", "avx2", "generic") if set(_NEEDS[n]) <= usable]
    elif platform.machine().lower() in ("aarch64", "arm64"):
        names, usable = ["neon"], usable | {"neon"}
    else:
        raise InternalError(f"no code generation for {platform.machine()!r}", because="only x86-64 and AArch64 are known")
    return tuple(level(n, usable, tuned=True) for n in names)


def host() -> CpuTarget:
    """The best level of this machine."""
    return host_levels()[0]
