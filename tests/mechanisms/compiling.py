"""How graphs are cut and compiled beside inference."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import hotfuse.fusion.criteria as criteria
from hotfuse.analysis.resources import Bound, CorePeaks
from hotfuse.base.errors import CaptureError
from hotfuse.compile import compilation_graph as graph_module
from hotfuse.compile.answer_bodies import UnitRefused, message
from hotfuse.compile.compilation import Compilation
from hotfuse.compile.compilation_graph import CompileGraph
from hotfuse.compile.unit import units
from hotfuse.compile.value import Expected, Facts
from hotfuse.compile.workers.scheduler import Governor
from hotfuse.compile.workers.slot import PoolLimits, WorkerSlot
from hotfuse.compile.workers.task import Task
from hotfuse.compile.workers.worker_pool import Pool
from hotfuse.fusion.bandit import Budget
from hotfuse.fusion.criteria import Criterion, Reason, judge
from hotfuse.fusion.groups import Group
from hotfuse.fusion.kinds import CandidateKind, GroupKind
from hotfuse.fusion.seen_costs import SeenCosts
from hotfuse.ir.text import parse
from hotfuse.partition.change import PartitionChange
from hotfuse.partition.manager import fuse, split
from hotfuse.profile.traffic import TrafficSeen, data_size
from tests.contract.test_fusion_engine import CHAIN
from tests.contract.test_partition_manager import DIAMOND, each_alone
from tests.contract.test_resources import side
from tests.contract.test_seen_costs import PICKED, SIZES, linear_us, planned, planner, served
from tests.mechanisms.table import Row, World, replaced
from tests.races import forking, kernels_win
from tests.runtime.test_parallel_branches import WIDTH, forked, towers
from tests.runtime.test_parallel_branches import compiled as compiled_towers
from tests.runtime.test_pool import blocked, light, said
from tests.runtime.test_units import MIXED, PAIR, Scripted, Waiting, compiled, layers, pairs

# --- partitions ---------------------------------------------------------------------------------------------------------

ADJUST: dict[PartitionChange, Callable[[Any], Any]] = {
    PartitionChange.FUSE: lambda p: fuse(p, 0, 1, "why"),
    PartitionChange.SPLIT: lambda p: split(both := fuse(p, 0, 1, "why"), both.parts[0].number, 1, "why"),
}
"""What adjusts a partitioning; a switch takes one out."""


def adjusted(change: PartitionChange) -> Callable[[World], float]:
    """Steps of this kind in the history, where the graph is another partitioning now and the old one is untouched."""

    def probe(_world: World) -> float:
        before = each_alone(parse(DIAMOND))
        parts, seen = before.parts, len(before.history.diffs)
        after = ADJUST[change](before)
        assert before.parts == parts and len(before.history.diffs) == seen, "a partitioning is a value"
        return (
            sum(d.change is change for d in after.history.diffs)
            if after.parts != parts or change is PartitionChange.SPLIT
            else 0
        )

    return probe


def untouched(change: PartitionChange) -> Callable[[World], None]:
    def off(world: World) -> None:
        world.patch.setitem(ADJUST, change, lambda p: p)

    return off


def no_clocks(world: World) -> None:
    kernels_win(world.patch)
    world.patch.setattr(units, "measuring", lambda _sizes: None)


def given_up(self: Any, unit: Any, _at: int, why: str, _pieces: object) -> list[Any]:
    self.leave_to_library(unit, why)
    return []


def fused_while_compiling(world: World) -> float:
    no_clocks(world)
    budget = Budget(float(str(world.changes.get("measuring", 60.0))))
    return compiled(PAIR, Scripted(pairs(15.0)), measuring=budget).graph.counts["fusions"]


def cut_while_compiling(world: World) -> float:
    no_clocks(world)
    return compiled(layers(4).replace("aten.exp.default", "aten.lgamma.default")).graph.counts["splits"]


# --- the compilation graph ----------------------------------------------------------------------------------------------


def replaced_units(world: World) -> float:
    """Units that waited when the sizes changed, and were not compiled in vain."""
    no_clocks(world)
    pool = Waiting()
    done = Compilation(pool, MIXED, {"s0": 4})
    thread = threading.Thread(target=done.run)
    thread.start()
    with pool.ready:
        assert pool.ready.wait_for(lambda: len(pool.queue) == 2, 60)
    _, running = pool.queue.pop(0)
    running.set_running_or_notify_cancel()
    done.reprofile({"s0": 9})
    running.set_result(message(UnitRefused("it loses at 4")))
    while thread.is_alive():
        if any(not f.cancelled() for _, f in list(pool.queue)):
            pool.work()
        thread.join(0.01)
    return done.graph.counts["replaced"]


def valuable_first(world: World) -> float:
    """Whether the unit of most value was compiled before the others."""
    no_clocks(world)

    def estimate(facts: Facts) -> Expected:
        return Expected(1000.0 if "softmax" in facts.ops else 1.0, 1.0)

    asked = Scripted()
    done = compiled(MIXED, asked, estimate=estimate)
    graph = parse(done.graph.levels[0].text)
    return any(graph.nodes[i].op == "aten.softmax.int" for i in asked.units[0]["alike"][0][1])


def complement(_world: World) -> float:
    both = judge(side(bound=Bound.COMPUTE), side(bound=Bound.MEMORY), 0, 2, CorePeaks())
    same = judge(side(bound=Bound.MEMORY), side(bound=Bound.MEMORY), 0, 2, CorePeaks())
    return both.saving_us - same.saving_us


def accepted(criterion: Criterion) -> Callable[..., Reason]:
    return lambda *_a: Reason(criterion, True, "not asked")


def refused_for(**changes: Any) -> Callable[[World], float]:
    return lambda _w: not judge(side(**changes), side(parallel=64), 4 << 20, 8, CorePeaks()).accepted


def unpredictable(_world: World) -> float:
    """Whether a pair stays apart because what passes between is not about the same in most calls."""
    passed = [v for n in parse(PICKED).nodes[:1] for v in n.outs]
    seen = SeenCosts(TrafficSeen(sizes=(data_size("u0", (1, 60, 3, 30)),)))
    return not judge(side(), side(), 4 << 20, 8, CorePeaks(), seen.boundary(passed)).accepted


def fused_rows(_world: World) -> float:
    """Groups of several nodes behind a size that only data tell."""
    return sum(len(g.nodes) > 1 for g in planned(PICKED, TrafficSeen(sizes=(data_size("u0", (40, 40)),))).groups)


def moved_to_library(_world: World) -> float:
    """Groups that the library takes over because they took longer than predicted while they served."""
    seen = TrafficSeen(pieces=(served(CHAIN, (0, 1, 2), us=60.0),))
    engine = planner(seen, linear_us(10), kinds=frozenset({CandidateKind.LIBRARY}))
    found = engine.plan(parse(CHAIN), [Group((0, 1, 2), GroupKind.ROWS)], SIZES)
    return sum(g.kind == GroupKind.LIBRARY for g in found.groups)


def recorded_use(world: World) -> float:
    """Kernels whose use of the machine was measured while they were compiled and tried."""
    no_clocks(world)
    return sum(u.use is not None and u.use.us > 0 for u in compiled(PAIR).graph.units.values())


def side_by_side(world: World) -> float:
    """Stretches of a run whose independent parts went to two threads."""
    no_clocks(world)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    if not world.changes:
        forking(world.patch, pays=True)
    try:
        sample = [torch.randn(64, WIDTH), torch.randn(64, WIDTH)]
        native, _ = compiled_towers(towers, sample, symbolic=False)
        rounds = forked(native)
        native.run(*sample)
        return forked(native) - rounds
    finally:
        torch.set_num_threads(before)


def measured_slower(world: World) -> None:
    world.changes["race"] = "lost"
    forking(world.patch, pays=False)


# --- workers ------------------------------------------------------------------------------------------------------------


def in_pool(work: Callable[[Pool, float], float], **limits: Any) -> Callable[[World], float]:
    """What came of some work, which is told how long a request that nobody ends may go on."""

    def probe(world: World) -> float:
        pool = Pool(PoolLimits(1, **limits), light, lambda: 0.0, 60.0)
        try:
            return work(pool, 60.0 if world.turned is None else 0.5)
        finally:
            pool.close()

    return probe


def survived(pool: Pool, _long: float) -> float:
    """A request whose worker died is done by another."""
    with tempfile.TemporaryDirectory() as folder:
        task = Task("a request", {"die_once": str(Path(folder) / "died"), "say": 7}, tries=2)
        try:
            return said(pool.submit(task)) == 7
        except CaptureError:
            return 0


def ended_late(pool: Pool, long: float) -> float:
    try:
        pool.submit(Task("a request", {"sleep": long}, timeout=0.2)).result(120)
    except CaptureError:
        return pool.counts()["late"]
    return 0


def ended_fat(pool: Pool, long: float) -> float:
    try:
        pool.submit(Task("hungry", {"eat": 150 << 20, "hold": long})).result(120)
    except CaptureError as e:
        return "64 MiB" in e.because
    return 0


def newest(pool: Pool, _long: float) -> float:
    with blocked(pool):
        pool.submit(Task("unit", {"say": "old"}, key="unit"))
        new = pool.submit(Task("unit", {"say": "new"}, key="unit"))
    assert said(new) == "new"
    return pool.counts()["replaced"]


def gives_way(_world: World) -> float:
    """Steps in which a worker stands still because calls need every core."""
    governor = Governor(share=0.1, cores=2)
    return sum(governor.step(0.1, 0.0 if governor.paused else 0.1, load=1.0) for _ in range(200))


def at_once(_pool: Any, waiting: Any, error: Any) -> None:
    waiting.future.set_exception(error)


def no_key(self: Any, task: Any, real: Any = Pool.submit) -> Any:
    return real(self, replace(task, key=""))


part, row = functools.partial(Row, "partitions"), functools.partial(Row, "compiling")
ROWS: tuple[Row, ...] = (
    *(part(f"{change.name.lower()}: a new partitioning with a diff in its history", adjusted(change), untouched(change))
      for change in ADJUST),
    part("two kernels become one while others compile", fused_while_compiling,
         lambda w: w.changes.update(measuring=0.0)),
    part("a group is cut where it cannot be compiled", cut_while_compiling,
         replaced(CompileGraph, "cut", given_up)),
    row("a unit whose profile changed is replaced", replaced_units, replaced(Compilation, "reprofile", lambda *_a: None)),
    row("the most valuable unit goes first", valuable_first, replaced(Compilation, "_value", lambda *_a: 1.0)),
    row("criterion: resource complementarity", complement, replaced(
        criteria, "_complement", lambda *_a: (Reason(Criterion.COMPLEMENT, False, "not asked"), 0.0))),
    row("criterion: parallelism that must remain", refused_for(parallel=1),
        replaced(criteria, "_parallel", accepted(Criterion.PARALLEL))),
    row("criterion: limits of the machine", refused_for(vectors=40), replaced(criteria, "_limits", accepted(Criterion.LIMITS))),
    row("criterion: predictability of what passes", unpredictable, replaced(SeenCosts, "boundary", lambda *_a: None)),
    row("sizes that data tell are planned for where calls have about the same", fused_rows, replaced(
        TrafficSeen, "with_data_sizes", lambda _self, sizes: dict(sizes))),
    row("what served is weighed by what it took", moved_to_library, replaced(SeenCosts, "measured", lambda *_a, **_k: None)),
    row("a kernel's use of the machine is recorded", recorded_use, replaced(graph_module, "_use_from", lambda _data: None)),
    row("independent parts run side by side where that measured faster", side_by_side, measured_slower),
    row("a worker that dies is replaced", in_pool(survived), replaced(Pool, "_failed", at_once)),
    row("a request has a deadline", in_pool(ended_late), replaced(WorkerSlot, "look", lambda *_a: 0.0)),
    row("a worker's memory is bounded", in_pool(ended_fat, memory=64 << 20), replaced(WorkerSlot, "look", lambda *_a: 0.0)),
    row("a newer request replaces the one that waits", in_pool(newest), replaced(Pool, "submit", no_key)),
    row("workers give way to calls", gives_way, replaced(Governor, "step", lambda *_a, **_k: False)),
)  # fmt: skip
