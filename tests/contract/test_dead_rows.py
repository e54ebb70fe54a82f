"""Rows that nobody reads are not computed, and what is read stays what it was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
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
from hotfuse.simplify.dead_rows import without_dead_rows

INLINE = Settings(capture="inline", hot_calls=1_000_000)
HEADS, WIDTH = 2, 8
SIZE = HEADS * WIDTH


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Layer(nn.Module):
    """A layer of an encoder, its attention as one op or spelled out."""

    def __init__(self, spelled: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.up, self.down = nn.Linear(SIZE, 3 * SIZE), nn.Linear(3 * SIZE, SIZE)
        self.first, self.second, self.spelled = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE), spelled

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, HEADS, WIDTH).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.spelled:
            scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
            y = torch.softmax(scores.masked_fill(~mask[:, None, None, :], -math.inf), -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.first(x + self.o(y.transpose(1, 2).reshape(b, s, SIZE)))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Classifier(nn.Module):
    """Layers, then one row of each sequence."""

    def __init__(self, pick: Any, spelled: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(spelled) for _ in range(layers))
        self.head, self.pick = nn.Linear(SIZE, 3), pick

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x, mask)
        return self.pick(self.head, x)


PICKS: dict[str, Any] = {
    "first": lambda head, x: head(x[:, 0]),
    "last": lambda head, x: head(x[:, -1]),
    "fourth": lambda head, x: head(x[:, 3]),
    "slice": lambda head, x: head(x[:, :1]),
    "last slice": lambda head, x: head(x[:, -1:]).squeeze(1),
    "all heads first": lambda head, x: head(x)[:, 0],
}
KEEPS: dict[str, Any] = {
    "mean": lambda head, x: head(x.mean(1)),
    "row and all": lambda head, x: (head(x[:, 0]), x),
    "two rows": lambda head, x: head(x[:, 0] + x[:, 1]),
    "two of them": lambda head, x: head(x[:, :2]),
}


def batch(rows: int = 3, length: int = 6) -> tuple[Tensor, Tensor]:
    mask = torch.rand(rows, length) < 0.7
    mask[:, 0] = True
    return torch.randn(rows, length, SIZE), mask


def served(model: nn.Module, calls: list[tuple[Tensor, Tensor]]) -> Graph:
    """Every answer is the model's; the graph that gave it."""
    fast = hotfuse.jit(model, settings=INLINE)
    for call in calls:
        torch.testing.assert_close(fast(*call), model(*call), rtol=1e-5, atol=1e-5)
    assert fast.stats()["calls_per_tier"]["0"] >= 1, str(fast.explain(full=True))
    (site,) = fast._engine.sites.values()
    entry = site.entries[-1]
    said = str(fast.explain(full=True))
    assert ("rows that nobody reads are not computed" in said) == any(".row" in v.name for n in entry.baseline.graph.nodes
                                                                     for v in n.outs), said  # fmt: skip
    return entry.baseline.graph


def rows_of_products(graph: Graph) -> list[Any]:
    return [n.outs[0].type.shape[1] for n in graph.nodes if packet(n.op) == "aten.linear" and len(n.outs[0].type.shape) == 3]


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("pick", PICKS)
def test_one_row_of_the_last_layer(pick: str, spelled: bool) -> None:
    graph = served(Classifier(PICKS[pick], spelled).eval(), [batch() for _ in range(3)])
    rows = rows_of_products(graph)
    assert rows[:12] == [6] * 6 + [1, 6, 6, 1, 1, 1], rows  # the first layer is whole, and keys and values of the last one


@pytest.mark.parametrize("pick", KEEPS)
def test_rows_that_are_read_are_computed(pick: str) -> None:
    graph = served(Classifier(KEEPS[pick]).eval(), [batch() for _ in range(3)])
    assert 1 not in rows_of_products(graph)


@pytest.mark.parametrize("pick", ["first", "last"])
def test_any_sizes(pick: str) -> None:
    calls = [batch(3, 6), batch(3, 6), *[batch(int(r), int(n)) for r, n in torch.randint(2, 9, (6, 2))]]
    graph = served(Classifier(PICKS[pick]).eval(), calls)
    assert rows_of_products(graph).count(1) >= 4


def test_what_is_not_finite_stays_so() -> None:
    calls = [batch() for _ in range(2)]
    for x, mask in (batch() for _ in range(3)):
        x[1, 2, 3], x[2, 4], mask[1, 2] = math.nan, math.inf, True
        calls.append((x, mask))
    model = Classifier(PICKS["first"]).eval()
    fast = hotfuse.jit(model, settings=INLINE)
    for call in calls:
        torch.testing.assert_close(fast(*call), model(*call), rtol=1e-5, atol=1e-5, equal_nan=True)


TEXT = """graph g(%x: f32[s0, s1, 4], %w: f32[4, 4]) where (2 <= s1) {{
  %h: f32[s0, s1, 4] = aten.linear.default(%x, %w, None)
  {body}
  %y: f32[s0, 4] = aten.select.int(%g, 1, {index})
  return %y
}}"""


@pytest.mark.parametrize(("body", "rows"), [
    ("%g: f32[s0, s1, 4] = aten.gelu.default(%h)", 1),
    ("%g: f32[s0, s1, 4] = aten.softmax.int(%h, -1)", 1),
    ("%g: f32[s0, s1, 4] = aten.softmax.int(%h, 1)", None),
    ("%g: f32[s0, s1, 4] = aten.cumsum.default(%h, 1)", None),
    ("%g: f32[s0, s1, 4] = aten.layer_norm.default(%h, [4])", 1),
    ("%t: f32[s1, s0, 4] = aten.transpose.int(%h, 0, 1)\n%u: f32[s1, s0, 4] = aten.neg.default(%t)\n"
     "%g: f32[s0, s1, 4] = aten.permute.default(%u, [1, 0, 2])", 1),
    ("%m: f32[s0, 1, 4] = aten.mean.dim(%h, [1], True)\n%g: f32[s0, s1, 4] = aten.add.Tensor(%h, %m)", None),
    ("%g: f32[s0, s1, 4] = aten.flip.default(%h, [1])", None),
])  # fmt: skip
@pytest.mark.parametrize("index", [0, 1, -1])
def test_ops_one_by_one(body: str, rows: int | None, index: int) -> None:
    graph = verify(parse(TEXT.format(body=body, index=index)))
    found, products = without_dead_rows(graph)
    assert products == (1 if rows else 0) and (found is graph) == (rows is None)
    for s0, s1 in ((3, 5), (1, 2), (2, 7)):
        x, w = torch.randn(s0, s1, 4), torch.randn(4, 4)
        (got,), (want,) = (compile_tier0(g, {}, INLINE).run(x, w) for g in (found, graph))
        torch.testing.assert_close(got, want)
        assert verify(found)


def test_an_onnx_file(tmp_path: Path) -> None:
    model, path = Classifier(PICKS["first"], spelled=True).eval(), tmp_path / "first.onnx"
    x, mask = batch()
    torch.onnx.export(model, (x, mask), str(path), input_names=["x", "mask"], dynamo=False, verbose=False)
    session = hotfuse.InferenceSession(str(path))
    with session:
        for _ in range(4):
            x, mask = batch()
            (got,) = session.run(None, {"x": x.numpy(), "mask": mask.numpy()})
            torch.testing.assert_close(torch.from_numpy(got), model(x, mask), rtol=1e-5, atol=1e-5)
            session.wait(60)
        assert "rows that nobody reads are not computed" in str(session.explain(full=True)), str(session.explain(full=True))
