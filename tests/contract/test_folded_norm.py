"""Layer norms that products take in on a device: right at every level, for rows that one pass would get wrong, in every tiling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.backends.device_code import GpuTarget
from hotfuse.backends.library import meaning
from hotfuse.backends.pycode import flat_function
from hotfuse.backends.triton.device_build import build
from hotfuse.backends.triton.emit import emit
from hotfuse.compile.device import units
from hotfuse.compile.request_bodies import DevicePlanRequest
from hotfuse.fusion.kinds import GroupKind
from hotfuse.ir.normal import normalized
from hotfuse.ir.subgraph import extract
from hotfuse.ir.text import parse, show
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.gpu import GpuTiling, lower_gpu
from hotfuse.ops.own.folded_norm import BLOCK, MEAN, NORMALIZED, SPREAD
from tests.contract.lowering import group_of, interpret
from tests.contract.test_triton import TARGETS, half, interpreted, needs_triton

Tensor = torch.Tensor
_OPS: Any = torch.ops.hotfuse
EPS = 1e-5
TILINGS = {
    "whole tiles": GpuTiling(32, 32, 32, 4, 2), "tails": GpuTiling(64, 64, 64, 4, 3),
    "bulk copies": GpuTiling(64, 64, 32, 4, 2, bulk=True),
    "shared": GpuTiling(32, 32, 32, 4, 2, split=3), "in turns": GpuTiling(64, 32, 32, 4, 2, programs=2),
}  # fmt: skip


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return _OPS.block_mean(x), _OPS.block_spread(x)


def makes(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    y = F.linear(x, w, b) + r
    return y, *moments(y)


def reads(x: Tensor, m: Tensor, s: Tensor, g: Tensor, c: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(_OPS.normalized(x, m, s, g, c, EPS), w, b))


def reads_thrice(x: Tensor, m: Tensor, s: Tensor, g: Tensor, c: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = _OPS.normalized(x, m, s, g, c, EPS)
    return F.linear(y, w, b), F.linear(y, w), F.relu(F.linear(y, w, b))


def adds(x: Tensor, m: Tensor, s: Tensor, g: Tensor, c: Tensor, h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y = F.linear(h, w, b) + _OPS.normalized(x, m, s, g, c, EPS)
    return y, *moments(y)


def rows(offset: float = 0.0, count: int = 40, width: int = 96) -> Tensor:
    return (torch.randn(count, width) + offset).half()


def near(got: Tensor, want: Tensor, allowed: float) -> None:
    assert got.shape == want.shape
    assert float((got.double() - want).abs().max()) <= allowed * float(want.abs().max())


@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_the_pieces_are_a_layer_norm(offset: float) -> None:
    """Far from zero too, where squares minus the square of the mean would leave nothing of a variance."""
    x, g, c = rows(offset), half(96), half(96)
    got = _OPS.normalized(x, *moments(x), g, c, EPS)
    near(got, F.layer_norm(x.double(), (96,), g.double(), c.double(), EPS), 2e-3)


@pytest.mark.parametrize("name", TILINGS)
def test_a_product_stores_what_its_rows_are_like(name: str) -> None:
    tensors = (rows(), half(96, 96) / 8, half(96), rows(20.0))
    made = group_of(makes, tensors)
    y, mean, spread = interpret(lower_gpu(made.graph, TILINGS[name]), made, tensors)
    near(y, F.linear(*(t.double() for t in tensors[:3])) + tensors[3].double(), 2e-3)
    wide = y.double().unflatten(-1, (-1, BLOCK))  # of what is stored, which others read
    near(mean, wide.mean(-1), 1e-6)
    near(spread, wide.var(-1, correction=0) * BLOCK, 1e-5)


CASES: dict[str, tuple[Callable[..., Any], Callable[[Tensor], tuple[Tensor, ...]]]] = {
    "one product": (reads, lambda x: (half(64, 96) / 8, half(64))),
    "three": (reads_thrice, lambda x: (half(64, 96) / 8, half(64))),
    "an epilogue": (adds, lambda x: (half(40, 96), half(96, 96) / 8, half(96))),
}


def case(name: str, offset: float) -> tuple[Any, tuple[Tensor, ...], list[Tensor]]:
    fn, more = CASES[name]
    x, g, c = rows(offset), half(96), half(96)
    tensors = (x, *moments(x), g, c, *more(x))
    y = F.layer_norm(x.double(), (96,), g.double(), c.double(), EPS)
    rest = [t.double() for t in tensors[5:]]
    if name == "one product":
        return fn, tensors, [F.gelu(F.linear(y, *rest))]
    if name == "three":
        return fn, tensors, [F.linear(y, *rest), F.linear(y, rest[0]), F.relu(F.linear(y, *rest))]
    return fn, tensors, [F.linear(rest[0], rest[1], rest[2]) + y]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tiling", TILINGS)
def test_products_read_rows_normalized(name: str, tiling: str) -> None:
    fn, tensors, want = case(name, 30.0)
    made = group_of(fn, tensors)
    got = interpret(lower_gpu(made.graph, TILINGS[tiling]), made, tensors)
    for g, w in zip(got, want, strict=False):  # moments of a result follow it
        near(g, w, 5e-3)


@needs_triton
@pytest.mark.parametrize("name", [*CASES, "makes"])
@pytest.mark.parametrize("tiling", ["tails", "bulk copies", "shared"])
def test_their_text_computes_the_same_in_the_interpreter(name: str, tiling: str, tmp_path: Path) -> None:
    if name == "makes":
        tensors: tuple[Tensor, ...] = (rows(), half(96, 96) / 8, half(96), rows(20.0))
        made = group_of(makes, tensors)
    else:
        fn, tensors, _ = case(name, 30.0)
        made = group_of(fn, tensors)
    low = lower_gpu(made.graph, TILINGS[tiling])
    meant = interpret(low, made, tensors)
    for got, want in zip(interpreted(made, low, TILINGS[tiling], tensors, tmp_path), meant, strict=True):
        near(got, want.double(), 5e-3 if got.dtype is torch.half else 1e-3)


@needs_triton
@pytest.mark.parametrize("name", [*CASES, "makes"])
def test_code_for_three_architectures(name: str) -> None:
    if name == "makes":
        made = group_of(makes, (rows(), half(96, 96), half(96), rows()))
    else:
        made = group_of(*case(name, 0.0)[:2])
    for target in TARGETS:
        tiling = TILINGS["bulk copies" if target.bulk else "tails"]
        source = emit(lower_gpu(made.graph, tiling).kernel, 2, dependent=target.bulk, bulk=target.bulk)
        assert build(source, target, 4, dependent=target.bulk).code


def test_what_has_no_blocks_or_one_row_is_refused() -> None:
    made = group_of(makes, (rows(), half(96, 96), half(96), rows()))
    with pytest.raises(CannotLower, match="blocks of 32"):
        lower_gpu(made.graph, GpuTiling(32, 16, 32, 4, 2))
    fn, tensors, _ = case("one product", 0.0)
    one = (*(t[:1] for t in tensors[:3]), *tensors[3:])
    with pytest.raises(CannotLower, match="rows and columns"):
        lower_gpu(group_of(fn, one).graph, TILINGS["tails"])


class Layers(torch.nn.Module):
    """Norms behind and before products, as encoders have them: the first and the last stand beside something else."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(64, dtype=dtype) for _ in range(4))
        self.wide = torch.nn.ModuleList(torch.nn.Linear(64, 96, dtype=dtype) for _ in range(2))
        self.narrow = torch.nn.ModuleList(torch.nn.Linear(96, 64, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        for norm, wide, narrow in zip(self.norms[1:], self.wide, self.narrow, strict=False):
            y = norm(narrow(F.gelu(wide(y))) + y)
        return y


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_norms_between_products_are_taken_in_and_others_stay(dtype: torch.dtype) -> None:
    model, x = Layers(dtype).eval(), torch.randn(2, 24, 64, dtype=dtype)
    with torch.no_grad():
        made = group_of(lambda x: model(x), (x,), constants=True)
        text = show(made.graph)
        plain, _ = units.plan(DevicePlanRequest(text))
        answer, _ = units.plan(DevicePlanRequest(text, folded=True))
        assert plain.foldable and "normalized" not in plain.graph
        graph = parse(answer.graph)
        ops = [n.op for n in graph.nodes]
        assert ops.count("aten.layer_norm.default") == 2  # the first reads no product, the last is the result
        assert (ops.count(MEAN), ops.count(SPREAD), ops.count(NORMALIZED)) == (1, 1, 2)
        assert sum(count for count, _ in answer.groups) == len(graph.nodes)
        run, _ = flat_function(graph, meaning, made.weights)
        near(run(x)[0], copy.deepcopy(model).double()(x.double()), 5e-3 if dtype is torch.half else 4e-2)
        at = 0
        for count, kind in answer.groups:
            piece, at = extract(graph, range(at, at + count), "part"), at + count
            if any(n.op in (MEAN, NORMALIZED) for n in piece.nodes):
                assert kind == GroupKind.GEMM_WEIGHT
                assert lower_gpu(normalized(piece), TILINGS["tails"]).kernel.body


def test_many_rows_wide_types_and_other_norms_are_left_alone() -> None:
    with torch.no_grad():
        for dtype, count in ((torch.float32, 24), (torch.half, 2000), (torch.half, 1)):
            model, x = Layers(dtype).eval(), torch.randn(1, count, 64, dtype=dtype)
            made = group_of(lambda x, model=model: model(x), (x,), constants=True)
            assert not units.plan(DevicePlanRequest(show(made.graph)))[0].foldable


@needs_triton
def test_vectors_that_a_loop_reads_are_asked_for_before_it() -> None:
    """Weight and bias of a norm: a piece in every step, which the step would wait for."""
    g, c, w, b = half(96), half(96), half(64, 96), half(64)
    x = rows()
    with torch.no_grad():
        made = group_of(lambda x, m, s: F.linear(_OPS.normalized(x, m, s, g, c, EPS), w, b), (x, *moments(x)), constants=True)
    source = emit(lower_gpu(made.graph, GpuTiling(64, 64, 32, 4, 2, bulk=True)).kernel, 2, dependent=True, bulk=True)
    assert source.text.count("  _prefetch_near(p") == 2
    assert source.text.index("  _prefetch_near(p") < source.text.index("gdc_wait()\n")
    built = build(source, GpuTarget("cuda", "90"), 4, dependent=True)
    assert "prefetch.global.L1" in built.texts["ptx"]
