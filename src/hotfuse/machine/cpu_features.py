"""One row per CPU feature: the name the kernel advertises it under, and machine code that uses it.

The code is a few instructions of the feature followed by `return 90`. It is called as `int f(void *scratch)`, so it
may clobber caller-saved registers only. x86 rows may read the tile configuration at `scratch`.
"""

from __future__ import annotations

import platform

from hotfuse.base.lazy_dataclass import dataclass

RETURNS = 90
_X86_RETURN = "b85a000000c3"  # mov eax, 90; ret
_ARM_RETURN = "400b8052c0035fd6"  # mov w0, #90; ret


@dataclass(frozen=True, slots=True)
class Feature:
    """A CPU feature and a piece of code that traps where the feature is missing."""

    name: str
    flag: str
    """The word that advertises it in /proc/cpuinfo."""
    code: bytes
    tiles: bool = False
    """Needs the kernel's permission for AMX tile state first."""


def _x86(name: str, flag: str, code: str, *, tiles: bool = False) -> Feature:
    return Feature(name, flag, bytes.fromhex(code + _X86_RETURN), tiles)


def _arm(name: str, flag: str, code: str) -> Feature:
    return Feature(name, flag, bytes.fromhex(code + _ARM_RETURN))


_X86_64 = (
    _x86("sse4.2", "sse4_2", "660f3837c0"),  # pcmpgtq xmm0, xmm0
    _x86("avx", "avx", "c5fc58c0c5f877"),  # vaddps ymm0, ymm0, ymm0; vzeroupper (also below)
    _x86("avx2", "avx2", "c5fdfec0c5f877"),  # vpaddd ymm0, ymm0, ymm0
    _x86("fma", "fma", "c4e27db8c0c5f877"),  # vfmadd231ps ymm0, ymm0, ymm0
    _x86("f16c", "f16c", "c4e27d13c0c5f877"),  # vcvtph2ps ymm0, xmm0
    _x86("avx-vnni", "avx_vnni", "c4e27d50c0c5f877"),  # {vex} vpdpbusd ymm0, ymm0, ymm0
    _x86("avx512f", "avx512f", "62f17c4858c0c5f877"),  # vaddps zmm0, zmm0, zmm0
    _x86("avx512bw", "avx512bw", "62f17d48fdc0c5f877"),  # vpaddw zmm0, zmm0, zmm0
    _x86("avx512dq", "avx512dq", "62f2fd4840c0c5f877"),  # vpmullq zmm0, zmm0, zmm0
    _x86("avx512vl", "avx512vl", "62a17d20fec0c5f877"),  # vpaddd ymm16, ymm16, ymm16
    _x86("avx512vnni", "avx512_vnni", "62f27d4850c0c5f877"),  # vpdpbusd zmm0, zmm0, zmm0
    _x86("avx512bf16", "avx512_bf16", "62f27e4852c0c5f877"),  # vdpbf16ps zmm0, zmm0, zmm0
    _x86("avx512fp16", "avx512_fp16", "62f57c4858c0c5f877"),  # vaddph zmm0, zmm0, zmm0
    # ldtilecfg [rdi]; tilezero ...; (tdpbssd | tdpbf16ps) tmm0, tmm1, tmm2; tilerelease
    _x86("amx-tile", "amx_tile", "c4e2784907c4e27b49c0c4e27849c0", tiles=True),
    _x86("amx-int8", "amx_int8", "c4e2784907c4e27b49c0c4e27b49c8c4e27b49d0c4e26b5ec1c4e27849c0", tiles=True),
    _x86("amx-bf16", "amx_bf16", "c4e2784907c4e27b49c0c4e27b49c8c4e27b49d0c4e26a5cc1c4e27849c0", tiles=True),
)

_AARCH64 = (
    _arm("neon", "asimd", "00d4204e"),  # fadd v0.4s, v0.4s, v0.4s
    _arm("fp16", "asimdhp", "0014404e"),  # fadd v0.8h, v0.8h, v0.8h
    _arm("dotprod", "asimddp", "0094804e"),  # sdot v0.4s, v0.16b, v0.16b
    _arm("i8mm", "i8mm", "00a4804e"),  # smmla v0.4s, v0.16b, v0.16b
    _arm("bf16", "bf16", "00fc406e"),  # bfdot v0.4s, v0.8h, v0.8h
    _arm("sve", "sve", "0000a004"),  # add z0.s, z0.s, z0.s
    _arm("sve2", "sve2", "0074a004"),  # sqrdmulh z0.s, z0.s, z0.s
)


def known_features(machine: str | None = None) -> tuple[Feature, ...]:
    """The rows of an architecture, this one by default; empty where there are none yet."""
    machine = (machine or platform.machine()).lower()
    if machine in ("x86_64", "amd64"):
        return _X86_64
    if machine in ("aarch64", "arm64"):
        return _AARCH64
    return ()
