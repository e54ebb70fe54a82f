"""Getting code that looks (`compile.unit.instrumented`): asked of a worker from a background job, and linked here."""

from __future__ import annotations

from collections.abc import Mapping

from hotfuse.backends.llvm.native import CompiledKernel, load_kernel
from hotfuse.backends.llvm.probe import Probes
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.base.settings import Settings
from hotfuse.compile.workers.service import ask
from hotfuse.native.target import host
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import parse, show


def fetch_probes(settings: Settings) -> Probes:
    """Have the probes compiled, and link them: a fraction of a millisecond each."""
    header, codes = ask({"kind": "probes"}, [], settings)
    return Probes(dict(zip(header["names"], codes, strict=True)))


def fetch_counting(kernels: Mapping[int, Kernel], settings: Settings) -> dict[int, NativeKernel]:
    """Have counting kernels made, and link them. What cannot count is left out."""
    request = {"kind": "counting", "numbers": list(kernels), "kernels": [show(k) for k in kernels.values()]}
    header, codes = ask(request, [], settings)
    return {
        int(number): load_kernel(CompiledKernel(parse(text), host(), code, {}))
        for number, text, code in zip(header["numbers"], header["kernels"], codes, strict=True)
    }
