"""Getting code that looks (`compile.unit.instrumented`): from the cache, or of a worker, in a background job; and linked here.

A process that begins with kept plans asks workers for nothing. Without the cache it started one for the probes alone: seconds of
the machine beside its first calls, and what recurs in them had to wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hotfuse.backends import registry
from hotfuse.backends.protocol import CompiledKernel, LoadedKernel, LoadedProbes
from hotfuse.base.settings import Settings
from hotfuse.cache.address import Address, digest, versions
from hotfuse.cache.place import folder_of
from hotfuse.compile.answer_bodies import CountingAnswer, ProbesAnswer, received
from hotfuse.compile.kept import answered, code_features, target
from hotfuse.compile.request_bodies import CountingRequest, ProbesRequest
from hotfuse.compile.workers.service import ask
from hotfuse.compile.workers.wire import Message
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import parse, show


def fetch_probes(settings: Settings) -> LoadedProbes:
    """Have the probes compiled, and link them: a fraction of a millisecond each."""
    made, codes = received(_kept(ProbesRequest(), settings), ProbesAnswer)
    return registry.host().load_probes(dict(zip(made.names, codes, strict=True)))


def fetch_counting(kernels: Mapping[int, Kernel], settings: Settings) -> dict[int, LoadedKernel]:
    """Have counting kernels made, and link them. What cannot count is left out."""
    request = CountingRequest(tuple(kernels), tuple(show(k) for k in kernels.values()))
    made, codes = received(_kept(request, settings), CountingAnswer)
    own = registry.kernels(settings.backend)
    return {
        number: own.load_kernel(CompiledKernel(parse(text), own.target(), code, {}))
        for number, text, code in zip(made.numbers, made.kernels, codes, strict=True)
    }


def _kept(request: ProbesRequest | CountingRequest, settings: Settings) -> Message:
    """What an earlier process was answered, or what a worker answers now."""
    options = {"options": repr(settings.code_key())} if isinstance(request, CountingRequest) else {}
    address = Address(request.kind, digest(repr(request)), {**versions(), **target(), **options})

    def make() -> Message:
        return ask(request, [], settings)

    return answered(folder_of(settings), address, make, settings.unit_timeout_s, features=code_features())[0]
