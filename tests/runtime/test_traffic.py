# pyright: reportPrivateUsage=false
"""What calls were seen to bring reaches whoever plans for them, and plans made by it are right at every extent."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hotfuse
from hotfuse import Settings
from hotfuse.base.events import EventLog, Why
from hotfuse.compile.account import SEEN
from hotfuse.hpm.bottleneck import Bottleneck
from hotfuse.ir.text import parse
from hotfuse.profile.names import Names
from hotfuse.profile.records import Flag
from hotfuse.profile.snapshot import GraphSeen, Share, ValueSeen
from hotfuse.profile.traffic import MeasuredPiece, TrafficSeen, data_size
from hotfuse.runtime.observe.call_sampler import CallSampler
from hotfuse.runtime.observe.data_sizes import data_sizes
from hotfuse.runtime.observe.findings import Finding
from hotfuse.runtime.observe.traffic import as_planned, mix_of, traffic_of
from hotfuse.runtime.samples import CallSamples
from hotfuse.runtime.tierup.proposals import PROPOSERS, _hidden, _multiplies
from hotfuse.specialize.table import PADDING, ZERO_ROWS, row
from tests.contract.test_seen_costs import PICKED
from tests.races import kernels_win

ROWS = 48


class Picks(torch.nn.Module):
    """Rows that a mask picks, and something behind."""

    def __init__(self, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.behind = torch.nn.Linear(32, 32), behind

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Of rows that are picked, some function."""
        return self.behind(torch.tanh(self.first(x[mask]) * 2 + 1))


def picks(n: int) -> torch.Tensor:
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[torch.randperm(ROWS)[:n]] = True
    return mask


def entries(fast: Any) -> list[Any]:
    return [e for s in fast._engine.sites.values() for e in s.entries]


def warm(model: torch.nn.Module, x: torch.Tensor, calls: int = 12) -> Any:
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2, race_s=0.01))
    with torch.no_grad():
        for _ in range(calls):
            fast(x, picks(20))
    return fast


BEHIND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda y: torch.softmax(y * 3, -1), "sums": lambda y: y.sum(0) * 3, "means": lambda y: y.mean() + y,
    "pairs": lambda y: torch.relu(y @ y.T), "joined": lambda y: torch.cat([y, y * 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND)
def test_rows_that_data_pick_get_kernels_which_are_right_for_any_number_of_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_win(monkeypatch)
    model, x = Picks(BEHIND[name]).eval(), torch.randn(ROWS, 32)
    with warm(model, x) as fast, torch.no_grad():
        (entry,) = entries(fast)
        assert entry.plan.tier == 1, entry.refused
        assert entry.plan.account.seen.sizes[0].size == 20
        assert f"{SEEN} u0 is 20 to 20" in fast.explain(full=True).text(full=True)
        for n in (0, 1, 2, 3, 20, ROWS):
            mask = picks(n)
            torch.testing.assert_close(fast(x, mask), model(x, mask), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("behind", [lambda y: y.amax(0) * 2, lambda y: y[0] * 2, lambda y: y.max() * 2, lambda y: y[-1] * 2])
def test_where_an_operator_may_refuse_no_rows_it_still_does(
    behind: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_win(monkeypatch)
    model, x = Picks(behind).eval(), torch.randn(ROWS, 32)
    with warm(model, x) as fast, torch.no_grad():
        with pytest.raises((IndexError, RuntimeError)):
            model(x, picks(0))
        with pytest.raises((IndexError, RuntimeError)):
            fast(x, picks(0))
        mask = picks(5)
        torch.testing.assert_close(fast(x, mask), model(x, mask), rtol=1e-4, atol=1e-4)


def test_kept_calls_tell_the_sizes_that_data_have() -> None:
    graph, x = parse(PICKED.replace("512", "8")), torch.randn(ROWS, 8)
    steady = data_sizes(graph, {}, [(x, picks(n)) for n in (20, 21, 19, 20)])
    assert steady == (data_size("u0", (20, 21, 19, 20)),) and steady[0].predictable
    wild = data_sizes(graph, {}, [(x, picks(n)) for n in (1, 40, 3, 12)])
    assert not wild[0].predictable and (wild[0].low, wild[0].high) == (1, 40)
    assert not data_sizes(graph, {}, [(x, picks(0))])[0].predictable, "nothing can be tried on no rows"
    assert TrafficSeen(steady).with_data_sizes({"s0": ROWS}) == {"s0": ROWS, "u0": 20}


def test_several_sizes_are_planned_for_where_none_is_most() -> None:
    graph = parse(PICKED)
    samples = CallSamples(1 << 30)

    def came(sizes: list[int]) -> None:
        for n in sizes:
            samples.note((n,), [torch.zeros(n, 512), torch.zeros(n, dtype=torch.bool)])

    came([8] * 10)
    assert mix_of(samples, graph) == ()
    came([16] * 10)
    found = mix_of(samples, graph)
    assert {m.dims["s0"] for m in found} == {8, 16} and sum(m.share for m in found) == pytest.approx(1.0, abs=0.01)
    came([16] * 60)
    assert mix_of(samples, graph) == (), "most calls have one size by now"


def test_what_sampled_calls_took_is_told_to_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled calls of a plan of kernels: their partitions' times are weights of the next plan, by what they compute."""
    kernels_win(monkeypatch)
    model, x = Picks(BEHIND["rows"]).eval(), torch.randn(ROWS, 32)
    settings = Settings(capture="inline", hot_calls=2, race_s=0.01, watch_rate=1)
    with hotfuse.jit(model, settings=settings) as fast, torch.no_grad():
        for _ in range(200):
            fast(x, picks(20))
        (entry,) = entries(fast)
        sampler: CallSampler = fast._engine.call_sampler

        def told() -> tuple[MeasuredPiece, ...]:
            return traffic_of(sampler, entry, EventLog())(entry.baseline.graph).pieces

        for _ in range(40):
            if told():
                break
            for _ in range(50):
                fast(x, picks(20))
            sampler._shared.analyzer.flush()
        pieces = told()
        assert pieces, "sampled calls show what partitions take"
        graphs = {a.graph.name for a in entry.plan.artifacts}
        assert all(p.us > 0 and p.n >= 1 and p.noise > 0 and parse(p.graph).name in graphs for p in pieces)
        assert as_planned(entry)(entry.baseline.graph) == entry.plan.account.seen


def found(share: float, *products: str) -> Finding:
    return Finding(1, 0, "partition", "", 1.0, share, Bottleneck.COMPUTE, "", None, 0, products=products)


def zeros(item: int, share: float, flags: int = 0, live: float = 0.0) -> ValueSeen:
    none, some = Share(8, 0.0, 0.0), Share(8, share, 0.0)
    return ValueSeen(item, 8, flags, (4, 4), some, none, none, none, none, Share(8, live, 0.0), none, 0.0, 1.0, 1.0)


def test_zeros_are_worth_the_time_of_the_products_that_they_are_in() -> None:
    names = Names()
    number = names.graph("a model")
    hot, cold = (zeros(names.item(number, n), 0.9) for n in ("hot", "cold"))
    sampler: Any = SimpleNamespace(known=lambda _key: (number, None, names))
    context: Any = SimpleNamespace(plans=SimpleNamespace(call_sampler=sampler))
    entry: Any = SimpleNamespace(key=0, plan=SimpleNamespace(tier=1), findings=(found(0.6, "hot"), found(0.38, "x")))
    assert _multiplies(context, entry, hot) == 0.6
    assert _multiplies(context, entry, cold) == pytest.approx(0.02), "too fast to be told apart: at most what the others leave"
    entry.findings = ()
    assert _multiplies(context, entry, hot) == row(ZERO_ROWS).saves, "nobody has looked"


def test_zeros_of_a_mask_say_nothing_of_what_products_multiply() -> None:
    """Inputs are seen long before what flows through tier 1 is: refused by them, rows of zeros were never looked for."""
    names = Names()
    number = names.graph("a model")
    mask, hidden = (zeros(names.item(number, n), share) for n, share in (("mask", 0.8), ("hidden", 0.9)))
    shown: list[ValueSeen] = [mask]
    sampler: Any = SimpleNamespace(
        known=lambda _key: (number, None, names), seen=lambda _key: GraphSeen(1, 99, (), tuple(shown), (), (), (), (), 0),
    )
    context: Any = SimpleNamespace(plans=SimpleNamespace(call_sampler=sampler))
    entry: Any = SimpleNamespace(key=0, plan=SimpleNamespace(tier=1, sides=None), baseline=None, refused={},
                                 findings=(found(0.96, "hidden"), found(0.04, "mask too")))  # fmt: skip
    assert PROPOSERS[ZERO_ROWS](context, entry, entry) is None
    shown.append(hidden)
    proposed = PROPOSERS[ZERO_ROWS](context, entry, entry)
    assert proposed is not None and (proposed.saves, proposed.share) == (0.96, 0.9)


def test_packing_is_expected_to_save_the_rows_that_masks_hide() -> None:
    mask = int(Flag.MASK) | int(Flag.INPUT)

    def seen(*values: ValueSeen) -> GraphSeen:
        return GraphSeen(0, 8, (), values, (), (), (), (), 0)

    assert _hidden(seen(zeros(0, 0.0, mask, live=0.33))) == pytest.approx(0.67)
    assert _hidden(seen(zeros(0, 0.0, int(Flag.MASK), live=0.33))) == row(PADDING).saves, "made inside: no rows of the calls"
    assert _hidden(None) == row(PADDING).saves


def test_a_kept_call_that_raises_is_no_reason_to_go_without_a_plan() -> None:
    graph, log, samples = parse(PICKED), EventLog(), CallSamples(1 << 30)
    samples.note((8,), [torch.zeros(8, 512), torch.zeros(9, dtype=torch.bool)])
    entry: Any = SimpleNamespace(key=0, samples=samples, baseline=SimpleNamespace(graph=graph), weights={}, measured=())
    sampler: Any = SimpleNamespace(known=lambda _key: None)
    assert not traffic_of(sampler, entry, log)(graph) and log.counts["traffic_unknown"] == 1
    assert any(d.why is Why.BACKGROUND_FAILED for d in log.decisions)
