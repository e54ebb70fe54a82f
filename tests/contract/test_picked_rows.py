"""Rows that data do not pick are not computed, and what is picked stays what it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotfuse
from hotfuse import Settings
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.ops.table import packet
from hotfuse.pipeline import compile_tier0
from hotfuse.simplify.picked_rows import without_unpicked_rows

INLINE = Settings(capture="inline", hot_calls=1_000_000)
KERNELS = Settings(capture="inline", hot_calls=2)
HEADS, SIZE, TOKENS, LONGEST = 2, 16, 40, 32
SAID = "rows that data do not pick are not computed"


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Flat(nn.Module):
    """A layer that takes all rows of all sequences as one axis, as GPT-2's do."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out) * 0.2), nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class TextEncoder(nn.Module):
    """Causal layers, then the row that the token with the highest number stands in."""

    def __init__(self, pick: Any, layer: Any = nn.Linear) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, SIZE), nn.Parameter(torch.randn(LONGEST, SIZE))
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": layer(SIZE, 3 * SIZE), "out": layer(SIZE, SIZE), "up": layer(SIZE, 2 * SIZE),
                           "down": layer(2 * SIZE, SIZE), "first": nn.LayerNorm(SIZE), "second": nn.LayerNorm(SIZE)})
            for _ in range(2)
        )  # fmt: skip
        self.head, self.pick = nn.Linear(SIZE, 5), pick

    def forward(self, ids: Tensor) -> Any:
        b, s = ids.shape
        x = self.tokens(ids) + self.places[:s]
        for one in self.layers:
            q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in one["qkv"](one["first"](x)).chunk(3, -1))
            x = x + one["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, SIZE))
            x = x + one["down"](F.gelu(one["up"](one["second"](x))))
        return self.pick(self.head, x, ids)


PICKS: dict[str, Any] = {
    "the end token": lambda head, x, ids: head(x[torch.arange(len(ids)), ids.argmax(-1)]),
    "scores first": lambda head, x, ids: head(x)[torch.arange(len(ids)), ids.argmax(-1)],
    "from the end": lambda head, x, ids: head(x)[torch.arange(len(ids)), -1 - (ids == 0).sum(1).clamp(max=ids.shape[1] - 1)],
    "gathered": lambda head, x, ids: head(x).gather(1, ids.argmax(-1)[:, None, None].expand(-1, 1, 5)).squeeze(1),
}
KEEPS: dict[str, Any] = {
    "and a mean": lambda head, x, ids: (head(x)[torch.arange(len(ids)), ids.argmax(-1)], head(x).mean(1)),
    "two rows": lambda head, x, ids: sum(head(x)[torch.arange(len(ids)), at(-1)] for at in (ids.argmax, ids.argmin)),
    "of the other axis": lambda head, x, ids: head(x)[ids[0, :2].clamp(max=len(ids) - 1), torch.arange(2)],
}


def served(model: nn.Module, calls: list[Any], settings: Settings = INLINE) -> Graph:
    fast: Any = hotfuse.jit(model, settings=settings)
    for call in calls:
        torch.testing.assert_close(fast(*call), model(*call), rtol=1e-4, atol=1e-5)
    (site,) = fast._engine.sites.values()
    graph = site.entries[-1].baseline.graph
    said = str(fast.explain(full=True))
    assert (SAID in said) == any(".picked" in v.name for n in graph.nodes for v in n.outs), said
    return graph


def ids(rows: int = 3, length: int = 7) -> tuple[Tensor]:
    return (torch.randint(0, TOKENS, (rows, length)),)


def picked(graph: Graph) -> int:
    return sum(".picked" in v.name for n in graph.nodes for v in n.outs)


def widths(graph: Graph) -> list[Any]:
    """Rows that products of the last layer make, the head's last."""
    ops = [n for n in graph.nodes if packet(n.op) in ("aten.linear", "aten.addmm")]
    return [n.outs[0].type.shape[:-1] for n in ops]


@pytest.mark.parametrize("layer", [nn.Linear, Flat])
@pytest.mark.parametrize("pick", PICKS)
def test_the_last_layer_is_computed_for_what_is_picked(pick: str, layer: Any) -> None:
    graph = served(TextEncoder(PICKS[pick], layer).eval(), [ids() for _ in range(3)])
    many, few = {(3, 7), (21,)}, {(3, 1), (3,)}
    rows = widths(graph)
    assert all(r in many for r in rows[:5]) and all(r in few for r in rows[5:]), rows  # the second layer's qkv is the fifth product


@pytest.mark.parametrize("pick", ["the end token", "gathered"])
def test_kernels_and_other_sizes(pick: str) -> None:
    calls = [ids(), ids(), *(ids(int(b), int(s)) for b, s in torch.randint(2, 12, (8, 2))), ids(1, 9), ids(4, 1)]
    assert picked(served(TextEncoder(PICKS[pick]).eval(), calls, KERNELS))


@pytest.mark.parametrize("pick", KEEPS)
def test_rows_that_others_read_are_computed(pick: str) -> None:
    graph = served(TextEncoder(KEEPS[pick]).eval(), [ids() for _ in range(3)])
    assert not picked(graph)


def _at_their_number(head: Any, x: Tensor, ids: Tensor) -> Tensor:
    return head(x)[torch.arange(len(ids)), ids[:, 0]]


def test_an_index_out_of_range_is_said_as_in_eager() -> None:
    model = TextEncoder(_at_their_number).eval()
    fast: Any = hotfuse.jit(model, settings=KERNELS)
    good, bad = torch.randint(0, 7, (3, 7)), torch.full((3, 7), 7)
    for _ in range(6):
        torch.testing.assert_close(fast(good), model(good), rtol=1e-4, atol=1e-5)
    with pytest.raises(IndexError, match="out of bounds"):
        fast(bad)
    torch.testing.assert_close(fast(good), model(good), rtol=1e-4, atol=1e-5)


class Detector(nn.Module):
    """Boxes of the best scores: the head that makes boxes runs on these alone."""

    def __init__(self, best: int) -> None:
        super().__init__()
        self.scores, self.best = nn.Linear(SIZE, 4), best
        self.boxes = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, 4))
        self.register_buffer("anchors", torch.randn(1, 50, 4))

    def forward(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(memory)
        boxes = self.boxes(memory) + self.anchors
        _, at = torch.topk(scores.max(-1).values, self.best, dim=1)
        chosen = boxes.gather(1, at.unsqueeze(-1).repeat(1, 1, 4)).sigmoid()
        return chosen, scores.gather(1, at.unsqueeze(-1).expand(-1, -1, 4))


@pytest.mark.parametrize("best", [1, 6, 20, 30])
@pytest.mark.parametrize("settings", [INLINE, KERNELS], ids=["library", "kernels"])
def test_boxes_of_the_best_scores(best: int, settings: Settings) -> None:
    graph = served(Detector(best).eval(), [(torch.randn(2, 50, SIZE),) for _ in range(5)], settings)
    assert widths(graph) == [(2, 50), *[(2, best if 2 * best <= 50 else 50)] * 3]


TEXT = """graph g(%x: f32[s0, s1, 4], %w: f32[4, 4], %at: i64[s0]) where (2 <= s1) {{
  %every: i64[s0] = aten.arange.default(%n)
  %h: f32[s0, s1, 4] = aten.linear.default(%x, %w, None)
  {body}
  %y: f32[s0, 4] = aten.index.Tensor(%g, [%every, %at])
  return %y
}}""".replace("  %every", "  %n: int(s0) = aten.sym_size.int(%x, 0)\n  %every")


@pytest.mark.parametrize(("body", "small"), [
    ("%g: f32[s0, s1, 4] = aten.gelu.default(%h)", True),
    ("%g: f32[s0, s1, 4] = aten.softmax.int(%h, -1)", True),
    ("%g: f32[s0, s1, 4] = aten.softmax.int(%h, 1)", False),
    ("%g: f32[s0, s1, 4] = aten.cumsum.default(%h, 1)", False),
    ("%g: f32[s0, s1, 4] = aten.layer_norm.default(%h, [4])", True),
    ("%m: f32[s0, 1, 4] = aten.mean.dim(%h, [1], True)\n%g: f32[s0, s1, 4] = aten.add.Tensor(%h, %m)", False),
    ("%m: f32[s0, 1, 4] = aten.mean.dim(%x, [1], True)\n%g: f32[s0, s1, 4] = aten.add.Tensor(%h, %m)", True),
    ("%g: f32[s0, s1, 4] = aten.flip.default(%h, [1])", False),
    ("%t: f32[s1, s0, 4] = aten.transpose.int(%h, 0, 1)\n%g: f32[s0, s1, 4] = aten.permute.default(%t, [1, 0, 2])", False),
])  # fmt: skip
def test_ops_one_by_one(body: str, small: bool) -> None:
    graph = verify(parse(TEXT.format(body=body)))
    found, products = without_unpicked_rows(graph)
    assert products == int(small) and (found is graph) == (not small)
    for s0, s1 in ((3, 5), (1, 2), (2, 7)):
        x, w, at = torch.randn(s0, s1, 4), torch.randn(4, 4), torch.randint(-s1, s1, (s0,))
        (got,), (want,) = (compile_tier0(g, {}, INLINE).run(x, w, at) for g in (found, graph))
        torch.testing.assert_close(got, want)
