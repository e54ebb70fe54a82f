"""Programs whose Python reads tensor data, over eager: `python -m benchmarks.data_paths` (decision 160).

Each serves traffic whose data flip its branches until tier 1 answers, or for `SECONDS`; then both answer the same calls in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hotfuse

SECONDS, ROUNDS, D = 15.0, 200, 256


class CheckedEncoder(nn.Module):
    """Two encoder layers behind checks of their input, as servers have them; the mask is left out where it hides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise ValueError("NaN in the input")
        assert mask.any(-1).all(), "a sequence has no tokens"
        keep = None if mask.all() else mask[:, None, None, :]
        for _ in range(2):
            h = self.n1(x)
            q, k, v = (f(h).unflatten(-1, (4, D // 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
            a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
            x = x + a.transpose(1, 2).flatten(2)
            x = x + self.down(nn.functional.gelu(self.up(self.n2(x))))
        return x


class EarlyExit(nn.Module):
    """Layers until the answer is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D)) for _ in range(4))
        self.head = nn.Linear(D, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x)
            if self.head(x).softmax(-1).amax() > 0.5:
                return self.head(x)
        return self.head(self.layers[-1](x))


class Experts(nn.Module):
    """A mixture that loops over the experts which have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 8, bias=False), nn.ModuleList(nn.Linear(D, D) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, ids = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(ids == e)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * w[rows, k, None])
        return out


def _mask(i: int) -> torch.Tensor:
    return torch.ones(2, 32, dtype=torch.bool) if i % 3 else torch.arange(32) < torch.tensor([[20], [32]])


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "checked encoder, mask open in 2 of 3 calls": (CheckedEncoder, lambda i: (torch.randn(2, 32, D), _mask(i))),
    "early exit, in every second call": (EarlyExit, lambda i: (torch.randn(8, D) * (1 if i % 2 else 0) + (0 if i % 2 else 1),)),
    "experts that have tokens": (Experts, lambda i: (torch.randn(64, D),)),
}


def main() -> None:
    """A row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    asked, found = parser.parse_args(), dict[str, dict[str, float]]()
    torch.set_num_threads(1)
    for name, (make, data) in PROGRAMS.items():
        torch.manual_seed(0)
        model = make().eval()
        fast, calls = hotfuse.jit(model), [data(i) for i in range(12)]
        with torch.inference_mode():
            begin, n = time.perf_counter(), 0
            while time.perf_counter() - begin < SECONDS:
                fast(*calls[n % 12])
                n += 1
            fast.wait(20)
            times: tuple[list[float], list[float]] = ([], [])
            for i in range(ROUNDS):
                for side in (0, 1) if i % 2 else (1, 0):
                    at = time.perf_counter()
                    (model, fast)[side](*calls[i % 12])
                    times[side].append(time.perf_counter() - at)
            worst = max(float((model(*c) - fast(*c)).abs().max()) for c in calls)
        eager, ours = (statistics.median(t) * 1e6 for t in times)
        print(f"{name}: eager {eager:.0f} us, ours {ours:.0f} us, {eager / ours:.2f}x; means {sum(times[0]) / sum(times[1]):.2f}x; "
              f"largest difference {worst:.1e}; {fast.stats()['calls_per_tier']}", flush=True)  # fmt: skip
        for line in str(fast.explain()).splitlines()[1:5]:
            print("   ", line[:200])
        found[name] = {"eager_us": eager, "hotfuse_us": ours, "over_eager": eager / ours, "error": worst}
    if asked.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
