"""What is seen of calls, and what is made of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hotfuse
import hotfuse.profile.agent as agent_module
import hotfuse.profile.stats as stats_module
import hotfuse.runtime.observe.call_sampler as watcher_module
from hotfuse.pipeline import compile_tier0
from hotfuse.profile.agent import BUDGET, DENSE, Sampler
from hotfuse.profile.analyzer import Analyzer
from hotfuse.profile.analyzer_memory import AnalyzerMemory
from hotfuse.profile.predict import StreamPredictor
from hotfuse.profile.records import LAYOUTS, SIZE, RecordKind
from hotfuse.profile.ring import Ring
from hotfuse.profile.snapshot import GraphSeen
from hotfuse.profile.stats import Outcomes
from hotfuse.profile.traffic_drift import Stream
from hotfuse.runtime.observe.call_notes import Noting
from hotfuse.runtime.observe.call_sampler import Shared
from hotfuse.runtime.observe.instrument import InstrumentedPlan
from tests.contract.test_analyzer import call
from tests.mechanisms.table import Row, World, replaced, setting
from tests.races import samples_cost_nothing
from tests.runtime.test_watching import INLINE, LOOP, graph_of, sampled, variant_of


class Watched(nn.Module):
    """A mask that hides something, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        h = x.masked_fill(~keep, 0.0)
        return torch.cond(keep.sum() > 0, lambda t: torch.relu(self.first(t)), lambda t: self.second(t), (h,))


def call_of() -> tuple[torch.Tensor, torch.Tensor]:
    """Of everything that is counted, something: a row of zeros (which is constant), a column of them, an infinity, a hidden row."""
    x = torch.rand(6, 8) * 3 + 1
    x[0], x[2, 5], x[3, 0] = 0.0, float("inf"), -7.0
    x[:, 3] = 0.0
    keep = torch.ones(6, 8, dtype=torch.bool)
    keep[5] = False
    return x, keep


def served(world: World) -> tuple[Any, Analyzer]:
    """A model that was sampled, watched by an analyzer of its own."""
    shared = Shared(Analyzer())
    world.patch.setattr(watcher_module, "_shared", shared)
    samples_cost_nothing(world.patch)
    fast: Any = hotfuse.jit(Watched().eval(), settings=world.settings(tiers=0, watch_rate=2))
    for _ in range(40):
        fast(*call_of())
    shared.analyzer.flush(0.2 if Analyzer._spawn is _nothing else 120.0)  # pyright: ignore[reportPrivateUsage]
    return fast, shared.analyzer


SEEN: dict[object, GraphSeen | None] = {}
"""What was seen in a run, by the switch that was turned: many rows read the same run."""


def seen_of(read: Callable[[GraphSeen], float]) -> Callable[[World], float]:
    """A figure of what was seen, 0 where nothing was."""

    def probe(world: World) -> float:
        if world.turned not in SEEN:
            fast, analyzer = served(world)
            entry = next(iter(fast._engine.sites.values())).entries[0]
            SEEN[world.turned] = fast._engine.call_sampler.seen(entry.key)
            fast.close()
            analyzer.stop()
        found = SEEN[world.turned]
        return float(read(found)) if found is not None else 0.0

    return probe


def value(name: str, of: int = 0) -> Callable[[World], float]:
    """The mean of a share of an input."""
    return seen_of(lambda seen: getattr(seen.values[of], name).mean if seen.values else 0.0)


def without(statistic: str) -> Callable[[World], None]:
    """A switch that takes one statistic of values away and leaves the others: its field in the records stays empty."""
    see, at = Noting.see, LAYOUTS[RecordKind.VALUE].fields[statistic][1]

    def seen(noting: Any, s: Any, *about: Any) -> None:
        before = s.batch.count
        see(noting, s, *about)
        if s.batch.count > before:
            s.batch.write(s.batch.address + before * SIZE + at, bytes(8))

    return replaced(Noting, "see", seen)


def trips(_world: World) -> float:
    variant, _, _ = variant_of(compile_tier0(graph_of(LOOP), {}, INLINE), {})
    _, records = sampled(variant, [torch.zeros(4), torch.tensor(3)])
    return sum(int(r["outcome"]) for r in records.get(RecordKind.CONTROL, ()))


def steady(sampler: Sampler, cost: int) -> int:
    for n in range(1, 400):
        sampler.took(n * 1000, 10_000_000 + cost, cost)
        sampler.compared(n * 1000 + 1, 10_000_000)
    return sampler.interval


def sparser(_world: World) -> float:
    return steady(Sampler(64), 1) - DENSE


def affordable(_world: World) -> float:
    """How much seldomer a costly sample is taken than a cheap one."""
    return steady(Sampler(64), 5_000_000) - steady(Sampler(64), 1)


def drifted(_world: World) -> float:
    book = AnalyzerMemory()
    for i in range(600):
        call(book, i, branch=int(i < 300))
    return sum(len(g.drifts) for g in book.graphs.values())


def predicted(_world: World) -> float:
    book = AnalyzerMemory()
    for i in range(100):
        call(book, i, branch=1)
    return sum(p.accuracy for g in book.snapshot().graphs.values() for p in g.predictions if p.kind == "branch")


def faded(_world: World) -> float:
    """Whether what was frequent long ago is no more."""
    outcomes = Outcomes()
    for n in range(2000):
        outcomes.add(0 if n < 1500 else 1)
    return outcomes.shares()[0][0]


def beside(world: World) -> float:
    """Records that another process than this one has taken in."""
    fast, analyzer = served(world)
    try:
        return analyzer.snapshot.records if analyzer.pid not in (None, os.getpid()) else 0
    finally:
        fast.close()
        analyzer.stop()


def _nothing(*_a: object, **_k: object) -> None:
    return None


UNWATCHED = setting(watch=False)
NO_OUTCOMES = replaced(Noting, "outcome", _nothing)
row = functools.partial(Row, "instrumentation")
rows = functools.partial(Row, "analyzer")
ROWS: tuple[Row, ...] = (
    row("zero fraction per element", value("zero"), without("zeros")),
    row("zero fraction per row", value("zero_rows"), without("zero_rows")),
    row("zeros joint over rows", value("zero_cols"), without("zero_cols")),
    row("constant rows", value("constant_rows"), without("constant_rows")),
    row("what is not finite", value("nonfinite"), without("nonfinite")),
    row("least value", seen_of(lambda s: -s.values[0].min if s.values else 0), without("min")),
    row("greatest value", seen_of(lambda s: s.values[0].max if s.values else 0), without("max")),
    row("greatest magnitude", seen_of(lambda s: s.values[0].absmax if s.values else 0), without("absmax")),
    row("valid fraction of a mask", value("valid", 1), without("valid")),
    row("valid rows of a mask", value("valid_rows", 1), without("valid_rows")),
    row("branch outcomes", seen_of(lambda s: sum(c.n for c in s.controls if not c.loop)),
        NO_OUTCOMES),
    row("trip counts", trips, NO_OUTCOMES),
    row("time of partitions", seen_of(lambda s: sum(p.mean for p in s.partitions)), UNWATCHED),
    row("flops and bytes of partitions", seen_of(lambda s: max(p.flops for p in s.partitions) + 1),
        replaced(InstrumentedPlan, "needs_costs", lambda *_a: False)),
    row("shapes per signature", seen_of(lambda s: len(s.signatures)), UNWATCHED),
    row("the ring carries records", seen_of(lambda s: s.samples), replaced(Ring, "publish", _nothing)),
    row("samples become rarer when nothing changes", sparser, replaced(Sampler, "_next", lambda _s: DENSE)),
    row("what samples may cost is bounded", affordable, replaced(agent_module, "BUDGET", 1e9 * BUDGET)),
    rows("runs in a process of its own", beside, replaced(Analyzer, "_spawn", _nothing)),
    rows("drift is noticed", drifted, replaced(Stream, "add", _nothing)),
    rows("predictions are scored", predicted, replaced(StreamPredictor, "see", _nothing)),
    rows("statistics fade", faded, replaced(stats_module, "DECAY", 1.0)),
)  # fmt: skip
