"""torch's sizes, strides and dtypes as the graph's: what dims say at other sizes is what torch then does."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._sympy import functions as tsf

from hotfuse.base.errors import CaptureError
from hotfuse.ir.dims import Sym, evaluate, parse, show, sym
from hotfuse.ir.types import ROW_MAJOR, STRIDED, DType, Layout, ScalarKind, ScalarType, TensorType
from hotfuse.ops.torch_dtypes import dtype_of, torch_dtype
from hotfuse.ops.torch_types import (
    dim_of,
    layout_of,
    pred_of,
    scalar_type,
    tensor_type,
)


def test_dtypes_lead_both_ways() -> None:
    without = {d for d in DType if d is DType.STR or d.value.startswith(("f4e", "f6e"))}
    for dtype in set(DType) - without:
        assert dtype_of(torch_dtype(dtype)) is dtype
    for dtype in without:
        with pytest.raises(CaptureError, match="no torch dtype"):
            torch_dtype(dtype)
    with pytest.raises(CaptureError, match="no place in the graph"):
        dtype_of(torch.quint8)


a, b = sympy.symbols("a b", integer=True, positive=True)
EXPRESSIONS: list[Any] = [
    a + b,
    2 * a - 3 * b + 1,
    a * b**2,
    tsf.FloorDiv(a, b),
    tsf.FloorDiv(-a, 3),
    tsf.CeilDiv(a, b) if isinstance(tsf.CeilDiv(a, b), sympy.Basic) else a,
    tsf.Mod(a, b),
    tsf.PythonMod(-a, b),
    tsf.ModularIndexing(a * 5, 2, 3),
    tsf.PowByNatural(a, sympy.Integer(3)),
    tsf.Max(a, b),
    tsf.Min(a, b + 1),
    tsf.Where(a < b, a + 5, b),
    tsf.FloorToInt(tsf.IntTrueDiv(a, b)),
    tsf.CeilToInt(tsf.IntTrueDiv(a, b)),
    tsf.TruncToInt(tsf.IntTrueDiv(a, b)),
    tsf.FloorToInt(1.5 * tsf.ToFloat(a)),
    tsf.CeilToInt(0.375 * tsf.ToFloat(a)),
    tsf.TruncToInt(2.0 * tsf.ToFloat(a + b)),
    tsf.LShift(a, b),
    tsf.RShift(a * 16, b),
]


@pytest.mark.parametrize("e", EXPRESSIONS, ids=str)
def test_sizes_have_torchs_value(e: Any) -> None:
    dim = dim_of(e)
    assert isinstance(dim, Sym) and parse(show(dim)) == dim
    for x, y in itertools.product((1, 2, 3, 4, 7, 12, 30), repeat=2):
        assert evaluate(dim, {"a": x, "b": y}) == int(e.subs({a: x, b: y})), (x, y)


@pytest.mark.parametrize(
    "p",
    [
        sympy.Eq(tsf.Mod(a, 4), 0), sympy.Ne(a, b), a < b, a <= 2 * b, a > b, a >= b + 1, sympy.And(a > 2, b < 5),
        sympy.Or(a > 8, sympy.Eq(b, 3)), sympy.Not(sympy.And(a > 2, b < 5)),
    ],
    ids=str,
)  # fmt: skip
def test_predicates_have_torchs_value(p: Any) -> None:
    pred = pred_of(p)
    for x, y in itertools.product((1, 2, 3, 4, 7, 12), repeat=2):
        assert bool(evaluate(pred, {"a": x, "b": y})) is bool(p.subs({a: x, b: y}))


def test_decided_predicates_and_plain_numbers() -> None:
    assert dim_of(7) == 7 and dim_of(sympy.Integer(7)) == 7
    assert pred_of(True) == 1 and pred_of(sympy.false) == 0


@pytest.mark.parametrize(
    "e",
    [
        sympy.sin(a), sympy.Rational(1, 2) * a, sympy.Float(1.5), tsf.FloorToInt(0.1 * tsf.ToFloat(a)),
        tsf.ToFloat(a), tsf.IntTrueDiv(a, b), a**-1, sympy.Symbol("zf0", real=True), 1.5,
        tsf.TruncToInt(0.5 * tsf.ToFloat(a - b)),
    ],
    ids=str,
)  # fmt: skip
def test_what_dims_cannot_say_is_refused(e: Any) -> None:
    with pytest.raises(CaptureError, match="cannot express"):
        dim_of(e)


def test_a_size_is_no_predicate() -> None:
    with pytest.raises(CaptureError, match="not a predicate"):
        pred_of(a + b)


@pytest.mark.parametrize(
    ("t", "want"),
    [
        (torch.empty(2, 3, 4), ROW_MAJOR),
        (torch.empty(()), ROW_MAJOR),
        (torch.empty(0, 3), ROW_MAJOR),
        (torch.empty(3, 0).t(), ROW_MAJOR),
        (torch.empty(2, 3).t(), Layout(order=(1, 0))),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), Layout(order=(0, 2, 3, 1))),
        (torch.empty(1, 3, 4, 5).to(memory_format=torch.channels_last), Layout(order=(0, 2, 3, 1))),
        (torch.empty(2, 1, 4, 5).to(memory_format=torch.channels_last), ROW_MAJOR),
        (torch.empty(2, 3, 4).permute(2, 0, 1), Layout(order=(1, 2, 0))),
        (torch.empty(1, 3).expand(2, 3), STRIDED),
        (torch.empty(1, 3).expand(1, 3), ROW_MAJOR),
        (torch.empty(4, 6)[:, ::2], STRIDED),
        (torch.empty(4, 6)[:, :3], STRIDED),
        (torch.empty(4, 6)[1:], ROW_MAJOR),
        (torch.empty(5)[::2], STRIDED),
        (torch.empty(1, 1, 1).permute(2, 0, 1), ROW_MAJOR),
    ],
)
def test_layouts(t: torch.Tensor, want: Layout) -> None:
    assert layout_of(tuple(t.shape), t.stride()) == want
    assert tensor_type(t) == TensorType(DType.F32, tuple(t.shape), want, "cpu")


class _Sizes(torch.nn.Module):
    """Ops whose result sizes are every kind of expression."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return (
            torch.cat([x, x], 1)[:, ::2],
            F.interpolate(y, scale_factor=2.0),
            F.interpolate(y, scale_factor=0.5).to(memory_format=torch.channels_last),
            F.avg_pool2d(y, 2),
            F.max_pool2d(y, 3, 2, 1, ceil_mode=True),
            F.conv2d(y, torch.ones(4, 3, 3, 3), stride=2, padding=1),
            F.pad(y, (1, 2, 3, 4)),
            F.unfold(y, 2),
            x.t(),
            y.permute(0, 2, 3, 1),
            y.reshape(y.shape[0], -1),
            y.flatten(2).transpose(1, 2),
            x.expand(3, -1, -1),
            x.unsqueeze(0).repeat(2, 3, 1),
            torch.zeros(math.floor(x.shape[0] / 2)),
            torch.arange(x.shape[0] + 1),
            x.new_zeros(max(x.shape[0], x.shape[1]), min(x.shape[0], 3)),
            x.chunk(2, 0)[1],
        )


def test_types_of_a_dynamic_program_hold_at_other_sizes() -> None:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic, 1: dynamic}, {0: dynamic, 2: dynamic, 3: dynamic})
    sample = (torch.randn(6, 8), torch.randn(4, 3, 12, 14))
    program = torch.export.export(_Sizes(), sample, dynamic_shapes=shapes, strict=False)
    symbolic = 0
    for sizes in ((6, 8, 4, 12, 14), (10, 14, 2, 18, 22), (20, 30, 5, 64, 50)):
        rows, cols, n, h, w = sizes
        seen: dict[fx.Node, Any] = {}

        class CallSampler(fx.Interpreter):
            def run_node(self, node: fx.Node) -> Any:
                seen[node] = super().run_node(node)  # noqa: B023
                return seen[node]  # noqa: B023

        gm = program.module(check_guards=False)
        assert isinstance(gm, fx.GraphModule)
        CallSampler(gm).run(torch.randn(rows, cols), torch.randn(n, 3, h, w))
        places = [node for node in seen if node.op == "placeholder"]
        env: dict[str, int] = {}
        for place in places:
            for dim, size in zip(tensor_type(place.meta["val"]).shape, seen[place].shape, strict=True):
                if isinstance(dim, Sym):
                    env[str(dim)] = size
        for node, value in seen.items():
            claimed = node.meta.get("val")
            if isinstance(claimed, torch.Tensor):
                kind = tensor_type(claimed)
                symbolic += any(isinstance(d, Sym) for d in kind.shape)
                assert tuple(evaluate(d, env) for d in kind.shape) == tuple(value.shape), node
                found = layout_of(tuple(value.shape), value.stride())
                # A claim of unknown strides holds for every layout: torch 2.11 makes it for im2col.
                assert kind.layout == found or kind.layout.strided, node
            elif isinstance(claimed, torch.SymInt):
                kind = scalar_type(claimed)
                assert kind.expr is not None and evaluate(kind.expr, env) == value, node
    assert symbolic >= 60


def test_host_numbers() -> None:
    assert scalar_type(3) == ScalarType(ScalarKind.INT, 3)
    assert scalar_type(True) == ScalarType(ScalarKind.BOOL)
    assert scalar_type(0.5) == ScalarType(ScalarKind.FLOAT)
    assert sym("a") == dim_of(a)
