"""Independent calls of a native run side by side: the same values, counted, and only where several threads measured it faster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import hotfuse
from hotfuse import Settings
from hotfuse.backends.llvm.threads.parallel import runtime
from hotfuse.compile.run.lanes import ForkSpan, LaneCall, allocate_lanes, forks
from hotfuse.compile.unit import units
from hotfuse.ir.dims import evaluate
from hotfuse.lower.run.arena import Live
from hotfuse.pipeline import compile_tier0, compile_tier1
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.serve.parallel_branches import set_all
from tests.contract.lowering import group_of
from tests.races import forking, kernels_win, slow_library

INLINE = Settings(capture="inline", hot_calls=1, race_s=0.02)
WIDTH = 128


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    kernels_win(monkeypatch)
    monkeypatch.setattr(units, "measuring", lambda _sizes: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


def weight(seed: int) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) / WIDTH**0.5


WEIGHTS = [weight(i) for i in range(6)]


def towers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for i in range(3):
        x = F.layer_norm(F.gelu(F.linear(x, WEIGHTS[i].to(x.dtype))), (WIDTH,))
        y = F.layer_norm(F.relu(F.linear(y, WEIGHTS[3 + i].to(y.dtype))), (WIDTH,))
    return torch.softmax(x * y, -1)


def heads(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One trunk, three heads."""
    x = F.layer_norm(F.linear(x, WEIGHTS[0].to(x.dtype)), (WIDTH,))
    hidden = [F.gelu(F.linear(x, WEIGHTS[i].to(x.dtype))) for i in (1, 2, 3)]
    return tuple(torch.softmax(F.linear(h, WEIGHTS[5].to(x.dtype)), -1) for h in hidden)


def compiled(fn: Any, sample: list[torch.Tensor], symbolic: bool) -> tuple[Plan, Plan]:
    found = group_of(fn, sample, symbolic, constants=True)
    return compile_tier1(found.graph, found.weights, sample, INLINE), compile_tier0(found.graph, found.weights, INLINE)


def forked(plan: Plan) -> int:
    return plan.counters().get("forks_taken", 0)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("fn", "inputs"), [(towers, 2), (heads, 1)])
def test_both_ways_give_the_same(fn: Any, inputs: int, symbolic: bool) -> None:
    sample = [torch.randn(64, WIDTH) for _ in range(inputs)]
    native, library = compiled(fn, sample, symbolic)
    assert native.switches and any(r.code.forks for r in native.runs), [a.source for a in native.artifacts]
    for rows in (64, 1, 2, 33, 0, 96) if symbolic else (64, 64):
        given = [torch.randn(rows, WIDTH) for _ in range(inputs)]
        exact = fn(*(t.double() for t in given))
        truths = (exact,) if torch.is_tensor(exact) else exact
        results: list[Any] = []
        for on in (False, True):
            set_all(native, on=on)
            before = forked(native)
            results.append(native.run(*given))
            assert (forked(native) > before) == (on and runtime().kind == "gomp")
        for alone, beside, lib, truth in zip(*results, library.run(*given), truths, strict=True):
            torch.testing.assert_close(beside.double(), truth, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(alone, beside, rtol=1e-5, atol=1e-6)
            assert beside.shape == lib.shape and beside.dtype == lib.dtype
    assert native.counters()["fell_back"] == 0


def test_nothing_forks_on_one_thread() -> None:
    sample = [torch.randn(64, WIDTH), torch.randn(64, WIDTH)]
    native, _ = compiled(towers, sample, symbolic=False)
    set_all(native, on=True)
    torch.set_num_threads(1)
    before = forked(native)
    native.run(*sample)
    assert forked(native) == before
    alone, _ = compiled(towers, sample, symbolic=False)  # nor is it even planned
    assert not alone.switches and not any(r.code.forks for r in alone.runs)


def test_a_timed_call_tells_partitions_apart() -> None:
    sample = [torch.randn(64, WIDTH), torch.randn(64, WIDTH)]
    native, library = compiled(towers, sample, symbolic=False)
    set_all(native, on=True)
    before = forked(native)
    outs, times = native.timed(*sample)
    assert forked(native) == before and len(times) == len(native.artifacts) and sum(times) > 0
    torch.testing.assert_close(outs[0], library.run(*sample)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("won", [True, False])
def test_the_measurement_decides_and_is_told(monkeypatch: pytest.MonkeyPatch, won: bool) -> None:
    held = forking(monkeypatch, pays=won)
    sample = [torch.randn(64, WIDTH), torch.randn(64, WIDTH)]
    native, library = compiled(towers, sample, symbolic=False)
    ((found, _, _),) = held
    assert [s.on for s in native.switches] == [won] * len(native.switches)
    said = [n for n in native.notes if "independent parts" in n]
    assert said == [f"2 independent parts in 1 stretch run {'side by side' if won else 'one after the other'}: side by side "
                    f"{found.new_us:.1f} us, one after the other {found.old_us:.1f} us, {found.rounds} rounds"]  # fmt: skip
    before = forked(native)
    torch.testing.assert_close(native.run(*sample)[0], library.run(*sample)[0], rtol=1e-4, atol=1e-5)
    assert forked(native) == before + won


class Towers(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return towers(x, y)


def test_users_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_library(monkeypatch)
    forking(monkeypatch, pays=True)
    fast = hotfuse.jit(Towers(), settings=INLINE)
    for _ in range(12):
        given = [torch.randn(64, WIDTH), torch.randn(64, WIDTH)]
        torch.testing.assert_close(fast(*given), towers(*given), rtol=1e-4, atol=1e-5)
    plan = next(iter(fast._engine.sites.values())).entries[0].plan
    assert forked(plan) > 0, str(fast.explain(full=True))
    shown = str(fast.explain(full=True))
    assert f"{forked(plan)} forks taken" in shown and "2 independent parts in 1 stretch run side by side" in shown, shown


def test_a_real_race_is_recorded() -> None:
    sample = [torch.randn(64, WIDTH), torch.randn(64, WIDTH)]
    native, _ = compiled(towers, sample, symbolic=False)
    assert forked(native) >= 5  # rounds, whoever won them
    assert any("independent parts" in n and "rounds" in n for n in native.notes)


def test_threads_that_share_a_forking_plan() -> None:
    sample = [torch.randn(64, WIDTH), torch.randn(64, WIDTH)]
    native, library = compiled(towers, sample, symbolic=True)
    set_all(native, on=True)
    wrong: list[float] = []

    def serve(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        torch.set_num_threads(2)
        with torch.no_grad():
            for n in range(30):
                given = [torch.randn(1 + (seed * 7 + n) % 70, WIDTH, generator=generator) for _ in range(2)]
                error = float((native.run(*given)[0] - library.run(*given)[0]).abs().max())
                if not error < 1e-4:
                    wrong.append(error)

    everyone = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for t in everyone:
        t.start()
    for t in everyone:
        t.join(200)
    assert not wrong and not any(t.is_alive() for t in everyone)


BIG = 1e6


def piece(step: int, reads: list[int], writes: list[int], work: float = BIG) -> LaneCall:
    return LaneCall(step, frozenset(reads), frozenset(writes), work)


def test_what_needs_each_other_is_one_lane() -> None:
    chain = [piece(0, [0], [1]), piece(1, [1], [2]), piece(2, [2], [3])]
    assert forks([chain], 2) == ()
    web = [piece(0, [0], [1]), piece(1, [0], [2]), piece(2, [1], [3]), piece(3, [2], [4]), piece(4, [3, 4], [5])]
    (fork,) = forks([web], 2)
    assert (fork.first, fork.last) == (0, 4) and {frozenset(lane) for lane in fork.lanes} == {frozenset({0, 2}), frozenset({1, 3})}
    assert forks([web], 1) == ()
    assert forks([[piece(i, [0], [i + 1], 100.0) for i in range(2)]], 2) == ()  # too little to wake anybody for


@given(st.lists(st.tuples(st.sets(st.integers(0, 8), max_size=3), st.integers(0, 8)), min_size=1, max_size=14), st.integers(2, 4))
@settings(max_examples=200, deadline=None)
def test_lanes_never_touch_what_another_writes(calls: list[tuple[set[int], int]], threads: int) -> None:
    pieces = [piece(i, list(reads), [write]) for i, (reads, write) in enumerate(calls)]
    for fork in forks([pieces], threads):
        assert sorted(i for lane in fork.lanes for i in lane) == list(range(fork.first, fork.last))
        assert all(list(lane) == sorted(lane) for lane in fork.lanes) and 2 <= len(fork.lanes) <= threads
        for n, lane in enumerate(fork.lanes):
            others = [pieces[i] for m, other in enumerate(fork.lanes) if m != n for i in other]
            for i in lane:
                assert all(not pieces[i].writes & (o.reads | o.writes) for o in others)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 9), st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_lanes_share_no_memory(values: list[tuple[int, int, int, int]]) -> None:
    begin, end = 3, 6
    lives = [Live(i, size, min(a, b), max(a, b)) for i, (size, a, b, _) in enumerate(values)]
    lanes = [frozenset(i for i, (_, a, b, lane) in enumerate(values) if lane == n and min(a, b) <= end and max(a, b) >= begin)
             for n in range(2)]  # fmt: skip
    found = allocate_lanes(lives, [], {}, [ForkSpan(begin, end, (lanes[0], lanes[1]))])
    spans = [(evaluate(found.offsets[v.name], {}), evaluate(found.offsets[v.name], {}) + v.bytes) for v in lives]
    for v in lives:
        assert spans[v.name][1] <= evaluate(found.bytes, {})
        for w in lives[: v.name]:
            both = any(v.name in lane for lane in lanes) and any(w.name in lane for lane in lanes)
            apart = both and not any({v.name, w.name} <= lane for lane in lanes)
            if apart or (v.first <= w.last and w.first <= v.last):
                assert spans[v.name][1] <= spans[w.name][0] or spans[w.name][1] <= spans[v.name][0]
