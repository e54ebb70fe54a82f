"""Zeros behind a ReLU: the second product of an MLP (64 rows, 4096 to 1024) on activations of which 0 to 95% are zero: scattered,
in blocks of 8 rows and 32 channels, or in channels that are dead in all rows.

The kernel that leaves out steps of K at which a few rows are zero, changing sides where it pays, in turns with our dense kernel and
with torch's. Kernels are compiled and run as they are, without serving. On one thread they are timed by the processor time of the
calling thread, which holds on a busy machine, else by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.fusion_cases import graph_of
from hotfuse.compile.request_context import kernels
from hotfuse.compile.unit.kernel_cache import kernel_cache
from hotfuse.compile.variants.skipping import at_limit
from hotfuse.ir.graph import Graph
from hotfuse.lower import lower
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.lower.run.constants import Constants
from hotfuse.lower.run.kernel_state import ROWS_TOGETHER

SHARES = (0.0, 0.5, 0.8, 0.9, 0.95)
LIMIT, QUICK_LIMIT = 250, 620
"""Thousandths of steps left out from which the kernel changes sides: about what a worker measures for either product. The weights
of the smaller one lie in the caches, where leaving steps out saves less."""
ROUNDS = 11
TOLERANCE = 1e-3
TEXT = """
graph main(%x: f32[M, K]) {
  param %w: f32[N, K] = "w"
  param %b: f32[N] = "b"
  %y: f32[M, N] = aten.linear.default(%x, %w, %b)
  return %y
}
"""
Run = Callable[[torch.Tensor], torch.Tensor]


def scattered(rows: int, depth: int, share: float) -> torch.Tensor:
    return torch.rand(rows, depth) >= share


def blocks(rows: int, depth: int, share: float) -> torch.Tensor:
    return (torch.rand(rows // 8, depth // 32) >= share).repeat_interleave(8, 0).repeat_interleave(32, 1)


def channels(rows: int, depth: int, share: float) -> torch.Tensor:
    return (torch.rand(1, depth) >= share).expand(rows, depth)


def compiled(graph: Graph, lowered: Lowered, weights: dict[str, torch.Tensor]) -> Run:
    """A kernel with its weights packed."""
    own = kernels()
    run = own.glue(graph, lowered, own.load_kernel(own.compile_kernel(lowered.kernel)), Constants(weights))
    return lambda x: run(x)[0]


def rows(quick: bool) -> list[dict[str, Any]]:
    """One line a kind of zeros and share."""
    torch.manual_seed(0)
    m, k, n = (64, 1024, 256) if quick else (64, 4096, 1024)
    graph, core = graph_of(TEXT, {"M": m, "K": k, "N": n}), kernel_cache().core
    weights = {"w": torch.randn(n, k) / k**0.5, "b": torch.randn(n)}
    limit = QUICK_LIMIT if quick else LIMIT
    sparse = lower_contraction(graph, core, skipping=False, sparse=ROWS_TOGETHER)
    runs: dict[str, Run] = {
        "ours": compiled(graph, at_limit(sparse, limit), weights), "dense": compiled(graph, lower(graph, core), weights),
        "torch": lambda x: torch.nn.functional.linear(x, weights["w"], weights["b"]),
    }  # fmt: skip
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for kind in (scattered, blocks, channels):
            for share in SHARES:
                x = (torch.rand(m, k) + 0.01) * kind(m, k, share)
                spent: dict[str, list[float]] = {name: [] for name in runs}
                for _ in range(ROUNDS):
                    answers: dict[str, torch.Tensor] = {}
                    for name, run in runs.items():
                        run(x)  # its weights are in the caches then
                        begin = clock()
                        answers[name] = run(x)
                        spent[name].append(1e3 * (clock() - begin))
                    torch.testing.assert_close(answers["ours"], answers["torch"], rtol=TOLERANCE, atol=TOLERANCE)
                ms = {name: statistics.median(t) for name, t in spent.items()}
                found.append({
                    "zeros": kind.__name__, "share": f"{share:.0%}", **{name: round(t, 3) for name, t in ms.items()},
                    "over dense": round(ms["dense"] / ms["ours"], 2), "over torch": round(ms["torch"] / ms["ours"], 2),
                })  # fmt: skip
    return found
