"""Linear + bias under `precision="bf16"`: every kernel that this machine executes, against torch's bf16 and our own fp32.

    python -m benchmarks.bf16 [--threads N] [--rounds N] [--quick] [--json]

    tiles     blocks on the matrix unit (AMX), where the probe saw it execute; `tiles, any M` has M known at run time only
    dots      pairs of bf16 in vectors (avx512_bf16)
    fp32      what runs without the setting
    torch     F.linear on bf16 tensors (oneDNN); `torch, fp32 in and out` casts its input and its result, as ours do inside

Contenders take turns in short bursts; times are those of the best tenth of bursts, and their medians, in microseconds. Errors are
the largest against float64, relative to the largest magnitude of the result.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gemm import Linear, ours, turns
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.compile.host import host_core
from hotfuse.ir.text import parse
from hotfuse.lower.common import pack
from hotfuse.lower.common.lowered import PackArgument
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import host

_US = "us"
ROWS = (1, 16, 128, 512)
SHAPES = ((768, 768), (3072, 768), (768, 3072), (3072, 3072))
"""K, N."""


def cores() -> dict[str, Core]:
    """The kernels of this machine, by the core that they are cut for."""
    best = host_core(host(), "bf16")
    found = {"fp32": replace(best, precision="fp32", tiles=False)}
    if best.precision == "bf16":
        found["dots"] = replace(best, tiles=False)
    if best.tiles:
        found["tiles"] = best
    return found


def call_of(core: Core, m: int | str, x: torch.Tensor, layer: Linear, threads: int) -> Callable[[], torch.Tensor]:
    """A kernel for a number of rows, or for any."""
    n, k = layer.weight.shape
    low = lower_contraction(
        parse(f"""graph layer(%x: f32[{m}, {k}]) {{
          param %w: f32[{n}, {k}] = "w"
          param %b: f32[{n}] = "b"
          %y: f32[{m}, {n}] = aten.linear.default(%x, %w, %b)
          return %y }}"""),
        core,
    )
    (spec,) = (a.spec for a in low.arguments if isinstance(a, PackArgument))
    packed = torch.from_numpy(pack.pack(spec, {"w": layer.weight.numpy()}).view(np.uint8))
    call = ours(low, load_kernel(compile_kernel(low.kernel)), x, layer, packed, threads)
    return lambda keep=packed: call()  # type: ignore[misc]


def cell(m: int, k: int, n: int, rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Times and errors of all contenders at one size."""
    x, layer = torch.randn(m, k), Linear(torch.randn(n, k) / math.sqrt(k), torch.randn(n))
    half = [t.bfloat16() for t in (x, layer.weight, layer.bias)]
    calls: dict[str, Callable[[], torch.Tensor]] = {name: call_of(c, m, x, layer, threads) for name, c in cores().items()}
    if "tiles" in calls:
        calls["tiles, any M"] = call_of(cores()["tiles"], "s0", x, layer, threads)
    calls["torch"] = lambda: F.linear(*half)
    calls["torch, fp32 in and out"] = lambda: F.linear(x.bfloat16(), *half[1:]).float()
    want = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    errors = {name: float((c().double() - want).abs().max() / want.abs().max()) for name, c in calls.items()}
    times = turns(dict(calls), rounds)
    return {
        name: {"us": statistics.median(t) * 1e6, "low": _low(t) * 1e6, "error": errors[name]} for name, t in times.items()
    }


def _low(times: list[float]) -> float:
    """The best tenth of bursts: on machines that others use too, a matrix unit has several paces."""
    best = sorted(times)[: max(1, len(times) // 10)]
    return sum(best) / len(best)


def main() -> None:
    """Run the grid and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="two sizes, few rounds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    sizes = [(m, k, n) for k, n in SHAPES for m in ROWS]
    found = {s: cell(*s, 3 if args.quick else args.rounds, args.threads) for s in (sizes[:2] if args.quick else sizes)}
    if args.json:
        json.dump([{"m": m, "k": k, "n": n, "threads": args.threads, "found": f} for (m, k, n), f in found.items()], sys.stdout)
        return
    names = list(next(iter(found.values())))
    print("us, the best tenth of bursts (median); the best of ours over the best of torch's, of both; largest error of ours")
    print(f"{'M x K x N':>16s}  " + "  ".join(f"{name[:18]:>18s}" for name in names))
    own, others = (names[: names.index("torch")], names[names.index("torch") :])
    ratios: list[list[float]] = []
    for (m, k, n), f in found.items():
        ratios.append([min(f[o][way] for o in others) / min(f[o][way] for o in own) for way in ("low", "us")])
        row = "  ".join(f"{f[name]['low']:8.1f} {f'({f[name][_US]:.1f})':>9s}" for name in names)
        worst = max(f[name]["error"] for name in own)
        print(f"{f'{m} x {k} x {n}':>16s}  {row}   {ratios[-1][0]:.2f}x {ratios[-1][1]:.2f}x  {worst:.1e}")
    low, median = (statistics.geometric_mean(r) for r in zip(*ratios, strict=True))
    print(f"geomean {low:.2f}x ({median:.2f}x), worst {min(r[0] for r in ratios):.2f}x, {args.threads} thread(s)")


if __name__ == "__main__":
    main()
