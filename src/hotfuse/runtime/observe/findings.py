"""What limits each partition of a plan that serves, from sampled calls: the evidence that strategies are chosen by.

    seen      times, flops, bytes and counters of partitions, from the analyzer
    finding   the same with a diagnosis: what binds it, how near its roofline, what was predicted, which strategies address that

Making sense of it happens in a worker (`compile.learn.profiling`), whose answer also goes to the profile store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import torch

from hotfuse.analysis.registers import parallel_iterations
from hotfuse.analysis.shapes import Mismatch, bind
from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.compile.answer_bodies import PartitionDiagnosis, ProfileAnswer
from hotfuse.compile.frequency import Outcomes
from hotfuse.compile.request_bodies import PartitionTimes
from hotfuse.hpm.bottleneck import Bottleneck, Diagnosis, Ledger, Strategy
from hotfuse.ir.text import show
from hotfuse.machine.assumed import assumed_core
from hotfuse.machine.energy import watts_per_core
from hotfuse.machine.memory_traffic import of_misses
from hotfuse.ops.table import Access, lookup
from hotfuse.profile.names import Names
from hotfuse.profile.snapshot import GraphSeen, PartitionSeen
from hotfuse.runtime.observe.partition_cost import or_unknown, partition_cost
from hotfuse.runtime.plan import Plan

MAX_PARTITIONS = 12
"""Partitions that are looked into, the slowest: the others are not worth it."""
MIN_NS = 100
"""What takes less is views, and limited by nothing."""
TIMED_CALLS = 5
"""Calls of a plan that was just raced in which its partitions are timed."""
COUNTED = ("cycles", "instructions", "cache_misses")


@dataclass(frozen=True, slots=True)
class PartitionQuestion:
    """A partition of a plan at one kind of call."""

    tier: int
    index: int
    name: str
    """What the analyzer calls it."""
    shapes: str
    seen: PartitionSeen
    share: float
    """Its part of the time of all partitions."""
    threads: int
    times: PartitionTimes
    """For the worker."""
    products: tuple[str, ...] = ()
    """Values that products of it multiply."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What limits a partition, with the evidence."""

    tier: int
    index: int
    name: str
    shapes: str
    us: float
    share: float
    bottleneck: Bottleneck
    because: str
    predicted_us: float | None
    version: int
    """Of the model that predicted."""
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])
    products: tuple[str, ...] = ()
    """Values that products of it multiply: what zeros in them are worth is its share of the time."""

    def strategies(self, ledger: Ledger) -> list[tuple[Strategy, float]]:
        """What addresses it, the most promising first."""
        return ledger.propose(Diagnosis(self.bottleneck, {}, 0.0, 1.0))

    def to_dict(self, ledger: Ledger) -> dict[str, Any]:
        """Plain data."""
        return {
            "tier": self.tier, "partition": self.index, "shapes": self.shapes, "us": round(self.us, 1),
            "share": round(self.share, 3),
            "bottleneck": self.bottleneck.value, "because": self.because, "predicted_us": self.predicted_us,
            "model": self.version, **self.evidence,
            "strategies": {s.value: round(p, 2) for s, p in self.strategies(ledger)},
        }  # fmt: skip


def questions(
    plan: Plan, found: GraphSeen, number: int, names: Names, threads: int, most: int = MAX_PARTITIONS
) -> list[PartitionQuestion]:
    """The slowest partitions of a plan at the kind of call that came most often."""
    items = {names.item(number, _name(plan, p.index)): p.index for p in plan.partitioning.parts}
    for signature in found.signatures:
        shapes = names.shapes(number, signature.signature)
        seen = {items[p.item]: p for p in signature.partitions if p.item in items and p.n and p.mean > 0}
        if shapes is not None and (asked := _asked(plan, seen, shapes, threads, found.by_name(names), most)):
            return asked
    return []


def timed(plan: Plan, call: Sequence[torch.Tensor], threads: int, most: int = MAX_PARTITIONS) -> list[PartitionQuestion]:
    """Questions about a plan that was just raced, on the call of its race: no call of it has been sampled yet."""
    with torch.no_grad():
        rounds = [plan.timed(*call)[1] for _ in range(TIMED_CALLS)]
    if len(rounds[0]) != len(plan.artifacts):  # a plan that cannot say what its partitions take
        return []
    seen: dict[int, PartitionSeen] = {}
    for i, times in enumerate(zip(*rounds, strict=True)):
        ordered = sorted(float(t) for t in times)
        middle, mean = ordered[TIMED_CALLS // 2], sum(ordered) / TIMED_CALLS
        if middle > 0:
            seen[i] = PartitionSeen(0, TIMED_CALLS, mean, 0.0, ordered[0], middle, ordered[-1], -1, -1, ())
    return _asked(plan, seen, [tuple(t.shape) for t in call], threads, most=most)


def _name(plan: Plan, index: int) -> str:
    """What the analyzer calls a partition."""
    return f"{'' if plan.tier == 0 else f'tier {plan.tier} '}partition {index}"


def _asked(
    plan: Plan, seen: Mapping[int, PartitionSeen], shapes: Sequence[Sequence[int]], threads: int, outcomes: Outcomes | None = None,
    most: int = MAX_PARTITIONS,
) -> list[PartitionQuestion]:  # fmt: skip
    env = bind(plan.graph, list(shapes))
    if not seen or isinstance(env, Mismatch):
        return []
    if plan.account is not None:
        env = plan.account.seen.with_data_sizes(env)
    seen = {i: p for i, p in seen.items() if p.p50 >= MIN_NS}
    total = sum(p.mean for p in seen.values())
    text = " ".join("x".join(map(str, s)) or "scalar" for s in shapes)
    slowest = sorted(seen.items(), key=lambda kv: -kv[1].mean)[:most]
    return [
        PartitionQuestion(plan.tier, i, _name(plan, i), text, p, p.mean / total, threads, _times(plan, i, p, env, threads),
                          _multiplied(plan, i))
        for i, p in ((i, _complete(plan, i, p, env, outcomes)) for i, p in slowest)
    ]  # fmt: skip


def _multiplied(plan: Plan, index: int) -> tuple[str, ...]:
    """What products of a partition multiply by weights or by each other, by name."""
    part, params = plan.partitioning.parts[index], {p.value.name for p in plan.graph.params}
    products = (n for n in plan.graph.nodes[part.first : part.last] if lookup(n.op).access is Access.CONTRACTION)
    return tuple(dict.fromkeys(v.name for n in products for v in n.ins if v.name not in params))


def _complete(plan: Plan, index: int, p: PartitionSeen, env: Mapping[str, int], outcomes: Outcomes | None) -> PartitionSeen:
    """With the bytes and flops that sampled calls had not been told yet, or that follow from the branches they took."""
    if p.bytes >= 0 and p.flops >= 0:
        return p
    cost = partition_cost(plan, index, env, outcomes)
    return replace(p, bytes=or_unknown(cost.bytes), flops=or_unknown(cost.flops))


def _times(plan: Plan, index: int, p: PartitionSeen, env: Mapping[str, int], threads: int) -> PartitionTimes:
    made = plan.artifacts[index]
    noise = (p.p90 - p.p10) / 2 / p.p50 if p.p50 > 0 else 1.0
    return PartitionTimes(
        show(made.graph), dict(env), library=made.backend != "llvm", us=p.p50 * 1e-3, n=p.n, noise=max(0.0, noise),
        balance=_balance(plan, index, env, threads), flops=p.flops, bytes=p.bytes,
    )  # fmt: skip


def _balance(plan: Plan, index: int, env: Mapping[str, int], threads: int) -> float:
    """How evenly the iterations of a kernel's outermost parallel loop go round among threads: derived, as nobody times threads."""
    source = plan.artifacts[index].source
    number = next((n for n, name in plan.kernels.names().items() if source.startswith(f"{name}:")), None)
    if threads < 2 or number is None:
        return 1.0
    try:
        n = parallel_iterations(plan.kernels[number], env)
    except (KeyError, HotfuseError):  # sizes of the kernel's own
        return 1.0
    return 1.0 if n < 2 else n / threads / math.ceil(n / threads)


def findings(asked: Sequence[PartitionQuestion], answer: ProfileAnswer) -> tuple[Finding, ...]:
    """Questions with what the worker said of them."""
    return tuple(_finding(q, said, answer.model) for q, said in zip(asked, answer.parts, strict=False))


def _finding(q: PartitionQuestion, said: PartitionDiagnosis, version: int) -> Finding:
    us = q.seen.p50 * 1e-3
    evidence: dict[str, Any] = {
        "utilization": dict(said.utilization), "overhead": said.overhead, "source": said.source,
        "rooflines": "measured" if said.measured_rooflines else "guessed", **_counters(q, said), **_traffic(q), **_energy(q),
    }  # fmt: skip
    return Finding(q.tier, q.index, q.name, q.shapes, us, q.share, Bottleneck(said.bottleneck), said.because,
                   said.predicted_us, version, evidence, q.products)  # fmt: skip


def _counters(q: PartitionQuestion, said: PartitionDiagnosis) -> dict[str, Any]:
    """Counted where the system lets us; else cycles follow from time and the clock, and say so."""
    if q.seen.counters:
        found = dict(zip(COUNTED, (round(c) for c in q.seen.counters), strict=True))
        return {"counters": found, "counters_source": "counted on the calling thread"}
    clock = "measured" if said.measured_rooflines else "stated or guessed"
    cycles = round(q.seen.p50 * 1e-9 * said.hz)
    return {"counters": {"cycles": cycles}, "counters_source": f"derived from time and a {clock} clock"}


def _traffic(q: PartitionQuestion) -> dict[str, Any]:
    """Bytes a second from memory, by cache misses where they are counted; else what operators read and write, wherever it lies."""
    seconds = q.seen.p50 * 1e-9
    if q.seen.counters:
        moved = of_misses(q.seen.counters[COUNTED.index("cache_misses")], seconds)
        return {"gigabytes_per_s": round(moved.per_s / 1e9, 3), "traffic_source": f"derived from {moved.of}"}
    if q.seen.bytes < 0:
        return {}
    return {"gigabytes_per_s": round(q.seen.bytes / seconds / 1e9, 3), "traffic_source": "derived from operands, cached or not"}


def _energy(q: PartitionQuestion) -> dict[str, Any]:
    """An estimate: meters of a whole processor say nothing about some microseconds of it."""
    return {"microjoules": microjoules(q), "energy_source": "estimated"}


def microjoules(q: PartitionQuestion) -> float:
    """What a partition takes of energy, by its time and what it moves."""
    moved = max(q.seen.bytes, 0)
    return round((q.seen.p50 * 1e-9 * watts_per_core() * q.threads + moved * assumed_core().joules_per_byte) * 1e6, 2)
