"""What device code is made for, and device code itself: plain data that workers and the serving process speak of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What a kernel is compiled for."""

    backend: str
    """`cuda` or `hip`."""
    arch: str
    """A compute capability times ten (`90`), or an architecture's name (`gfx942`)."""
    warp: int = 32

    @property
    def dependent(self) -> bool:
        """Whether a kernel may begin before the one in front of it has ended, and wait for it itself."""
        return self.backend == "cuda" and int(self.arch) >= 90

    @property
    def bulk(self) -> bool:
        """Whether a copy engine fetches blocks of matrices by tensor descriptors."""
        return self.backend == "cuda" and int(self.arch) >= 90

    @property
    def shared(self) -> int:
        """Bytes of shared memory that one program may take."""
        if self.backend != "cuda":
            return 64 << 10
        return {"80": 163 << 10, "87": 163 << 10, "90": 227 << 10, "100": 227 << 10}.get(self.arch, 99 << 10)

    @property
    def code(self) -> str:
        """What device code is called among Triton's results."""
        return "cubin" if self.backend == "cuda" else "hsaco"


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a program of a kernel runs."""

    warps: int
    stages: int
    """Loop iterations whose loads are under way at the same time."""
    tf32: bool = False
    """Whether products of fp32 may round their operands."""
    bulk: bool = False
    """Whether the copy engine fetches blocks of matrices."""
    split: int = 1
    """Programs that share the sums of one."""
    programs: int = 0
    """So many make one tile after the other; 0: one program a tile."""


@dataclass(frozen=True, slots=True)
class TensorDescriptor:
    """A matrix that the copy engine reads in blocks: what the driver is told, besides the address."""

    argument: int
    """The place of its memory among a kernel's arguments."""
    shape: tuple[int, int]
    stride: int
    """Elements from one row to the next."""
    block: tuple[int, int]
    swizzle: int
    """How blocks lie in shared memory, as the driver numbers it."""
    dtype: str
    """`fp16`, `bf16` or `fp32`."""


@dataclass(frozen=True, slots=True)
class BuiltDeviceKernel:
    """Device code, and what a launch has to give it."""

    code: bytes
    name: str
    """Of the function in it."""
    shared: int
    """Bytes of shared memory."""
    warps: int
    warp: int
    grid: int
    dependent: bool
    texts: Mapping[str, str]
    """Other stages by name, for a reader: `ptx` or `amdgcn`."""
    descriptors: tuple[TensorDescriptor, ...] = ()
    """Further arguments, behind its memory."""
    workspace: int = 0
    """Numbers of f32 that its programs leave each other; where there are some, they and the counters are further arguments too."""
    counters: int = 0
    """Words that are 0 before and after."""


def device_kernel(code: bytes, about: Mapping[str, Any]) -> BuiltDeviceKernel:
    """Device code with what was told of it as plain data (`dataclasses.asdict`)."""
    descriptors = tuple(
        TensorDescriptor(
            int(d["argument"]), _pair(d["shape"]), int(d["stride"]), _pair(d["block"]), int(d["swizzle"]), str(d["dtype"])
        )
        for d in about["descriptors"]
    )
    return BuiltDeviceKernel(
        code, str(about["name"]), int(about["shared"]), int(about["warps"]), int(about["warp"]), int(about["grid"]),
        bool(about["dependent"]), {}, descriptors, int(about["workspace"]), int(about["counters"]),
    )  # fmt: skip


def _pair(numbers: Sequence[int]) -> tuple[int, int]:
    first, second = numbers
    return int(first), int(second)
