"""What workers made of a graph, as the serving process holds it: kernels, bodies cut into them, native runs; and their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from hotfuse.backends.protocol import Run
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.answer_bodies import MadeKernel, RunsAnswer
from hotfuse.compile.value import ANY_DEMAND, Demand
from hotfuse.compile.variants.skips import Skips
from hotfuse.compile.variants.variant_table import VariantTable
from hotfuse.compile.workers import wire
from hotfuse.compile.workers.checked_json import decoded
from hotfuse.ir import dims
from hotfuse.ir.dims import Dim
from hotfuse.ir.graph import Graph
from hotfuse.ir.normal import normalized
from hotfuse.ir.text import parse, show
from hotfuse.ir.types import DType
from hotfuse.lower.common.codec import from_json, header_from_json
from hotfuse.lower.common.lowered import BufferArgument, Lowered, PackArgument, StrideArgument
from hotfuse.lower.run.description import InputSpec, OutputSpec, RunCode, SizeSpec, word_from_json
from hotfuse.partition.cut import CutReason, Partition, Partitioning, device_of
from hotfuse.tile.compressed import StoredKernel, StoredKernels, header
from hotfuse.tile.text import show as show_kernel

if TYPE_CHECKING:
    from hotfuse.compile.device.launch import GeneratedKernel

ReadGraph = Callable[[str], Graph]
FACTS = ("flops", "traffic", "predicted_us", "kernel_us", "library_us")
"""What is kept of a kernel for readers: operations, bytes to and from memory, microseconds."""


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A kernel as the worker made it."""

    lowered: Lowered
    """How it is called; the kernel in there is its header."""
    code: bytes
    about: str
    """Its name and what the worker measured, for a reader."""
    variants: VariantTable | None = None
    """The kernels that serve its group at other sizes."""
    predicted_us: float | None = None
    """What it was predicted to take, where a model knows this machine."""
    said: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The kernel as the worker said it, to be said again."""
    facts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What it computes and moves, what it was predicted to take and what it took, as far as that is known."""


@dataclass(frozen=True, slots=True)
class GeneratedPlan:
    """A graph's generated kernels on a device, in one function with library operators."""

    graph: Graph
    run: Run
    source: str
    kernels: tuple[GeneratedKernel, ...]
    notes: tuple[str, ...]
    untried: int = 0
    """Groups of which only the likeliest kernels were compiled and tried."""
    checks: bool = False
    """Whether its last result says if the others are the call's (`compile.device.late_checks`)."""


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


@dataclass(frozen=True, slots=True)
class RunBody:
    """A body with its runs; inside, those of its branches."""

    body: Body
    runs: tuple[RunCode, ...]
    branches: Mapping[int, tuple[RunBody, ...]]


@dataclass(frozen=True, slots=True)
class RunParts:
    """A graph as native runs and what is between them."""

    body: RunBody
    kernels: tuple[KernelCode, ...]
    notes: tuple[str, ...]
    answer: RunsAnswer | None = None
    """What the worker said; None where there are no runs."""
    blobs: tuple[bytes, ...] = ()
    """What came beside it."""


def parts_from(header: dict[str, Any], codes: Sequence[bytes], demand: Demand, read: ReadGraph = parse) -> NativeParts:
    """Parts as an earlier process kept them."""
    made = (decoded(MadeKernel, k, "a kept kernel") for k in header["kernels"])
    kernels = tuple(kernel_from(k, code) for k, code in zip(made, codes, strict=True))
    return NativeParts(body_from_json(header, read), kernels, tuple(header["notes"]), demand, (header, list(codes)))


def runs_from(parts: NativeParts, answer: RunsAnswer, blobs: Sequence[bytes], read: ReadGraph = parse) -> RunParts:
    """Parts with the runs that a worker made of them, in this process or an earlier one."""
    count = len(blobs) - answer.drivers
    more = tuple(kernel_from(k, code) for k, code in zip(answer.kernels, blobs[:count], strict=True))
    body = _run_body(dict(answer.body), blobs[count:], read)
    return RunParts(body, (*parts.kernels, *more), (*parts.notes, *answer.notes), answer, tuple(blobs))


def without_runs(parts: NativeParts) -> RunParts:
    """The same parts, each entered by itself."""

    def plain(body: Body) -> RunBody:
        return RunBody(body, (), {i: tuple(plain(b) for b in bodies) for i, bodies in body.branches.items()})

    return RunParts(plain(parts.body), parts.kernels, parts.notes)


def body_from_json(data: dict[str, Any], read: ReadGraph = parse) -> Body:
    """A body as the worker sent it."""
    graph = read(data["graph"])
    branches = {int(i): tuple(body_from_json(b, read) for b in bodies) for i, bodies in data["branches"].items()}
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


def kernel_from(made: MadeKernel, code: bytes) -> KernelCode:
    """A kernel as the worker sent it; its statements stay text."""
    data = made.lowered()
    lowered, again = from_json(data, header_from_json(data)), {k: data[k] for k in ("kernel", "arguments", "strides")}
    variants = VariantTable.from_json(made.variants)
    if made.kernel_us is None:
        return KernelCode(lowered, code, f"{lowered.kernel.name}: for some sizes only", said=again)
    us = made.predicted_us
    said = "" if us is None else f"predicted {us:.1f} us, "
    by = f" ({made.multiplies})" if made.multiplies else ""
    about = f"{lowered.kernel.name}{by}: {said}{made.kernel_us:.1f} us in the worker, the library {made.library_us:.1f} us"
    more = [str(m) for m in (made.kinds or None, variants, Skips.from_json(made.skips)) if m is not None]
    every = {**(made.use or {}), **{k: getattr(made, k) for k in FACTS if hasattr(made, k)}}
    facts = {k: float(every[k]) for k in FACTS if every.get(k) is not None}
    return KernelCode(lowered, code, "; ".join([about, *more]), variants, us, again, facts)


def at_rest(kernel: KernelCode) -> KernelCode:
    """A kernel that is linked: what calling it needs, without its statements, its text and its object code."""
    lowered = replace(kernel.lowered, kernel=header(kernel.lowered.kernel))
    return replace(kernel, lowered=lowered, code=b"", said=None)


def stored(kernels: Sequence[KernelCode]) -> StoredKernels:
    """The tile kernels by number, at rest."""

    def text(k: KernelCode) -> str:
        return show_kernel(k.lowered.kernel) if k.said is None else str(k.said["kernel"])

    return StoredKernels({i: StoredKernel.of(k.lowered.kernel.name, text(k), k.facts) for i, k in enumerate(kernels)})


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


# --- runs -----------------------------------------------------------------------------------------------------------


def body_to_json(body: Body) -> dict[str, Any]:
    """A body for a worker."""
    parts = [[p.first, p.last, k] for p, k in zip(body.partitioning.parts, body.chosen, strict=True)]
    nested = {str(i): [body_to_json(b) for b in bodies] for i, bodies in body.branches.items()}
    return {"graph": show(body.partitioning.graph), "parts": parts, "branches": nested}


def _run_body(data: dict[str, Any], codes: Sequence[bytes], read: ReadGraph) -> RunBody:
    nested = {int(i): tuple(_run_body(b, codes, read) for b in bodies) for i, bodies in data["branches"].items()}
    return RunBody(body_from_json(data, read), tuple(_run_code(r, codes[r["code"]]) for r in data["runs"]), nested)


def _run_code(data: dict[str, Any], code: bytes) -> RunCode:
    inputs = tuple(
        InputSpec(str(name), DType(dtype), int(rank), None if order is None else tuple(int(d) for d in order))
        for name, dtype, rank, order in data["inputs"]
    )
    sizes = tuple(SizeSpec(str(s), int(i), bool(stride), int(d)) for s, i, stride, d in data["sizes"])
    outputs = tuple(
        OutputSpec(str(n), DType(t), _read(shape), _read(strides), None if grows is None else (int(grows[0]), int(grows[1])))
        for n, t, shape, strides, grows in data["outputs"]
    )
    return RunCode(
        int(data["first"]), int(data["last"]), inputs, sizes, outputs, tuple(word_from_json(w) for w in data["words"]),
        tuple(int(i) for i in data["exits"]), tuple(str(n) for n in data["returned"]), dims.parse(data["arena"]),
        dims.parse(data["scratch"]), code, tuple(str(n) for n in data["branches"]), frozenset(str(n) for n in data["loops"]),
        tuple((int(word), tuple(str(n) for n in names)) for word, names in data["made"]), tuple(int(n) for n in data["forks"]),
    )  # fmt: skip


def _read(ds: Sequence[str]) -> tuple[Dim, ...]:
    return tuple(dims.parse(d) for d in ds)
