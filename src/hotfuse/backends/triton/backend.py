"""Triton as a back end: tile kernels become device code in any process, and functions where there is a device."""

from __future__ import annotations

from importlib.metadata import version

import torch

from hotfuse.backends.device_code import BuiltDeviceKernel, GpuTarget, LaunchShape
from hotfuse.backends.device_protocol import LaunchedKernel
from hotfuse.backends.triton.device_build import build, triton_missing
from hotfuse.backends.triton.driver import DeviceFunction
from hotfuse.backends.triton.emit import TritonSource, emit
from hotfuse.base.errors import CaptureError
from hotfuse.tile.program import Kernel


class TritonBackend:
    """One for all devices that Triton compiles for; code is loaded on CUDA devices."""

    name = "triton"

    def unavailable(self) -> str:
        """Why no kernels can be generated; empty where they can."""
        return triton_missing()

    def toolchain(self) -> str:
        """What code rests on besides its text."""
        return f"triton {version('triton')}"

    def target(self, device: torch.device) -> GpuTarget:
        """What kernels for a device are compiled for."""
        if torch.version.hip is not None:
            raise CaptureError("no kernels are generated for this device", because="code for AMD is compiled, not yet loaded")
        major, minor = torch.cuda.get_device_capability(device)
        return GpuTarget("cuda", str(10 * major + minor))

    def source(self, kernel: Kernel, target: GpuTarget, how: LaunchShape) -> tuple[str, int]:
        """A kernel's text, and how many programs run it."""
        made = _emitted(kernel, target, how)
        return made.text, made.grid

    def compile(self, kernel: Kernel, target: GpuTarget, how: LaunchShape) -> BuiltDeviceKernel:
        """Device code of a kernel."""
        made = _emitted(kernel, target, how)
        return build(made, target, how.warps, dependent=target.dependent)

    def load(self, built: BuiltDeviceKernel, device: torch.device) -> LaunchedKernel:
        """Code as a function on a device."""
        return DeviceFunction(built, device)


def _emitted(kernel: Kernel, target: GpuTarget, how: LaunchShape) -> TritonSource:
    return emit(
        kernel, how.stages, tf32=how.tf32, dependent=target.dependent, bulk=how.bulk, split=how.split, programs=how.programs
    )
