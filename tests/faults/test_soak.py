"""Everything at once, for long: random shapes on four threads while workers are killed and plans are swapped all the time.

HOTFUSE_SOAK_CALLS sets the number of calls; by default a few thousand, which takes half a minute. `make soak` makes 200,000.
Races are run for real, and what they measured is looked at; only the verdict is given, so that something is swapped in.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
import hotfuse.runtime.improve as improve_module
from hotfuse import Settings
from hotfuse.runtime.epochs import epochs
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.race import Trial, race

CALLS = int(os.environ.get("HOTFUSE_SOAK_CALLS", "3000"))
THREADS = 4
SHORT = CALLS < 20_000
KILL_EVERY_S = 2.0 if SHORT else 6.0
"""A compilation beside four threads that call as fast as they can takes seconds, and some must live to see their end."""
SWAP_EVERY_S = 0.002
FORGET = 0.0003 if SHORT else 0.0001
GROWTH = 0.02
OFTEN = 11
"""Rows of half the calls."""
WATCHDOG_S = 120 + CALLS / 100


class Model(nn.Module):
    """Two inputs of varying sizes; a norm, a softmax and products, so that several kinds of kernels take part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(nn.functional.gelu(self.first(x)))
        return torch.softmax(self.second(h), -1), y * 2 + 1


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


def alive() -> set[int]:
    """The plans there are, whoever holds them, once all that was retired is freed."""
    for _ in range(100):
        epochs.drain()
        if epochs.retired == epochs.freed:
            break
        time.sleep(0.1)
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if type(thing) is Plan}


def in_use(engine: Any) -> set[int]:
    """The plans that calls may be routed to, those they rest on, and the few whose instrumented variants are kept."""
    entries = [e for site in engine.sites.values() for e in site.entries]
    variants = {plan for watched in engine.watcher._watched.values() for plan in watched.variants}
    return variants | {id(p) for e in entries for p in (e.plan, e.baseline, *e.versions.values())}


def workers() -> list[int]:
    """Worker processes that this process started."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and b"hotfuse.compile.worker" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except (OSError, ValueError, IndexError):  # it ended while we looked
            continue
    return found


class Chaos:
    """What goes on beside the calls."""

    def __init__(self, fast: Any, seed: int) -> None:
        self.engine = fast._engine
        self.random = random.Random(seed)
        self.plans: dict[int, list[Plan]] = {}
        self.killed = self.swaps = 0
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.kill, name="soak-kill"), threading.Thread(target=self.swap, name="soak-swap")]

    def kill(self) -> None:
        while not self.stop.wait(KILL_EVERY_S * self.random.uniform(0.3, 1.7)):
            for pid in self.random.sample(found := workers(), min(1, len(found))):
                os.kill(pid, signal.SIGKILL)
                self.killed += 1

    def swap(self) -> None:
        """Exchange each entry's plan for another that was once proven for it: what a policy would do, only far too often."""
        while not self.stop.wait(SWAP_EVERY_S):
            for site in list(self.engine.sites.values()):
                for entry in site.entries:
                    known = self.plans.setdefault(id(entry), [entry.baseline])
                    if all(entry.plan is not p for p in known):
                        known[1:] = [entry.plan]
                    entry.plan = self.random.choice(known)
                    self.swaps += 1
                    if self.random.random() < FORGET:
                        self.engine.plans.demote(site, entry)  # and it has to be compiled again
                        self.plans.pop(id(entry), None)


@pytest.fixture
def fresh_heap() -> Iterator[None]:
    """What other tests left in this process is out of the collections that this one asks for, four times a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.timeout(int(WATCHDOG_S) + 60)
@pytest.mark.usefixtures("fresh_heap")
def test_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    before_plans = len(alive())  # of other tests in this process
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    races: list[Trial] = []

    def won(*args: Any, **kwargs: Any) -> Trial:
        races.append(race(*args, **kwargs))
        return replace(races[-1], won=True)

    monkeypatch.setattr(improve_module, "race", won)
    torch.manual_seed(seed)
    model = Model().eval()
    settings = Settings(hot_calls=2, max_captures=100_000, capture_timeout_s=20.0, max_events=256, race_s=0.05)
    fast = hotfuse.jit(model, settings=settings)
    chaos = Chaos(fast, seed)
    wrong: list[str] = []
    served = [0] * THREADS
    marks: list[tuple[int, int]] = []
    """Calls served so far, and bytes resident then."""

    def serve(me: int) -> None:
        chance = random.Random(seed + me)
        generator = torch.Generator().manual_seed(seed + me)
        with torch.no_grad():
            for _ in range(CALLS // THREADS):
                rows = OFTEN if chance.random() < 0.5 else chance.randint(1, 24)  # a size that recurs earns a plan of its own
                x = torch.randn(rows, 32, generator=generator)
                shape = (3, OFTEN) if rows == OFTEN else (chance.choice((1, 3, 8)), chance.randint(1, 40))
                y = torch.randn(shape, generator=generator)
                if chance.random() < 0.1:
                    y = y.t()
                got, want = fast(x, y), model(x, y)
                served[me] += 1
                if not all(torch.allclose(g, w, rtol=1e-4, atol=1e-5) for g, w in zip(got, want, strict=True)):
                    wrong.append(f"x {tuple(x.shape)}, y {tuple(y.shape)}")
                if SHORT:
                    time.sleep(0.015)  # leave the background time to do something in a short run

    def note() -> None:
        while not chaos.stop.wait(0.25):
            marks.append((sum(served), resident()))

    with torch.no_grad():  # until there is something to swap
        for n in range(120):
            rows = OFTEN if n % 2 else 2 + n % 7
            fast(torch.randn(rows, 32), torch.randn(3, OFTEN if n % 2 else 2 + n % 5))
            assert fast.wait(120)
    before_it = fast.stats()["calls_per_tier"]
    warm = sum(before_it.values())
    threads = [threading.Thread(target=serve, args=(i,), name=f"soak-{i}") for i in range(THREADS)]
    everyone = [*chaos.threads, threading.Thread(target=note, name="soak-note"), *threads]
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=False, file=sys.__stderr__)
    try:
        for t in everyone:
            t.start()
        end = time.monotonic() + WATCHDOG_S
        for t in threads:
            t.join(max(0.0, end - time.monotonic()))
        hung = [t.name for t in threads if t.is_alive()]
    finally:
        chaos.stop.set()
        faulthandler.cancel_dump_traceback_later()
    for t in everyone[:3]:
        t.join(30)
    assert fast.wait(120), "background work hangs"
    chaos.plans.clear()
    stats = fast.stats()
    for _ in range(30):  # a question that waits in a worker's queue holds what it asks about
        left, used = alive(), in_use(fast._engine)
        if len(left - used) <= before_plans:
            break
        time.sleep(1)
    fast.close()
    assert not hung, f"{hung} hang after {served} calls"
    assert not wrong, f"{len(wrong)} of {sum(served)}: {wrong[:3]}"
    assert stats["calls"] - warm == sum(served) == CALLS // THREADS * THREADS
    quarter = CALLS / 4
    sizes = [[size for calls, size in marks if n * quarter <= calls < (n + 1) * quarter] for n in range(4)]
    before, after = median(sizes[1]), median(sizes[3])  # what the first quarter takes is warming up
    print({"calls": stats["calls"], "warm-up": before_it, "per tier": stats["calls_per_tier"], "killed": chaos.killed,
           "swaps": chaos.swaps, "deployed": stats["swaps"], "races": len(races), "plans": [len(used), len(left)],
           "rss MB by quarter": [round(median(q) / 1e6, 1) for q in sizes]})  # fmt: skip
    assert all(not t.is_alive() for t in everyone), "something beside hangs"
    assert chaos.swaps > 100 and chaos.killed > 0 and stats["graph_calls"] > 0  # else nothing was tested
    reached = stats["calls_per_tier"]
    assert min(reached["1"], reached["2"]) > 0, str(fast.explain())
    compiled = reached["1"] + reached["2"] - before_it["1"] - before_it["2"]
    assert compiled > 0.05 * CALLS, f"compiled plans served {compiled} calls only"
    assert races and all(t.rounds > 0 and t.old_us > 0 and t.new_us > 0 for t in races)
    assert after - before < GROWTH * before, f"{before} bytes grew to {after}"
    assert len(left - used) <= before_plans, f"{len(left - used)} plans are held that no call can reach"
