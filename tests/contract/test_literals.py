"""Weights of one number become numbers: the graph computes the same, with torch's own operators."""

from __future__ import annotations

import math

import pytest
import torch

from hotfuse.backends.library import LibraryBackend
from hotfuse.compile.literals import with_numbers
from hotfuse.ir.text import parse, show
from hotfuse.ir.verify import verify

CASES = [
    ("%y: f32[3, 4] = aten.mul.Tensor(%x, %c)", "aten.mul.Tensor(%x, 0.5)"),
    ("%y: f32[3, 4] = aten.mul.Tensor(%c, %x)", "aten.mul.Tensor(%x, 0.5)"),
    ("%y: f32[3, 4] = aten.add.Tensor(%c, %x)", "aten.add.Tensor(%x, 0.5)"),
    ("%y: f32[3, 4] = aten.sub.Tensor(%c, %x)", "aten.rsub.Scalar(%x, 0.5)"),
    ("%y: f32[3, 4] = aten.sub.Tensor(%x, %c)", "aten.sub.Tensor(%x, 0.5)"),
    ("%y: f32[3, 4] = aten.div.Tensor(%x, %c)", "aten.div.Tensor(%x, 0.5)"),
    ("%y: f32[3, 4] = aten.div.Tensor(%c, %x)", ""),
    ("%y: f32[3, 4] = aten.add.Tensor(%x, %c, alpha=2)", ""),
    ("%y: f32[3, 4] = aten.pow.Tensor_Tensor(%x, %c)", "aten.pow.Tensor_Scalar(%x, 0.5)"),
    ("%y: f32[3, 4] = aten.where.self(%b, %x, %d)", "aten.where.ScalarOther(%b, %x, -inf)"),
    ("%y: f32[3, 4] = aten.where.self(%b, %c, %x)", "aten.where.ScalarSelf(%b, 0.5, %x)"),
    ("%y: f32[3, 4] = aten.where.self(%b, %c, %d)", "aten.where.Scalar(%b, 0.5, -inf)"),
    ("%y: f32[3, 4] = aten.sub.Tensor(%x, %same)", "aten.sub.Tensor(%x, 7.0)"),
    ("%y: f64[3, 4] = aten.mul.Tensor(%x, %g)", ""),
    ("%y: f32[1, 1, 1] = aten.mul.Tensor(%one, %e)", ""),
]


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_numbers(line: str, expected: str) -> None:
    text = (
        "graph g(%x: f32[3, 4], %b: bool[3, 4], %one: f32[1]) {\n"
        '  param %c: f32[] = "c"\n  param %d: f32[1] = "d"\n  param %e: f32[1, 1, 1] = "e"\n'
        '  param %same: f32[4] = "same"\n  param %g: f64[3, 4] = "g"\n'
        f"  {line}\n  return %y\n}}\n"
    )
    graph = verify(parse(text))
    weights = {"c": torch.tensor(0.5), "d": torch.tensor([-math.inf]), "e": torch.tensor([[[2.0]]])}
    weights |= {"same": torch.full((4,), 7.0), "g": torch.full((3, 4), 2.0, dtype=torch.float64)}
    after = verify(with_numbers(graph, weights))
    shown = show(after)
    assert expected in shown if expected else after.nodes == graph.nodes
    if expected:
        assert parse(shown) == after
        assert not after.params
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    inputs = [x, x > 0.5, torch.tensor([3.0])]
    before, now = (LibraryBackend().compile(g, weights).run(*inputs)[0] for g in (graph, after))
    assert now.dtype == before.dtype
    torch.testing.assert_close(now, before, rtol=1e-6, atol=0)
