# pyright: reportPrivateUsage=false
"""What watching and the audit cost together: a served model with and without them, in turns.

    python -m benchmarks.watching [--models mlp,bert-base,magika] [--threads N] [--rounds N] [--json]

Only some calls are sampled, so single calls tell nothing: blocks of calls are timed, long enough to hold several samples, and the
figure is the median over rounds of a block with watching over the block without it next to it. The bar is 1%.
It is the same model, the same plan and the same memory all the time: samples are only put off, call by call, while it is not
watched, and rounds of the audit with them. A second block without watching is measured in the same way: what it seems to cost
(`noise`) is what this machine cannot tell from nothing.

The last line of output is one JSON document; `watching_overhead` is the worst of the models.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import hotfuse
from benchmarks import zoo
from benchmarks.overhead import bert, mlp
from hotfuse import Settings
from hotfuse.runtime.engine import Engine

LIMIT = 0.01
BLOCK_S = 0.4
"""Least time of a block."""
WARM_S = 2.5
"""Most time of the calls before each wait."""
SETTLE_S = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """A model in service: how to call it, and what it counts."""

    call: Callable[[], object]
    stats: Callable[[], dict[str, Any]]
    wait: Callable[[], object]
    close: Callable[[], None]
    engine: Engine


def serve(name: str, settings: Settings) -> Served:
    """A model through the public API."""
    if name == "magika":
        model = zoo.load(name)
        session = hotfuse.InferenceSession(str(model.path), settings=settings)
        feeds = model.inputs(0, model.timed)
        wait = lambda: session.wait(SETTLE_S)  # noqa: E731
        return Served(lambda: session.run(None, feeds), session.stats, wait, session.close, session._engine)
    module, inputs = mlp() if name == "mlp" else bert()
    fast = hotfuse.jit(module, settings=settings)
    if isinstance(inputs, dict):
        return Served(lambda: fast(**inputs), fast.stats, lambda: fast.wait(SETTLE_S), fast.close, fast._engine)
    return Served(lambda: fast(inputs), fast.stats, lambda: fast.wait(SETTLE_S), fast.close, fast._engine)


@contextmanager
def unwatched(engine: Engine) -> Generator[None]:
    """Calls within are neither sampled nor audited; what was due stays due, so many calls later."""
    entries = [e for site in engine.sites.values() for e in site.entries]
    left = [(e, e.sampler.at - e.calls, e.not_audited, [(a, a.at - e.calls) for a in e.audits.values()]) for e in entries]
    for e in entries:
        e.sampler.off()
        e.not_audited = "measured without"
    try:
        yield
    finally:
        for e, calls, why, audits in left:
            e.sampler.at, e.not_audited = e.calls + max(1, calls), why
            for audit, away in audits:
                audit.at = e.calls + max(1, away)


def block(call: Callable[[], object], calls: int) -> float:
    """Seconds that so many calls take."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def measure(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """One model, on and off."""
    served = serve(name, Settings(threads=threads))

    def side(watched: bool) -> float:
        with nullcontext() if watched else unwatched(served.engine):
            return block(served.call, calls)

    try:
        for _ in range(3):  # tiers are reached, and the first, dense samples taken, before the clock runs
            end = time.perf_counter() + WARM_S
            for _ in range(400):
                served.call()
                if time.perf_counter() > end:
                    break
            served.wait()
        once = min(block(served.call, 4) / 4 for _ in range(3))
        calls = max(4, round(BLOCK_S / once))
        block(served.call, 2 * calls)
        before, audited = _samples(served), _rounds(served)
        times: dict[str, list[float]] = {which: [] for which in ("off", "on", "control")}
        gc.collect()
        gc.disable()
        try:
            for i in range(rounds):
                for which in ("off", "on", "control") if i % 2 == 0 else ("control", "on", "off"):
                    times[which].append(side(which == "on"))
        finally:
            gc.enable()
        taken = _samples(served) - before
        stats = served.stats()
        around = [(a + b) / 2 for a, b in zip(times["off"], times["control"], strict=True)]
        ratios = [on / off for on, off in zip(times["on"], around, strict=True)]
        noise = [b / a for a, b in zip(times["off"], times["control"], strict=True)]
        return {
            "calls_per_block": calls, "rounds": rounds, "samples": taken,
            "audit_rounds": _rounds(served) - audited,
            "off_ms": round(statistics.median(around) / calls * 1e3, 5),
            "on_ms": round(statistics.median(times["on"]) / calls * 1e3, 5),
            "overhead": round(statistics.median(ratios) - 1, 5),
            "noise": round(statistics.median(noise) - 1, 5),
            "spread": round(statistics.pstdev(noise), 5),
            "overhead_of_totals": round(statistics.mean(times["on"]) / statistics.mean(around) - 1, 5),
            "overhead_by_its_own_account": stats["watching"]["overhead"], "calls_per_tier": stats["calls_per_tier"],
        }
    finally:
        served.close()


def _samples(side: Served) -> int:
    return int(side.stats()["watching"]["samples"])


def _rounds(side: Served) -> int:
    return sum(a.rounds for site in side.engine.sites.values() for e in site.entries for a in e.audits.values())


def main() -> None:
    """Measure, print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,bert-base,magika")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"benchmark": "watching", "threads": options.threads, "torch": torch.__version__, "limit": LIMIT}
    with torch.inference_mode():
        for name in options.models.split(","):
            found = report[name] = measure(name, options.threads, options.rounds)
            if not found["samples"]:
                raise RuntimeError(f"no call of {name} was sampled, so there is nothing to measure")
            if not options.json:
                verdict = "ok" if found["overhead"] <= LIMIT else "OVER"
                print(f"{name:<12} off {found['off_ms']:10.4f} ms   on {found['on_ms']:10.4f} ms   "
                      f"overhead {found['overhead']:7.2%} of {LIMIT:.0%} {verdict}   "
                      f"nothing at all {found['noise']:7.2%} ± {found['spread']:.2%}   "
                      f"{found['samples']} samples, {found['audit_rounds']} rounds of the audit in "
                      f"{options.rounds * found['calls_per_block']} calls")
    report["watching_overhead"] = max(report[n]["overhead"] for n in options.models.split(","))
    report["watching_noise"] = max(abs(report[n]["noise"]) for n in options.models.split(","))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
