"""Recurrent cells as products: torch's numbers to the bit in tier 0, and kernels for all of a loop over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse.base.settings import Settings
from hotfuse.ops.table import packet
from hotfuse.pipeline import compile_tier0
from hotfuse.simplify import simplify_captured
from tests.contract.lowering import group_of

aten = torch.ops.aten
WIDTH, INPUTS = 7, 5


def operands(cell: type[nn.RNNCellBase], rows: int, *, bias: bool, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made = cell(INPUTS, WIDTH, bias=bias, dtype=dtype)  # type: ignore[call-arg]
    states = [torch.randn(rows, WIDTH, dtype=dtype) for _ in range(2 if cell is nn.LSTMCell else 1)]
    return [torch.randn(rows, INPUTS, dtype=dtype), *states, *(p.detach() for p in made.parameters())]


def called(cell: type[nn.RNNCellBase], function: str) -> Callable[..., Any]:
    op = getattr(aten, function).default

    def step(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        if cell is nn.LSTMCell:
            h, c, *weights = rest
            h, c = op(x, [h, c], *weights)
            return h + 1, c
        h, *weights = rest
        return op(x, h, *weights) + 1

    return step


CELLS: dict[str, tuple[type[nn.RNNCellBase], str]] = {
    "lstm": (nn.LSTMCell, "lstm_cell"), "gru": (nn.GRUCell, "gru_cell"), "tanh": (nn.RNNCell, "rnn_tanh_cell"),
    "relu": (nn.RNNCell, "rnn_relu_cell"),
}  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", CELLS)
def test_torchs_numbers_to_the_bit(name: str, rows: int, bias: bool, symbolic: bool) -> None:
    cell, function = CELLS[name]
    xs, fn = operands(cell, rows, bias=bias), called(cell, function)
    group = group_of(fn, xs, symbolic=symbolic)
    graph, _ = simplify_captured(group.graph)
    if not symbolic:
        assert not any(packet(n.op) == f"aten.{function}" for n in graph.nodes)
    got = compile_tier0(graph, group.weights, Settings()).run(*xs)
    want = fn(*xs)
    for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        assert torch.equal(g, w) and g.stride() == w.stride() and g.dtype is w.dtype


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_pass_through(number: float) -> None:
    cell, function = CELLS["gru"]
    xs, fn = operands(cell, 3, bias=True), called(cell, function)
    xs[0][1, 2] = xs[1][2, 0] = number
    group = group_of(fn, xs)
    got = compile_tier0(simplify_captured(group.graph)[0], group.weights, Settings()).run(*xs)
    torch.testing.assert_close(got[0], fn(*xs), rtol=0, atol=0, equal_nan=True)


def test_half_precision_stays_whole() -> None:
    """Torch rounds between the parts of a cell where it likes."""
    cell, function = CELLS["gru"]
    xs = operands(cell, 2, bias=True, dtype=torch.bfloat16)
    graph, _ = simplify_captured(group_of(called(cell, function), xs).graph)
    assert f"aten.{function}" in {packet(n.op) for n in graph.nodes}
