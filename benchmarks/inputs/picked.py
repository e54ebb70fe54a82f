"""Work in front of a filter that data decide: a text encoder that reads the row of its end token, a causal classifier, a detector
that reads the boxes of its best scores. Our plan, which computes these rows alone behind its last attention
(`simplify.picked_rows`), in turns with our plan that computes all of them, and with eager. Plans are made before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import hotfuse
import hotfuse.simplify as simplify
from benchmarks.inputs.repeated import Call, in_turns
from hotfuse.ir.graph import Graph

VOCABULARY, END = 49408, 49407
WARM_CALLS = 6


class CausalEncoder(nn.Module):
    """Pre-norm layers with a causal mask, as CLIP's text encoder and decoders have them; one row of each sequence is projected."""

    def __init__(self, dim: int, layers: int, length: int, out: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(VOCABULARY, dim), nn.Parameter(torch.randn(length, dim) * 0.01)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers))
        self.head = nn.Linear(dim, out)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        b, s = ids.shape
        x = self.table(ids) + self.places[:s]
        for i, (qkv, out, mlp) in enumerate(zip(self.qkv, self.out, self.mlp, strict=True)):
            q, k, v = qkv(self.norms[2 * i](x)).view(b, s, 3, -1, 64).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(y.transpose(1, 2).reshape(b, s, -1))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))[torch.arange(b), (ids == END).int().argmax(-1)]


class BestBoxes(nn.Module):
    """The choice of queries of a detector such as RT-DETR: scores of all places, boxes of the best."""

    def __init__(self, dim: int, places: int, best: int) -> None:
        super().__init__()
        self.best, self.scores = best, nn.Linear(dim, 80)
        self.boxes = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))
        self.register_buffer("anchors", torch.randn(1, places, 4))

    def forward(self, memory: torch.Tensor) -> torch.Tensor:
        boxes = self.boxes(memory) + self.anchors
        at = torch.topk(self.scores(memory).amax(-1), self.best, dim=1).indices
        return boxes.gather(1, at.unsqueeze(-1).expand(-1, -1, 4)).sigmoid().mean(1)  # in whatever order equal scores come


def texts(rows: int, length: int) -> Iterator[Call]:
    while True:
        ids = torch.randint(0, END, (rows, length))
        yield (ids.scatter(1, torch.randint(1, length, (rows, 1)), END),)


def images(places: int, dim: int) -> Iterator[Call]:
    while True:
        yield (torch.randn(1, places, dim),)


def without_it(graph: Graph) -> tuple[Graph, int]:
    """Every row is computed."""
    return graph, 0


def served(model: nn.Module, calls: Iterator[Call]) -> Any:
    """A model whose plans are made."""
    fast = hotfuse.jit(model, settings=hotfuse.Settings(capture="inline", hot_calls=2, watch=False))
    for _ in range(WARM_CALLS):
        fast(*next(calls))
    return fast


def rows(quick: bool) -> list[dict[str, Any]]:
    """One line a model."""
    torch.manual_seed(0)
    dim, layers = (128, 2) if quick else (512, 12)
    cases: list[tuple[str, nn.Module, Callable[[], Iterator[Call]], int]] = [
        ("text encoder, end token, b1 s77", CausalEncoder(dim, layers, 77, dim), lambda: texts(1, 77), 60),
        ("the same, b8", CausalEncoder(dim, layers, 77, dim), lambda: texts(8, 77), 20),
        ("classifier, 6 layers, b4 s128", CausalEncoder(dim, layers // 2, 128, 3), lambda: texts(4, 128), 30),
        ("300 of 8,400 boxes", BestBoxes(256, 8400, 300), lambda: images(8400, 256), 40),
    ]
    found: list[dict[str, Any]] = []
    real = simplify.without_unpicked_rows
    with torch.no_grad():
        for name, model, calls, count in cases:
            fast = served(model.eval(), calls())
            simplify.without_unpicked_rows = without_it
            try:
                without = served(model, calls())
            finally:
                simplify.without_unpicked_rows = real
            ms = in_turns({"ours": fast, "without": without, "eager": model}, calls(), count, settle=5)
            call = next(calls())
            found.append({
                "": name, **{k: round(v, 2) for k, v in ms.items()}, "over without": round(ms["without"] / ms["ours"], 2),
                "over eager": round(ms["eager"] / ms["ours"], 2), "error": f"{float((fast(*call) - model(*call)).abs().max()):.1e}",
            })  # fmt: skip
            print(found[-1], flush=True)
            fast.close()
            without.close()
    return found
