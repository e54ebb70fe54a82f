"""Attention of half-precision operands, and of heads of width 1: op reference, tile interpreter and native code.

Everything is computed in fp32 from operands as they are, so the bound is one rounding of the result.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.lower.cpu.attention.attention_group import lower_attention
from hotfuse.lower.cpu.tiling import Core
from tests.contract.lowering import Group, group_of, interpret, run_native
from tests.contract.test_lower_attention import ON_ANY, graph_of

AVX512, AVX2 = Core(16, 32), Core(8, 16)
BOUND = {torch.float32: 3e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def attention(heads: int, **options: Any):
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).transpose(1, 2).flatten(2)

    return function


def check(function: Any, args: list[torch.Tensor], core: Core, symbolic: bool = False) -> None:
    found = Group(graph_of(function, args, ON_ANY), {}) if symbolic else group_of(function, args)
    lowered = lower_attention(found.graph, core)
    want = function(*(a.double() if a.is_floating_point() else a for a in args))
    bound = BOUND[args[0].dtype]
    for way in (interpret, run_native):
        (got,) = way(lowered, found, args)
        assert got.dtype is args[0].dtype and got.shape == want.shape
        assert torch.equal(got.isnan(), want.isnan())
        good = ~want.isnan()
        assert ((got.double() - want).abs() <= bound * (1 + want.abs()))[good].all(), way.__name__


def operands(dtype: torch.dtype, b: int, sq: int, sk: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sq * 100 + sk)
    return [torch.randn(b, s, width, generator=generator).to(dtype) for s in (sq, sk, sk)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("core", [AVX512, AVX2], ids=["avx512", "avx2"])
@pytest.mark.parametrize(("sq", "sk", "d"), [(1, 9, 16), (5, 5, 8), (33, 33, 15), (70, 20, 32), (2, 1, 24)])
def test_halves(dtype: torch.dtype, core: Core, sq: int, sk: int, d: int) -> None:
    check(attention(2), operands(dtype, 2, sq, sk, 2 * d), core)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_with_lengths_known_at_run_time(dtype: torch.dtype) -> None:
    check(attention(2, is_causal=True), operands(dtype, 2, 37, 37, 32), AVX512, symbolic=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["bool", "added", "added per key"])
def test_halves_with_masks(dtype: torch.dtype, kind: str) -> None:
    q, k, v = operands(dtype, 2, 19, 21, 32)
    mask = torch.rand(2, 1, 19, 21) > 0.3
    mask[..., 0] = True
    if kind != "bool":
        mask = torch.zeros(2, 1, 19, 21, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        mask = mask[:, :, :1] if kind == "added per key" else mask
    check(attention(2), [q, k, v, mask], AVX512)


def test_special_values_of_halves() -> None:
    q, k, v = operands(torch.bfloat16, 1, 20, 20, 32)
    q[0, 3, 2], v[0, 7, 20] = float("nan"), float("nan")
    check(attention(2), [q, k, v], AVX512)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize(("sq", "sk"), [(1, 5), (3, 3), (20, 33), (70, 70)])
@pytest.mark.parametrize("heads", [1, 3])
def test_heads_of_width_1(dtype: torch.dtype, sq: int, sk: int, heads: int) -> None:
    check(attention(heads), operands(dtype, 2, sq, sk, heads), AVX512)
    check(attention(heads, is_causal=True), operands(dtype, 2, sk, sk, heads), AVX512)
