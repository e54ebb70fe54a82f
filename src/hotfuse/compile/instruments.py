"""Getting code that looks (`compile.unit.instrumented`): asked of a worker from a background job, and linked here."""

from __future__ import annotations

from collections.abc import Mapping

from hotfuse.backends import registry
from hotfuse.backends.protocol import CompiledKernel, LoadedKernel, LoadedProbes
from hotfuse.base.settings import Settings
from hotfuse.compile.request_bodies import CountingRequest, ProbesRequest
from hotfuse.compile.workers.service import ask
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import parse, show


def fetch_probes(settings: Settings) -> LoadedProbes:
    """Have the probes compiled, and link them: a fraction of a millisecond each."""
    header, codes = ask(ProbesRequest(), [], settings)
    return registry.host().load_probes(dict(zip(header["names"], codes, strict=True)))


def fetch_counting(kernels: Mapping[int, Kernel], settings: Settings) -> dict[int, LoadedKernel]:
    """Have counting kernels made, and link them. What cannot count is left out."""
    request = CountingRequest(tuple(kernels), tuple(show(k) for k in kernels.values()))
    header, codes = ask(request, [], settings)
    own = registry.kernels(settings.backend)
    return {
        int(number): own.load_kernel(CompiledKernel(parse(text), own.target(), code, {}))
        for number, text, code in zip(header["numbers"], header["kernels"], codes, strict=True)
    }
