"""A mask that always lets everything through costs nothing; one that hides something again is served right at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hotfuse
from hotfuse import Settings
from hotfuse.ir.graph import Graph
from hotfuse.ir.text import parse
from hotfuse.ir.verify import verify
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.observe import watch_points
from hotfuse.runtime.tierup import proposals
from hotfuse.runtime.tierup.layers import open_mask
from hotfuse.specialize.masks import all_alike
from hotfuse.specialize.table import OPEN_MASK, AttemptKey
from tests.races import new_plans_win, samples_cost_nothing

INLINE = Settings(capture="inline", hot_calls=2, watch_rate=2)


@pytest.fixture(autouse=True)
def new_plans_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here: samples are taken whatever they cost."""
    samples_cost_nothing(monkeypatch)
    new_plans_win(monkeypatch)
    with torch.no_grad():
        yield


class Attention(torch.nn.Module):
    """One head, masked as encoders do it."""

    def __init__(self, added: bool) -> None:
        super().__init__()
        self.qkv, self.added = torch.nn.Linear(16, 48), added

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.added:
            hidden = (1.0 - mask[:, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
            return torch.softmax(q @ k.transpose(1, 2) / 4 + hidden, -1) @ v
        scores = (q @ k.transpose(1, 2) / 4).masked_fill((mask == 0)[:, None, :], float("-inf"))
        return torch.softmax(scores, -1) @ v


def entry_of(fast: Any) -> Any:
    return next(iter(fast._engine.sites.values())).entries[0]


@pytest.mark.parametrize("added", [False, True])
def test_an_open_mask_goes_and_flips_are_served(added: bool) -> None:
    torch.manual_seed(0)
    model = Attention(added).eval()
    fast = hotfuse.jit(model, settings=INLINE)

    def serve(calls: int, hide: int) -> None:
        for _ in range(calls):
            x, mask = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.int64)
            mask[1, 6 - hide :] = 0
            torch.testing.assert_close(fast(x, mask), model(x, mask), rtol=1e-4, atol=1e-5)

    for _ in range(5):
        serve(60, 0)
        assert fast._engine.call_sampler._shared.analyzer.flush(120)
    entry = entry_of(fast)
    assert entry.plan.tier == 2 and entry.plan.layers, str(fast.explain(full=True))
    before = entry.plan.counters()
    assert before["mask_hits"] > 0
    serve(10, 0)
    assert entry.plan.counters()["mask_hits"] >= before["mask_hits"] + 10
    serve(10, 2)  # and right, which `serve` asks
    after = entry.plan.counters()
    assert after["mask_misses"] >= before["mask_misses"] + 10
    shown = str(fast.explain(full=True))
    assert f"{after['mask_hits']} mask hits, {after['mask_misses']} mask misses" in shown, shown
    fewer = len(all_alike(entry.baseline.graph, entry.baseline.graph.inputs[1].name, 1).nodes)  # type: ignore[union-attr]
    assert f"is 1: {fewer} nodes instead of {len(entry.baseline.graph.nodes)}; else as before" in shown, shown
    assert any(d["action"] == "deploy" and d["evidence"].get("mask") for d in fast.explain().to_dict()["decisions"])


class Shifted(torch.nn.Module):
    """Whose mask decides nothing: it is a number like others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.first(x), -1) - mask[:, :, None].float()


@pytest.mark.parametrize("decides", [True, False])
def test_looks_at_calls_go_through_no_graph(monkeypatch: pytest.MonkeyPatch, decides: bool) -> None:
    """Counted: which values are masks took a millisecond of a call that was looked at, and more of larger models."""
    model = (Attention(False) if decides else Shifted()).eval()
    mask = torch.ones(2, 6, dtype=torch.int64 if decides else torch.bool)
    fast = hotfuse.jit(model, settings=INLINE)

    def serve(calls: int) -> None:
        for _ in range(calls):
            entry_of(fast).next_look = 0
            fast(torch.randn(2, 6, 16), mask)

    fast(torch.randn(2, 6, 16), mask)
    for _ in range(5):
        serve(60)
        assert fast._engine.call_sampler._shared.analyzer.flush(120)
    serve(30)
    entry = entry_of(fast)
    about = AttemptKey(OPEN_MASK, f"all of tensors_1 is {mask.flatten()[0].item()}")
    assert about in entry.refused or any(layer.key == about for layer in entry.layers), str(fast.explain(full=True))
    if not decides:
        assert "the graph is the same without it" in str(fast.explain(full=True))
    walks: list[str] = []

    def counted(graph: Graph, name: str, number: float) -> Graph | None:
        walks.append(name)
        return all_alike(graph, name, number)

    for module in (proposals, watch_points, open_mask):
        monkeypatch.setattr(module, "all_alike", counted)
    looks = entry.samples.taken
    serve(100)
    assert entry.samples.taken - looks >= 90 and not walks


def test_without_watching_masks_stay() -> None:
    model = Attention(False).eval()
    fast = hotfuse.jit(model, settings=INLINE.with_(watch=False))
    for _ in range(100):
        x = torch.randn(2, 6, 16)
        fast(x, torch.ones(2, 6, dtype=torch.int64))
    assert not entry_of(fast).plan.layers


@pytest.mark.parametrize(("body", "number"), [
    ("%b: bool[s0, 4] = aten.eq.Scalar(%m, 0)\n%y: f32[s0, 4] = aten.masked_fill.Scalar(%x, %b, -1.0)", 1),
    ("%b: bool[s0, 4] = aten.ne.Scalar(%m, 0)\n%y: f32[s0, 4] = aten.where.self(%b, %x, %w)", 1),
    ("%b: bool[s0, 4] = aten.ne.Scalar(%m, 3)\n%y: f32[s0, 4] = aten.where.self(%b, %w, %x)", 3),
])  # fmt: skip
def test_what_follows_from_one_number(body: str, number: int) -> None:
    graph = verify(parse(f'graph g(%x: f32[s0, 4], %m: i64[s0, 4], %w: f32[s0, 4]) {{\n{body}\n'
                         "%z: f32[s0, 4] = aten.neg.default(%y)\nreturn %z\n}"))  # fmt: skip
    found = all_alike(graph, "m", number)
    assert found is not None and [n.op for n in found.nodes] == ["aten.neg.default"]
    x, w, m = torch.randn(3, 4), torch.randn(3, 4), torch.full((3, 4), number)
    (got,), (want,) = (compile_tier0(g, {}, INLINE).run(x, m, w) for g in (found, graph))
    assert torch.equal(got, want)
    assert all_alike(graph, "x", 0.5) is None  # which decides nothing


def test_attention_itself() -> None:
    graph = verify(parse("""graph g(%q: f32[2, 1, 6, 8], %m: bool[2, 6]) {
      %a: bool[2, 1, 6] = aten.unsqueeze.default(%m, 1)
      %b: bool[2, 1, 1, 6] = aten.unsqueeze.default(%a, 1)
      %c: bool[2, 1, 6, 6] = aten.expand.default(%b, [2, 1, 6, 6])
      %y: f32[2, 1, 6, 8] = aten.scaled_dot_product_attention.default(%q, %q, %q, %c)
      return %y
    }"""))
    found = all_alike(graph, "m", True)
    assert found is not None and len(found.nodes) == 1 and all_alike(graph, "m", False) is None
    q = torch.randn(2, 1, 6, 8)
    (got,) = compile_tier0(found, {}, INLINE).run(q, torch.ones(2, 6, dtype=torch.bool))
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, q, q))
