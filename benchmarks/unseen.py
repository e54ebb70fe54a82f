# pyright: reportPrivateUsage=false
"""Writes to weights behind torch's back: how late they are noticed, and what looking for them costs.

    python -m benchmarks.unseen [--parameters 100000000] [--trials 100] [--through 2] [--threads 1] [--rounds 60]

A model of wide layers serves one row a call, so that a call reads every weight once and computes next to nothing: the smallest call
for so many weights, of which looking is the largest part. In each trial one weight, drawn at random, is changed through `p.data`,
calls step on until it is noticed, and it is put back. `--through` trials go all the way: noticed, compiled anew, and right.

The cost is what the sweep that every call makes takes longer with a step in it than without, right behind a call, when the memory
has left the caches, over the time of the call. The thread's part is one pass over copies in half of the time allowed. The last line
of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.machine.copied import Copied
from hotfuse.native.checksums import SAME

WIDTH = 2048
SETTLE_S = 240.0
LIMIT = 0.005


def serving(parameters: int) -> tuple[nn.Sequential, torch.Tensor]:
    """Layers with about so many weights, and a call for them."""
    width = WIDTH if parameters >= 8 * WIDTH**2 else 128
    layers = max(2, round(parameters / width**2))
    model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]).eval()
    return model, torch.randn(1, width)


def drawn(model: nn.Module) -> tuple[torch.Tensor, int]:
    """One weight of a matrix, at random."""
    p = random.choice([p for p in model.parameters() if p.dim() == 2])
    return p.data.view(-1), random.randrange(p.numel())


def hot(fast: hotfuse.api.Jit, x: torch.Tensor) -> None:
    """Until copies of weights serve."""
    until = time.monotonic() + SETTLE_S
    while not fast._engine.plans.originals.bytes and time.monotonic() < until:
        fast(x)
        fast.wait(1.0)


def trimmed(seconds: list[float]) -> float:
    """The mean without the slowest fiftieth: one step in some compares, and others were interrupted."""
    return statistics.fmean(sorted(seconds)[: -max(1, len(seconds) // 50)])


def main() -> None:
    """Measure, print a table, end with JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--through", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings()
    model, x = serving(given.parameters)
    with torch.no_grad(), hotfuse.jit(model, settings=settings) as fast:
        hot(fast, x)
        own = fast._engine.plans.originals
        table = own.table
        if table is None:
            raise SystemExit(f"no copies of weights serve:\n{fast.explain(full=True)}")
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {own.bytes / 1e6:.0f} MB compared "
              f"in {table.steps} steps; bounds: {settings.weights_calls} calls, {settings.weights_ms:.0f} ms")
        noticed = list[int]()
        for _ in range(given.trials):
            for _ in range(random.randrange(table.steps)):
                table.step()
            flat, at = drawn(model)
            kept = flat[at].item()
            flat[at] += 1e-3 + abs(kept) * 1e-3
            steps = next((i for i in range(1, settings.weights_calls + 1) if table.step() != SAME), 0)
            flat[at] = kept
            table.found()
            if steps:
                noticed.append(steps)
        calls, looks, plain = list[float](), list[float](), list[float]()
        watch = fast._engine.plans.watch
        assert watch is not None and watch.native is True
        for turn in range(2 * given.rounds):
            begin = time.perf_counter()
            fast(x)
            between = time.perf_counter()
            own._word.value = table.address if turn % 2 else 0
            sweep = time.perf_counter()
            watch.unchanged()
            (looks if turn % 2 else plain).append(time.perf_counter() - sweep)
            calls.append(between - begin)
        own._word.value = table.address
        room = Copied()
        table._words[4] = 0  # as if no pass had ended for long
        begin = time.perf_counter()
        own.scrub(room, lambda: None)
        scrubbed = time.perf_counter() - begin
        room.close()
        through = list[int]()
        for _ in range(given.through):
            flat, at = drawn(model)
            flat[at] += 100.0
            before, late = own.noticed, 0
            while own.noticed == before and late <= 2 * settings.weights_calls:
                fast(x)
                late += 1
            through.append(late)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
            fast.wait(SETTLE_S)
            hot(fast, x)
        call = statistics.median(calls)
        look = trimmed(looks) - trimmed(plain)
        result = {
            "parameters": given.parameters, "trials": given.trials, "noticed": len(noticed), "most_calls": max(noticed, default=0),
            "median_calls": statistics.median(noticed) if noticed else None, "through_calls": through,
            "call_us": round(call * 1e6, 1), "step_us": round(look * 1e6, 2), "cost": round(look / call, 5),
            "thread_pass_ms": round(scrubbed * 1e3, 1), "thread_share": round(scrubbed / (settings.weights_ms * 5e-4), 5),
            "bound_calls": settings.weights_calls, "bound_ms": settings.weights_ms,
        }  # fmt: skip
    lateness = f"{result['median_calls']} calls later (median), {result['most_calls']} at most"
    print(f"noticed {len(noticed)} of {given.trials}: {lateness}")
    print(f"all the way: {through} calls")
    print(f"a call {result['call_us']} us, a step {result['step_us']} us: {result['cost']:.2%} (asked {LIMIT:.1%})")
    print(f"the thread: a pass {result['thread_pass_ms']} ms, {result['thread_share']:.2%} of one core where calls are too few")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
