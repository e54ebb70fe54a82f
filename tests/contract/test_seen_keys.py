"""Keys that a mask hides from a whole panel of queries are left out, and nothing else changes: any mask, any numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotfuse.ir.graph import Graph
from hotfuse.lower.common.lowered import Lowered
from hotfuse.lower.cpu.attention import seen_keys
from hotfuse.lower.cpu.attention.attention_group import lower_attention
from hotfuse.lower.cpu.attention.tiling import choose
from hotfuse.native.target import host
from hotfuse.tile import interpreter
from tests.contract.test_lower_attention import (
    AVX512,
    Tensor,
    _core,  # pyright: ignore[reportPrivateUsage]
    block,
    call,
    check,
    exact,
    graph_of,
    inputs,
    interpreted,
    native,
)

HEADS, BATCH, LENGTH = 4, 2, 150
LEAST = torch.finfo(torch.float32).min
ANY = [{1: "s"}, {1: "s"}, {1: "s"}, {2: "s", 3: "s"}]


def spelled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention in single operators: a query without keys is NaN, and all the least number is an even mean."""
    q, k, v = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25 + mask, -1) @ v


def seen_by(kind: str, length: int = LENGTH, batch: int = BATCH) -> Tensor:
    """Which keys a query sees, [batch, 1, queries, keys]."""
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    one = {
        "causal": j <= i, "window": (j <= i) & (j > i - 9), "blocks": i // 30 == j // 30, "open": i + j >= 0,
        "a query without keys": (j <= i) & (i != length // 2), "holes": (j <= i) & (j % 7 != 3) | (j == i),
    }[kind]  # fmt: skip
    seen = one[None, None].repeat(batch, 1, 1, 1)
    if kind == "causal" and batch > 1:
        seen[1, :, 20:, :9] = False  # padding in front
    return seen


def as_mask(seen: Tensor, low: float | None) -> Tensor:
    return seen if low is None else torch.zeros(seen.shape).masked_fill(~seen, low)


@pytest.fixture(scope="module")
def kernels() -> dict[Any, tuple[Graph, Lowered]]:
    return {}


def lowered_for(kernels: dict[Any, Any], function: Any, args: Sequence[Tensor], *, dynamic: bool) -> tuple[Graph, Lowered]:
    key = (function is spelled, args[3].dtype, dynamic)
    if key not in kernels:
        graph = graph_of(function, args, ANY if dynamic else ())
        kernels[key] = graph, lower_attention(graph, _core(host()))
    return kernels[key]


SDPA = block(HEADS)


@pytest.mark.parametrize("kind", ["causal", "window", "blocks", "open", "a query without keys", "holes"])
@pytest.mark.parametrize("low", [None, -math.inf, LEAST], ids=["bools", "-inf", "least"])
def test_any_mask_gives_what_it_gives_without(kind: str, low: float | None, kernels: dict[Any, Any]) -> None:
    args = [*inputs(BATCH, LENGTH, LENGTH, HEADS, 16), as_mask(seen_by(kind), low)]
    expected = SDPA(*args) if kind == "a query without keys" else exact(SDPA, args)  # the least number hides nothing in float64
    for dynamic in (False, True):
        graph, lowered = lowered_for(kernels, SDPA, args, dynamic=dynamic)
        check(call(graph, lowered, args, native(host())), expected)
    if low is not None:
        graph, lowered = lowered_for(kernels, spelled, args, dynamic=False)
        check(call(graph, lowered, args, native(host())), spelled(*args), 1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e18, 1e38])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_what_is_left_out_could_have_mattered(which: int, value: float, kernels: dict[Any, Any]) -> None:
    """Hidden keys and values, queries, and numbers of the mask that are not finite, or large, count as in eager."""
    args = [*inputs(BATCH, LENGTH, LENGTH, HEADS, 16), as_mask(seen_by("causal"), LEAST)]
    args[which].view(-1)[-3 if which in (1, 2) else 5] = value
    graph, lowered = lowered_for(kernels, SDPA, args, dynamic=False)
    check(call(graph, lowered, args, native(host())), SDPA(*args), 1e-5)


def test_padding_that_one_row_tells(kernels: dict[Any, Any]) -> None:
    """A mask of keys alone."""
    seen = torch.arange(LENGTH)[None] < torch.tensor([[40], [LENGTH]])
    args = [*inputs(BATCH, LENGTH, LENGTH, HEADS, 16), seen[:, None, None]]
    graph = graph_of(SDPA, args)
    lowered = lower_attention(graph, _core(host()))
    for lengths in ((40, LENGTH), (1, 77), (0, 3)):
        args[3] = (torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None])[:, None, None]
        check(call(graph, lowered, args, native(host())), exact(SDPA, args))


def test_hidden_keys_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the interpreter, which also sees every access; with and without."""
    length = 72
    products = Counter[str]()
    real = interpreter.compute

    def counting(op: str, *rest: Any) -> Any:
        products[op] += 1
        return real(op, *rest)

    monkeypatch.setattr(interpreter, "compute", counting)
    tiling = replace(choose(AVX512, 8), vectors=1)  # panels of 16 queries
    found: dict[tuple[str, bool], int] = {}
    for on in (True, False):
        monkeypatch.setattr(seen_keys, "MIN_KEYS", 64 if on else 1 << 20)
        args = [*inputs(1, length, length, HEADS, 8), seen_by("open", length, 1)]
        graph = graph_of(SDPA, args)
        lowered = lower_attention(graph, AVX512, tiling=tiling)
        for kind in ("open", "causal", "window"):
            args[3] = seen_by(kind, length, 1)
            products.clear()
            check(call(graph, lowered, args, interpreted), exact(SDPA, args))
            found[kind, on] = products["mma"]
    assert found["causal", True] < 0.72 * found["causal", False] and found["window", True] < 0.5 * found["window", False], found
    assert found["open", True] < 1.1 * found["open", False], found
