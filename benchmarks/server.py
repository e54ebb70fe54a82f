"""A threaded server in front of one model, beside the model's own code: while plans are made, and behind that.

    python -m benchmarks.server [--seconds 20] [--callers 4] [--width 768] [--rows 8]

The server and its clients are those of `examples/recipes/threaded_server.py`: every request is a thread of its own, which parses
numbers, calls the model and prints numbers, so most of the time is Python's and several threads want its lock. Each side is a
process of its own and nothing else runs meanwhile: the own code, a server that computes nothing, Hotfuse from a cold start (no
cache, no profiles), the own code again. A process in which jobs run slows whatever else it serves: the sides never share one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

BATCH = 8
"""Requests that are asked at once and timed together."""


def side(kind: str, seconds: float, callers: int, width: int, rows: int) -> dict[str, Any]:
    """One process: milliseconds of each batch, with the second at which it began."""
    import torch
    from torch import nn

    import hotfuse
    from examples.recipes.threaded_server import serving

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)
    ).eval()
    served: Any = {"own": lambda: model, "nothing": lambda: lambda x: x, "hotfuse": lambda: hotfuse.jit(model)}[kind]()
    server = serving(served)
    url, body = f"http://127.0.0.1:{server.server_address[1]}", json.dumps(torch.randn(rows, width).tolist()).encode()
    begin, found = time.perf_counter(), list[tuple[float, float]]()
    with ThreadPoolExecutor(callers) as pool:
        while (at := time.perf_counter()) - begin < seconds:
            list(pool.map(lambda _: json.loads(urlopen(Request(url, body), timeout=60).read()), range(BATCH)))
            found.append((at - begin, (time.perf_counter() - at) * 1e3))
    server.shutdown()
    tiers = served.stats()["calls_per_tier"] if kind == "hotfuse" else {}
    return {"batches": found, "tiers": tiers}


def apart(kind: str, seconds: float, asked: argparse.Namespace) -> dict[str, Any]:
    """The same in a fresh process with an empty home."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "benchmarks.server", "--side", kind, "--seconds", str(seconds),
                   "--callers", str(asked.callers), "--width", str(asked.width), "--rows", str(asked.rows)]  # fmt: skip
        env = os.environ | {"HOME": home, "XDG_CACHE_HOME": f"{home}/cache"}
        return json.loads(
            subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )


def middle(batches: list[tuple[float, float]], since: float = 0.0, until: float = float("inf")) -> float:
    """The median milliseconds of batches that began in that time."""
    return statistics.median([ms for at, ms in batches if since <= at < until] or [float("nan")])


def main() -> None:
    """Print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=["own", "nothing", "hotfuse"], default="")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=8)
    asked = parser.parse_args()
    if asked.side:
        print(json.dumps(side(asked.side, asked.seconds, asked.callers, asked.width, asked.rows)))
        sys.stdout.flush()
        return
    short = max(asked.seconds / 4, 2.0)
    first, nothing = apart("own", short, asked), apart("nothing", short, asked)
    fast, last = apart("hotfuse", asked.seconds, asked), apart("own", short, asked)
    own, half = middle(first["batches"] + last["batches"], since=0.5), asked.seconds / 2
    early, late = middle(fast["batches"], 0.5, half), middle(fast["batches"], half)
    print(json.dumps({
        "own_ms": round(own, 1), "own_twice_ms": [round(middle(b["batches"], since=0.5), 1) for b in (first, last)],
        "nothing_ms": round(middle(nothing["batches"], since=0.5), 1), "hotfuse_first_half_ms": round(early, 1),
        "hotfuse_second_half_ms": round(late, 1), "over_own_first_half": round(own / early, 3),
        "over_own_second_half": round(own / late, 3), "tiers": fast["tiers"]}, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
