"""Reductions inside the loops of others, running sums in another order: one kernel in stages, three ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.fusion.groups import group
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.cpu.group import lower_group
from hotfuse.tile.program import BufferKind
from tests.contract.lowering import group_of, interpret, run_native

Function = Callable[[torch.Tensor], Any]

NESTED: dict[str, Function] = {
    "log_softmax, all summed": lambda x: torch.log_softmax(x, -1).sum(),
    "log_softmax, some summed": lambda x: torch.log_softmax(x, -1).sum((1, 2)),
    "log_softmax, summed across rows": lambda x: torch.log_softmax(x, -1).sum(1),
    "spread of a softmax over all": lambda x: torch.softmax(x, -1).var(),
    "statistic of a layer norm": lambda x: F.layer_norm(x, (x.shape[-1],)).var((0, 2)),
    "group norm of a layer norm": lambda x: F.group_norm(F.layer_norm(x, (x.shape[-1],)), x.shape[1]),
    "softmax of a softmax": lambda x: torch.softmax(torch.softmax(x, -1), 1),
    "softmax of means": lambda x: torch.softmax(x.mean(-1), -1),
    "three deep": lambda x: torch.softmax(torch.softmax(x, 0).mean(-1), -1).amax(0),
    "scaled by its own sum": lambda x: torch.softmax(x, -1) / (1 + torch.softmax(x, -1).amax()),
    "running sum, then summed": lambda x: x.cumsum(-1).sum(1),
    "running sum of a softmax": lambda x: torch.softmax(x, -1).cumsum(1),
    "running sum, turned": lambda x: x.cumsum(-1).flip(-1) + x,
    "place of the largest mean": lambda x: x.mean(-1).argmax(-1),
    "two outputs": lambda x: (torch.softmax(x, -1).sum(1), torch.softmax(x, 1).sum(-1)),
}


def resized(x: torch.Tensor, size: int) -> torch.Tensor:
    return F.interpolate(x, size, mode="linear", align_corners=False)


ALSO_OUTPUTS: dict[str, Function] = {
    "resized": lambda x: (y := F.gelu(x), resized(y, 5)),
    "resized and joined": lambda x: (y := F.gelu(x), torch.cat([resized(y, 5)] * 3)),
    "resized, then normalized": lambda x: (y := x * x, (z := resized(y, 7)) * y.flip(1)[..., :1], torch.log_softmax(z, -1)),
    "resized twice, each given": lambda x: (y := x + 1, z := resized(y, 9), resized(z, 4)),
    "a part of the input, resized": lambda x: (y := x.select(1, 0)[None], z := resized(y, 9), z - z),
    "means, and their softmax": lambda x: (m := x.mean(-1), torch.softmax(m, -1)),
    "largest of rows, and across them": lambda x: (m := x.amax(-1, keepdim=True), s := (x - m).sum(1), s.amax(-1)),
    "softmax, and that of it": lambda x: (y := torch.softmax(x, -1), torch.softmax(y, 1)),
    "running sum, and turned": lambda x: (y := x.cumsum(-1), y.flip(-1) + x, y.sum(1)),
}
"""What is computed first is an output as well: it is stored where the caller looks for it."""


def check(fn: Function, x: torch.Tensor, symbolic: bool) -> None:
    traced = group_of(fn, [x], symbolic)
    lowered = lower_group(traced.graph)
    want = fn(x.double())
    for way in (interpret, run_native):
        for got, w in zip(way(lowered, traced, [x]), want if isinstance(want, tuple) else (want,), strict=True):
            scale = w.double().abs().nan_to_num(posinf=0.0, neginf=0.0).amax().item() if w.numel() else 0.0
            torch.testing.assert_close(got.double(), w.double(), rtol=1e-5, atol=1e-6 + 1e-6 * scale, equal_nan=True,
                                       msg=lambda m, name=way.__name__: f"{name}: {m}")  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize("name", NESTED)
def test_nested(name: str, symbolic: bool) -> None:
    check(NESTED[name], torch.randn(6, 5, 33) if symbolic else torch.randn(5, 33, 3).transpose(1, 2), symbolic)


@pytest.mark.parametrize("symbolic", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize("name", ALSO_OUTPUTS)
def test_what_is_computed_first_is_an_output_too(name: str, symbolic: bool) -> None:
    check(ALSO_OUTPUTS[name], torch.randn(6, 5, 33) if symbolic else torch.randn(5, 17, 3).transpose(1, 2), symbolic)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 17), (3, 70, 2)], ids=str)
@pytest.mark.parametrize("name", ["resized", "resized twice, each given", "means, and their softmax"])
def test_odd_shapes_of_outputs_computed_first(name: str, shape: tuple[int, ...]) -> None:
    check(ALSO_OUTPUTS[name], torch.randn(shape), False)


def test_what_is_sorted_or_counted_is_an_output_too() -> None:
    check(lambda x: (y := torch.cat([x, x.flip(0) + 1, x * 2], 1), torch.topk(y, 2, 1)[0] * 2), torch.randn(4, 5, 3), False)

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.cat([x, x, x])
        best = torch.topk(F.one_hot((y > 0).long(), 3).to(x.dtype), 1, 1)[0]
        return y, best / (best.abs() + 1), best.unflatten(0, (8, 6)) + 1

    check(counted, torch.randn(16, 1), False)


def test_an_output_computed_first_is_stored_once() -> None:
    traced = group_of(ALSO_OUTPUTS["resized"], [torch.randn(6, 5, 33)])
    kernel = lower_group(traced.graph).kernel
    assert [b.kind for b in kernel.buffers].count(BufferKind.OUTPUT) == 2
    assert all(b.kind is not BufferKind.SHARED for b in kernel.buffers)


def test_channels_last_output_computed_first() -> None:
    x = torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last)
    check(lambda x: (y := F.gelu(x), F.interpolate(y, (9, 4), mode="bilinear", align_corners=True)), x, False)


@pytest.mark.parametrize("name", ["log_softmax, all summed", "softmax of means", "running sum of a softmax"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 7, 1), (3, 1, 65), (2, 0, 5)], ids=str)
def test_odd_shapes(name: str, shape: tuple[int, ...]) -> None:
    check(NESTED[name], torch.randn(shape), False)


@pytest.mark.parametrize("name", ["log_softmax, all summed", "softmax of means", "running sum, then summed"])
def test_what_is_not_finite(name: str) -> None:
    x = torch.randn(4, 5, 20)
    x[0, 1, 3], x[2, 2, 2], x[3, 0, 19] = float("nan"), float("inf"), -float("inf")
    check(NESTED[name], x, False)


def test_the_memory_between_is_the_kernels_own() -> None:
    traced = group_of(NESTED["log_softmax, all summed"], [torch.randn(6, 5, 33)])
    kernel = lower_group(traced.graph).kernel
    assert [b.kind for b in kernel.buffers].count(BufferKind.SHARED) == 2  # each row's maximum and sum
    assert [b.kind for b in kernel.buffers].count(BufferKind.OUTPUT) == 1


def test_one_nest_is_enough_for_a_spread_of_each_row() -> None:
    traced = group_of(lambda x: torch.softmax(x, -1).var(-1), [torch.randn(6, 5, 33)])
    assert all(b.kind is not BufferKind.SHARED for b in lower_group(traced.graph).kernel.buffers)


def test_one_kernel_serves_other_sizes() -> None:
    fn = NESTED["softmax of a softmax"]
    traced = group_of(fn, [torch.randn(6, 5, 33)], symbolic=True)
    lowered = lower_group(traced.graph)
    for shape in ((2, 3, 4), (3, 17, 130), (1, 70, 17)):
        x = torch.randn(shape)
        for way in (interpret, run_native):
            torch.testing.assert_close(way(lowered, traced, [x])[0].double(), fn(x.double()), rtol=1e-5, atol=1e-6)


# --- sorting short dims ---------------------------------------------------------------------------------------------------


def sorted_ways(fn: Function, x: torch.Tensor) -> None:
    traced = group_of(fn, [x])
    lowered = lower_group(traced.graph)
    want = fn(x)
    for way in (interpret, run_native):
        for got, w in zip(way(lowered, traced, [x]), want if isinstance(want, tuple) else (want,), strict=True):
            assert got.dtype is w.dtype
            torch.testing.assert_close(got, w, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=way.__name__: f"{n}: {m}")


@pytest.mark.parametrize(("dim", "descending"), [(0, True), (1, False), (-1, True), (-1, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8,
                                   torch.bool], ids=str)  # fmt: skip
def test_sort(dtype: torch.dtype, dim: int, descending: bool) -> None:
    x = (torch.randn(3, 5, 17) * 2).round()  # equal ones are kept in order
    x = (x.abs() if dtype is torch.uint8 else x).to(dtype)
    if dtype.is_floating_point:
        x[0, 0, 2], x[0, 0, 4], x[1, 1, 1], x[2, 0, 16] = float("nan"), float("nan"), -float("inf"), float("inf")
    sorted_ways(lambda t: tuple(torch.sort(t, dim=dim, descending=descending, stable=True)), x)


def test_argsort() -> None:
    sorted_ways(lambda t: torch.argsort(t, dim=0, stable=True), (torch.randn(9, 5) * 2).round())


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("shape", "k", "dim"), [((6, 8), 2, -1), ((3, 1), 1, -1), ((7,), 7, 0), ((64, 5), 3, 0), ((0, 4), 2, 1)],
                         ids=str)  # fmt: skip
def test_topk(shape: tuple[int, ...], k: int, dim: int, largest: bool) -> None:
    n = torch.Size(shape).numel()
    x = torch.randperm(n).reshape(shape).float() - n / 2  # all different: torch's order of equal ones is nobody's promise
    sorted_ways(lambda t: tuple(torch.topk(t, k, dim, largest)), x)


def test_the_best_experts_of_a_token() -> None:
    def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, expert = torch.topk(torch.softmax(x, -1), 2)
        return weight / weight.sum(-1, keepdim=True), expert

    x = torch.randn(19, 8)
    traced = group_of(route, [x])
    lowered = lower_group(traced.graph)
    weight, expert = route(x.double())
    for way in (interpret, run_native):
        got = way(lowered, traced, [x])
        torch.testing.assert_close(got[0].double(), weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(got[1], expert)


@pytest.mark.parametrize("fn", [lambda x: torch.topk(x, 3)[0], lambda x: torch.sort(x)[0]])
def test_long_dims_stay_with_the_library(fn: Function) -> None:
    for x, symbolic in ((torch.randn(2, 65), False), (torch.randn(2, 8), True)):
        with pytest.raises(CannotLower, match=r"aten\.(topk|sort)"):
            lower_group(group_of(fn, [x], symbolic).graph)


def test_grouping_knows_which_sorts_are_short() -> None:
    fn = lambda x: torch.topk(torch.softmax(x, -1), 2)[0] * 2  # noqa: E731
    assert [g.kind for g in group(group_of(fn, [torch.randn(4, 8)]).graph)] == ["rows", "rows"]
    assert [g.kind for g in group(group_of(fn, [torch.randn(4, 800)]).graph)] == ["rows", "library", "rows"]
