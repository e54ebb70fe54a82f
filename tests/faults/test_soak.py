"""Everything at once, for long: random shapes on four threads while workers are killed and plans are swapped all the time.

HOTFUSE_SOAK_CALLS sets the number of calls; by default a few thousand, which takes half a minute. `make soak` makes 200,000.
HOTFUSE_SOAK_SEED draws other data; a run is repeated as far as threads let it be. Races are run for real, and what they measured is
looked at; only the verdict is given, so that something is swapped in.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import threading
import time
from typing import Any

import pytest
import torch

import hotfuse
from hotfuse import Settings
from tests import process
from tests.faults.soak import LOOK_EVERY_S, Chaos, Model, Scales, alive, holders, settled
from tests.races import raced

CALLS = int(os.environ.get("HOTFUSE_SOAK_CALLS", "3000"))
SEED = int(os.environ.get("HOTFUSE_SOAK_SEED", "0"))
THREADS = 4
SHORT = CALLS < 20_000
KILL_EVERY_S = 2.0 if SHORT else 6.0
"""A compilation beside four threads that call as fast as they can takes seconds, and some must live to see their end."""
FORGET = 0.0003 if SHORT else 0.00005
GROWTH = 0.06 if SHORT else 0.02
"""Of memory, behind the first quarter. A short run is warm for a few seconds only: plans are still compiled in its last quarter
(thirteen runs grew by 0.1% to 1.7%, one before them by more than 2%). Plans that stay are counted, not weighed."""
OFTEN = 11
"""Rows of half the calls."""
WATCHDOG_S = 300 + CALLS / 100
COMPILED = 0.05 * CALLS
"""Calls that compiled plans must have served. A slow machine compiles for longer, so serving goes on until they have."""
SWAPS = 100
MAX_S = WATCHDOG_S / 2


@pytest.fixture
def fresh_heap() -> None:
    """What other tests left in this process is out of the collections that this one asks for, four times a second."""
    process.freeze()


@pytest.mark.timeout(int(WATCHDOG_S) + 240)
@pytest.mark.usefixtures("fresh_heap")
def test_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not alive()  # those of other tests in this process are frozen
    print(f"HOTFUSE_SOAK_SEED={SEED}")
    races = raced(monkeypatch, lambda: (0.005, 0.0))
    torch.manual_seed(SEED)
    model = Model().eval()
    settings = Settings(hot_calls=2, max_captures=100_000, capture_timeout_s=20.0, max_events=256, race_s=0.05)
    fast: Any = hotfuse.jit(model, settings=settings)
    chaos = Chaos(fast._engine, SEED, KILL_EVERY_S, FORGET)
    wrong: list[str] = []
    served = [0] * THREADS
    scales = Scales()

    def reached() -> dict[str, int]:
        return {tier: n - before_it["calls_per_tier"][tier] for tier, n in fast.stats()["calls_per_tier"].items()}

    def enough() -> bool:
        """Whether all has happened that is to be tested: much of it is up to chance and to how fast this machine compiles."""
        chaos.spare = chaos.killed > 0
        now = reached()
        compiled = now["1"] + now["2"] > COMPILED and min(now["0"], now["1"], now["2"]) > 0
        forgot = fast.stats()["deopts"] > before_it["deopts"]
        chaos.due = not forgot
        return (compiled and forgot and chaos.swaps > SWAPS and chaos.killed > 0) or time.monotonic() > started + MAX_S

    def serve(me: int) -> None:
        chance = random.Random(SEED + me)
        generator = torch.Generator().manual_seed(SEED + me)
        with torch.no_grad():
            while served[me] < CALLS // THREADS or served[me] % 25 or not enough():
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
        while not chaos.stop.wait(LOOK_EVERY_S):
            scales.look(sum(served))

    with torch.no_grad():  # until there is something to swap
        for n in range(120):
            rows = OFTEN if n % 2 else 2 + n % 7
            fast(torch.randn(rows, 32), torch.randn(3, OFTEN if n % 2 else 2 + n % 5))
            assert fast.wait(120)
    assert len(alive()) > 1, "else no plan that is held would be noticed"
    before_it, started = fast.stats(), time.monotonic()
    threads = [threading.Thread(target=serve, args=(i,), name=f"soak-{i}") for i in range(THREADS)]
    beside = [*chaos.threads, threading.Thread(target=note, name="soak-note")]
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=False, file=sys.__stderr__)
    try:
        for t in (*beside, *threads):
            t.start()
        end = time.monotonic() + WATCHDOG_S
        for t in threads:
            t.join(max(0.0, end - time.monotonic()))
        hung = [t.name for t in threads if t.is_alive()]
    finally:
        faulthandler.cancel_dump_traceback_later()
        chaos.end()
    beside[-1].join(30)
    assert not hung, f"{hung} hang after {served} calls"
    assert all(not t.is_alive() for t in beside), "something beside hangs"
    assert fast.wait(120), "background work hangs"
    stats, left = fast.stats(), settled(fast._engine)
    last, slope = scales.growth()
    print({"calls": stats["calls"], "warm-up": before_it["calls_per_tier"], "per tier": stats["calls_per_tier"],
           "killed": chaos.killed, "swaps": chaos.swaps, "forgotten": chaos.forgotten, "deopts": stats["deopts"],
           "deployed": stats["swaps"], "races": len(races), "plans held": len(left),
           "rss MB by quarter": [round(b / 1e6, 1) for b in scales.windows(scales.bytes)],
           "asked MB by quarter": [round(b / 1e6, 1) for b in scales.windows(scales.asked)],
           "growth": [round(last, 4), round(slope, 4)]})  # fmt: skip
    fast.close()
    assert not wrong, f"{len(wrong)} of {sum(served)}: {wrong[:3]}"
    assert stats["calls"] - before_it["calls"] == sum(served) >= CALLS // THREADS * THREADS
    assert chaos.swaps > SWAPS and chaos.killed > 0 and stats["deopts"] > before_it["deopts"]  # else nothing was tested
    tiers = reached()
    assert min(tiers["0"], tiers["1"], tiers["2"]) > 0, str(fast.explain(full=True))
    assert tiers["1"] + tiers["2"] > COMPILED, f"compiled plans served {tiers} calls only"
    decided = [r.found for r in races if r.found.decided]  # calls may have come into every round of another
    assert decided and all(r.rounds > 0 and r.old_us > 0 and r.new_us > 0 for r in decided)
    assert max(last, slope) < GROWTH, f"memory grew by {last:.2%} from the second quarter to the last, {slope:.2%} along a line"
    held_by = "\n".join(f"tier {p.tier} {p.layers}, held by\n{holders(p)}" for p in left)
    assert not left, f"{len(left)} plans are held that no call can reach:\n{held_by}"
