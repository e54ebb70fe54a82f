"""Counting kernels: compiled by the worker beside the plain ones, when sampled calls could make use of them.

A plan's values inside native runs never leave the arena, so only kernels that count at their stores can show them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotfuse.backends.llvm.native import CompiledKernel, compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.base.errors import HotfuseError
from hotfuse.base.settings import Settings
from hotfuse.compile.workers.service import ask
from hotfuse.native.target import host
from hotfuse.tile.instrument import instrumented
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import parse, show


def handle(header: dict[str, Any], _blobs: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """The request of kind `counting`: kernels in, those of them that can count out, with their numbers."""
    numbers: list[int] = []
    texts: list[str] = []
    codes: list[bytes] = []
    refused: list[str] = []
    for number, text in zip(header["numbers"], header["kernels"], strict=True):
        try:
            kernel = instrumented(parse(text))
            codes.append(compile_kernel(kernel).code)
        except HotfuseError as e:
            refused.append(e.what)
            continue
        numbers.append(int(number))
        texts.append(show(kernel))
    return {"ok": True, "numbers": numbers, "kernels": texts, "refused": refused}, codes


def fetch(kernels: Mapping[int, Kernel], settings: Settings) -> dict[int, NativeKernel]:
    """Have counting kernels made, and link them; from a background job. What cannot count is left out."""
    request = {"kind": "counting", "numbers": list(kernels), "kernels": [show(k) for k in kernels.values()]}
    header, codes = ask(request, [], settings)
    return {
        int(number): load_kernel(CompiledKernel(parse(text), host(), code, {}))
        for number, text, code in zip(header["numbers"], header["kernels"], codes, strict=True)
    }
