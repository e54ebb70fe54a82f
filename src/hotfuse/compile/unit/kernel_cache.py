"""What a worker has at hand from one request to the next: groups as pieces in their normal form, kernels lowered and compiled.

All of it is bounded, and kept apart for what requests ask: rounding to bf16, weights that may grow or must not, threads.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeVar

from hotfuse.analysis.resources import CorePeaks
from hotfuse.backends.protocol import CompiledKernel
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.base.passes import Pass, Where, run
from hotfuse.base.settings import Precision
from hotfuse.compile.host import host_core
from hotfuse.compile.learn.learned import Foreseen, foresight
from hotfuse.compile.learn.measure import CompiledCandidate
from hotfuse.compile.request_context import kernels, request_settings
from hotfuse.compile.variants import precision_variants
from hotfuse.ir.dims import Dim, evaluate, symbols
from hotfuse.ir.graph import Graph, output_values
from hotfuse.ir.normal import normalized
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import show
from hotfuse.ir.types import TensorType
from hotfuse.ir.verify import verify
from hotfuse.lower import Core
from hotfuse.lower.common.effort import OutOfSteps
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.common.own_sizes import anchored, symbols_of, with_own_sizes
from hotfuse.machine.topology import stated_hz
from hotfuse.native.target import host
from hotfuse.ops.table import packet
from hotfuse.tile.verify import verify as verify_kernel

MAX_KEPT = 256


def host_peaks(core: Core) -> CorePeaks:
    """Peaks of this machine, estimated."""
    return CorePeaks(l1=core.l1, l2=core.l2, flops_per_s=core.lanes * 4 * stated_hz(), registers=core.registers)


V = TypeVar("V")


def keep(cache: OrderedDict[str, V], key: str, make: Callable[[], V], most: int) -> V:
    """What is kept under a key, made where it is not; beyond `most` the longest unused goes."""
    if key not in cache:
        cache[key] = make()
        while len(cache) > most:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


@dataclass(frozen=True, slots=True)
class NormalGroup:
    """A group as a graph of its own, in its normal form."""

    normal: Graph
    text: str
    sizes: Mapping[str, int]
    """The call's sizes, and the piece's own."""
    key: str
    """The same for pieces that are compiled and tried as one."""
    meaning: Mapping[str, Dim] = field(default_factory=dict[str, Dim])
    """Its own sizes in those of the graph it is from."""

    @property
    def ops(self) -> str:
        """What it computes, for a reader."""
        return "+".join(dict.fromkeys(packet(n.op).removeprefix("aten.") for n in self.normal.nodes))


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A kernel that compiled, before any trial."""

    lowered: Lowered
    compiled: CompiledKernel
    seconds: float
    core: Core | None = None
    """What it was cut for, where that is not the bench's own core."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class GroupUse:
    """Nodes of a graph, at the sizes of a call."""

    graph: Graph
    nodes: Sequence[int]
    sizes: Mapping[str, int]


def _normal(use: GroupUse, _job: None) -> NormalGroup:
    own, meaning = with_own_sizes(anchored(use.graph, extract(use.graph, use.nodes, "group")))
    normal = normalized(own)
    text = show(normal)
    known = {n: evaluate(d, use.sizes) for n, d in meaning.items() if symbols(d) <= use.sizes.keys()}
    key = hashlib.sha256(f"{text}\n{sorted(known.items())}".encode()).hexdigest()[:24]
    return NormalGroup(normal, text, {**use.sizes, **known}, key, meaning)


def _well_formed(piece: NormalGroup, _job: None) -> object:
    """Sizes that none of its inputs shows are those of the graph it is from: a group with such has no kernel."""
    return verify(piece.normal, {*piece.sizes, *(symbols_of(piece.normal) - piece.meaning.keys())})


def _lower(piece: NormalGroup, core: Core) -> Lowered:
    for v in output_values(piece.normal):
        if isinstance(v.type, TensorType) and 0 in v.type.shape:  # a loop over nothing stores nothing
            raise CannotLower(f"%{v.name} has no elements in any call")
    return kernels().lower(piece.normal, core)


def _code(lowered: Lowered, _job: None) -> CompiledCandidate:
    return CompiledCandidate(lowered, kernels().compile_kernel(lowered.kernel))


NORMALIZE = Pass("normalize", GroupUse, NormalGroup, _normal, _well_formed, Where.WORKER)
LOWER = Pass("lower", NormalGroup, Lowered, _lower, lambda made, _: verify_kernel(made.kernel), Where.WORKER)
GENERATE_CODE = Pass("generate code", Lowered, CompiledCandidate, _code, where=Where.WORKER)
KERNEL = (NORMALIZE, LOWER, GENERATE_CODE)
"""One group's way to object code."""


@dataclass(slots=True)
class KernelCache:
    """What a worker has at hand from earlier requests, all of it bounded."""

    core: Core
    peaks: CorePeaks
    graphs: OrderedDict[str, Graph] = field(default_factory=OrderedDict[str, Graph])
    lowered: OrderedDict[str, Lowered | str] = field(default_factory=OrderedDict[str, "Lowered | str"])
    """Per group as text: its kernel before code generation, or why there is none."""
    made: OrderedDict[str, BuiltKernel] = field(default_factory=OrderedDict[str, BuiltKernel])

    def lowers(self, piece: NormalGroup) -> str:
        """Why a group has no kernel; empty if it has one, as far as lowering goes."""
        found = self.lowering(piece)
        return found if isinstance(found, str) else ""

    def lowering(self, piece: NormalGroup) -> Lowered | str:
        """A group's kernel before code generation, or why there is none."""
        try:
            return self._lowering(piece)
        except OutOfSteps as e:  # another request may have more luck with it
            return e.because

    def _lowering(self, piece: NormalGroup) -> Lowered | str:
        def make() -> Lowered | str:
            try:
                return run(LOWER, piece, self.core)
            except OutOfSteps:
                raise
            except HotfuseError as e:
                return e.because or e.what

        return keep(self.lowered, piece.text, make, MAX_KEPT)

    def kernel(self, piece: NormalGroup) -> BuiltKernel:
        """A group's kernel, compiled; raises a HotfuseError where there is none."""

        def make() -> BuiltKernel:
            start = time.perf_counter()
            lowered = self._lowering(piece)
            if isinstance(lowered, str):
                raise CannotLower(lowered)
            first = run(GENERATE_CODE, lowered, None)
            kind = precision_variants.chosen(piece.normal, piece.sizes, self.core, first)
            return BuiltKernel(kind.candidate.lowered, kind.candidate.compiled, time.perf_counter() - start, kind.core, kind.note)

        # Where rounding is allowed, sizes decide between kinds of instructions.
        return keep(self.made, piece.text if self.core.precision == "fp32" else piece.key, make, MAX_KEPT)


_caches: OrderedDict[tuple[Precision, bool, int, str], KernelCache] = OrderedDict()
MAX_CACHES = 8


def kernel_cache(*, lean: bool | None = None) -> KernelCache:
    """This process's, for what the request in hand wants, or for weights that may or must not grow."""
    own = request_settings()
    wants = (own.precision, own.lean if lean is None else lean, own.threads, own.backend)
    if wants not in _caches:
        core = replace(host_core(host(), own.precision), lean=wants[1], threads=own.threads)
        _caches[wants] = KernelCache(core, host_peaks(core))
        while len(_caches) > MAX_CACHES:
            _caches.popitem(last=False)
    _caches.move_to_end(wants)
    return _caches[wants]


def piece_of(graph: Graph, nodes: Sequence[int], sizes: Mapping[str, int]) -> NormalGroup:
    """Some nodes of a graph as a piece."""
    return run(NORMALIZE, GroupUse(graph, nodes, sizes), None)


def foreseen(piece: NormalGroup) -> Foreseen | None:
    """What a model of this machine says of a piece, if there is one."""
    ahead = foresight()
    return None if ahead is None else ahead.of_group(piece.normal, piece.sizes)
