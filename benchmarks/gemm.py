"""Linear + bias + GELU: generated kernels against every way torch has, over the grid of sizes that transformers use.

    python -m benchmarks.gemm [--threads 1 2] [--rounds N] [--quick] [--cpu] [--json]

Contenders take turns in short bursts: F.linear + F.gelu, oneDNN with packed weights and fused GELU, MKL with packed weights and
F.gelu, and ours, once specialized to M and once with M known only at run time. All of them allocate their result. A ratio
above 1 means that ours is faster than the best torch path; `low` ratios compare the best tenth of the bursts, which other load
disturbs least. `--cpu` counts the calling thread's processor time instead: on one thread, of a machine that others use too.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.compile.host import host_core
from hotfuse.ir.text import parse
from hotfuse.ir.types import DType
from hotfuse.lower.common import pack
from hotfuse.lower.common.lowered import BufferArgument, BufferRole, Lowered, PackArgument
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import CpuTarget, host
from hotfuse.tile.build import KernelBuilder

ROWS = (1, 4, 16, 64, 128, 512)
SHAPES = ((768, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024), (2304, 768))
BURST = 1e-3
"""Seconds that one contender runs before the next takes its turn."""

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Linear:
    """A layer's weights, with the kernels made for it."""

    weight: torch.Tensor
    bias: torch.Tensor


def lowered(m: int | str, n: int, k: int, core: Core) -> Lowered:
    """The group, specialized to a number of rows, or generic."""
    return lower_contraction(
        parse(f"""graph layer(%x: f32[{m}, {k}]) {{
          param %w: f32[{n}, {k}] = "w"
          param %b: f32[{n}] = "b"
          %h: f32[{m}, {n}] = aten.linear.default(%x, %w, %b)
          %y: f32[{m}, {n}] = aten.gelu.default(%h)
          return %y }}"""),
        core,
    )


def ours(
    low: Lowered, kernel: NativeKernel, x: torch.Tensor, layer: Linear, packed: torch.Tensor, threads: int
) -> Call:
    """A call of a generated kernel: the result is allocated, everything else is bound."""
    m, n = x.shape[0], layer.weight.shape[0]
    fixed: list[torch.Tensor | None] = []
    for a in low.arguments:
        match a:
            case BufferArgument(role=BufferRole.OUTPUT):
                fixed.append(None)
            case BufferArgument(role=BufferRole.INPUT):
                fixed.append(x)
            case BufferArgument():
                fixed.append(layer.bias)
            case PackArgument():
                fixed.append(packed)
            case _:
                pass
    at = fixed.index(None)
    before = [t.data_ptr() for t in fixed[:at] if t is not None]
    after = [t.data_ptr() for t in fixed[at + 1 :] if t is not None]
    sizes = [m] * len(low.kernel.sizes)
    arena = kernel.arena(dict(zip(low.kernel.sizes, sizes, strict=True)), threads)
    tail = (*after, 0 if arena is None else -(-arena.data_ptr() // 64) * 64, *sizes, threads)
    enter, keep = kernel.enter, (arena, kernel)

    def call(enter: Any = enter, keep: Any = keep) -> torch.Tensor:
        out = torch.empty(m, n)
        enter(*before, out.data_ptr(), *tail)
        return out

    return call


def torch_paths(x: torch.Tensor, layer: Linear) -> dict[str, Call]:
    """Every way torch has to do it; packed ones where this build has them."""
    w, b, m = layer.weight, layer.bias, x.shape[0]
    paths: dict[str, Call] = {"eager": lambda: F.gelu(F.linear(x, w, b))}
    if torch.backends.mkldnn.is_available():
        reordered = torch.ops.mkldnn._reorder_linear_weight(w, m)
        fused = torch.ops.mkldnn._linear_pointwise
        paths["onednn packed"] = lambda: fused(x, reordered, b, "gelu", [], "none")
    if torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"):
        mkl = torch.ops.mkl._mkl_reorder_linear_weight(w, m)
        linear = torch.ops.mkl._mkl_linear
        paths["mkl packed"] = lambda: F.gelu(linear(x, mkl, w, b, m))
    return paths


def turns(
    calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per call, burst by burst, the contenders in turns."""
    inner: dict[str, int] = {}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        inner[name] = max(1, int(BURST / max(clock() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            for name in list(calls) if i % 2 == 0 else list(calls)[::-1]:
                call, count = calls[name], inner[name]
                start = clock()
                for _ in range(count):
                    call()
                times[name].append((clock() - start) / count)
    finally:
        gc.enable()
    return times


def peak_kernel(target: CpuTarget, accumulators: int, steps: int) -> tuple[NativeKernel, int]:
    """Multiply-adds on registers only, and how many operations a call does."""
    b = KernelBuilder("peak")
    factors = b.input("factors", DType.F32, (2,))
    out = b.output("out", DType.F32, (accumulators, target.lanes))
    x, y = (b.load(factors, (i,)) for i in range(2))
    zero = b.fill(0.0, DType.F32, (target.lanes,))
    with b.loop("i", 0, steps, carry=[b.map("add", zero, y) for _ in range(accumulators)]) as i:
        tiles = list(i.carried)
        for _ in range(4):
            tiles = [b.map("fma", t, x, y) for t in tiles]
        i.yields(*tiles)
    for a, tile in enumerate(i.outs):
        b.store(out, (a, 0), tile)
    return load_kernel(compile_kernel(b.finish(), target)), 2 * 4 * accumulators * target.lanes * steps


def measured_peak(target: CpuTarget) -> float:
    """Multiply-add operations per second that one core reaches, at its best."""
    count = 24 if target.name in ("avx512", "neon") else 12
    kernel, operations = peak_kernel(target, count, 2000)
    factors, out = torch.tensor([0.5, 1.0]), torch.empty(count, target.lanes)
    best = math.inf
    for _ in range(300):
        start = time.perf_counter()
        kernel([factors, out], [], threads=1)
        best = min(best, time.perf_counter() - start)
    return operations / best


@dataclass(slots=True)
class Cell:
    """One size on one number of threads."""

    threads: int
    m: int
    n: int
    k: int
    times: dict[str, list[float]]
    peak: float

    def best(self, pick: Callable[[list[float]], float]) -> tuple[str, float]:
        """The fastest torch path and its seconds."""
        found = {name: pick(t) for name, t in self.times.items() if not name.startswith("ours")}
        name = min(found, key=lambda n: found[n])
        return name, found[name]

    def ratio(self, which: str, pick: Callable[[list[float]], float]) -> float:
        """How much faster one of ours is than the best torch path."""
        return self.best(pick)[1] / pick(self.times[which])

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        return {
            "threads": self.threads, "m": self.m, "n": self.n, "k": self.k,
            "median_us": {n: round(statistics.median(t) * 1e6, 2) for n, t in self.times.items()},
            "low_us": {n: round(low(t) * 1e6, 2) for n, t in self.times.items()},
            "ratio": round(self.ratio("ours", statistics.median), 3),
            "ratio_low": round(self.ratio("ours", low), 3),
            "ratio_generic": round(self.ratio("ours generic", statistics.median), 3),
            "ratio_generic_low": round(self.ratio("ours generic", low), 3),
            "of_peak": round(self.of_peak, 3),
        }  # fmt: skip

    @property
    def of_peak(self) -> float:
        """Operations per second against the measured peak of as many cores."""
        return 2 * self.m * self.n * self.k / low(self.times["ours"]) / (self.peak * self.threads)


def low(times: list[float]) -> float:
    """The 10th percentile: what the machine does when it is left alone."""
    return sorted(times)[len(times) // 10]


def geomean(numbers: list[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(n) for n in numbers))


def grid(
    threads: list[int],
    rounds: int,
    shapes: tuple[tuple[int, int], ...],
    rows: tuple[int, ...],
    clock: Callable[[], float],
) -> dict[str, Any]:
    """All cells; prints one line for each."""
    target = host()
    core = host_core(target)
    peak = measured_peak(target)
    print(
        f"# {target.name}, peak of one core {peak / 1e9:.1f} GFLOP/s, caches {core.l1 >> 10} / {core.l2 >> 10} KiB",
        flush=True,
    )
    cells: list[Cell] = []
    compile_ms: dict[str, list[float]] = {"ours": [], "ours generic": []}
    generator = torch.Generator().manual_seed(0)
    for n, k in shapes:
        layer = Linear(torch.randn(n, k, generator=generator) / k**0.5, torch.randn(n, generator=generator))
        generic = lowered("s0", n, k, core)
        (spec,) = [a.spec for a in generic.arguments if isinstance(a, PackArgument)]
        packed = torch.from_numpy(pack.pack(spec, {"w": layer.weight.numpy()}))
        generic_kernel = _timed(generic, target, compile_ms["ours generic"])
        for m in rows:
            x = torch.randn(m, k, generator=generator)
            special = lowered(m, n, k, core)
            special_kernel = _timed(special, target, compile_ms["ours"])
            exact = F.gelu(F.linear(x.double(), layer.weight.double(), layer.bias.double()))
            for count in threads:
                torch.set_num_threads(count)
                calls = torch_paths(x, layer)
                calls["ours"] = ours(special, special_kernel, x, layer, packed, count)
                calls["ours generic"] = ours(generic, generic_kernel, x, layer, packed, count)
                for name, call in calls.items():
                    worst = (call() - exact).abs().max().item()
                    if not worst < 1e-4:
                        raise SystemExit(f"{name} is wrong by {worst} at {m}x{n}x{k}")
                cell = Cell(count, m, n, k, turns(calls, rounds, clock), peak)
                cells.append(cell)
                _print(cell)
    summary = {str(t): _summary([c for c in cells if c.threads == t]) for t in threads}
    for t, s in summary.items():
        print(f"# {t} threads: " + ", ".join(f"{name} {value}" for name, value in s.items()))
    compiled = {name: round(statistics.median(ms), 1) for name, ms in compile_ms.items()}
    print(f"# compile, median ms: {compiled}")
    return {"peak_gflops": peak / 1e9, "target": target.name, "compile_ms": compiled, "summary": summary,
            "cells": [c.to_dict() for c in cells]}  # fmt: skip


def _timed(low_level: Lowered, target: CpuTarget, into: list[float]) -> NativeKernel:
    compiled = compile_kernel(low_level.kernel, target)
    into.append(sum(compiled.seconds.values()) * 1e3)
    return load_kernel(compiled)


def _print(c: Cell) -> None:
    name, best = c.best(low)
    micro = {n: f"{statistics.median(t) * 1e6:.1f}" for n, t in c.times.items()}
    print(
        f"t{c.threads} {c.m:4}x{c.n}x{c.k}  median us {micro}  low: best torch {name} {best * 1e6:.1f}, "
        f"ours {low(c.times['ours']) * 1e6:.1f}  ratio {c.ratio('ours', statistics.median):.2f} "
        f"low {c.ratio('ours', low):.2f} generic {c.ratio('ours generic', low):.2f}  peak {c.of_peak:.2f}",
        flush=True,
    )


def _summary(cells: list[Cell]) -> dict[str, float]:
    found: dict[str, float] = {}
    for which in ("ours", "ours generic"):
        for label, pick in (("median", statistics.median), ("low", low)):
            ratios = [c.ratio(which, pick) for c in cells]
            found[f"{which} {label} geomean"] = round(geomean(ratios), 3)
            found[f"{which} {label} minimum"] = round(min(ratios), 3)
    return found


def main() -> int:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="two shapes and three numbers of rows")
    parser.add_argument("--cpu", action="store_true", help="processor time of the calling thread; needs --threads 1")
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    options = parser.parse_args()
    if options.cpu and options.threads != [1]:
        parser.error("--cpu counts one thread's time: add --threads 1")
    clock = time.thread_time if options.cpu else time.perf_counter
    shapes, rows = (SHAPES[:2], (1, 16, 128)) if options.quick else (SHAPES, ROWS)
    with torch.inference_mode():
        result = grid(options.threads, options.rounds, shapes, rows, clock)
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
