"""Lowered kernels as JSON and text: how they cross from the worker that made them to the process that runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotfuse.base.errors import InternalError
from hotfuse.ir import dims
from hotfuse.ir.types import DType
from hotfuse.lower.common.lowered import (
    Argument,
    BufferArgument,
    BufferRole,
    Lowered,
    PackArgument,
    StateArgument,
    StrideArgument,
    SymbolArgument,
)
from hotfuse.lower.common.pack import PackSource, PackSpec, WeightOrder
from hotfuse.tile.compressed import header
from hotfuse.tile.program import Kernel
from hotfuse.tile.text import parse, show


def to_json(lowered: Lowered) -> dict[str, Any]:
    """Plain data: the kernel as its assembly text."""
    return {
        "kernel": show(lowered.kernel),
        "header": show(header(lowered.kernel)),
        "instructions": sorted(lowered.kernel.ops),  # not "ops": who sends a kernel says by that what of the graph it computes
        "arguments": [argument_to_json(a) for a in lowered.arguments],
        "strides": [[name, [dims.show(d) for d in ds]] for name, ds in lowered.strides],
    }


def from_json(data: dict[str, Any], kernel: Kernel | None = None) -> Lowered:
    """The inverse of `to_json`; `kernel` is what its text says, where that is known."""
    strides = tuple((str(name), tuple(dims.parse(d) for d in ds)) for name, ds in data["strides"])
    kernel = parse(data["kernel"]) if kernel is None else kernel
    return Lowered(kernel, tuple(argument_from_json(a) for a in data["arguments"]), strides)


def header_from_json(data: dict[str, Any]) -> Kernel:
    """What calling a kernel needs. Reading the statements of 45 kernels takes a second; a process that serves reads none."""
    return replace(parse(data["header"]), left_out=frozenset(str(op) for op in data["instructions"]))


def argument_to_json(a: Argument) -> dict[str, Any]:
    """One argument as plain data."""
    match a:
        case BufferArgument():
            return {"is": "buffer", "buffer": a.buffer, "role": a.role.value, "value": a.value}
        case SymbolArgument():
            return {"is": "symbol", "size": a.size, "symbol": a.symbol}
        case StrideArgument():
            return {"is": "stride", "size": a.size, "value": a.value, "dim": a.dim}
        case StateArgument():
            return {"is": "state", "buffer": a.buffer, "words": list(a.words)}
        case PackArgument():
            spec = a.spec
            return {
                "is": "pack", "buffer": a.buffer, "k": spec.k, "nr": spec.nr, "dtype": spec.dtype.value,
                "together": spec.together, "paired": spec.paired, "whole": spec.whole, "experts": spec.experts,
                "sources": [[s.name, s.order.value, s.n, s.first, list(s.taps)] for s in spec.sources],
            }


def argument_from_json(a: dict[str, Any]) -> Argument:
    """The inverse of `argument_to_json`."""
    match a["is"]:
        case "buffer":
            return BufferArgument(a["buffer"], BufferRole(a["role"]), a["value"])
        case "symbol":
            return SymbolArgument(a["size"], a["symbol"])
        case "stride":
            return StrideArgument(a["size"], a["value"], int(a["dim"]))
        case "state":
            return StateArgument(a["buffer"], tuple(int(w) for w in a["words"]))
        case "pack":
            sources = tuple(
                PackSource(name, WeightOrder(order), int(n), int(first), tuple(int(t) for t in taps))
                for name, order, n, first, taps in a["sources"]
            )
            spec = PackSpec(
                sources, int(a["k"]), int(a["nr"]), DType(a["dtype"]), bool(a["together"]), bool(a["paired"]), int(a["whole"]),
                int(a["experts"]),
            )
            return PackArgument(a["buffer"], spec)
        case other:
            raise InternalError(f"no kernel argument of kind {other!r}")
