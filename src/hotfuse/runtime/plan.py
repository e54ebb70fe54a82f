"""An immutable plan: a partitioned graph whose partitions are compiled, and one function that runs them in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from hotfuse.backends.protocol import Artifact, Backend, LoadedRun, Run
from hotfuse.backends.pycode import flat_function
from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.account import Account
from hotfuse.ir.graph import Arg, Graph, Kind, Node, Value, output_values
from hotfuse.ir.subgraph import extract
from hotfuse.ops.torch_args import to_torch
from hotfuse.partition.cut import CutReason, Partition, Partitioning
from hotfuse.runtime.zero_rows import Sides
from hotfuse.specialize.table import AttemptKey
from hotfuse.tile.compressed import StoredKernels

if TYPE_CHECKING:
    from hotfuse.compile.recipes import Recipe
    from hotfuse.lower.run.forks import Switch

UNTRIED = "groups_of_few_tilings"
"""Counts groups of a device plan of which only the likeliest kernels were made."""


@dataclass(frozen=True, slots=True)
class PlanUnit:
    """What a plan enters at once: a partition, a native run of several, or views behind a run (no partition of their own)."""

    parts: tuple[int, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    run: Run
    native: LoadedRun | None = None
    """Where partitions are entered as one native run: it can tell what went on inside."""


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Bytes a plan takes besides the model's weights, for the sizes it was made with."""

    arena: int = 0
    """Intermediates of native runs, and their kernels' own memory."""
    constants: int = 0
    """Packed and re-ordered copies of weights."""
    eager_peak: int | None = None
    """What intermediates take at most when every op makes its own; None where that depends on data."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that a plan itself decides, in Python."""

    name: str
    telling: Callable[[Callable[[bool], None]], Run]
    """The plan's run, which tells a listener which way every call went."""


@dataclass(frozen=True, slots=True)
class BetCount:
    """How often the bet of a specialization held."""

    held: int
    missed: int
    saved_s: float | None = None
    """What that saved in all, where the plan itself knows."""
    outgrown: float = 0.0
    """The part of the calls of late that code for those which the bet is not for would serve better, where there is none yet."""
    values: tuple[str, ...] = ()
    """The graph's inputs that the bet is about."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Plan:
    """What a call runs in, from beginning to end."""

    partitioning: Partitioning
    artifacts: tuple[Artifact, ...]
    run: Run
    tier: int
    notes: tuple[str, ...] = ()
    """What stayed with the library, and why."""
    units: tuple[PlanUnit, ...] = ()
    """In order; empty where the only artifact is all there is."""
    weights: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unread: frozenset[str] = frozenset()
    """Those of its weights that it reads only where a call falls back: there are copies, or nothing needs them."""
    live: frozenset[str] = frozenset()
    """Those of its graph's weights that it reads in every call where they lie, and of which it has no copies of any kind."""
    memory: PlanMemory = PlanMemory()
    runs: tuple[LoadedRun, ...] = ()
    """Its native runs, those in branches too."""
    counters: Callable[[], dict[str, int]] = dict[str, int]
    """What the plan counts while it serves: calls that left native code, arenas."""
    begin: Callable[[], None] = lambda: None
    """Has it forget what calls have shown so far: proofs run kept ones, which follow no traffic."""
    ahead: Callable[..., tuple[Any, ...] | None] | None = None
    """Begins a call on a device before anybody has looked whether the model is still the same; None where it cannot this time. What
    it reads is held, and nothing of it is seen where the model turns out to be another one."""
    holds: tuple[object, ...] = ()
    """Memory of weights that is read by address, so it stays where it is for as long as the plan does."""
    kernels: StoredKernels = field(default_factory=lambda: StoredKernels({}))
    """The tile kernels of its native runs, by number."""
    layers: tuple[AttemptKey, ...] = ()
    """The specializations that it is made of, the outermost first."""
    bets: tuple[tuple[AttemptKey, Callable[[], BetCount]], ...] = ()
    """Of its specializations that count: how often each held."""
    bet: Condition | None = None
    """The condition it bets on, if it does."""
    switches: tuple[Switch, ...] = ()
    """Of its native runs that may fork: whether they do, and how often they did."""
    sides: Sides | None = None
    """Of its products that leave rows of zeros out: whether they do, and how often they did."""
    recipe: Recipe | None = None
    """Where it is kept for later processes, and what earlier ones knew of it."""
    account: Account | None = None
    """How its graph came to its kernels, where it has some."""

    @property
    def graph(self) -> Graph:
        """The graph this plan computes."""
        return self.partitioning.graph

    def timed(self, *inputs: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """A call with the nanoseconds that every partition took; views behind a run count as its last partition."""
        if not self.units:
            start = time.perf_counter_ns()
            outs = self.run(*inputs)
            return outs, (time.perf_counter_ns() - start,)
        spent = [0] * len(self.artifacts)
        env: dict[str, Any] = {p.value.name: self.weights[p.key] for p in self.graph.params}
        env |= {v.name: t for v, t in zip(self.graph.inputs, inputs, strict=True)}
        at = 0
        for unit in self.units:
            args = [env[v.name] for v in unit.inputs]
            if unit.native is not None:
                made, inside = unit.native.timed(*args)
                for part, ns in zip(unit.parts, inside, strict=True):
                    spent[part] += ns
            else:
                start = time.perf_counter_ns()
                made = unit.run(*args)
                spent[unit.parts[-1] if unit.parts else at] += time.perf_counter_ns() - start
            at = unit.parts[-1] if unit.parts else at
            env |= {v.name: t for v, t in zip(unit.outputs, made, strict=True)}
        return tuple(_resolved(o, env) for o in self.graph.outputs), tuple(spent)


def _resolved(arg: Arg, env: Mapping[str, Any]) -> Any:
    if isinstance(arg, Value):
        return env[arg.name]
    if isinstance(arg, tuple):
        return [_resolved(a, env) for a in arg]
    return to_torch(arg)


def build(partitioning: Partitioning, backend: Backend, weights: Mapping[str, Any], tier: int = 0) -> Plan:
    """Compile every partition with one back end."""
    return assemble(partitioning, lambda _part, piece: backend.compile(piece, weights), weights, tier)


def assemble(
    partitioning: Partitioning, compiled: Callable[[Partition, Graph], Artifact], weights: Mapping[str, Any], tier: int
) -> Plan:
    """Have each partition compiled, and chain them; a single partition runs without a chain."""
    graph = partitioning.graph
    if len(partitioning.parts) <= 1:
        part = partitioning.parts[0] if partitioning.parts else Partition(0, 0, 0, CutReason.START, "")
        artifact = compiled(part, graph)
        return Plan(partitioning, (artifact,), artifact.run, tier, weights=weights, memory=PlanMemory(constants=artifact.bytes))
    pieces = [compiled(p, piece_of(graph, p)) for p in partitioning.parts]
    units = [PlanUnit((i,), a.graph.inputs, output_values(a.graph), a.run) for i, a in enumerate(pieces)]
    memory = PlanMemory(constants=sum(a.bytes for a in pieces))
    run = chained(graph, units, weights)
    return Plan(partitioning, tuple(pieces), run, tier, units=tuple(units), weights=weights, memory=memory)


def not_made(graph: Graph, weights: Mapping[str, Any]) -> Plan:
    """Stands for tier 0 of a graph until that is made: no call runs in it."""

    def run(*_inputs: Any) -> tuple[Any, ...]:
        raise InternalError(f"tier 0 of {graph.name} has not been made")

    return Plan(Partitioning(graph, ()), (), run, 0, weights=weights)


def piece_of(graph: Graph, part: Partition) -> Graph:
    """A partition as a graph of its own."""
    return extract(graph, range(part.first, part.last), f"{graph.name}.p{part.index}")


def chained(graph: Graph, units: Sequence[PlanUnit], weights: Mapping[str, Any]) -> Run:
    """One function that runs units in order; a single one that takes and gives what the graph does is itself that function."""
    if len(units) == 1 and units[0].inputs == graph.inputs and units[0].outputs == graph.outputs:
        return units[0].run
    runs = {f"plan.u{i}": u.run for i, u in enumerate(units)}
    nodes = tuple(Node(Kind.OPERATOR, op, u.inputs, u.outputs) for op, u in zip(runs, units, strict=True))
    outline = Graph(graph.name, graph.inputs, graph.params, nodes, graph.outputs)
    run, _ = flat_function(outline, lambda node: (runs[node.op], True), weights)
    return run
