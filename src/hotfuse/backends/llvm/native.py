"""From a tile kernel to something that runs: compile (anywhere), load (here), and what a reader may want to see of it.

What writes LLVM's text is imported by those who compile: a process that serves loads code and writes none.
"""

from __future__ import annotations

import time

from hotfuse.backends.llvm.runs import kernel_faults
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.backends.llvm.runs.symbols import symbol
from hotfuse.backends.llvm.threads.parallel import runtime
from hotfuse.backends.protocol import CompiledKernel, Target
from hotfuse.base.errors import InternalError
from hotfuse.lower.cpu import scratch
from hotfuse.machine import tiles
from hotfuse.native import jit
from hotfuse.native.target import CpuTarget, host
from hotfuse.tile.program import Kernel
from hotfuse.tile.type_rules import BLOCK_OP


def compile_kernel(kernel: Kernel, target: CpuTarget | None = None, *, passes: bool = False) -> CompiledKernel:
    """Generate and compile; needs nothing of the machine that will run it but its target."""
    from hotfuse.backends.llvm.emission.emit import emit_kernel
    from hotfuse.backends.llvm.emission.multiplies import multiplies

    target = target or host()
    start = time.perf_counter()
    text = emit_kernel(kernel, target)
    emitted = time.perf_counter() - start
    compiled = jit.compile_object(text, target, passes=passes)
    return CompiledKernel(kernel, target, compiled.code, {"emit": emitted, **compiled.seconds}, multiplies(kernel, text, target))


def load_kernel(compiled: CompiledKernel) -> NativeKernel:
    """Link into this process, with the OpenMP runtime that torch uses; raises where the system does not let it run here."""
    if _uses_tiles(compiled.kernel, compiled.target) and (why := tiles.refused()):
        raise InternalError(f"kernel {compiled.kernel.name} cannot run in this process", because=why)
    name = symbol(compiled.kernel)
    loaded = jit.load_object(compiled.code, [name], {**runtime().symbols, **kernel_faults.SYMBOLS})
    return NativeKernel(loaded, name, compiled.kernel, scratch.plan(compiled.kernel))


def _uses_tiles(kernel: Kernel, target: Target) -> bool:
    """Whether a kernel's code for a target needs the system's permission."""
    return target.has("amx-tile") and target.has("amx-bf16") and BLOCK_OP in kernel.ops


def llvm_text(kernel: Kernel, target: CpuTarget | None = None) -> str:
    """The kernel as generated LLVM IR."""
    from hotfuse.backends.llvm.emission.emit import emit_kernel

    return emit_kernel(kernel, target or host())


def assembly_text(kernel: Kernel, target: CpuTarget | None = None) -> str:
    """The kernel as machine code in assembler's notation."""
    target = target or host()
    return jit.assembly(llvm_text(kernel, target), target)
