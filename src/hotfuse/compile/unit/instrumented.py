"""Code that looks, made in a worker: probes of tensors, and kernels that count at their stores.

A plan's values inside native runs never leave the arena, so only counting kernels can show them.
"""

from __future__ import annotations

from hotfuse.backends import registry
from hotfuse.base.errors import HotfuseError
from hotfuse.compile.answer_bodies import Answered, CountingAnswer, ProbesAnswer
from hotfuse.compile.request_bodies import CountingRequest
from hotfuse.compile.request_context import kernels
from hotfuse.tile.instrument import instrumented
from hotfuse.tile.text import parse, show


def probes() -> Answered:
    """The request of kind `probes`: some two hundred milliseconds, which are not the server's."""
    made = registry.host().compile_probes()
    return ProbesAnswer(tuple(made)), list(made.values())


def counting(request: CountingRequest) -> Answered:
    """The request of kind `counting`: kernels in, those of them that can count out, with their numbers."""
    numbers: list[int] = []
    texts: list[str] = []
    codes: list[bytes] = []
    refused: list[str] = []
    for number, text in zip(request.numbers, request.kernels, strict=True):
        try:
            kernel = instrumented(parse(text))
            codes.append(kernels().compile_kernel(kernel).code)
        except HotfuseError as e:
            refused.append(e.what)
            continue
        numbers.append(number)
        texts.append(show(kernel))
    return CountingAnswer(tuple(numbers), tuple(texts), tuple(refused)), codes
