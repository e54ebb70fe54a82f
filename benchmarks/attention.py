"""Attention with the reshapes around it, and over packed sequences: generated kernels against eager.

    python -m benchmarks.attention [--threads 1 2] [--rounds N] [--only packed] [--cpu] [--json]

- dense: projections [1, S, 12 * 64] to heads, attention, and back to [1, S, 12 * 64], without a mask, with a mask of keys, and
  causal. Eager is `scaled_dot_product_attention` between `view`, `transpose` and `reshape`; ours is once specialized to S and
  once for any batch and length.
- packed: 8 sequences, a third of the tokens real. Eager pads them and masks (floats or bools, the faster counts) or loops over
  them; ours reads them one behind the other: the kernel alone (offsets are data, any batch), and `jit` of a module that calls
  `hotfuse.packed_attention`, as users have it.

Contenders take turns in short bursts, and all of them allocate their result. A ratio above 1 means that ours is faster; `low`
ratios compare the best tenth of the bursts, which other load disturbs least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import hotfuse
from benchmarks.gemm import geomean, host_core, low, measured_peak, turns
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.abi import NativeKernel
from hotfuse.frontends.fx import PlaceholderRole, to_graph
from hotfuse.lower.common.lowered import BufferArgument, Lowered, SymbolArgument
from hotfuse.lower.common.lowered import BufferRole as Is
from hotfuse.lower.cpu.attention.attention_group import lower_attention
from hotfuse.lower.cpu.attention.packed import lower_packed
from hotfuse.lower.cpu.tiling import Core
from hotfuse.native.target import host

HEADS, WIDTH = 12, 64
LENGTHS = (16, 64, 128, 384)
PACKED = (128, 22, 40, 17, 65, 12, 31, 28)
"""Lengths of the packed batch: 343 tokens, where padding makes 1,024."""

Call = Callable[[], torch.Tensor]
Kind = str
KINDS: tuple[Kind, ...] = ("plain", "mask", "causal")


def heads(x: torch.Tensor) -> torch.Tensor:
    """A projection's heads, as models take them apart."""
    return x.view(x.shape[0], x.shape[1], HEADS, WIDTH).transpose(1, 2)


class Block(torch.nn.Module):
    """Attention as models write it."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.causal = kind == "causal"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Projections to the input of the next one."""
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask, is_causal=self.causal)
        return y.transpose(1, 2).reshape(q.shape[0], q.shape[1], HEADS * WIDTH)


def inputs(kind: Kind, batch: int, length: int) -> list[torch.Tensor]:
    """Three projections, and a mask that forbids some keys."""
    generator = torch.Generator().manual_seed(length)
    args = [torch.randn(batch, length, HEADS * WIDTH, generator=generator) for _ in range(3)]
    if kind == "mask":
        args.append(torch.where(torch.rand(batch, 1, 1, length, generator=generator) < 0.2, -torch.inf, 0.0))
        args[3][..., 0] = 0.0
    return args


@dataclass(slots=True)
class Made:
    """A kernel with what making it took."""

    lowered: Lowered
    kernel: NativeKernel
    names: list[str]
    """The graph's inputs."""
    symbols: list[str]
    """(batch, length) as the graph calls them; empty for a specialized kernel."""
    milliseconds: float


def made(kind: Kind, core: Core, length: int | None) -> Made:
    """A kernel for one length, or (None) for all."""
    example = inputs(kind, 1, length) if length else inputs(kind, 3, 37)
    shapes: Any = None
    if length is None:
        batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
        shapes = tuple({0: batch, 3 if i == 3 else 1: tokens} for i in range(len(example)))
    program = torch.export.export(Block(kind).eval(), tuple(example), dynamic_shapes=shapes, strict=False)
    graph = to_graph(program.graph_module, [PlaceholderRole("input") for _ in example]).graph
    start = time.perf_counter()
    lowered = lower_attention(graph, core)
    kernel = load_kernel(compile_kernel(lowered.kernel))
    taken = (time.perf_counter() - start) * 1e3
    symbols = [] if length else [str(d.args[0]) for d in graph.inputs[0].type.shape[:2]]  # type: ignore[union-attr]
    return Made(lowered, kernel, [v.name for v in graph.inputs], symbols, taken)


def dense(m: Made, args: Sequence[torch.Tensor], threads: int) -> Call:
    """A call of a dense kernel."""
    env = dict(zip(m.symbols, args[0].shape[:2], strict=True)) if m.symbols else {}
    return entered(m, args, env, args[0].shape, threads)


def entered(m: Made, args: Sequence[torch.Tensor], env: dict[str, int], shape: Sequence[int], threads: int) -> Call:
    """A call of a kernel: the result is allocated, everything else is bound."""
    named = dict(zip(m.names, args, strict=True))
    at, pointers = 0, list[int]()
    sizes: list[int] = []
    for a in m.lowered.arguments:
        match a:
            case BufferArgument(role=Is.OUTPUT):
                at = len(pointers)
                pointers.append(0)
            case BufferArgument():
                pointers.append(named[a.value].data_ptr())
            case SymbolArgument():
                sizes.append(env[a.symbol])
            case _:
                raise SystemExit(f"an argument that this benchmark does not know: {a}")
    arena, base = scratch(m.kernel, sizes, threads)
    enter = m.kernel.enter

    def call(keep: object = (arena, m, args)) -> torch.Tensor:
        out = torch.empty(shape)
        pointers[at] = out.data_ptr()
        enter(*pointers, base, *sizes, threads)
        return out

    return call


def scratch(kernel: NativeKernel, sizes: Sequence[int], threads: int) -> tuple[torch.Tensor | None, int]:
    """Scratch memory and where it begins."""
    arena = kernel.arena(dict(zip(kernel.kernel.sizes, sizes, strict=True)), threads)
    return arena, 0 if arena is None else -(-arena.data_ptr() // 64) * 64


@dataclass(slots=True)
class Cell:
    """One case on one number of threads; the first name is the one all others are judged by."""

    name: str
    threads: int
    operations: float
    times: dict[str, list[float]]

    def ratio(self, ours: str, pick: Callable[[list[float]], float]) -> float:
        """How much faster one of ours is than the best that eager's ways of the same kind do."""
        rivals = [t for n, t in self.times.items() if n.startswith(("eager", "padded"))]
        return min(map(pick, rivals)) / pick(self.times[ours])

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for JSON."""
        mine = [n for n in self.times if n.startswith("ours")]
        return {
            "case": self.name,
            "threads": self.threads,
            "median_us": {n: round(statistics.median(t) * 1e6, 2) for n, t in self.times.items()},
            "low_us": {n: round(low(t) * 1e6, 2) for n, t in self.times.items()},
            "ratio": {n: round(self.ratio(n, statistics.median), 3) for n in mine},
            "ratio_low": {n: round(self.ratio(n, low), 3) for n in mine},
            "gflops": round(self.operations / low(self.times["ours"]) / 1e9, 1),
        }


def check(name: str, call: Call, exact: torch.Tensor) -> None:
    """A contender that is wrong is not timed."""
    worst = (call() - exact).abs().max().item()
    if not worst < 1e-5:
        raise SystemExit(f"{name} is wrong by {worst}")


def dense_cells(threads: Sequence[int], rounds: int, clock: Callable[[], float], core: Core) -> list[Cell]:
    """All kinds and lengths."""
    cells: list[Cell] = []
    for kind in KINDS:
        generic = made(kind, core, None)
        print(f"# {kind}: kernel for all lengths made in {generic.milliseconds:.0f} ms", flush=True)
        for length in LENGTHS:
            special = made(kind, core, length)
            args, block = inputs(kind, 1, length), Block(kind)
            exact = block(*(a.double() for a in args))
            for count in threads:
                torch.set_num_threads(count)
                calls: dict[str, Call] = {
                    "eager": lambda block=block, args=args: block(*args),
                    "ours": dense(special, args, count),
                    "ours generic": dense(generic, args, count),
                }
                for name, call in calls.items():
                    check(f"{name}, {kind}, length {length}", call, exact)
                operations = 4 * length**2 * HEADS * WIDTH / (2 if kind == "causal" else 1)
                cells.append(Cell(f"{kind} {length}", count, operations, turns(dict(calls), rounds, clock)))
                report(cells[-1])
    return cells


def packed_cells(threads: Sequence[int], rounds: int, clock: Callable[[], float], core: Core) -> list[Cell]:
    """The packed batch."""
    wide, longest, batch = HEADS * WIDTH, max(PACKED), len(PACKED)
    offsets = [sum(PACKED[:i]) for i in range(batch + 1)]
    tokens = offsets[-1]
    x = torch.randn(tokens, 3 * wide, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(batch, longest, 3 * wide)
    real = torch.zeros(batch, 1, 1, longest, dtype=torch.bool)
    for i, n in enumerate(PACKED):
        padded[i, :n] = x[offsets[i] : offsets[i + 1]]
        real[i, ..., :n] = True
    added = torch.zeros(real.shape).masked_fill(~real, -torch.inf)

    def attention(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (heads(part) for part in x.split(wide, -1)) if mask is None else map(split_heads, x.split(wide, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(*x.shape[:2], wide)

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

    def loop() -> torch.Tensor:
        return torch.cat([attention(x[None, a:b], None)[0] for a, b in itertools.pairwise(offsets)])

    block, given = PackedBlock().eval(), torch.tensor(offsets)
    tokens_dim, count_dim = torch.export.Dim("tokens"), torch.export.Dim("count")
    program = torch.export.export(block, (x, given), dynamic_shapes=({0: tokens_dim}, {0: count_dim}), strict=False)
    graph = to_graph(program.graph_module, [PlaceholderRole("input"), PlaceholderRole("input")]).graph
    start = time.perf_counter()
    lowered = lower_packed(graph, core)
    kernel = Made(lowered, load_kernel(compile_kernel(lowered.kernel)), [v.name for v in graph.inputs], [], 0.0)
    print(f"# packed: kernel for all batches made in {(time.perf_counter() - start) * 1e3:.0f} ms", flush=True)
    env = {str(v.type.shape[0].args[0]): n for v, n in zip(graph.inputs, (tokens, batch + 1), strict=True)}  # type: ignore[union-attr]
    cells: list[Cell] = []
    for count in threads:
        torch.set_num_threads(count)
        ours = entered(kernel, [x, given], env, (tokens, wide), count)
        served = served_packed(block, x, given)

        def from_padding(mask: torch.Tensor) -> torch.Tensor:
            return torch.cat([attention(padded, mask)[i, :n] for i, n in enumerate(PACKED)])

        calls: dict[str, Call] = {
            "padded, float mask": lambda: attention(padded, added),
            "padded, bool mask": lambda: attention(padded, real),
            "loop": loop,
            "ours": ours,
            "ours through jit": lambda served=served: served(x, given),
        }
        check("ours, packed", ours, from_padding(added).double())
        check("ours through jit", calls["ours through jit"], from_padding(added).double())
        check("loop", loop, from_padding(real).double())
        operations = sum(4 * n**2 * wide for n in PACKED)
        cells.append(Cell("packed", count, operations, turns(dict(calls), rounds, clock)))
        report(cells[-1])
        print(f"# packed through jit, {count} threads: calls per tier {served.stats()['calls_per_tier']}", flush=True)
        if not served.stats()["calls_per_tier"]["1"]:
            print(served.explain(full=True), flush=True)  # why no kernel serves
        served.close()
    return cells


class PackedBlock(torch.nn.Module):
    """Packed attention of one projection, as users write it."""

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[tokens, 3 * width] to [tokens, width]."""
        q, k, v = (part.unflatten(-1, (HEADS, WIDTH)) for part in x.split(HEADS * WIDTH, -1))
        return hotfuse.packed_attention(q, k, v, offsets).reshape(-1, HEADS * WIDTH)


def served_packed(block: torch.nn.Module, x: torch.Tensor, offsets: torch.Tensor) -> hotfuse.Jit:
    """The block as `jit` serves it once it has settled; batches of other lengths come too, so that sizes are not fixed."""
    served = hotfuse.jit(block)
    until = time.perf_counter() + 30
    while time.perf_counter() < until and served.stats()["calls_per_tier"]["1"] < 20:
        served(x, offsets)
        served(x[: offsets[-2]], offsets[:-1])
        time.sleep(0.001)
    served.wait(10)
    return served


def report(c: Cell) -> None:
    """One line."""
    median = {n: f"{statistics.median(t) * 1e6:.1f}" for n, t in c.times.items()}
    lows = {n: f"{low(t) * 1e6:.1f}" for n, t in c.times.items()}
    ratios = ", ".join(
        f"{n} {c.ratio(n, statistics.median):.2f} low {c.ratio(n, low):.2f}" for n in c.times if n.startswith("ours")
    )
    rate = c.operations / low(c.times["ours"]) / 1e9
    print(f"t{c.threads} {c.name:11} median us {median}  low {lows}  ratio: {ratios}  {rate:.0f} GFLOP/s", flush=True)


def summary(cells: Sequence[Cell], threads: Sequence[int]) -> dict[str, float]:
    """Geometric means over lengths, per kind and number of threads."""
    found: dict[str, float] = {}
    for count in threads:
        for kind in (*KINDS, "packed"):
            mine = [c for c in cells if c.threads == count and c.name.split()[0] == kind]
            for which in ("ours", "ours generic", "ours through jit"):
                for label, pick in (("median", statistics.median), ("low", low)):
                    if mine and all(which in c.times for c in mine):
                        key = f"{count} threads, {kind}, {which}, {label}"
                        found[key] = round(geomean([c.ratio(which, pick) for c in mine]), 3)
    return found


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", choices=("dense", "packed"), help="one part")
    parser.add_argument("--cpu", action="store_true", help="processor time of the calling thread; needs --threads 1")
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    options = parser.parse_args()
    if options.cpu and options.threads != [1]:
        parser.error("--cpu counts one thread's time: add --threads 1")
    clock = time.thread_time if options.cpu else time.perf_counter
    target = host()
    core = host_core(target)
    peak = measured_peak(target)
    print(f"# {target.name}, peak of one core {peak / 1e9:.1f} GFLOP/s", flush=True)
    with torch.no_grad():
        cells: list[Cell] = []
        if options.only != "packed":
            cells += dense_cells(options.threads, options.rounds, clock, core)
        if options.only != "dense":
            cells += packed_cells(options.threads, options.rounds, clock, core)
    means = summary(cells, options.threads)
    for name, value in means.items():
        print(f"# {name}: {value}x")
    if options.json:
        print(json.dumps({"target": target.name, "peak_gflops": round(peak / 1e9, 1), "summary": means,
                          "cells": [c.to_dict() for c in cells]}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
