"""What device code is made for, and device code itself: plain data that workers and the serving process speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
