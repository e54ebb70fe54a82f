"""Products of two activations: torch, the tile interpreter and native code, against float64.

Bound: |error| <= (K + 8) * unit * (|a| @ |b| + |bias|), unit being that of the sums (fp32 for halves), plus one rounding to the
result's type; epilogues add 1e-5 relative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.cpu.gemm.bmm import lower_product
from hotfuse.lower.cpu.tiling import Core
from tests.contract.lowering import group_of, interpret, run_native

Tensor = torch.Tensor
AVX512, SMALL = Core(16, 32), Core(4, 16)
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-24}
ROUND = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def check(
    fn: Callable[..., Any], tensors: Sequence[Tensor], k: int, *, symbolic: bool = False, core: Core = AVX512,
    native: bool = True,
) -> None:  # fmt: skip
    group = group_of(fn, tensors, symbolic)
    lowered = lower_product(group.graph, core)
    exact = fn(*(t.double() for t in tensors))
    size = fn(*(t.double().abs() for t in tensors)).abs() + 1
    dtype = tensors[0].dtype
    bound = (k + 8) * UNIT[dtype] * size + ROUND[dtype] * exact.abs() + 1e-5 * (UNIT[dtype] > 1e-10) * size
    ways = [interpret(lowered, group, tensors)] + ([run_native(lowered, group, tensors)] if native else [])
    for got in ways:
        assert got[0].shape == exact.shape and got[0].dtype is dtype
        assert (got[0].double() - exact).abs().le(bound).all()


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("turned_a", [False, True])
@pytest.mark.parametrize("turned_b", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 50, 33), (7, 5, 3), (20, 70, 18), (13, 48, 64)])
def test_every_layout(m: int, n: int, k: int, turned_a: bool, turned_b: bool, symbolic: bool) -> None:
    a = rand(3, k, m).transpose(1, 2) if turned_a else rand(3, m, k)
    b = rand(3, n, k).transpose(1, 2) if turned_b else rand(3, k, n)
    check(torch.bmm, (a, b), k, symbolic=symbolic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symbolic", [False, True])
def test_every_type(dtype: torch.dtype, symbolic: bool) -> None:
    a, b = rand(2, 11, 19, dtype=dtype), rand(2, 19, 35, dtype=dtype)
    check(torch.bmm, (a, b), 19, symbolic=symbolic)


@pytest.mark.parametrize("shape", [(0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_sizes_of_nothing(shape: tuple[int, int, int, int], symbolic: bool) -> None:
    count, m, k, n = shape
    check(torch.bmm, (rand(count, m, k), rand(count, k, n)), k, symbolic=symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
def test_batches_are_broadcast(symbolic: bool) -> None:
    check(torch.matmul, (rand(2, 1, 6, 9), rand(3, 9, 21)), 9, symbolic=symbolic)
    check(torch.matmul, (rand(6, 9), rand(2, 3, 9, 21)), 9, symbolic=symbolic)
    check(torch.matmul, (rand(2, 3, 6, 9), rand(9, 21)), 9, symbolic=symbolic)


@pytest.mark.parametrize("core", [AVX512, SMALL], ids=["avx512", "small"])
@pytest.mark.parametrize("symbolic", [False, True])
def test_epilogues_and_views_in_front(core: Core, symbolic: bool) -> None:
    def heads(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        left = q.view(q.shape[0], q.shape[1], 2, 8).transpose(1, 2)
        right = k.view(k.shape[0], k.shape[1], 2, 8).permute(0, 2, 3, 1)
        return F.gelu(torch.matmul(left, right) * 0.125 + mask)

    check(heads, (rand(3, 11, 16), rand(3, 13, 16), rand(3, 1, 1, 13)), 8, symbolic=symbolic, core=core)


@pytest.mark.parametrize("symbolic", [False, True])
def test_batch_dims_that_are_one_in_the_product(symbolic: bool) -> None:
    def folded(q: Tensor, k: Tensor) -> Tensor:
        return torch.relu(torch.bmm(q.reshape(6, q.shape[2], 8), k.reshape(6, k.shape[2], 8).transpose(1, 2)))

    check(folded, (rand(2, 3, 11, 8), rand(2, 3, 13, 8)), 8, symbolic=symbolic)


def test_added_tensors_and_factors() -> None:
    a, b = rand(2, 5, 7), rand(2, 7, 33)
    for bias in (rand(2, 5, 33), rand(33), rand(2, 1, 33), rand(5, 1)):
        check(lambda c, x, y: torch.baddbmm(c, x, y, beta=0.5, alpha=2.0), (bias, a, b), 7)
    nans = torch.full((33,), torch.nan)
    group = group_of(lambda c, x, y: torch.baddbmm(c, x, y, beta=0), (nans, a, b))
    assert torch.isfinite(run_native(lower_product(group.graph, AVX512), group, (nans, a, b))[0]).all()
    check(torch.addmm, (rand(33), rand(5, 7), rand(7, 33)), 7)
    check(F.linear, (rand(2, 5, 7), rand(33, 7), rand(33)), 7)


def test_rows_any_distance_apart() -> None:
    wide = rand(2, 24, 40)
    check(torch.bmm, (wide[:, ::2, :9], rand(2, 30, 21)[:, ::3, :][:, :9]), 9)
    check(torch.bmm, (wide[:, :7, 1:19:2], rand(2, 9, 70)[:, :, ::2]), 9)
    same = rand(1, 1, 9).expand(2, 12, 9)
    check(torch.bmm, (same, same.transpose(1, 2)), 9)


def test_what_is_not_a_number_stays_in_its_row_and_column() -> None:
    a, b = rand(1, 12, 9), rand(1, 9, 50)
    a[0, 3, 4], b[0, 2, 49] = torch.nan, torch.inf
    group = group_of(torch.bmm, (a, b))
    (got,) = run_native(lower_product(group.graph, AVX512), group, (a, b))
    want = torch.bmm(a, b)
    assert torch.equal(torch.isnan(got), torch.isnan(want)) and torch.equal(torch.isinf(got), torch.isinf(want))


def test_computed_operands_are_refused() -> None:
    group = group_of(lambda a, b: torch.bmm(torch.exp(a), b), (rand(2, 3, 4), rand(2, 4, 5)))
    with pytest.raises(CannotLower, match="is computed"):
        lower_product(group.graph, AVX512)
