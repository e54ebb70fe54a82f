"""Inputs that come again while others change, through `hotfuse.jit` with default settings, in turns with our plan without
specializations (tier 1 is its highest) and with eager: a fixed set of texts, one image with ten prompts, and traffic that
flips every call, every 10 and every 1,000 behind a plan that was deployed on better days.

On one thread calls are timed by the processor time of the calling thread, which holds on a busy machine, else by the clock.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import hotfuse
from hotfuse.specialize.table import REPEATED

LEARN_S = 75.0
"""Seconds of calls for a plan to be deployed."""
SETTLE_CALLS = 400
"""Calls of a kind before it is measured: the first behind a deployment are looked at closely, whatever they bring."""
UNSPECIALIZED = hotfuse.Settings(watch=False, tiers=1)
"""Nothing is bet on, and nobody looks what could be: some strategies need no watching."""
Call = tuple[torch.Tensor, ...]


class Tower(nn.Module):
    """Pre-norm transformer layers, and a mean."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            b, s, d = x.shape
            q, k, v = qkv(self.norms[2 * i](x)).view(b, s, 3, d // 32, 32).permute(2, 0, 3, 1, 4)
            x = x + out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d))
            x = x + mlp(self.norms[2 * i + 1](x))
        return x.mean(1)


class TwoTowers(nn.Module):
    """Images against texts, as CLIP compares them."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.table, self.patches = nn.Embedding(1000, dim), nn.Linear(48, dim)
        self.text, self.image = Tower(dim, layers), Tower(dim, layers)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        t = nn.functional.normalize(self.text(self.table(text)), dim=-1)
        v = nn.functional.normalize(self.image(self.patches(image)), dim=-1)
        return v @ t.T


def image(tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, 48)


def text(rows: int) -> torch.Tensor:
    return torch.randint(0, 1000, (rows, 12))


def fixed_text(tokens: int, rows: int) -> Iterator[Call]:
    kept = text(rows)
    return ((image(tokens), kept) for _ in itertools.count())


def prompts(tokens: int, rows: int) -> Iterator[Call]:
    return ((kept, text(rows)) for kept in (image(tokens) for _ in itertools.count()) for _ in range(10))


def flips(every: int, tokens: int, rows: int) -> Iterator[Call]:
    return ((image(tokens), kept) for kept in (text(rows) for _ in itertools.count()) for _ in range(every))


def plans(fast: Any) -> list[Any]:
    return [e.plan for s in fast._engine.sites.values() for e in s.entries]


def layered(fast: Any) -> bool:
    return any(key.row == REPEATED for p in plans(fast) for key in p.layers)


def compiled(fast: Any) -> bool:
    return any(p.tier for p in plans(fast))


def learn(fast: Any, calls: Iterator[Call], done: Callable[[], bool]) -> float:
    begin = time.perf_counter()
    while time.perf_counter() < begin + LEARN_S and not done():
        fast(*next(calls))
    fast.wait(10)
    return time.perf_counter() - begin


def in_turns(runs: dict[str, Any], calls: Iterator[Call], count: int, settle: int = SETTLE_CALLS) -> dict[str, float]:
    """Milliseconds of a call by contender: each answers every call, so that contents come to each as traffic has them."""
    spent = dict.fromkeys(runs, 0.0)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    worst = 0.0
    for _ in range(settle):
        given = next(calls)
        for name in ("ours", "without"):
            runs[name](*given)
    for n in range(count):
        given, answers = next(calls), dict[str, torch.Tensor]()
        for name in (*list(runs)[n % len(runs) :], *list(runs)[: n % len(runs)]):  # each is first as often: contents are cold then
            begin = clock()
            answers[name] = runs[name](*given)
            spent[name] += clock() - begin
        worst = max(worst, float((answers["ours"] - answers["eager"]).abs().max()))
    assert worst < 1e-3, f"{worst} from eager's"
    return {name: 1e3 * s / count for name, s in spent.items()}


def rows(quick: bool) -> list[dict[str, Any]]:
    """One line a kind of traffic."""
    dim, layers = (64, 1) if quick else (192, 3)
    model = TwoTowers(dim, layers).eval()
    found: list[dict[str, Any]] = []
    cases = {"fixed text": (fixed_text, 24, 4), "one image, ten prompts": (prompts, 96, 1)}
    with torch.no_grad():
        for name, (traffic, tokens, texts) in cases.items():
            without = hotfuse.jit(model, settings=UNSPECIALIZED)
            with without, hotfuse.jit(model) as fast:
                calls = traffic(tokens, texts)
                took = learn(fast, calls, lambda fast=fast: layered(fast))
                learn(without, calls, lambda without=without: compiled(without))
                runs = {"ours": fast, "without": without, "eager": model}
                streams = [(name, calls, 600 if quick else 150)]
                if name == "fixed text":
                    counts = ((1, 1500), (10, 1500), (1000, 1500)) if quick else ((1, 300), (10, 200), (1000, 300))
                    streams += [(f"then flips every {n}", flips(n, tokens, texts), c) for n, c in counts]
                for label, stream, count in streams:
                    ms = in_turns(runs, stream, count)
                    found.append({
                        "traffic": label, "deployed": layered(fast), "after s": round(took, 1),
                        **{k: round(v, 3) for k, v in ms.items()},
                        "over without": round(ms["without"] / ms["ours"], 2), "over eager": round(ms["eager"] / ms["ours"], 2),
                    })  # fmt: skip
    return found
