"""The seam of accelerators: what a device, its recordings and its generated kernels are to the rest of the package.

    DeviceBackend         runs of library kernels, recorded once and replayed (`cuda`)
    DeviceKernelBackend   device code of tile kernels, made in processes without a device, loaded where there is one (`triton`)

`backends.protocol` has the seam of this machine's own cores, and what both share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hotfuse.backends.protocol import Run

if TYPE_CHECKING:  # a seam needs the names of what passes through it, and nothing else
    import torch

    from hotfuse.backends.device_code import BuiltDeviceKernel, GpuTarget, LaunchShape
    from hotfuse.tile.program import Kernel


class RecordedRun(Protocol):
    """A run on an accelerator that is replayed for kinds of calls that recur."""

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """Replay, record, or launch kernel by kernel."""
        ...

    def replayed(self, *inputs: torch.Tensor) -> tuple[Any, ...] | None:
        """Replay, where something is recorded for such inputs; else None."""
        ...

    @property
    def kernel_by_kernel(self) -> Run:
        """What is recorded, for recordings around it."""
        ...

    def counters(self) -> dict[str, int]:
        """What it did so far."""
        ...


class LaunchedKernel(Protocol):
    """A kernel's function on one device."""

    def launch(self, pointers: list[int], stream: int) -> None:
        """On a stream, with the memory of every buffer in order."""
        ...


class DeviceKernelBackend(Protocol):
    """Makes device code of tile kernels, in processes without a device, and loads it where there is one (`triton`)."""

    name: str

    def unavailable(self) -> str:
        """Why no kernels can be generated; empty where they can."""
        ...

    def toolchain(self) -> str:
        """What code rests on besides its text, for cache keys."""
        ...

    def target(self, device: torch.device) -> GpuTarget:
        """What kernels for a device are compiled for; raises CaptureError where none are."""
        ...

    def source(self, kernel: Kernel, target: GpuTarget, how: LaunchShape) -> tuple[str, int]:
        """A kernel's text, for readers, and how many programs run it; raises CannotLower for instructions that devices lack."""
        ...

    def compile(self, kernel: Kernel, target: GpuTarget, how: LaunchShape) -> BuiltDeviceKernel:
        """Device code of a kernel; raises a HotfuseError where there is none."""
        ...

    def load(self, built: BuiltDeviceKernel, device: torch.device) -> LaunchedKernel:
        """Code as a function on a device; raises CaptureError where the driver refuses."""
        ...


class Replay(Protocol):
    """What was recorded of one run on a device."""

    def replay(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The results for other inputs of the same sizes and strides; they are the caller's own."""
        ...


class RecordingDevice(Protocol):
    """A device as recordings need it: a memory pool, the order of streams, and which threads may record."""

    def record(self, run: Run, inputs: Sequence[torch.Tensor], in_place: Collection[int] = ()) -> Replay:
        """Record a run; raises CaptureError where that cannot be. Inputs `in_place` are read and written where they lie: replays
        are for inputs at these addresses, which nobody holds for them."""
        ...

    def may_record(self) -> bool:
        """Whether the calling thread serves a call, on a stream that is not itself being recorded."""
        ...

    def enter(self) -> None:
        """The caller's stream goes on when the last replay is done."""
        ...

    def leave(self) -> None:
        """A replay was launched."""
        ...

    def drain(self) -> None:
        """Until the last replay is done."""
        ...

    def held(self) -> int:
        """Bytes of device memory that recordings hold."""
        ...

    def total(self) -> int:
        """Bytes of memory that the device has."""
        ...

    def free(self) -> int:
        """Bytes of memory that the program can still have."""
        ...

    def short_of_memory(self) -> str:
        """Why nothing should be recorded: there is little memory; empty where there is enough."""
        ...

    def random_state(self) -> Any:
        """The state of the device's own generator of random numbers; equal ones compare equal."""
        ...


MIN_LEFT = 2
"""Times the memory that recordings take of a device that has to be left to the program: it needs some between calls, too."""


def too_large(device: RecordingDevice) -> str:
    """Why what was just recorded is better let go of; empty where it leaves memory enough to the program."""
    held = device.held()
    left = device.free() if held else 0
    return f"its recordings hold {held >> 20} MiB and leave {left >> 20} MiB of the device" if left < MIN_LEFT * held else ""


class DeviceBackend(Protocol):
    """Devices of one kind, as runs of library kernels need them."""

    kind: str
    """torch's name of the kind of device."""
    records: str
    """What its recordings are called, for readers."""

    def recorded(
        self, run: Run, device: torch.device, in_background: Callable[[], bool],
        differ: Callable[[tuple[Any, ...], tuple[Any, ...]], str],
    ) -> RecordedRun:  # fmt: skip
        """A run whose calls are replayed where they recur. Threads for which `in_background` holds must not record; `differ` says
        how a first replay differs from the run itself, and one that does is not used."""
        ...

    def recorder(self, device: torch.device, in_background: Callable[[], bool]) -> RecordingDevice:
        """A device with a memory pool of its own, for those who decide themselves what is recorded."""
        ...

    def prepare(self, device: torch.device, copied_bytes: int) -> None:
        """Load what recordings and their comparisons need for the first time in a process, where no call waits for it. Tensors of
        more than `copied_bytes` will be compared on the device, others on the host."""
        ...

    def short_of_memory(self, device: torch.device) -> str:
        """Why nothing should be computed beside calls; empty where there is memory enough."""
        ...

    def let_go(self) -> bool:
        """Let go of all recordings of plans: a device has no memory left; whether there were any."""
        ...
