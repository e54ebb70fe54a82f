"""The inline cache of a site: first case that fits, counts, limits, states, and tables exchanged under calls."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hotfuse.analysis.call_facts import AllEqual, Dense, Facts, Plain, Ranked, Sized, Typed
from hotfuse.ir.types import DType
from hotfuse.native import tensors
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.serve import dispatch as dispatch_module
from hotfuse.runtime.serve.budget import MemoryHolder, victims
from hotfuse.runtime.serve.dispatch import Case, InlineCache, SiteState
from hotfuse.runtime.serve.partition_guard import guarded

GENERAL: Facts = (Plain(0), Typed(0, DType.F32), Ranked(0, 2), Dense(0, 2, None, True))
NATIVE = pytest.mark.skipif(tensors.unavailable() != "", reason="native code cannot read tensors")


def special(n: int) -> Case[str]:
    return Case((*GENERAL, Sized(0, 0, n)), f"size {n}")


def cache(limit: int = 8, native: bool = True) -> InlineCache[str]:
    return InlineCache(1, limit, (lambda job: job()) if native else None)


def routed(site: InlineCache[Any], leaves: list[Any]) -> Any:
    """The target of the first case whose facts hold, as calls ask for it."""
    table = site.table  # once: another one may take its place meanwhile
    number = table.select(*leaves)
    return table.routes[number] if number >= 0 else None


@pytest.mark.parametrize("native", [pytest.param(True, marks=NATIVE), False])
def test_special_cases_come_before_general_ones_in_any_order(native: bool) -> None:
    for order in (0, 1):
        site = cache(native=native)
        cases = [Case(GENERAL, "general"), special(3)]
        for case in cases[:: 1 - 2 * order]:
            site.add(case)
        assert site.table.native is native
        assert routed(site, [torch.ones(3, 2)]) == "size 3"
        assert routed(site, [torch.ones(4, 2)]) == "general"
        assert routed(site, [torch.ones(4)]) is None
        assert dict(site.hits()) == {"size 3": 1, "general": 1}
        assert site.misses() == {"input 0 has rank 2": 1}


@pytest.mark.parametrize("native", [pytest.param(True, marks=NATIVE), False])
def test_what_is_removed_sends_its_calls_on_without_a_compile(native: bool) -> None:
    site = cache(native=native)
    three = special(3)
    for case in (Case(GENERAL, "general"), three, Case((*three.facts, Sized(0, 1, 2)), "3 by 2")):
        site.add(case)
    table, x, y = site.table, [torch.ones(3, 2)], [torch.ones(3, 5)]
    assert (routed(site, x), routed(site, y)) == ("3 by 2", "size 3")
    assert site.remove("3 by 2") == 1
    assert (routed(site, x), routed(site, y)) == ("size 3", "size 3")
    assert site.remove(three.target, "general") == 2
    assert routed(site, x) is None and routed(site, [torch.ones(4, 4)]) is None
    assert site.table is table and site.state is SiteState.EMPTY and site.hits() == []
    site.add(special(3))
    assert routed(site, x) == "size 3" and site.table.targets == ("size 3",)


@pytest.mark.parametrize("native", [pytest.param(True, marks=NATIVE), False])
def test_what_is_removed_is_not_held(native: bool) -> None:
    """A plan that was withdrawn goes, though the table that knew it stays."""

    class Target:
        pass

    site = InlineCache[Target](1, 8, (lambda job: job()) if native else None)
    targets = [Target(), Target()]
    for case in (Case(GENERAL, targets[0]), Case(special(3).facts, targets[1])):
        site.add(case)
    del case
    routed(site, [torch.ones(3, 2)])
    assert routed(site, [torch.ones(3)]) is None and site.misses()
    assert epochs.quiesce()  # what earlier tables counted is added up, by target
    assert site.remove(targets[1]) == 1
    gone = weakref.ref(targets.pop())
    assert epochs.quiesce()
    gc.collect()
    assert gone() is None and routed(site, [torch.ones(3, 2)]) is targets[0]


def test_an_empty_site_finds_nothing() -> None:
    site = cache()
    assert site.state is SiteState.EMPTY and routed(site, [torch.ones(1)]) is None and site.misses() == {}


def test_counts_survive_exchanges() -> None:
    site = cache()
    site.add(special(1))
    for _ in range(3):
        routed(site, [torch.ones(1, 1)])
        routed(site, [torch.ones(9, 1)])
    site.add(special(2))
    routed(site, [torch.ones(1, 1)])
    site.add(special(3))
    assert epochs.quiesce()
    routed(site, [torch.ones(1, 1)])
    assert dict(site.hits())["size 1"] == 5
    assert sum(site.misses().values()) == 3


def test_states_and_limits() -> None:
    site = cache(limit=3)
    states: list[SiteState] = []
    for n in range(3):
        assert site.add(special(n)) == ()
        states.append(site.state)
    assert states == [SiteState.MONOMORPHIC, SiteState.POLYMORPHIC, SiteState.POLYMORPHIC]
    for n in (0, 2):
        routed(site, [torch.ones(n, 1)])
    assert site.add(special(7)) == ("size 1",)  # the one that nobody called
    assert len(site.table.cases) == 3


def test_a_case_with_the_same_facts_takes_the_place_of_the_old_one() -> None:
    site = cache()
    site.add(Case(GENERAL, "old"))
    assert site.add(Case(GENERAL, "new")) == ("old",)
    assert routed(site, [torch.ones(2, 2)]) == "new" and len(site.table.cases) == 1


def test_a_site_that_thrashes_becomes_generic_and_can_be_reopened() -> None:
    site = cache(limit=3, native=False)
    site.add(Case(GENERAL, "general"))
    gone: list[str] = []
    for n in range(20):
        for _ in range(3):
            assert routed(site, [torch.ones(n, 1)]) == "general"
        gone += site.add(special(n))
        if site.state is SiteState.GENERIC:
            break
    assert site.state is SiteState.GENERIC and site.table.targets == ("general",)
    assert len(gone) == len(set(gone)) and "general" not in gone
    assert site.add(special(99)) == ("size 99",) and site.refused == 1
    site.reopen()
    assert site.add(special(99)) == () and site.state is SiteState.POLYMORPHIC


def test_a_site_whose_cases_pay_does_not_become_generic() -> None:
    site = cache(limit=2, native=False)
    x = {n: torch.ones(n, 1) for n in range(30)}
    for n in range(30):
        site.add(special(n))
        for _ in range(dispatch_module.PAID * 2):
            routed(site, [x[n]])
    assert site.state is SiteState.POLYMORPHIC and site.table.targets[0] == "size 29"


def test_without_native_access_a_site_serves_in_python_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotfuse.base.errors import InternalError

    def broken(_table: Any, _inputs: int) -> Any:
        raise InternalError("native code cannot read tensors here", because="another torch")

    monkeypatch.setattr(dispatch_module, "native_table", broken)
    site = cache()
    site.add(special(2))
    assert routed(site, [torch.ones(2, 2)]) == "size 2" and not site.table.native
    assert site.fallbacks == 1 and site.reason.endswith("another torch")


def test_inputs_elsewhere_stay_in_python() -> None:
    site: InlineCache[str] = InlineCache(1, 4, lambda job: job())
    site.add(Case((Plain(0, "cuda:0"), Typed(0, DType.F32)), "there"))
    assert routed(site, [torch.ones(2)]) is None and "cuda:0" in site.reason


def test_too_many_differences_are_asked_one_by_one() -> None:
    def many(size: int) -> Facts:
        return tuple(f for i in range(250) for f in (Plain(i), Typed(i, DType.F32), Ranked(i, 1), Sized(i, 0, size)))

    site: InlineCache[int] = InlineCache(250, 4, lambda job: job())
    for size in (1, 2, 3):
        site.add(Case(many(size), size))
    assert routed(site, [torch.ones(2)] * 250) == 2
    assert routed(site, [torch.ones(2), *[torch.ones(3)] * 249]) is None
    assert site.misses() and (site.table.native or "differ" in site.reason)


@NATIVE
def test_cases_are_exchanged_under_calls() -> None:
    """Threads that call meanwhile always get a target that fits; afterwards nothing is left over."""
    jobs: list[Callable[[], None]] = []
    site: InlineCache[str] = InlineCache(1, 4, jobs.append)
    site.add(Case(GENERAL, "general"))
    stop, wrong, calls = threading.Event(), list[Any](), [0] * 3
    inputs = {n: torch.ones(n, 2) for n in range(6)}

    def serve(me: int) -> None:
        slot = epochs.slot()
        while not stop.is_set():
            for n, x in inputs.items():
                slot.epoch = epochs.now
                got = routed(site, [x])
                slot.epoch = 0
                calls[me] += 1
                if got != "general" and got != f"size {n}":
                    wrong.append((n, got))

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for i in range(30):
        site.add(special(i % 6))
        while jobs:
            jobs.pop()()
        if i % 10 == 0:
            site.reopen()
        site.remove(*[t for t in site.table.targets if t == f"size {(i + 3) % 6}"])
    stop.set()
    for t in threads:
        t.join()
    assert not wrong and sum(calls) > 0
    assert epochs.quiesce()
    assert site._fading == []


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@NATIVE
def test_five_hundred_random_shapes_leave_nothing_behind() -> None:
    site = cache(limit=4)
    site.add(Case(GENERAL, "general"))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 10_000, (500,), generator=generator).tolist()
    warm = 0
    for i, n in enumerate(sizes):
        site.add(special(n))
        assert routed(site, [torch.empty(n, 1)]) in (f"size {n}", "general")
        assert len(site.table.cases) <= 4
        site.reopen()  # the worst case: it never gives up
        if i == 150:
            assert epochs.quiesce()
            warm = resident()
    assert epochs.quiesce()
    assert resident() - warm < 8 << 20


# --- partitions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [pytest.param(True, marks=NATIVE), False])
def test_a_partition_whose_bet_fails_runs_in_its_generic_version(native: bool) -> None:
    ran: list[str] = []

    def fast(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ran.append("fast")
        return (x,)

    def generic(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ran.append("generic")
        return (x * mask,)

    facts: Facts = (Plain(1), Typed(1, DType.BOOL), Ranked(1, 1), Dense(1, 1, None, True), AllEqual(1, DType.BOOL, True))
    part = guarded(fast, facts, generic, 2, (lambda job: job()) if native else None)
    assert part.table.native is native
    x = torch.randn(70)
    full = torch.ones(70, dtype=torch.bool)
    holed = full.clone()
    holed[69] = False
    for mask in (full, holed, full, full[:0]):
        torch.testing.assert_close(part(x[: len(mask)], mask)[0], x[: len(mask)] * mask)
    assert ran == ["fast", "generic", "fast", "fast"]
    assert part.hits == 3 and part.misses == {"every element of input 1 is True": 1}


# --- memory ----------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first() -> None:
    held = [MemoryHolder("a", 50, 3), MemoryHolder("b", 30, 1), MemoryHolder("c", 0, 0), MemoryHolder("d", 40, 2)]
    assert victims(held, 200) == ()
    assert victims(held, 100) == ("b",)
    assert victims(held, 60) == ("b", "d")
    assert victims(held, 60, keep="b") == ("d", "a")
    assert victims(held, 10, keep="a") == ("b", "d")
