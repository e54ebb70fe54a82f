"""`torch.compile(backend="hotfuse")`: graph breaks, dynamic shapes, gradients, and graphs that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse import torch_backend
from hotfuse.base.living import Living
from hotfuse.ir.text import show
from hotfuse.torch_backend import explain_compiled, hotfuse_backend, wait_compiled

INLINE = {"capture": "inline", "watch": False}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Graphs of other tests are no graphs of this one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        h = self.fc(x)
        h.add_(self.shift)
        h = torch.nn.functional.scaled_dot_product_attention(h[None], h[None], h[None])[0]
        return {"a": self.norm(h) * scale, "b": h.view(-1, 4), "c": torch.tensor([1.0, 2.0])}


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if y.sum() > 0:
            return y + 1
        return y - 1


def graphs() -> list[dict[str, Any]]:
    return explain_compiled().to_dict()["sites"]


def test_the_entry_point_is_registered() -> None:
    assert "hotfuse" in torch._dynamo.list_backends()


@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_are_named_by_what_they_compute(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier process kept of a graph is found by its text, whatever else was compiled before it there and here."""
    models = [nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval(), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)).eval()]
    met: list[Any] = []
    seen: list[set[str]] = []
    monkeypatch.setattr(torch_backend, "_graphs", Living())

    def keeping(gm: Any, inputs: Any) -> Any:
        met.append(hotfuse_backend(gm, inputs, options=INLINE))
        return met[-1]

    for order in (models, models[::-1]):
        torch._dynamo.reset()
        compiled = [torch.compile(m, backend=keeping, dynamic=dynamic) for m in order]
        with torch.no_grad():
            for fast in compiled:
                fast(torch.randn(3, 8))
        seen.append({show(g.converted.graph) for g in torch_backend._graphs})
        met.clear()
    assert seen[0] == seen[1] and len(seen[0]) == 2


def test_shapes_as_dynamo_gives_them() -> None:
    model = Model().eval()
    fast = torch.compile(model, backend="hotfuse", options=INLINE)
    with torch.no_grad():
        for rows in (4, 4, 6, 8, 10, 6):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fast(x), model(x))
    said = explain_compiled().to_dict()
    assert said["counts"]["graph_calls"] >= 4
    assert not [s["refused"] for s in said["sites"] if s["refused"]]
    ops = {op for p in said["sites"][-1]["plans"][0]["partitions"] for op in p["ops"]}
    assert "s" in said["sites"][-1]["plans"][0]["inputs"][0].split("[")[1]  # Dynamo's symbol
    assert {"aten.linear", "aten.layer_norm", "aten.scaled_dot_product_attention"} <= set(ops)


def test_graph_breaks() -> None:
    fast = torch.compile(Broken(), backend="hotfuse", options=INLINE)
    for sign in (1.0, -1.0, 1.0, -1.0):
        x = torch.full((5,), sign)
        torch.testing.assert_close(fast(x), Broken()(x))
    assert len(graphs()) >= 2


def test_a_graph_break_that_takes_as_long_as_its_graphs_is_told() -> None:
    """Neither race nor audit sees what Dynamo takes between two graphs: two small ones are slower than eager, each far ahead."""

    def breaks(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        torch._dynamo.graph_break()
        return y.cos() + 1

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2 + 1

    x, options = torch.randn(5), {**INLINE, "hot_calls": 1}
    for function, told in ((whole, False), (breaks, True)):
        fast = torch.compile(function, backend="hotfuse", options=options)
        for _ in range(12):
            torch.testing.assert_close(fast(x), function(x))
        assert (f"in the way: Dynamo breaks the graph at {__file__}" in str(explain_compiled())) is told, str(explain_compiled())


def test_gradients() -> None:
    model = Model()
    fast = torch.compile(model, backend="hotfuse", options=INLINE)
    for _ in range(3):
        x = torch.randn(4, 8)
        model.zero_grad()
        fast(x)["a"].square().sum().backward()
        got = model.fc.weight.grad.clone()
        model.zero_grad()
        model(x)["a"].square().sum().backward()
        torch.testing.assert_close(got, model.fc.weight.grad)


def test_gradients_stop_where_the_model_stops_them() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return y + x

    fast = torch.compile(half, backend="hotfuse", options=INLINE)
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        fast(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(3))


def test_random_and_stateful_graphs_run_as_dynamo_gave_them() -> None:
    drop = nn.Dropout(0.5).train()
    fast = torch.compile(lambda x: drop(x), backend="hotfuse", options=INLINE)
    assert (fast(torch.ones(1000)) == 0).any()
    bump = torch.compile(lambda x: x.add_(1), backend="hotfuse", options=INLINE)
    x = torch.zeros(3)
    bump(x)
    assert torch.equal(x, torch.ones(3))
    refused = [r for s in graphs() for r in s["refused"]]
    assert any("random" in r for r in refused) and any("in place" in r for r in refused)
    assert "in place" in str(explain_compiled(full=True))


def per_tier() -> dict[str, int]:
    counts = explain_compiled().to_dict()["counts"]
    return {tier: counts[f"tier{tier}_calls"] for tier in (0, 1, 2)}


def test_graphs_get_tiers_and_watched_weights() -> None:
    model = Model().eval()
    fast = torch.compile(model, backend="hotfuse", options=INLINE)
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(10):
            torch.testing.assert_close(fast(x), model(x))
        assert per_tier()[1] > 0, str(explain_compiled(full=True))
        model.fc.weight.mul_(2)
        torch.testing.assert_close(fast(x), model(x))
        model.fc.weight = nn.Parameter(torch.randn(8, 8))
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x))


def test_graphs_of_the_background() -> None:
    model = Model().eval()
    fast = torch.compile(model, backend="hotfuse", options={"tiers": 0})
    x = torch.randn(4, 8)
    with torch.no_grad():
        fast(x)
        assert wait_compiled(60)
        torch.testing.assert_close(fast(x), model(x))
    assert per_tier()[0] == 1, str(explain_compiled(full=True))


def test_gradients_are_served_from_plans() -> None:
    model = Model().eval()
    fast = torch.compile(model, backend="hotfuse", options=INLINE)
    for _ in range(10):
        x = torch.randn(4, 8)
        result = fast(x)
    assert per_tier()[1] > 0, str(explain_compiled(full=True))
    model.zero_grad()
    result["a"].sin().sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x)["a"].sin().sum().backward()
    for g, p in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-4, atol=1e-4)
    assert explain_compiled().to_dict()["gradients"]["backwards"] > 0


def test_instances_of_one_class_have_weights_of_their_own() -> None:
    models = [nn.Linear(8, 8).eval() for _ in range(6)]

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(model(x))

    fast = torch.compile(call, backend="hotfuse", options=INLINE)
    with torch.no_grad():
        for _ in range(3):
            for model in models:
                x = torch.randn(4, 8)
                torch.testing.assert_close(fast(model, x), call(model, x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_are_accepted(mode: str) -> None:
    fast = torch.compile(lambda x: x.sin() + 1, backend="hotfuse", mode=mode)
    x = torch.randn(3)
    torch.testing.assert_close(fast(x), x.sin() + 1)
    assert (mode == "default") is not any(d["evidence"].get("mode") == mode for d in explain_compiled().to_dict()["decisions"])


def test_unknown_options_are_errors_in_words() -> None:
    fast = torch.compile(lambda x: x.sin(), backend="hotfuse", options={"no_such": 1})
    with pytest.raises(Exception, match="no_such"):
        fast(torch.randn(3))


def test_sizes_that_no_tensor_shows_run_as_dynamo_gave_them() -> None:
    def scaled(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    fast = torch.compile(scaled, backend="hotfuse", options=INLINE, dynamic=True)
    x = torch.randn(3, 5)
    for n in (2, 3, 4):
        torch.testing.assert_close(fast(x, n), x * n)


def test_half_of_a_size() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        return x[: x.shape[0] // 2].reshape(-1) + x.shape[0]

    fast = torch.compile(half, backend="hotfuse", options=INLINE, dynamic=True)
    for rows in (4, 6, 6, 10, 12):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(fast(x), half(x))
    assert explain_compiled().to_dict()["counts"]["graph_calls"] >= 3, str(explain_compiled(full=True))
