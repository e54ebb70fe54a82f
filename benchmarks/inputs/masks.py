"""Attention with a mask that comes as data: causal, a sliding window, padding, and one that hides nothing. Our kernel, which leaves
out keys that the mask hides (`lower.cpu.attention.seen_keys`), in turns with our kernel that computes all of them, and with eager.
Kernels are for any length.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch

import hotfuse.lower.cpu.attention.attention_kernel as kernel
from benchmarks.attention import HEADS, WIDTH, Block, Call, Made, entered
from benchmarks.gemm import host_core
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.frontends.fx import PlaceholderRole, to_graph
from hotfuse.lower.cpu.attention.attention_group import lower_attention
from hotfuse.lower.cpu.attention.attention_job import Attention
from hotfuse.native.target import host

WINDOW = 64


def seen_by(kind: str, length: int) -> torch.Tensor:
    """Which keys a query sees: [1, 1, queries or 1, keys]."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    match kind:
        case "causal":
            seen = j <= i
        case "window":
            seen = (j <= i) & (j > i - WINDOW)
        case "padding":
            seen = j < length // 3
        case _:
            seen = i + j >= 0
    return seen[None, None]


def all_keys(_: Attention) -> bool:
    """No mask is looked at."""
    return False


def made(args: list[torch.Tensor]) -> Call:
    """A kernel for any length, bound to a call's tensors."""
    tokens = torch.export.Dim("tokens")
    of_mask = {3: tokens} if args[3].shape[2] == 1 else {2: tokens, 3: tokens}
    shapes = ({1: tokens}, {1: tokens}, {1: tokens}, of_mask)
    program = torch.export.export(Block("mask").eval(), tuple(args), dynamic_shapes=shapes, strict=False)
    graph = to_graph(program.graph_module, [PlaceholderRole("input") for _ in args]).graph
    lowered = lower_attention(graph, host_core(host()))
    symbol = str(graph.inputs[0].type.shape[1].args[0])  # type: ignore[union-attr]
    loaded = load_kernel(compile_kernel(lowered.kernel))
    threads, length = torch.get_num_threads(), args[0].shape[1]
    whole = Made(lowered, loaded, [v.name for v in graph.inputs], [symbol], 0)
    return entered(whole, args, {symbol: length}, args[0].shape, threads)


def rows(quick: bool) -> list[dict[str, Any]]:
    """One line a mask."""
    torch.manual_seed(0)
    cases = [(128, "causal"), (128, "open")] if quick else [
        *((n, "causal") for n in (128, 512, 1024)), (1024, "window"),
        *((n, kind) for kind in ("padding", "open") for n in (128, 512)),
    ]  # fmt: skip
    found: list[dict[str, Any]] = []
    real = kernel.pays
    for length, kind in cases:
        mask = torch.where(seen_by(kind, length), 0.0, -math.inf)
        args = [*(torch.randn(1, length, HEADS * WIDTH) for _ in range(3)), mask]
        block, ours = Block("mask"), made(args)
        kernel.pays = all_keys
        try:
            without = made(args)
        finally:
            kernel.pays = real
        calls: dict[str, Call] = {"ours": ours, "without": without, "eager": lambda block=block, args=args: block(*args)}
        exact = block(*(a.double() for a in args))
        worst = max(float((call() - exact).abs().max()) for call in calls.values())
        assert worst < 1e-5, f"{worst} from float64's"
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(60 if length < 512 else 11):
            for name, call in calls.items():
                begin = time.perf_counter()
                call()
                spent[name].append(1e3 * (time.perf_counter() - begin))
        ms = {name: statistics.median(t) for name, t in spent.items()}
        found.append({
            "mask": kind, "tokens": length, **{k: round(v, 3) for k, v in ms.items()},
            "over without": round(ms["without"] / ms["ours"], 2), "over eager": round(ms["eager"] / ms["ours"], 2),
        })  # fmt: skip
    return found
