"""Tier 1 in the serving process: have a graph's units compiled, check what came, and link its object code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hotfuse.backends.llvm.native import CompiledKernel, load_kernel
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.base.errors import InternalError
from hotfuse.base.settings import Settings
from hotfuse.compile.account import COUNTED, Account, add_up
from hotfuse.compile.drive import Compilation, Here
from hotfuse.compile.learn.recall import recalled
from hotfuse.compile.stored import place_of
from hotfuse.compile.value import ANY_DEMAND, Demand
from hotfuse.compile.variants.skips import Skips
from hotfuse.compile.variants.ways import Ways
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.service import sized
from hotfuse.ir.graph import Graph
from hotfuse.ir.normal import normalized
from hotfuse.ir.text import parse
from hotfuse.lower.common.codec import from_json
from hotfuse.lower.common.lowered import BufferArgument, Lowered, PackArgument, StrideArgument
from hotfuse.native.target import host
from hotfuse.partition.cut import CutReason, Partition, Partitioning, device_of


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A kernel as the worker made it."""

    lowered: Lowered
    code: bytes
    about: str
    """Its name and what the worker measured, for a reader."""
    ways: Ways | None = None
    """The kernels that serve its group at other sizes."""
    predicted_us: float | None = None
    """What it was predicted to take, where a model knows this machine."""
    said: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The kernel as the worker said it, to be said again."""


@dataclass(frozen=True, slots=True)
class Body:
    """A graph in the order its kernels need, cut into kernels and the runs of library nodes between them."""

    partitioning: Partitioning
    chosen: tuple[int, ...]
    """Per partition the kernel's number, or -1 for the library."""
    branches: Mapping[int, tuple[Body, ...]]
    """The branches of partitions that are a control node with kernels inside."""


@dataclass(frozen=True, slots=True)
class NativeParts:
    """What the worker made of a graph."""

    body: Body
    kernels: tuple[KernelCode, ...]
    notes: tuple[str, ...]
    demand: Demand = ANY_DEMAND
    """What it was made for: a group that is to be tried with the library stays there when runs are made."""
    message: wire.Message = field(default=({}, []), repr=False)
    """The same as it came: what is kept for later processes."""


Progress = Callable[[Callable[[], NativeParts], float], None]
"""Told after each kernel but the last: what there is so far, on demand, and which part of the expected saving is settled."""


def begin(text: str, sizes: Mapping[str, int], settings: Settings, demand: Demand = ANY_DEMAND) -> Compilation:
    """A graph to be compiled at the sizes of a real call, by the pool, or here when captures are inline."""
    executor = Here() if settings.capture == "inline" else sized(settings).pool
    place = place_of(settings)
    recall = recalled(place.path)
    return Compilation(
        executor, text, dict(sizes), demand, timeout=settings.unit_timeout_s,
        threads=settings.threads or torch.get_num_threads(),
        objective=settings.objective, precision=settings.precision,
        trust=recall.trust, ledger=recall.ledger, place=place, recall=recall,
    )  # fmt: skip


def finished(compilation: Compilation, on_progress: Progress | None = None) -> NativeParts:
    """Work a compilation off; raises InternalError where no part of the graph has a kernel."""
    known: dict[int, KernelCode] = {}

    def parts() -> NativeParts:
        header, codes = compilation.message()
        for i in range(len(known), len(codes)):
            known[i] = kernel_from_json(header["kernels"][i], codes[i])
        if not known and not header["branches"]:
            raise InternalError("no part of the graph has a kernel", because="; ".join(header["notes"])[:500])
        made = (header, codes)
        return NativeParts(body_from_json(header), tuple(known.values()), tuple(header["notes"]), compilation.demand, made)

    try:
        compilation.run(None if on_progress is None else lambda _message, settled: on_progress(parts, settled))
    finally:
        add_up(compilation.graph.counts)
        compilation.remember()
    return parts()


def parts_from(header: dict[str, Any], codes: Sequence[bytes], demand: Demand) -> NativeParts:
    """Parts as an earlier process kept them."""
    kernels = tuple(kernel_from_json(k, code) for k, code in zip(header["kernels"], codes, strict=True))
    return NativeParts(body_from_json(header), kernels, tuple(header["notes"]), demand, (header, list(codes)))


def account(compilation: Compilation) -> Account:
    """What became of its units so far."""
    counts = {k: compilation.graph.counts[k] for k in COUNTED}
    return Account(compilation.graph.history(), tuple(compilation.describe()), counts, compilation.graph.predicted_us)


def fetch(request: Mapping[str, Any], settings: Settings) -> NativeParts:
    """Kernels for a graph: its text, and the sizes of a real call."""
    return finished(begin(request["graph"], request["dims"], settings))


def body_from_json(data: dict[str, Any]) -> Body:
    """A body as the worker sent it."""
    graph = parse(data["graph"])
    branches = {int(i): tuple(body_from_json(b) for b in bodies) for i, bodies in data["branches"].items()}
    parts: list[Partition] = []
    for i, (first, last, kernel) in enumerate(data["parts"]):
        why = (
            CutReason.KERNEL
            if kernel >= 0
            else CutReason.CONTROL
            if i in branches
            else CutReason.START
            if i == 0
            else CutReason.REST
        )
        parts.append(Partition(i, first, last, why, device_of(graph.nodes[first])))
    chosen = tuple(int(kernel) for _, _, kernel in data["parts"])
    return Body(Partitioning(graph, tuple(parts)), chosen, branches)


def kernel_from_json(data: dict[str, Any], code: bytes) -> KernelCode:
    """A kernel as the worker sent it."""
    lowered, again = from_json(data), {k: data[k] for k in ("kernel", "arguments", "strides")}
    ways = Ways.from_json(data.get("ways"))
    if data["kernel_us"] is None:
        return KernelCode(lowered, code, f"{lowered.kernel.name}: for some sizes only", said=again)
    us = data.get("predicted_us")
    said = "" if us is None else f"predicted {us:.1f} us, "
    by = f" ({data['multiplies']})" if data.get("multiplies") else ""
    about = f"{lowered.kernel.name}{by}: {said}{data['kernel_us']:.1f} us in the worker, the library {data['library_us']:.1f} us"
    more = [str(m) for m in (data.get("kinds") or None, ways, Skips.from_json(data.get("skips"))) if m is not None]
    return KernelCode(lowered, code, "; ".join([about, *more]), ways, us, again)


def load(kernel: KernelCode) -> NativeKernel:
    """Link a kernel's object code into this process."""
    return load_kernel(CompiledKernel(kernel.lowered.kernel, host(), kernel.code, {}))


def renamed(lowered: Lowered, piece: Graph) -> Lowered:
    """A kernel made for the normal form of a group, speaking of the group's own values."""
    normal = normalized(piece)
    names = {n.name: v.name for n, v in zip(_values(normal), _values(piece), strict=True)}
    arguments = tuple(
        replace(a, value=names[a.value])
        if isinstance(a, BufferArgument | StrideArgument)
        else replace(a, spec=replace(a.spec, sources=tuple(replace(s, name=names[s.name]) for s in a.spec.sources)))
        if isinstance(a, PackArgument)
        else a
        for a in lowered.arguments
    )
    return replace(lowered, arguments=arguments, strides=tuple((names[n], s) for n, s in lowered.strides))


def _values(graph: Graph) -> list[Any]:
    return [*graph.inputs, *(p.value for p in graph.params), *(v for n in graph.nodes for v in n.outs)]
