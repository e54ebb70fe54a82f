"""`torch.compile(backend="hotfuse")`: graph breaks, dynamic shapes, gradients, and graphs that are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hotfuse.torch_backend import explain_compiled


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


def test_shapes_as_dynamo_gives_them() -> None:
    model = Model().eval()
    fast = torch.compile(model, backend="hotfuse")
    with torch.no_grad():
        for rows in (4, 4, 6, 8, 10, 6):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fast(x), model(x))
    said = explain_compiled().to_dict()
    assert said["counts"]["graph_calls"] >= 4
    assert not [s["refused"] for s in said["sites"] if s["refused"]]
    ops = said["sites"][0]["plans"][0]["partitions"][0]["ops"]
    assert {"aten.linear", "aten.layer_norm", "aten.scaled_dot_product_attention"} <= set(ops)


def test_graph_breaks() -> None:
    fast = torch.compile(Broken(), backend="hotfuse")
    for sign in (1.0, -1.0, 1.0, -1.0):
        x = torch.full((5,), sign)
        torch.testing.assert_close(fast(x), Broken()(x))
    assert len(graphs()) >= 2


def test_gradients() -> None:
    model = Model()
    fast = torch.compile(model, backend="hotfuse")
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

    fast = torch.compile(half, backend="hotfuse")
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        fast(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(3))


def test_random_and_stateful_graphs_run_as_dynamo_gave_them() -> None:
    drop = nn.Dropout(0.5).train()
    fast = torch.compile(lambda x: drop(x), backend="hotfuse")
    assert (fast(torch.ones(1000)) == 0).any()
    bump = torch.compile(lambda x: x.add_(1), backend="hotfuse")
    x = torch.zeros(3)
    bump(x)
    assert torch.equal(x, torch.ones(3))
    refused = [r for s in graphs() for r in s["refused"]]
    assert any("random" in r for r in refused) and any("in place" in r for r in refused)
