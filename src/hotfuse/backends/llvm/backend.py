"""LLVM as a back end: everything that the rest of the house asks of this folder.

Loading and entering code is imported with it; what generates and measures code, when that is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch

from hotfuse.backends.llvm import native
from hotfuse.backends.llvm.runs import bound, enter, kernel_call, kernel_faults
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.backends.llvm.runs.symbols import BODY, LAYOUT, TEAM_TIMES
from hotfuse.backends.llvm.threads import parallel
from hotfuse.backends.protocol import Artifact, BoundKernel, CompiledKernel, HostBackend, LoadedKernel, Run
from hotfuse.base.errors import InternalError
from hotfuse.ir.graph import Graph
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.run.constants import Constants
from hotfuse.lower.run.description import Run as RunSteps
from hotfuse.lower.run.description import RunCode
from hotfuse.machine.peaks import MachinePeaks
from hotfuse.native import jit
from hotfuse.native.target import CpuTarget, host
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import show

if TYPE_CHECKING:
    from hotfuse.backends.llvm import peak_kernels, probe_pass
    from hotfuse.lower.cpu.tiling import Core


class LlvmBackend(HostBackend):
    """Machine code for the cores that Python runs on."""

    name = "llvm"
    stages = ("tile", "llvm", "asm")
    competes = True

    def compile(self, graph: Graph, weights: Mapping[str, Any]) -> Artifact:
        """A graph as one kernel; raises CannotLower where it is none."""
        from hotfuse.lower.cpu.host_core import host_core

        lowered = self.lower(graph, host_core(self.target()))
        kernel = self.load_kernel(self.compile_kernel(lowered.kernel))
        return Artifact(graph, self.glue(graph, lowered, kernel, Constants(weights)), self.name, show(lowered.kernel))

    def target(self) -> CpuTarget:
        """The best level of this machine."""
        return host()

    def lower(self, graph: Graph, core: Core) -> Lowered:
        """One kernel, cut for a core."""
        from hotfuse.lower import lower

        return lower(graph, core)

    def compile_kernel(self, kernel: Kernel) -> CompiledKernel:
        """Object code."""
        return native.compile_kernel(kernel)

    def load_kernel(self, compiled: CompiledKernel) -> NativeKernel:
        """Link into this process, with the OpenMP runtime that torch uses."""
        return native.load_kernel(compiled)

    def glue(self, graph: Graph, lowered: Lowered, kernel: LoadedKernel, constants: Constants) -> Run:
        """A function that allocates results, reads sizes off tensors and enters the code."""
        return kernel_call.glue(graph, lowered, _own(kernel), constants)

    def bound(
        self, graph: Graph, lowered: Lowered, kernel: LoadedKernel, weights: Mapping[str, torch.Tensor], inputs: Sequence[Any],
        threads: int, results: Sequence[Any] = (),
    ) -> BoundKernel:  # fmt: skip
        """The code with addresses alone."""
        return bound.bound(graph, lowered, _own(kernel), weights, inputs, threads, results)

    def awake(self, threads: int) -> AbstractContextManager[None]:
        """A team around a kernel as in a native run, where that would have one."""
        return parallel.awake(threads)

    def serial_because(self) -> str:
        """Where torch has loaded no OpenMP runtime with GNU's interface."""
        own = parallel.runtime()
        return own.detail if own.kind == "serial" else ""

    def runs_unavailable(self) -> str:
        """Where the layout of torch's tensors is not known."""
        return enter.unavailable()

    def compile_run(self, run: RunSteps) -> bytes:
        """The driver's object code."""
        from hotfuse.backends.llvm.runs.run_driver import emit_driver

        return jit.compile_object(emit_driver(run, host()), host()).code

    def load_run(
        self, code: RunCode, table: Sequence[int], keep: Sequence[Any], fallback: Run, *, assumes: bool = False
    ) -> enter.NativeRun:
        """Link the driver."""
        fallback = kernel_faults.not_after_faults(fallback) if assumes else fallback
        driver = jit.load_object(code.code, [BODY, LAYOUT, TEAM_TIMES], parallel.runtime().symbols)
        return enter.NativeRun(code, driver, table, keep, fallback)

    def text(self, stage: str, kernel: Kernel) -> str:
        """Tile assembly, LLVM IR, or machine code in assembler's notation."""
        match stage:
            case "tile":
                return show(kernel)
            case "llvm":
                return native.llvm_text(kernel)
            case "asm":
                return native.assembly_text(kernel)
            case _:
                raise InternalError(f"the back end {self.name} has no stage {stage!r}", hint=f"one of {', '.join(self.stages)}")

    def measure_peaks(self, threads: Sequence[int] | None = None) -> MachinePeaks:
        """A second or two; 1 and torch's own number of threads unless given."""
        from hotfuse.backends.llvm import peak_kernels

        return peak_kernels.measure(threads)

    def speed_probe(self) -> peak_kernels.MicroProbe:
        """Multiply-adds, second-level cache, clock."""
        from hotfuse.backends.llvm import peak_kernels

        return peak_kernels.MicroProbe()

    def compile_probes(self) -> dict[str, bytes]:
        """Object code of a probe for every element type, and of the publisher."""
        from hotfuse.backends.llvm import probe_pass

        return probe_pass.compile_all()

    def load_probes(self, codes: Mapping[str, bytes]) -> probe_pass.Probes:
        """Link them, a fraction of a millisecond each."""
        from hotfuse.backends.llvm import probe_pass

        return probe_pass.Probes(codes)


def _own(kernel: LoadedKernel) -> NativeKernel:
    """A kernel that this back end loaded, or what stands in for one."""
    return cast(NativeKernel, kernel)
