"""one_hot, scatter and scatter_add as kernels: torch, the tile interpreter and native code; wrong indexes are the call's fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.base.errors import CallFault
from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.cpu.group import lower_group
from tests.contract.lowering import group_of, interpret, run_native

Function = Callable[..., Any]


def check(fn: Function, args: list[torch.Tensor], rtol: float = 0.0, symbolic: bool = False) -> None:
    found = group_of(fn, args, symbolic)
    lowered = lower_group(found.graph)
    want = fn(*args)
    for way in (interpret, run_native):
        (got,) = way(lowered, found, args)
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, w=way: f"{w.__name__}: {m}")


@pytest.mark.parametrize("shape", [(), (1,), (3, 7), (2, 3, 17)])
@pytest.mark.parametrize("classes", [1, 33])
def test_one_hot(shape: tuple[int, ...], classes: int) -> None:
    check(lambda i: F.one_hot(i, classes), [torch.randint(0, classes, shape)])
    check(lambda i: F.one_hot(i, classes).float() * 0.5, [torch.randint(0, classes, shape)])


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("many", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16], ids=str)
def test_scatter(dim: int, many: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 9, 4) * 3).to(dtype)
    shape = [5, 9, 4]
    shape[dim] = many
    index = torch.randint(0, x.shape[dim], shape)
    source = (torch.randn(shape) * 3).to(dtype)
    unique = torch.argsort(torch.rand(5, 9, 4), dim).narrow(dim, 0, min(many, x.shape[dim]))
    part = source.narrow(dim, 0, unique.shape[dim])
    check(lambda a, i, s: a.scatter(dim, i, s), [x, unique, part])
    check(lambda a, i: a.scatter(dim, i, 1), [x, index])
    if dtype is not torch.bool:
        check(lambda a, i, s: a.scatter_add(dim, i, s), [x, index, source], 1e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_index_put(dtype: torch.dtype) -> None:
    x, values, columns = ((torch.randn(*shape) * 3).to(dtype) for shape in ((7, 5), (3, 5), (7, 3)))
    index = torch.tensor([4, -1, 0])
    check(lambda a, i, v: torch.ops.aten.index_put(a, [i], v), [x, index, values])
    check(lambda a, i, v: torch.ops.aten.index_put(a, [None, i], v), [x, torch.tensor([0, 3, -3]), columns])
    if dtype is not torch.bool:
        twice = torch.tensor([2, 2, -7])
        check(lambda a, i, v: torch.ops.aten.index_put(a, [i], v, True), [x, twice, values], 1e-6)


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("alpha", [1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16], ids=str)
def test_index_add(dim: int, alpha: int, dtype: torch.dtype) -> None:
    """Some places are written to more than once, others never."""
    x = (torch.randn(5, 3, 4) * 3).to(dtype)
    index = torch.tensor([2, 0, 2, 3])
    shape = [5, 3, 4]
    shape[dim] = len(index)
    source = (torch.randn(shape) * 3).to(dtype)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    check(lambda a, i, s: a.index_add(dim, i, s, alpha=alpha), [x, index, source], tolerance)
    check(lambda a, i, s: a.index_add(dim, i.int(), s), [x, index, source], tolerance)


def test_many_into_few_places() -> None:
    """As a sum over the nodes of each graph of a batch."""
    x, source, index = torch.zeros(7, 19), torch.randn(130, 19), torch.randint(0, 7, (130, 1)).expand(130, 19).contiguous()
    check(lambda a, i, s: a.scatter_add(0, i, s), [x, index, source], 2e-5)
    check(lambda a, i, v: torch.ops.aten.index_put(a, [i], v, True), [x, torch.randint(0, 7, (130,)), source], 2e-5)


def test_nan_and_infinity_pass_through() -> None:
    x, source = torch.randn(4, 6), torch.tensor([[float("nan"), float("inf")]] * 4)
    x[0, 0] = float("nan")
    check(lambda a, i, s: a.scatter(1, i, s), [x, torch.tensor([[1, 3]] * 4), source])


def test_what_follows_is_in_the_same_kernel() -> None:
    check(lambda a, i: torch.tanh(a.scatter(1, i, -1e9)) + a, [torch.randn(6, 20), torch.randint(0, 20, (6, 3))], 1e-6)


@pytest.mark.parametrize("bad", [-1, 7, 1 << 40])
def test_an_index_outside_is_a_fault_of_the_call(bad: int) -> None:
    index = torch.randint(0, 7, (3, 5))
    index[1, 2] = bad
    for fn, args in ((lambda i: F.one_hot(i, 7), [index]),
                     (lambda a, i, s: a.index_add(0, i[1], s), [torch.randn(7, 2), index, torch.randn(5, 2)]),
                     (lambda a, i: a.scatter(1, i, 1.0), [torch.randn(3, 7), index])):  # fmt: skip
        found = group_of(fn, [torch.zeros_like(a) if a.dtype is torch.int64 else a for a in args])
        lowered = lower_group(found.graph)
        with pytest.raises(CallFault):
            run_native(lowered, found, args)


def test_refusals_say_why() -> None:
    for fn, args, why in (
        (lambda a, i: a.scatter(1, i, 1.0), [torch.randn(3, 400), torch.randint(0, 9, (3, 100))], "100 indexes"),
        (lambda a, i: a.scatter(1, i, 1.0), [torch.randn(3, 9), torch.randint(0, 9, (2, 4))], "a part of the other dims"),
    ):
        with pytest.raises(CannotLower) as e:
            lower_group(group_of(fn, args).graph)
        assert why in e.value.because
