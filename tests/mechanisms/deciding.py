"""What is tried, what calls must bring, and what is deployed."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import hotfuse
import hotfuse.runtime.call_learner as learner_module
import hotfuse.runtime.serve.dispatch as dispatch_module
import hotfuse.runtime.tierup.attempt_runner as runner_module
import hotfuse.runtime.tierup.judge as judge_module
import hotfuse.runtime.tierup.padding as padding_module
import hotfuse.runtime.tierup.tiers as tiers_module
from hotfuse.analysis.call_facts import Aligned, AllEqual, Dense, Fact, Facts, Plain, Sized, Typed
from hotfuse.analysis.decision import decide
from hotfuse.api import engine_stats
from hotfuse.base.events import Action, Why
from hotfuse.ir.types import DType
from hotfuse.native.guard import native_select
from hotfuse.runtime.engine import Engine
from hotfuse.runtime.plan import Plan, PlanMemory
from hotfuse.runtime.samples import CallSamples
from hotfuse.runtime.serve.dispatch import Case, InlineCache, SiteState, _Tallies
from hotfuse.runtime.serve.fact_checks import failed
from hotfuse.runtime.serve.partition_guard import guarded
from hotfuse.runtime.tierup.attempt import AttemptContext
from hotfuse.runtime.tierup.audit import Audit
from hotfuse.runtime.tierup.contest import PlanContest
from hotfuse.runtime.tierup.proof import Proof, prove
from hotfuse.runtime.tierup.proposals import PROPOSERS
from hotfuse.runtime.tierup.race import Trial
from hotfuse.specialize.table import BRANCH, OPEN_MASK, REPEATED, ZERO_ROWS
from tests.contract.test_native_guards import basics
from tests.mechanisms.table import Row, Switch, World, replaced, setting
from tests.padded import PaddedEncoder, batch
from tests.races import kernels_win, new_plans_win, samples_cost_nothing, skipping_pays
from tests.runtime.live import SETTINGS as LIVE
from tests.runtime.live import Live
from tests.runtime.test_bets import Branchy
from tests.runtime.test_dispatch import GENERAL, routed, special
from tests.runtime.test_masks import Attention
from tests.runtime.test_repeated_inputs import TwoTowers
from tests.runtime.test_tiers import Compiler, race_says, served, varied

# --- policy -------------------------------------------------------------------------------------------------------------


def engine_of(world: World, compiler: Any, calls: Sequence[int] = (3,) * 8, won: bool | None = True, **own: object) -> Engine:
    """A served linear layer after so many calls; races say what they are told, or measure."""
    if won is not None:
        race_says(world.patch, won)
    model = nn.Linear(4, 4).eval()
    engine = served(model, compiler, world.settings(**own))
    varied(engine, model, calls)
    return engine


def first(engine: Engine) -> Any:
    return next(e for e in next(iter(engine.sites.values())).entries)


def promoted(world: World) -> float:
    return engine_stats(engine_of(world, Compiler()))["calls_per_tier"]["1"]


def specialized(world: World) -> float:
    engine = engine_of(world, Compiler(), [3, 5, 6, 7] + [9] * 120, watch_rate=2)
    return len(first(engine).versions)


def dropped_for_memory(world: World) -> float:
    compiler = Compiler()

    def heavy(*args: Any, **more: Any) -> Plan:
        return replace(compiler(*args, **more), memory=PlanMemory(constants=600))

    engine = engine_of(world, heavy, [3, 5, 6, 7] + [9] * 120, watch_rate=2, code_bytes=1000)
    return engine_stats(engine)["events"].get("drop.too_much_memory", 0)


def generic(_world: World) -> float:
    """Whether a site that throws out what it has just made comes to rest."""
    site: InlineCache[str] = InlineCache(1, 3)
    site.add(Case(GENERAL, "general"))
    for n in range(20):
        routed(site, [torch.ones(n, 1)])
        site.add(special(n))
    return site.state is SiteState.GENERIC


def polymorphic(world: World) -> float:
    """Cases that had to go, so that the others stay few."""
    site: InlineCache[str] = InlineCache(1, world.settings(max_entries=3).max_entries)
    return sum(len(site.add(special(n))) for n in range(5))


def not_again(world: World) -> float:
    """Whether what lost was tried once only."""
    compiler = Compiler()
    engine_of(world, compiler, [3] * 20, won=False)
    return compiler.made == 1


def said_only(self: Any, _entry: object, _attempt: object, why: Any, _reason: str, **evidence: Any) -> None:
    self.decide(runner_module.Action.REFUSE, why, **evidence)


def without_row(name: str) -> Switch:
    """A row of the table of specializations that proposes nothing."""

    def off(world: World) -> None:
        world.patch.setitem(PROPOSERS, name, lambda *_a: None)  # pyright: ignore[reportArgumentType]

    return off


def sampled_always(world: World) -> None:
    samples_cost_nothing(world.patch)
    new_plans_win(world.patch)


def bets(world: World) -> float:
    """Calls that ran in straight-line code behind a condition."""
    sampled_always(world)
    fast: Any = hotfuse.jit(Branchy().eval(), settings=world.settings(watch_rate=2))
    for _ in range(3):
        for _ in range(100):
            fast(torch.rand(3, 8))
        fast._engine.call_sampler._shared.analyzer.flush(120)
    found = sum(b.outcomes.hits for b in first(fast._engine).bets.values())
    fast.close()
    return found


def unmasked(world: World) -> float:
    """Whether a mask that always lets everything through is gone from the plan."""
    sampled_always(world)
    fast: Any = hotfuse.jit(Attention(added=False).eval(), settings=world.settings(watch_rate=2))
    for _ in range(3):
        for _ in range(100):
            fast(torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.int64))
        fast._engine.call_sampler._shared.analyzer.flush(120)
    found = bool(first(fast._engine).plan.layers)
    fast.close()
    return found


def kept_results(world: World) -> float:
    """Calls that did not run again what depends on an input that came again."""
    new_plans_win(world.patch)
    fast: Any = hotfuse.jit(TwoTowers().eval(), settings=world.settings(watch_rate=2))
    text = torch.randint(0, 50, (5, 7))
    for _ in range(150):
        fast(torch.randn(3, 12), text)
    found = first(fast._engine).plan.counters().get("repeated_hits", 0)
    fast.close()
    return found


def rows_left_out(world: World) -> float:
    """Calls of a product that did not multiply rows of zeros, as sampled calls had shown them."""
    sampled_always(world)
    kernels_win(world.patch)
    skipping_pays(world.patch)
    fast: Any = hotfuse.jit(nn.Sequential(nn.Linear(24, 40), nn.GELU()).eval(), settings=world.settings(watch_rate=2))
    x = torch.randn(16, 24)
    x[4:] = 0
    for _ in range(3):
        for _ in range(100):
            fast(x)
        fast._engine.call_sampler._shared.analyzer.flush(120)
    found = first(fast._engine).plan.counters().get("calls_skipping_rows", 0)
    fast.close()
    return found


def packed_calls(world: World) -> float:
    """Calls of which padded rows were not computed."""
    race_says(world.patch, True)
    world.patch.setattr(padding_module, "paying_share", lambda *_a, **_k: 0.9)
    fast: Any = hotfuse.jit(PaddedEncoder().eval(), settings=world.settings())
    for _ in range(30):
        fast(*batch(3, 16))
    found = first(fast._engine).plan.counters().get("packed_calls", 0)
    fast.close()
    return found


# --- guards -------------------------------------------------------------------------------------------------------------

DROPPED: type | None = None
"""The kind of fact that is not checked."""
HERE = sys.modules[__name__]


def checked(facts: Sequence[Fact]) -> Facts:
    return tuple(f for f in facts if DROPPED is None or not isinstance(f, DROPPED))


def turned_away(facts: Facts, bad: Callable[[], torch.Tensor]) -> Callable[[World], float]:
    """Whether a call that lacks one fact is refused by native code."""
    return lambda _world: native_select(decide([checked(facts)])).select(bad()) < 0


def elsewhere(_world: World) -> float:
    return failed(checked((Plain(0), Typed(0, DType.F32))), [torch.empty(3, device="meta")]) is not None


def unchecked(kind: type) -> Callable[[World], None]:
    return replaced(HERE, "DROPPED", kind)


def attributed(_world: World) -> float:
    """Misses that are put down to the fact that failed."""
    site: InlineCache[str] = InlineCache(1, 3)
    site.add(special(3))
    routed(site, [torch.ones(4, 1)])
    return sum(n for text, n in site.misses().items() if "3" in text)


MASKED: Facts = (*basics(1, 1, DType.BOOL), AllEqual(1, DType.BOOL, True))


def partition_only(_world: World) -> float:
    """Whether a guard that fails inside a plan costs the partition's other version, once, and no wrong number."""
    ran: list[str] = []

    def fast(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ran.append("fast")
        return (x,)

    def general(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ran.append("general")
        return (x * mask,)

    part = guarded(fast, checked(MASKED), general, 2, lambda job: job())
    x, mask = torch.ones(9), torch.ones(9, dtype=torch.bool)
    part(x, mask)
    mask[4] = False
    return bool(torch.equal(part(x, mask)[0], x * mask)) and ran == ["fast", "general"]


# --- proof --------------------------------------------------------------------------------------------------------------


def right_answers(world: World) -> float:
    """Right answers while a compiler makes plans that are wrong."""
    race_says(world.patch, True)
    model = nn.Linear(4, 4).eval()
    engine = served(model, Compiler(lambda out: out + 1), world.settings())
    for _ in range(8):
        engine(torch.randn(3, 4))
    x = torch.randn(3, 4)
    return bool(torch.allclose(engine(x), model(x)))


def close_enough(_world: World) -> float:
    """Whether a result that differs from the library's by what the library's own errors are passes."""
    x = torch.randn(64, 257)
    exact = (x.double().sum(-1)).float()
    library = exact + 1e-5 * torch.randn(64)
    return not prove(lambda _x: (exact,), lambda _x: (library,), [[x]], 0.0, lambda noise=0: lambda t: (t.sum(-1),)).difference


def slow(out: torch.Tensor) -> torch.Tensor:
    time.sleep(0.003)
    return out


def kept_fast(world: World) -> float:
    """Whether a plan that takes a hundred times as long stays out, by a real race."""
    engine = engine_of(world, Compiler(slow), won=None, race_s=0.1)
    return first(engine).plan.tier == 0


def withdrawn(world: World) -> float:
    """A plan that was fast when live calls raced it, and is slow now."""
    slow: list[float] = []
    with torch.no_grad(), Live(own_s=0.009, tier0_s=0.003, tier1_s=lambda: sum(slow)) as live:
        for _ in range(400):
            live.call()
            if not slow and live.captured and live.entry.plan.tier == 1:
                slow.append(0.02)
            if live.said(Action.DROP, Why.REGRESSED, 1):
                return 1.0
    return 0.0


def decided_live(world: World) -> float:
    """Whether calls decided about a plan of tier 1; without them it waits for a pause, which these do not make."""
    world.patch.setattr(judge_module, "SUSPECT_S", 0.5)
    with torch.no_grad(), Live(own_s=0.009, tier0_s=0.003) as live:
        for _ in range(300):
            live.call()
            if live.captured and live.entry.plan.tier == 1:
                return 1.0
    return 0.0


def own_code(_world: World) -> float:
    """Calls that the own code answers because tier 0 is slower."""
    with torch.no_grad(), Live(own_s=0.0, tier0_s=0.003, settings=LIVE.with_(tiers=0)) as live:
        since = 0
        while since < 60:  # calls in turns decide, once there is a graph
            live.call()
            since += live.captured
        before = engine_stats(live.engine)["calls_per_tier"]["0"]
        for _ in range(20):
            live.call()
        return engine_stats(live.engine)["calls_per_tier"]["0"] == before


def private(world: World) -> float:
    """Whether nothing of what callers gave is kept."""
    race_says(world.patch, True)
    engine = served(nn.Linear(4, 4).eval(), Compiler(), world.settings(keep_inputs=False))
    secret = torch.full((3, 4), 42.0)
    for _ in range(6):
        engine(secret)
    return not any(torch.equal(t, secret) for t in first(engine).samples.inputs() or ())


def within_budget(world: World) -> float:
    samples = CallSamples(world.settings(sample_bytes=1000).sample_bytes)
    for n in range(20):
        samples.note((n,), [torch.zeros(100)])
    return samples.bytes <= 1000


row, guard, proof = (functools.partial(Row, part) for part in ("policy", "guards", "proof"))
ROWS: tuple[Row, ...] = (
    row("what is hot is compiled", promoted, setting(tiers=0)),
    row("sizes that recur get plans of their own", specialized, setting(tiers=1)),
    row("larger code must be hotter", lambda _w: tiers_module.threshold(3, 5000) - tiers_module.threshold(3, 1),
        replaced(tiers_module, "NODES_PER_STEP", 1 << 60)),
    row("a site has few cases", polymorphic, setting(max_entries=100)),
    row("a site that thrashes becomes generic", generic, replaced(dispatch_module, "THRASHING", 1 << 60)),
    row("compiled plans within a budget of memory", dropped_for_memory, setting(code_bytes=4 << 30)),
    row("what lost is not tried again", not_again, replaced(AttemptContext, "refuse", said_only)),
    row("a branch that goes one way becomes straight-line code", bets, without_row(BRANCH)),
    row("a mask that hides nothing goes", unmasked, without_row(OPEN_MASK)),
    row("what depends on repeated inputs is kept", kept_results, without_row(REPEATED)),
    row("rows of zeros are left out", rows_left_out, without_row(ZERO_ROWS)),
    row("padded rows are not computed", packed_calls, setting(padding="keep")),
    guard("shape", turned_away((*basics(0, 2), Sized(0, 1, 4)), lambda: torch.ones(2, 5)), unchecked(Sized)),
    guard("dtype", turned_away((Plain(0), Typed(0, DType.F32)), lambda: torch.ones(2).double()), unchecked(Typed)),
    guard("stride", turned_away(basics(0, 2), lambda: torch.ones(4, 4)[:, ::2]), unchecked(Dense)),
    guard("device", elsewhere, unchecked(Plain)),
    guard("alignment", turned_away((*basics(0, 1), Aligned(0, 64)), lambda: torch.ones(65)[1:]), unchecked(Aligned)),
    guard("value", turned_away((*basics(0, 1), AllEqual(0, DType.F32, 1.0)), lambda: torch.zeros(3)), unchecked(AllEqual)),
    guard("a miss is put down to a fact", attributed, replaced(_Tallies, "count", lambda _self, answer: answer)),
    guard("a miss costs its partition only", partition_only, unchecked(AllEqual)),
    proof("a plan that is wrong is never deployed", right_answers,
          replaced(runner_module, "prove", lambda *_a, **_k: Proof("", 1, "tier 0"))),
    proof("float64 judges what differs", close_enough, replaced(sys.modules["hotfuse.runtime.tierup.proof"], "SLACK", -1.0)),
    proof("a plan that is slower is never deployed", kept_fast,
          replaced(runner_module, "race", lambda *_a, **_k: Trial(2.0, 1.0, 7, True))),
    proof("live calls decide between two plans", decided_live, replaced(PlanContest, "took", lambda *_a: None)),
    proof("own code answers where tier 0 is slower", own_code, replaced(learner_module, "compare", lambda *_a: None)),
    proof("a plan that became slower is withdrawn", withdrawn, replaced(Audit, "took", lambda *_a: False)),
    proof("inputs need not be kept", private, setting(keep_inputs=True)),
    proof("kept inputs within a budget of memory", within_budget, setting(sample_bytes=1 << 30)),
)  # fmt: skip
