"""Products whose input has rows of zeros: eager, a kernel that multiplies every row, and one that leaves rows out where it pays.

    python -m benchmarks.zero_rows [--threads N] [--rounds N] [--json]

Each row of the table is a share of rows that are zero, evenly spread; the three take turns on the same data, in `--rounds` rounds,
and the median of each round's least times is shown. `dispatch` is the kernel as it serves: it looks at the rows in every call, and
changes sides where the worker measured the crossing, which stands in the head. The figures at 0% are what looking costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.fusion_cases import graph_of
from benchmarks.gemm import geomean
from hotfuse.backends.llvm.native import compile_kernel
from hotfuse.compile.learn import measure
from hotfuse.compile.learn.measure import CompiledCandidate
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.compile.variants.skipping import Skipping, Zeroed
from hotfuse.fusion.forecast import RooflinePredictor
from hotfuse.hpm.work import Candidate
from hotfuse.ir.graph import Graph
from hotfuse.lower import lower

SHAPES = ((64, 256, 512), (128, 768, 768), (128, 768, 3072), (512, 256, 256))
SHARES = (0, 250, 500, 750, 950)
PASSES, ROUND_S = 6, 0.4


TEXT = """
graph main(%x: f32[M, K]) {
  param %w: f32[N, K] = "w"
  param %b: f32[N] = "b"
  %h: f32[M, N] = aten.linear.default(%x, %w, %b)
  %y: f32[M, N] = aten.gelu.default(%h)
  return %y
}
"""


def timed(graph: Graph, sides: dict[str, CompiledCandidate | None], share: int, threads: int) -> dict[str, float]:
    """Microseconds of every contender in one round."""
    shelf = Zeroed(share)
    batch = [
        measure.bind(Candidate(graph, {}, kernel_cache().core if made else None, threads), "rows", made, shelf)
        for made in sides.values()
    ]
    measure.timed(batch, PASSES, time.perf_counter() + ROUND_S)
    return {name: b.figure()[0] * 1e6 for name, b in zip(sides, batch, strict=True)}


def main() -> int:
    """All shapes and shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for m, k, n in SHAPES:
        graph = graph_of(TEXT, {"M": m, "K": k, "N": n})
        lowered = lower(graph, kernel_cache().core)
        core, peaks = kernel_cache().core, kernel_cache().peaks
        both, skips = Skipping(graph, {}, core, peaks, RooflinePredictor(peaks), options.threads).build()
        print(f"{m} x {k} -> {n}, {options.threads} threads; {skips}", flush=True)
        sides = {"eager": None, "dense": CompiledCandidate(lowered, compile_kernel(lowered.kernel)), "dispatch": both}
        for share in SHARES:
            seen = [timed(graph, sides, share, options.threads) for _ in range(options.rounds)]
            us = {name: statistics.median(s[name] for s in seen) for name in sides}
            over = {f"vs_{name}": us[name] / us["dispatch"] for name in ("eager", "dense")}
            rows.append({"rows": m, "depth": k, "columns": n, "zero": share / 1000, "limit": skips.limit / 1000, **us, **over})
            times = "  ".join(f"{name} {taken:8.1f}" for name, taken in us.items())
            print(f"  {share / 10:4.0f}% zero  {times} us  "
                  f"{over['vs_dense']:5.2f}x dense, {over['vs_eager']:5.2f}x eager", flush=True)  # fmt: skip
    by_share = {
        str(s / 1000): {name: geomean([r[name] for r in rows if r["zero"] == s / 1000]) for name in ("vs_dense", "vs_eager")}
        for s in SHARES
    }
    for share, over in by_share.items():
        print(f"{float(share):4.0%} zero: {over['vs_dense']:.2f}x dense, {over['vs_eager']:.2f}x eager (geometric means)")
    if options.json:
        print(json.dumps({"rows": rows, "by_share": by_share}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
