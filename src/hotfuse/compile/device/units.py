"""In the worker: how a graph on a GPU is grouped, and one group at a time from nodes to device code, in several tilings.

    device plan   the graph's groups, in order
    device unit   one group in its normal form: kernels to try on the device, or why it has none

A worker has no device. So nothing is timed here: every kernel that is likely to be best is compiled, and the server tries them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from hotfuse.analysis.attention import BOUNDED, FUSED
from hotfuse.analysis.convolution import is_convolution
from hotfuse.analysis.sorts import is_sort
from hotfuse.backends import registry
from hotfuse.backends.device_code import BuiltDeviceKernel, GpuTarget, LaunchShape
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.passes import Pass, Where, run, run_all
from hotfuse.cache.address import Address, digest, versions
from hotfuse.compile import request_context
from hotfuse.compile.answer_bodies import (
    Answered,
    DevicePlanAnswer,
    DeviceUnitAnswer,
    MadeDeviceKernel,
    kept_body,
    message,
)
from hotfuse.compile.device.folding import FOLDED, folded
from hotfuse.compile.kept import WAIT_S, answered
from hotfuse.compile.learn.device_times import likeliest, program_shape
from hotfuse.compile.request_bodies import DevicePlanRequest, DeviceUnitRequest
from hotfuse.compile.unit.grouping import ORDER, GroupedGraph
from hotfuse.compile.workers.wire import Message
from hotfuse.fusion.groups import Group, group
from hotfuse.fusion.kinds import GroupKind
from hotfuse.fusion.memory_reads import reads_places
from hotfuse.hpm.device.work import work_of
from hotfuse.ir.graph import Graph, Kind, Node, makers, output_values, readers
from hotfuse.ir.text import parse, show
from hotfuse.ir.types import DType, TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower.common.activation_products import is_product
from hotfuse.lower.common.codec import to_json
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.gpu import GpuTiling, gpu_tilings, lower_gpu
from hotfuse.lower.ops import expand
from hotfuse.lower.ops.views import is_move
from hotfuse.lower.primitives import rules as primitive
from hotfuse.ops.table import Access, lookup, packet
from hotfuse.tile.verify import verify as verify_kernel

_COPIES = frozenset({"aten.contiguous", "aten.clone"})
BY_WINNER, BY_CALIBRATION = "an earlier process", "calibration"
BY_MODEL, BY_COUNT = "the device's performance model", "a count of what each program has to do"
"""Who chose what is compiled."""
Strides = Mapping[str, tuple[int, ...]]


def fits(node: Node) -> bool:
    """Whether a node may be in a kernel for a GPU, as far as its op says."""
    if node.kind is not Kind.OPERATOR or node.graphs or is_convolution(node) or is_sort(node) or reads_places(node):
        return False
    if any(not isinstance(v.type, TensorType) for v in (*node.ins, *node.outs)):
        return False
    return (
        is_product(node) or packet(node.op) in (FUSED, BOUNDED, *FOLDED) or expand.known(node.op) or is_move(node.op)
        or packet(node.op) in primitive.expansions()
    )


def plan(request: DevicePlanRequest) -> tuple[DevicePlanAnswer, list[bytes]]:
    """The request of kind `device plan`: a graph as text."""
    made: GroupedGraph = run_all(DEVICE_GROUPING, parse(request.graph), None)
    other = folded(made)
    foldable = other.graph is not made.graph and len(other.groups) < len(made.groups)
    if request.folded:
        verify(other.graph)
        made = other
    groups = tuple((len(g.nodes), _kind(made.graph, g)) for g in made.groups)
    return DevicePlanAnswer(show(made.graph), groups, foldable), []


def _grouped(graph: Graph, _job: None) -> GroupedGraph:
    return GroupedGraph(graph, _with_views(graph, _narrowed(graph, group(graph, fits))))


def _narrowed(graph: Graph, groups: Sequence[Group]) -> tuple[Group, ...]:
    """What widens the result of a product (to f32, for a norm) belongs to the rows that read it: else both forms are stored."""
    found = [Group(g.nodes, g.kind) for g in groups]
    home = {i: k for k, g in enumerate(found) for i in g.nodes}
    reading, returned = readers(graph), {v.name for v in output_values(graph)}
    for k, g in enumerate(found):
        made = {v.type.dtype for n in g.nodes for v in graph.nodes[n].outs if isinstance(v.type, TensorType)}
        if g.kind not in (GroupKind.GEMM_WEIGHT, GroupKind.GEMM_ACTIVATION) or not made & {DType.F16, DType.BF16}:
            continue
        for i in reversed(g.nodes):
            node = graph.nodes[i]
            into = {home[r] for v in node.outs for r in reading.get(v.name, [])}
            wide = any(isinstance(v.type, TensorType) and v.type.dtype is DType.F32 for v in node.outs)
            if is_product(node) or not wide or len(into) != 1 or any(v.name in returned for v in node.outs):
                continue
            (to,) = into
            if to != k and found[to].kind == GroupKind.ROWS:
                found[k] = Group(tuple(n for n in found[k].nodes if n != i), g.kind)
                found[to] = Group((i, *found[to].nodes), GroupKind.ROWS)
                home[i] = to
    return tuple(g for g in found if g.nodes)


def _with_views(graph: Graph, groups: Sequence[Group]) -> tuple[Group, ...]:
    """An attention takes in what only lays its result out in another way, copies too: it writes there itself."""
    found = [Group(g.nodes, g.kind) for g in groups]
    maker, reading = makers(graph), readers(graph)
    returned = {v.name for v in output_values(graph)}
    home = {i: k for k, g in enumerate(found) for i in g.nodes}
    for k, g in enumerate(found):
        nodes = [graph.nodes[i] for i in g.nodes]
        makes = {home.get(maker.get(v.name, -1), -1) for n in nodes for v in n.ins} - {k}
        if not all(is_move(n.op) or packet(n.op) in _COPIES for n in nodes) or len(makes) != 1:
            continue
        (into,) = makes
        if into < 0 or found[into].kind != GroupKind.ATTENTION:
            continue
        outs = [v for i in found[into].nodes for v in graph.nodes[i].outs]
        inside = {into, k}
        if any(v.name in returned or not {home[r] for r in reading.get(v.name, [])} <= inside for v in outs):
            continue
        found[into] = Group((*found[into].nodes, *g.nodes), GroupKind.ATTENTION)
        found[k] = Group((), GroupKind.LIBRARY)
        home |= {i: into for i in g.nodes}
    return tuple(g for g in found if g.nodes)


def _kind(graph: Graph, g: Group) -> str:
    """What only moves data is views to torch, and those cost nothing."""
    moves = all(lookup(graph.nodes[i].op).access is Access.MOVEMENT for i in g.nodes)
    return GroupKind.LIBRARY if moves or not all(fits(graph.nodes[i]) for i in g.nodes) else g.kind


def unit(request: DeviceUnitRequest) -> tuple[DeviceUnitAnswer, list[bytes]]:
    """The request of kind `device unit`: a group in its normal form, the strides of its sources, what to compile for, and which of
    its tilings: every `of`-th from the `first` on, so that several workers make the kernels of one group."""
    text, target, strides = request.graph, GpuTarget(*request.target), request.strides
    graph = parse(text)
    try:
        tilings, by = _chosen(graph, request, target)
    except HotfuseError as e:
        return DeviceUnitAnswer((), e.because or e.what, BY_COUNT), []
    basis = {
        **versions(), "toolchain": registry.device_kernels().toolchain(), "machine": f"{target.backend} {target.arch}",
        "options": repr((request.tf32, sorted(strides.items()), [str(t) for t in tilings])),
    }  # fmt: skip
    address = Address("device unit", digest(text), basis)

    def make() -> Message:
        return message(*_unit(graph, strides, target, tilings, tf32=request.tf32))

    answer = answered(request_context.folder(), address, make, WAIT_S)[0]
    return replace(kept_body(answer, DeviceUnitAnswer, "kept device code"), by=by), answer[1]


def _chosen(graph: Graph, request: DeviceUnitRequest, target: GpuTarget) -> tuple[Sequence[GpuTiling], str]:
    """This request's part of the tilings that are worth a trial, and who says so: the one that is wanted, those that the device's
    model ranks first, or those that a count of what each program has to do does."""
    first, of = request.share
    every = gpu_tilings(graph, bulk=target.bulk, every=True) if request.every or request.device or request.wanted else ()
    if request.wanted and (found := [t for t in every if str(t) == request.wanted]):
        return found[first::of], BY_WINNER
    if request.every:
        return every[first::of], BY_CALIBRATION
    likely = likeliest(graph, every, request.strides, request.device) if request.device else None
    if likely is not None:
        return likely[first::of], BY_MODEL
    return gpu_tilings(graph, bulk=target.bulk)[first::of], BY_COUNT


def _unit(graph: Graph, strides: Strides, target: GpuTarget, tilings: Sequence[GpuTiling], *, tf32: bool) -> Answered:
    kernels: list[MadeDeviceKernel] = []
    codes: list[bytes] = []
    because = ""
    for tiling in tilings:
        try:
            lowered, built = compiled(graph, tiling, strides, target, tf32=tf32)
        except HotfuseError as e:
            because = because or e.because or e.what
            continue
        about = {k: v for k, v in asdict(built).items() if k not in ("code", "texts")}
        work = work_of(lowered.kernel, program_shape(tiling))
        kernels.append(MadeDeviceKernel(to_json(lowered), about, str(tiling), work))
        codes.append(built.code)
    return DeviceUnitAnswer(tuple(kernels), because), codes


def launch_shape(tiling: GpuTiling, stages: int, *, tf32: bool) -> LaunchShape:
    """How the programs of a tiling run."""
    return LaunchShape(tiling.warps, stages, tf32, tiling.bulk, tiling.split, tiling.programs)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A group in its normal form, and how its sources lie where that is not as their types say."""

    graph: Graph
    strides: Strides


@dataclass(frozen=True, slots=True)
class DeviceKernelJob:
    """One of the kernels that a group is compiled to."""

    tiling: GpuTiling
    target: GpuTarget
    tf32: bool = False


def compiled(
    graph: Graph, tiling: GpuTiling, strides: Strides, target: GpuTarget, *, tf32: bool = False
) -> tuple[Lowered, BuiltDeviceKernel]:
    """One kernel of a group: what it reads and writes, and its code."""
    job = DeviceKernelJob(tiling, target, tf32)
    lowered = run(LOWER, DeviceGroup(graph, strides), job)
    return lowered, run(GENERATE_CODE, lowered, job)


def _lower(found: DeviceGroup, job: DeviceKernelJob) -> Lowered:
    return lower_gpu(found.graph, job.tiling, found.strides)


def _code(lowered: Lowered, job: DeviceKernelJob) -> BuiltDeviceKernel:
    """With fewer stages where they do not fit in shared memory."""
    for stages in range(job.tiling.stages, 0, -1):
        built = registry.device_kernels().compile(lowered.kernel, job.target, launch_shape(job.tiling, stages, tf32=job.tf32))
        if built.shared <= job.target.shared:
            return built
    raise CannotLower(f"tiles of {job.tiling} do not fit in {job.target.shared} bytes of shared memory")


DEVICE_GROUPING = (
    Pass("device groups", Graph, GroupedGraph, _grouped, lambda found, _: verify(found.graph), Where.WORKER),
    ORDER,
)
LOWER = Pass("device lower", DeviceGroup, Lowered, _lower, lambda made, _: verify_kernel(made.kernel), Where.WORKER)
GENERATE_CODE = Pass("device code", Lowered, BuiltDeviceKernel, _code, where=Where.WORKER)
DEVICE_KERNEL = (LOWER, GENERATE_CODE)
"""One group's way to device code, in one tiling."""
