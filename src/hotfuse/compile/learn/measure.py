"""Labels for the performance model: kernels made by the real lowering and compiler, timed so that the figures repeat.

A machine changes speed every few milliseconds; the same kernel measured twice in a row is lucky or unlucky twice. So all kernels
of a batch take turns, and each keeps the least of passes that are spread out over the batch's time. Compiling happens in
worker processes before, never beside.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace
from typing import Any

import torch

from hotfuse.backends.library import LibraryBackend
from hotfuse.backends.protocol import CompiledKernel
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.answer_bodies import Answered, KernelAnswer
from hotfuse.compile.request_bodies import KernelRequest, Request
from hotfuse.compile.request_context import kernels, request_settings
from hotfuse.compile.variants.trial import drawn, tamed
from hotfuse.hpm.work import NO_TILE, Candidate, TileShape
from hotfuse.hpm.work import CoreShape as AnyCore
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse, show
from hotfuse.lower import Core
from hotfuse.lower.common.codec import from_json, to_json
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.cpu.conv import shape as conv_shape
from hotfuse.lower.cpu.conv import winograd
from hotfuse.lower.cpu.conv.shape import Axis
from hotfuse.lower.cpu.tiling import GemmTiling, balance, choose

PASSES = 12
SINGLE_NOISE = 0.1
"""Of what was measured in one turn."""
BURST_S = 120e-6
"""One kernel's turn, at least: long against the clock, short against changes of speed."""
MAX_CALLS = 400
MIN_TURNS, MAX_S = 6, 0.3
"""Every kernel has so many turns; a long one has no more once they took this long."""


def tile_of(
    core: AnyCore, rows: int, columns: int, depth: int, window: int = 0, stride: int = 1, groups: int = 1
) -> TileShape:
    """How a product of these extents is cut, or a convolution, which has a window; images are taken for squares."""
    own = core if isinstance(core, Core) else Core(core.lanes, core.registers, l2=core.l2)
    if not window:
        return _tile(choose(own, rows, (columns,), depth, narrow=own.precision != "bf16"), rows, columns)
    if groups == columns and groups > 1:
        return NO_TILE  # every channel has sums of its own, and there is no product
    if window == stride == groups == 1:
        return _tile(conv_shape.product(own, rows, columns, depth), rows, columns)
    how = _winograd(own, rows, columns, depth, window) if stride == groups == 1 else None
    if how is not None:
        taken = how.points / (how.down.outputs * how.across.outputs * window)
        return _tile(how.tiling, how.block, columns, taken)
    side, each = max(1, math.isqrt(rows)), max(1, columns // groups)
    apart = 4 * stride * depth // window * groups
    return _tile(conv_shape.choose(own, side, each, depth, apart), side, each)


def _tile(t: GemmTiling, rows: int, columns: int, taken: float = 1.0) -> TileShape:
    high = rows / balance(rows, t.mr).count
    empty = -columns % t.nr - (t.nr - t.last if t.last else 0)
    return TileShape(high, t.vectors, t.sets(math.ceil(high)), empty / max(columns, 1), t.group_rows, taken)


def _winograd(core: Core, rows: int, columns: int, depth: int, window: int) -> winograd.WinogradTiling | None:
    """As lowering decides it, for an image as high as it is wide."""
    side = math.isqrt(window)
    if side * side != window:
        return winograd.cut(core, None, Axis(rows, window, count=rows), 1, depth // window, columns)
    along = max(1, math.isqrt(rows))
    axis = Axis(along, side, padding=side // 2, count=along)
    return winograd.cut(core, axis, axis, 1, depth // window, columns)


def core_variants(core: Core) -> tuple[Core, ...]:
    """Cores to cut for: this one, and ones that lead to smaller tiles, narrower vectors, shorter groups of rows."""
    found = [core, replace(core, registers=16), replace(core, l2=core.l2 // 8)]
    if core.lanes >= 8:
        found.append(replace(core, lanes=core.lanes // 2))
    return tuple(dict.fromkeys(found))


# --- compiling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompiledCandidate:
    """A kernel that compiled."""

    lowered: Lowered
    compiled: CompiledKernel


def make(graph: Graph, core: Core) -> CompiledCandidate:
    """Lower and compile; raises a HotfuseError where there is no kernel."""
    lowered = kernels().lower(graph, core)
    return CompiledCandidate(lowered, kernels().compile_kernel(lowered.kernel))


def request(graph: Graph, core: Core) -> dict[str, Any]:
    """What to ask a worker for, under the settings of the request that is being answered."""
    return Request(KernelRequest(show(graph), core), request_settings()).header()


def handle(request: KernelRequest) -> Answered:
    """The request of kind `kernel`: a group's graph as text, and the core to cut it for."""
    made = make(parse(request.graph), request.core)
    return KernelAnswer(to_json(made.lowered), dict(made.compiled.seconds)), [made.compiled.code]


def candidate_from(answer: KernelAnswer, codes: Sequence[bytes]) -> CompiledCandidate:
    """What a worker made."""
    lowered = from_json(dict(answer.lowered))
    return CompiledCandidate(lowered, CompiledKernel(lowered.kernel, kernels().target(), codes[0], dict(answer.seconds)))


# --- running -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class BoundCall:
    """Something to time, with everything that it needs in memory."""

    candidate: Candidate
    group: str
    call: Callable[[], object]
    keep: tuple[Any, ...] = ()
    bytes: int = 0
    """Data that it holds, roughly: weights are there twice, as they are and packed."""
    repeats: int = 1
    times: list[float] = field(default_factory=list[float])

    def choose_repeats(self) -> None:
        """Choose how many calls make a turn."""
        self.call()
        begin = time.perf_counter()
        self.call()
        taken = max(time.perf_counter() - begin, 1e-7)
        self.repeats = max(1, min(MAX_CALLS, round(BURST_S / taken)))

    def turn(self) -> None:
        """One call to bring everything into the caches, then a burst; kernels find threads awake, as inside a native run."""
        call = self.call
        with kernels().awake(1 if self.candidate.core is None else self.candidate.threads):
            call()
            begin = time.perf_counter()
            for _ in range(self.repeats):
                call()
            self.times.append((time.perf_counter() - begin) / self.repeats)

    def figure(self) -> tuple[float, float]:
        """Seconds at best, and how far the better half of the turns, two at least, lies from that. A single turn says nothing of
        it: it counts as noisy as a trial's, not as the quietest of all."""
        ordered = sorted(self.times)
        good = ordered[: max(2, len(ordered) // 2)]
        return good[0], sum(good) / len(good) / good[0] - 1 if len(good) > 1 else SINGLE_NOISE


@dataclass(slots=True)
class Shelf:
    """Data that the candidates of one problem share: where tensors happen to lie must not tell them apart."""

    _data: dict[Any, tuple[dict[str, Any], dict[str, torch.Tensor], list[Any]]] = field(default_factory=dict[Any, Any])

    def of(self, candidate: Candidate, group: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[Any]]:
        """Data by name, weights by key, and the results of the first run."""
        key = (group, *sorted(candidate.sizes.items()))
        if not group or key not in self._data:
            data = drawn(candidate.graph, candidate.sizes)
            weights = {p.key: tamed(data[p.value.name]) for p in candidate.graph.params}
            self._data[key] = (data, weights, [])
        return self._data[key]


def bind(candidate: Candidate, group: str, made: CompiledCandidate | None, shelf: Shelf | None = None) -> BoundCall:
    """A candidate on made-up data: its kernel called with addresses alone, or the library's where there is none."""
    graph = candidate.graph
    data, weights, results = (shelf or Shelf()).of(candidate, group)
    inputs = [data[v.name] for v in graph.inputs]
    held = _nbytes(inputs) + 2 * _nbytes(weights.values())
    with torch.no_grad():
        if made is None:
            run = LibraryBackend().compile(graph, weights).run
            return BoundCall(candidate, group, lambda: run(*inputs), (inputs, weights), held)
        own = kernels()
        kernel = own.load_kernel(made.compiled)
        bound = own.bound(graph, made.lowered, kernel, weights, inputs, candidate.threads, results)
    results[:] = results or bound.results
    return BoundCall(candidate, group, bound.call, (kernel, bound.keep, results, data), held + _nbytes(bound.results))


def _nbytes(data: Iterable[Any]) -> int:
    return sum(t.nbytes for t in data if isinstance(t, torch.Tensor))


def timed(batch: Sequence[BoundCall], passes: int = PASSES, until: float | None = None) -> None:
    """Let all of a batch take turns; `until` (perf_counter) ends it after a pass, three passes at the earliest."""
    with torch.no_grad():
        for b in batch:
            b.choose_repeats()
        gc.disable()  # nothing is collected before: looking through all that a worker holds takes longer than most turns
        try:
            for n in range(passes):
                for b in batch if n % 2 == 0 else reversed(batch):
                    if n < MIN_TURNS or sum(b.times) * b.repeats < MAX_S:
                        b.turn()
                if until is not None and n >= 2 and time.perf_counter() > until:
                    return
        finally:
            gc.enable()
