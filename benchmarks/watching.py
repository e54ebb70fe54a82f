"""What watching costs: the same model served with and without it, in turns.

    python -m benchmarks.watching [--models mlp,bert-base,magika] [--threads N] [--rounds N] [--json]

Only some calls are sampled, so single calls tell nothing: blocks of calls are timed, long enough to hold several samples, and the
figure is the median over rounds of a block with watching over the block without it next to it. The bar is 1%.
A second model without watching is measured in the same way: what it seems to cost (`noise`) is what this machine cannot tell from
nothing.

The last line of output is one JSON document; `watching_overhead` is the worst of the models.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import hotfuse
from benchmarks import zoo
from benchmarks.overhead import bert, mlp
from hotfuse import Settings

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


def serve(name: str, settings: Settings) -> Served:
    """A model through the public API."""
    if name == "magika":
        model = zoo.load(name)
        session = hotfuse.InferenceSession(str(model.path), settings=settings)
        feeds = model.inputs(0, model.timed)
        return Served(lambda: session.run(None, feeds), session.stats, lambda: session.wait(SETTLE_S), session.close)
    module, inputs = mlp() if name == "mlp" else bert()
    fast = hotfuse.jit(module, settings=settings)
    if isinstance(inputs, dict):
        return Served(lambda: fast(**inputs), fast.stats, lambda: fast.wait(SETTLE_S), fast.close)
    return Served(lambda: fast(inputs), fast.stats, lambda: fast.wait(SETTLE_S), fast.close)


def block(call: Callable[[], object], calls: int) -> float:
    """Seconds that so many calls take."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def measure(name: str, threads: int, rounds: int) -> dict[str, Any]:
    """One model, on and off."""
    base = Settings(threads=threads)
    sides = {side: serve(name, base.with_(watch=side == "on")) for side in ("off", "on", "control")}
    try:
        for _ in range(3):  # tiers are reached, and the first, dense samples taken, before the clock runs
            for s in sides.values():
                end = time.perf_counter() + WARM_S
                for _ in range(40):
                    s.call()
                    if time.perf_counter() > end:
                        break
                s.wait()
        once = min(block(sides["off"].call, 4) / 4 for _ in range(3))
        calls = max(4, round(BLOCK_S / once))
        for s in sides.values():
            block(s.call, calls)
        before = _samples(sides["on"])
        ratios: dict[str, list[float]] = {"on": [], "control": []}
        times: dict[str, list[float]] = {side: [] for side in sides}
        gc.collect()
        gc.disable()
        try:
            for i in range(rounds):
                for other, ratio in ratios.items():
                    pair = ("off", other) if i % 2 == 0 else (other, "off")
                    took = {side: block(sides[side].call, calls) for side in pair}
                    ratio.append(took[other] / took["off"])
                    for side in pair:
                        times[side].append(took[side])
        finally:
            gc.enable()
        taken = _samples(sides["on"]) - before
        stats = sides["on"].stats()
        return {
            "calls_per_block": calls, "rounds": rounds, "samples": taken,
            "off_ms": round(statistics.median(times["off"]) / calls * 1e3, 5),
            "on_ms": round(statistics.median(times["on"]) / calls * 1e3, 5),
            "overhead": round(statistics.median(ratios["on"]) - 1, 5),
            "noise": round(statistics.median(ratios["control"]) - 1, 5),
            "spread": round(statistics.pstdev(ratios["control"]), 5),
            "overhead_of_totals": round(statistics.mean(times["on"]) / statistics.mean(times["off"]) - 1, 5),
            "overhead_by_its_own_account": stats["watching"]["overhead"], "calls_per_tier": stats["calls_per_tier"],
        }
    finally:
        for s in sides.values():
            s.close()


def _samples(side: Served) -> int:
    return int(side.stats()["watching"]["samples"])


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
                      f"{found['samples']} samples in {options.rounds * found['calls_per_block']} calls")
    report["watching_overhead"] = max(report[n]["overhead"] for n in options.models.split(","))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
