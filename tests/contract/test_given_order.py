"""Images that the library hands to a run: predicted as torch gives them, so that no call leaves the run for their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse import Settings
from hotfuse.compile.run.given_order import GivenOrders
from hotfuse.compile.run.run_steps import LevelParts
from hotfuse.compile.unit import units
from hotfuse.ir.graph import Value
from hotfuse.ir.text import parse
from hotfuse.ir.types import TensorType
from hotfuse.lower import lowering
from hotfuse.lower.common.errors import CannotLower
from hotfuse.pipeline import compile_tier0, compile_tier1
from tests.contract.lowering import group_of
from tests.races import kernels_win

GRAPH = """graph g(%x: f32[1, 3, 8, 8], %l: f32[1, 3, 8, 8]{0,2,3,1}) {
  param %w: f32[4, 3, 1, 1] = "w"
  %a: f32[1, 4, 8, 8]{0,2,3,1} = aten.conv2d.default(%x, %w)
  %b: f32[1, 4, 8, 8]{0,2,3,1} = aten.relu.default(%a)
  %c: f32[1, 4, 8, 8]{0,2,3,1} = aten.conv2d.default(%l, %w)
  %d: f32[1, 4, 8, 8]{0,2,3,1} = aten.add.Tensor(%b, %c)
  %e: f32[1, 3, 8, 8]{0,2,3,1} = aten.contiguous.default(%x)
  %f: f32[1, 4, 8, 8]{0,2,3,1} = aten.conv2d.default(%e, %w)
  %g: f32[1, 4, 8, 8] = aten.relu.default(%f)
  return %d, %g }"""


def _orders(library: Sequence[int]) -> dict[str, bool]:
    """Which values come row-major, where these nodes stay with the library."""
    graph = parse(GRAPH)
    parts = [(i, i + 1, -1 if i in library else 0) for i in range(len(graph.nodes))]
    orders = GivenOrders(LevelParts(graph, parts, {}))

    def row_major(v: Value) -> bool:
        given = orders.given(v)
        assert given.name == v.name and isinstance(given.type, TensorType)
        return given.type.layout.order is None

    return {v.name: row_major(v) for n in graph.nodes for v in n.outs}


def test_torch_goes_by_what_it_reads() -> None:
    """Row-major in, row-major out, also through what follows; what lies channels last, or is made so, stays."""
    assert _orders(range(7)) == {"a": True, "b": True, "c": False, "d": False, "e": False, "f": False, "g": True}


def test_kernels_give_what_the_types_say() -> None:
    assert _orders(()) == {"a": False, "b": False, "c": False, "d": False, "e": False, "f": False, "g": True}
    assert _orders((1,))["b"] is False


def _patches(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    return F.gelu(F.linear(F.layer_norm(F.conv2d(x, w, stride=4).flatten(2).transpose(1, 2), (w.shape[0],)), v))


@pytest.mark.parametrize("symbolic", [False, True])
def test_patches_of_the_library_stay_in_the_run(symbolic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of image transformers, where the library is faster at it."""
    kernels_win(monkeypatch)
    monkeypatch.setattr(units, "measuring", lambda _sizes: None)

    def refused(*_args: object, **_options: object) -> None:
        raise CannotLower("the library is faster")

    monkeypatch.setattr(lowering, "lower_convolution", refused)
    w, v = torch.randn(8, 3, 4, 4), torch.randn(5, 8)
    settings = Settings(capture="inline", hot_calls=1)
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        found = group_of(lambda a: _patches(a, w, v), [x], symbolic, constants=True)
        native = compile_tier1(found.graph, found.weights, [x], settings)
        library = compile_tier0(found.graph, found.weights, settings)
        assert sum(u.native is not None for u in native.units) == 1, [a.source for a in native.artifacts]
        for given in (x, x * float("inf"), torch.randn(2, 3, 32, 32)[:, :, ::2, ::2]):
            (got,), (want,) = native.run(given), library.run(given)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert native.counters()["fell_back"] == 0
