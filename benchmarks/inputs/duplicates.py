"""Batches in which rows come twice, through `hotfuse.jit` with default settings, in turns with our plan without specializations
(tier 1 is its highest: this one needs no watching) and with eager: 16 sequences of which 8, 4 or all are distinct, and traffic that
flips.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

import hotfuse
from benchmarks.inputs.padding import VOCABULARY, Encoder
from benchmarks.inputs.repeated import UNSPECIALIZED, compiled, in_turns, plans
from hotfuse.specialize.table import DUPLICATES

ROWS, LEARN_S = 16, 100.0
Call = tuple[torch.Tensor, torch.Tensor]


def batches(length: int, *distinct: int) -> Iterator[Call]:
    """Batches with so many kinds of rows, in turns."""
    while True:
        for kinds in distinct:
            order = torch.cat([torch.randperm(kinds), torch.randint(0, kinds, (ROWS - kinds,))])
            yield torch.randint(0, VOCABULARY, (kinds, length))[order], torch.ones(ROWS, length, dtype=torch.int64)


def layered(fast: Any) -> bool:
    return any(key.row == DUPLICATES for p in plans(fast) for key in p.layers)


def learn(fast: Any, calls: Iterator[Call], done: Any) -> float:
    begin = time.perf_counter()
    while time.perf_counter() < begin + LEARN_S and not done(fast):
        fast(*next(calls))
    fast.wait(20)
    return time.perf_counter() - begin


def rows(quick: bool) -> list[dict[str, Any]]:
    """One line a kind of traffic."""
    torch.manual_seed(0)
    layers, width, length, count = (2, 128, 32, 60) if quick else (4, 384, 64, 25)
    model = Encoder(layers, width).eval()
    found: list[dict[str, Any]] = []
    with torch.no_grad(), hotfuse.jit(model) as fast, hotfuse.jit(model, settings=UNSPECIALIZED) as without:
        took = learn(fast, batches(length, 8), layered)
        learn(without, batches(length, 8), compiled)
        runs = {"ours": fast, "without": without, "eager": model}
        for label, distinct in (("8 of 16", (8,)), ("4 of 16", (4,)), ("flips: 8, then 16", (8, 16)), ("all distinct", (16,))):
            ms = in_turns(runs, batches(length, *distinct), count, settle=40)
            assert not layered(without), "both sides leave equal rows out: nothing is compared"
            found.append({
                "distinct": label, "deployed": layered(fast), "after s": round(took, 1), **{k: round(v, 2) for k, v in ms.items()},
                "over without": round(ms["without"] / ms["ours"], 2), "over eager": round(ms["eager"] / ms["ours"], 2),
            })  # fmt: skip
    return found
