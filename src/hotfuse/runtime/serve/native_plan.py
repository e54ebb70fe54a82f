"""A plan of native runs: what the worker made, linked into this process and chained with what stayed with the library.

A run is entered once for all its partitions. Each partition still has an artifact of its own: the fallback of the run, which
serves calls that native code does not (a tensor that lies otherwise, a branch without native code), is their chain. The chain and
their glue are made when they are first needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import torch

from hotfuse.analysis.eager_memory import eager_peak
from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.backends.branching import branching
from hotfuse.backends.library import LibraryBackend
from hotfuse.backends.protocol import Artifact, CompiledKernel, KernelBackend, LoadedKernel, LoadedRun, Run
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.parts import KernelCode, RunBody, RunParts, at_rest, renamed, stored
from hotfuse.compile.variants.variant_table import LIBRARY, VariantTable
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Graph, Value, output_values
from hotfuse.lower.common.own_sizes import anchored, with_own_sizes
from hotfuse.lower.run.constants import Constants
from hotfuse.lower.run.description import THREADS, RunCode
from hotfuse.lower.run.forks import Switch
from hotfuse.native import perf_map
from hotfuse.ops.own.assume import ASSUME
from hotfuse.ops.table import packet
from hotfuse.partition.cut import Partition
from hotfuse.runtime.plan import Plan, PlanMemory, PlanUnit, chained, piece_of
from hotfuse.runtime.zero_rows import Sides


class _Later:
    """A function that is made when it is first called."""

    def __init__(self, make: Any) -> None:
        self._make, self._run = make, None

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        if self._run is None:
            self._run = self._make()
        return self._run(*args)


@dataclass(slots=True)
class _SharedBody:
    """What all bodies of a plan have in common."""

    kernels: Sequence[KernelCode]
    backend: KernelBackend
    loaded: Sequence[LoadedKernel]
    constants: Constants
    weights: Mapping[str, torch.Tensor]
    runs: list[LoadedRun] = field(default_factory=list[LoadedRun])
    spare: list[LoadedRun] = field(default_factory=list[LoadedRun])
    """Runs of branches that a run around them has as well: they serve only what that one does not."""
    needed: set[str] = field(default_factory=set[str])
    """Keys of weights that the library reads in every call."""
    uses: dict[int, list[Graph]] = field(default_factory=dict[int, list[Graph]])
    """Per kernel, the groups of nodes that it computes."""
    switches: list[Switch] = field(default_factory=list[Switch])
    """Of runs that may fork."""
    inside: int = 0
    """How many such runs are around what is being built."""


def assembled(
    parts: RunParts, weights: Mapping[str, torch.Tensor], graph: Graph, sizes: Mapping[str, int], backend: KernelBackend,
    *, named: bool = False,
) -> Plan:  # fmt: skip
    """The plan; `graph` is what was captured and `sizes` are those of a real call, to say what memory it takes.

    `named`: tell profilers what its code is.
    """
    loaded = [backend.load_kernel(CompiledKernel(k.lowered.kernel, backend.target(), k.code, {})) for k in parts.kernels]
    shared = _SharedBody([at_rest(k) for k in parts.kernels], backend, loaded, Constants(weights), weights)
    plan = _body(parts.body, shared)
    if named:
        _name(shared, parts.kernels)
    runs = (*shared.runs, *shared.spare)
    memory = PlanMemory(sum(_arena(r.code, sizes) for r in shared.runs), shared.constants.bytes, eager_peak(graph, sizes))

    states = shared.constants.states
    products = {states[k.address].address: len(shared.uses.get(i, ())) for i, k in enumerate(loaded) if k.address in states}
    sides = Sides(tuple(states.values()), products) if states else None

    def counters() -> dict[str, int]:
        return {
            "native_runs": len(runs),
            "fell_back": sum(r.fell_back for r in runs),
            "arenas_allocated": sum(r.allocated for r in runs),
            "arena_bytes_kept": sum(r.arena_bytes for r in runs),
            **({"appended_in_place": sum(r.grown[0] for r in runs), "moved_to_grow": sum(r.grown[1] for r in runs)}
               if any(o.grows for r in runs for o in r.code.outputs) else {}),
            **({"forks_taken": sum(s.taken for s in shared.switches)} if shared.switches else {}),
            **({} if sides is None else sides.counts()),
            **_team_counts(runs),
        }

    def begin() -> None:
        for run in runs:
            run.forget_team_times()

    read = shared.constants.read | shared.needed | {p.key for p in graph.params if p.value in output_values(graph)}
    return replace(plan, memory=memory, counters=counters, begin=begin, notes=parts.notes, runs=runs,
                   unread=frozenset(weights) - read, live=frozenset(read - shared.constants.copied),
                   switches=tuple(shared.switches), sides=sides,
                   kernels=stored(parts.kernels))  # fmt: skip


def _team_counts(runs: Sequence[LoadedRun]) -> dict[str, int]:
    """Calls for which a team costs more than it saves (its threads sleep, or others have their cores) stay on one thread."""
    rows = [row for run in runs for row in run.team_times]
    paused = max((r for r in rows if r.serial_after_a_pause), key=lambda r: r.cold_calls, default=None)
    crowded = max((r for r in rows if r.serial_in_a_row), key=lambda r: r.hot_calls, default=None)
    counts: dict[str, int] = {}
    if paused is not None:
        counts |= {"us_after_a_pause_on_one_thread": paused.cold_alone // 1000, "us_after_a_pause_with_a_team": paused.cold // 1000}
    if woken := sum(r.woken for r in rows):
        counts["teams_woken_for_calls_in_a_row"] = woken
    if crowded is not None:
        counts |= {"us_on_one_thread": crowded.hot_alone // 1000, "us_with_a_team_on_busy_cores": crowded.hot // 1000}
    return counts


def _name(shared: _SharedBody, kernels: Sequence[KernelCode]) -> None:
    """Say for profilers which ops of the model each kernel and each run computes."""
    for number, (kernel, loaded) in enumerate(zip(kernels, shared.loaded, strict=True)):
        pieces = shared.uses.get(number, [])
        ops = "+".join(dict.fromkeys(packet(n.op).removeprefix("aten.") for p in pieces[:1] for n in p.nodes))
        where = list(dict.fromkeys(str(n.loc) for p in pieces for n in p.nodes if str(n.loc)))
        more = f", and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        label = f"{kernel.lowered.kernel.name}: {ops or 'copy'}" + (f" at {where[0]}{more}" if where else more)
        perf_map.note(kernel.code, loaded.symbol, loaded.address, label)
    for run in (*shared.runs, *shared.spare):
        perf_map.note(run.code.code, run.symbol, run.body, f"native run of parts {run.code.first} to {run.code.last - 1}")


def _arena(code: RunCode, sizes: Mapping[str, int]) -> int:
    env = {**sizes, THREADS: torch.get_num_threads()}
    try:
        return evaluate(code.arena, env) + evaluate(code.scratch, env)
    except (KeyError, ZeroDivisionError, HotfuseError):
        return 0  # a size that only data shows


def _body(body: RunBody, shared: _SharedBody) -> Plan:
    """The plan of a graph, or of a branch in it."""
    partitioning = body.body.partitioning
    graph = partitioning.graph
    covered = {i for r in body.runs for i in range(r.first, r.last)}
    made = tuple(_artifact(body, p, shared, later=p.index in covered) for p in partitioning.parts)
    single = {p.index: PlanUnit((p.index,), a.graph.inputs, output_values(a.graph), a.run)
              for p, a in zip(partitioning.parts, made, strict=True)}  # fmt: skip
    units: list[PlanUnit] = []
    begins = {r.first: r for r in body.runs}
    at = 0
    while at < len(made):
        run = begins.get(at)
        if run is None:
            units.append(single[at])
            at += 1
        else:
            units += _run(graph, run, [single[i] for i in range(run.first, run.last)], shared)
            at = run.last
    return Plan(partitioning, made, chained(graph, units, shared.weights), 1, units=tuple(units), weights=shared.weights)


def _artifact(body: RunBody, part: Partition, shared: _SharedBody, *, later: bool) -> Artifact:
    graph = body.body.partitioning.graph
    piece = piece_of(graph, part)
    if part.index in body.branches:
        shared.inside += later
        plans = [_body(b, shared) for b in body.branches[part.index]]
        shared.inside -= later
        return branching(piece, [(p.run, p.artifacts) for p in plans], shared.weights)
    kernel = body.body.chosen[part.index]
    if kernel < 0:
        if not later and not shared.inside:
            shared.needed |= {p.key for p in piece.params}
        return LibraryBackend().compile(piece, shared.weights)
    called = anchored(graph, piece)
    shared.uses.setdefault(kernel, []).append(piece)
    code, entered, constants, weights = shared.kernels[kernel], shared.loaded[kernel], shared.constants, shared.weights
    backend = shared.backend

    def make() -> Run:  # holds nothing that holds the run: a plan that is let go of must not wait for a garbage collection
        own, _ = with_own_sizes(called)
        run = backend.glue(own, renamed(code.lowered, own), entered, constants)
        if code.variants is None or LIBRARY not in code.variants.kernels:
            return run
        return _by_size(own, code.variants, run, LibraryBackend().compile(own, weights).run)

    return Artifact(called, _Later(make) if later else make(), backend.name, code.about, predicted_us=code.predicted_us)


def _by_size(own: Graph, variants: VariantTable, kernel: Run, library: Run) -> Run:
    """A group outside its native run, which has been left because the library is better at one of the call's sizes."""

    def run(*args: Any) -> tuple[Any, ...]:
        sizes = bind(own, [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args])  # numbers are sizes, too
        served = isinstance(sizes, Mismatch) or variants.kernel_at(evaluate(variants.size, sizes)) != LIBRARY
        return kernel(*args) if served else library(*args)

    return run


def _run(graph: Graph, code: RunCode, inside: Sequence[PlanUnit], shared: _SharedBody) -> list[PlanUnit]:
    """A run, and the views behind it."""
    values = {v.name: v for v in graph.inputs} | {v.name: v for n in graph.nodes for v in n.outs}
    inputs = tuple(values[i.name] for i in code.inputs)
    outputs = tuple(values[o.name] for o in code.outputs)
    kernels = {i: k.address for i, k in enumerate(shared.loaded)}
    words = [shared.constants.word(w, kernels) for w in code.words]
    shared.switches += [memory for _, memory in words if isinstance(memory, Switch)]
    weights = shared.weights
    fallback = _Later(lambda: chained(Graph(f"{graph.name}.fallback", inputs, graph.params, (), outputs), inside, weights))
    keep = [*(memory for _, memory in words if memory is not None), *shared.loaded]
    assumes = any(n.op == ASSUME for n in graph.nodes)
    native = shared.backend.load_run(code, [address for address, _ in words], keep, fallback, assumes=assumes)
    (shared.spare if shared.inside else shared.runs).append(native)
    found = [PlanUnit(tuple(range(code.first, code.last)), inputs, outputs, native.enter, native)]
    if code.exits:
        found.append(_views(graph, code, values, shared))
    return found


def _views(graph: Graph, code: RunCode, values: Mapping[str, Value], shared: _SharedBody) -> PlanUnit:
    nodes = tuple(graph.nodes[i] for i in code.exits)
    made = {v.name for n in nodes for v in n.outs}
    params = {p.value.name for p in graph.params}
    inputs = tuple(dict.fromkeys(v for n in nodes for v in n.ins if v.name not in made | params))
    outputs = tuple(values[n] for n in code.returned)
    piece = Graph(f"{graph.name}.views", inputs, graph.params, nodes, outputs)
    return PlanUnit((), inputs, outputs, LibraryBackend().compile(piece, shared.weights).run)
