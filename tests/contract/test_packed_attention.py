"""Packed attention: the operator against a plain formula, its kernel in the tile interpreter and as native code against both."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hotfuse
from hotfuse.analysis.shapes import bind
from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.kernel_call import artifact
from hotfuse.base.errors import CallFault, InputError
from hotfuse.fusion.groups import group
from hotfuse.ir.dims import evaluate
from hotfuse.ir.graph import Graph
from hotfuse.lower import CannotLower, lower
from hotfuse.lower.cpu.attention.packed import lower_packed
from hotfuse.lower.cpu.attention.tiling import choose
from hotfuse.lower.cpu.tiling import Core
from hotfuse.ops.table import lookup
from tests.contract.test_lower_attention import (
    AVX512,
    BOTH_WAYS,
    EVERYWHERE,
    call,
    check,
    graph_of,
    interpreted,
    numbers,
)

BATCHES = ([0, 19, 19, 20, 25, 61], [0, 61], [0], [2, 19, 40], [61, 61], [0, 1, 2, 3], [5, 5, 61, 61])
"""Empty sequences, one of everything, none at all, rows of no sequence, single tokens."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "window": {"window": (5, 3)},
    "left": {"window": (2, -1)},
    "right": {"window": (-1, 4)},
    "sliding": {"window": (6, 0), "causal": True},
    "itself": {"window": (0, 0)},
}


def formula(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, offsets_k: Tensor | None = None, *, causal: bool = False,
    scale: float | None = None, window: tuple[int, int] = (-1, -1), bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Query by query in float64, with no operator of attention in it."""
    q, k, v = q.double(), k.double(), v.double()
    left, right = window
    right = 0 if causal else right
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    rows_k = (offsets if offsets_k is None else offsets_k).tolist()
    for (a, b), (c, d) in zip(itertools.pairwise(offsets.tolist()), itertools.pairwise(rows_k), strict=True):
        for i in range(a, b):
            place = i - b + d
            lo = c if left < 0 else max(c, place - left)
            hi = d if right < 0 else min(d, place + right + 1)
            for h in range(q.shape[1]):
                if lo < hi:
                    kv = h * k.shape[1] // q.shape[1]
                    scores = k[lo:hi, kv] @ q[i, h] * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
                    scores = scores if bias is None else scores + bias[i, h, lo - c : hi - c].double()
                    out[i, h] = torch.softmax(scores, 0) @ v[lo:hi, kv]
    return out


def operands(heads: int, width: int, kv: int | None = None, wide: int | None = None, rows: int = 61) -> list[Tensor]:
    kv = kv or heads
    return [numbers(rows, heads, width), numbers(rows, kv, width, seed=1), numbers(rows, kv, wide or width, seed=2)]


ON_ANY = [{0: "t"}, {0: "t"}, {0: "t"}, {0: "n"}]


@functools.cache
def _graph(case: str, heads: int, width: int, kv: int, wide: int, dtype: torch.dtype) -> Graph:
    function = functools.partial(hotfuse.packed_attention, **CASES[case])
    return graph_of(function, [*operands(heads, width, kv, wide), torch.tensor([0, 5, 20, 61], dtype=dtype)], ON_ANY)


@pytest.mark.parametrize("case", CASES)
def test_the_operator_means_the_formula(case: str) -> None:
    for offsets in BATCHES:
        args = [*(x.double() for x in operands(4, 6, 2, 5)), torch.tensor(offsets)]
        check(hotfuse.packed_attention(*args, **CASES[case]), formula(*args, **CASES[case]), 1e-12)


@EVERYWHERE
@pytest.mark.parametrize("case", ["plain", "causal", "window"])
def test_one_kernel_for_all_batches(case: str, execute: Callable[..., None], core: Core) -> None:
    """Every sequence sees itself only; blocks of 16 keys stand for the hundreds that real ones have."""
    graph = _graph(case, 2, 16, 2, 16, torch.int64)
    lowered = lower_packed(graph, core, tiling=replace(choose(core, 16), block=16))
    for offsets in BATCHES:
        args = [*operands(2, 16), torch.tensor(offsets)]
        check(call(graph, lowered, args, execute), formula(*args, **CASES[case]))


@EVERYWHERE
@pytest.mark.parametrize("case", ["plain", "causal"])
def test_a_bias_is_added_to_scores(case: str, execute: Callable[..., None], core: Core) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, bias: Tensor) -> Tensor:
        return hotfuse.packed_attention(q, k, v, offsets, bias=bias, **CASES[case])

    bias = numbers(61, 2, 43, seed=3)
    first = [*operands(2, 16), torch.tensor([0, 20, 61]), bias]
    graph = graph_of(function, first, [*ON_ANY, {0: "t", 2: "s"}])
    lowered = lower_packed(graph, core, tiling=replace(choose(core, 16), block=16))
    for offsets in ([0, 20, 61], [0, 19, 19, 20, 25, 61], [2, 19, 40], [0]):
        args = [*operands(2, 16), torch.tensor(offsets), bias]
        want = formula(*args[:4], bias=bias, **CASES[case])
        check(call(graph, lowered, args, execute), want)
        check(function(*args), want)
    args = [*operands(2, 16), torch.tensor([0, 61]), bias]  # a sequence for which it has too few keys
    with pytest.raises(InputError, match="for 43 keys, and a sequence has 61"):
        function(*args)
    if execute is interpreted:
        with pytest.raises(hotfuse.HotfuseError, match="require"):
            call(graph, lowered, args, execute)


@BOTH_WAYS
@pytest.mark.parametrize("case", ["left", "right", "sliding", "itself"])
def test_windows(case: str, execute: Callable[..., None], core: Core) -> None:
    graph = _graph(case, 1, 8, 1, 8, torch.int64)
    lowered = lower_packed(graph, core, tiling=replace(choose(core, 8), block=16))
    for offsets in BATCHES[:2]:
        args = [*operands(1, 8), torch.tensor(offsets)]
        check(call(graph, lowered, args, execute), formula(*args, **CASES[case]))


HEADS = [(4, 16, 2, 24), (1, 1, 1, 1), (3, 7, 1, 5), (1, 64, 1, 64), (6, 8, 3, 1)]


@BOTH_WAYS
@pytest.mark.parametrize(("heads", "width", "kv", "wide"), HEADS)
def test_heads(heads: int, width: int, kv: int, wide: int, execute: Callable[..., None], core: Core) -> None:
    for case in ("plain", "causal"):
        graph = _graph(case, heads, width, kv, wide, torch.int32)
        lowered = lower_packed(graph, core)
        for offsets in ([0, 19, 19, 20, 61], [0, 0]):
            args = [*operands(heads, width, kv, wide), torch.tensor(offsets, dtype=torch.int32)]
            check(call(graph, lowered, args, execute), formula(*args, **CASES[case]))


@BOTH_WAYS
def test_long_sequences(execute: Callable[..., None], core: Core) -> None:
    """Several panels of queries and, as real kernels are cut, all keys in one block."""
    for case in ("plain", "causal", "window"):
        graph = _graph(case, 1, 8, 1, 8, torch.int64)
        args = [*operands(1, 8, rows=150), torch.tensor([0, 3, 145, 150])]
        check(call(graph, lower_packed(graph, core), args, execute), formula(*args, **CASES[case]))


@BOTH_WAYS
@pytest.mark.parametrize("case", ["plain", "causal", "window", "sliding"])
def test_other_keys_than_queries(case: str, execute: Callable[..., None], core: Core) -> None:
    """The last query stands at the last key; a query before the first key is 0, and so is one of a sequence without keys."""

    def function(*args: Tensor) -> Tensor:
        return hotfuse.packed_attention(*args, **CASES[case])

    def given(q_rows: Sequence[int], k_rows: Sequence[int]) -> list[Tensor]:
        q, k, v = operands(2, 8, rows=40)
        return [q[: q_rows[-1]], k[: k_rows[-1]], v[: k_rows[-1]], torch.tensor(q_rows), torch.tensor(k_rows)]

    dynamic = [{0: "t"}, {0: "s"}, {0: "s"}, {0: "n"}, {0: "n"}]
    graph = graph_of(function, given([0, 5, 20], [0, 9, 31]), dynamic)
    lowered = lower_packed(graph, core, tiling=replace(choose(core, 8), block=16))
    for q_rows, k_rows in (([0, 5, 20], [0, 9, 31]), ([0, 20, 27], [0, 3, 40]), ([0, 4, 8], [0, 0, 8]), ([0, 0], [0, 3])):
        args = given(q_rows, k_rows)
        check(function(*(x.double() if x.is_floating_point() else x for x in args)), formula(*args, **CASES[case]), 1e-12)
        check(call(graph, lowered, args, execute), formula(*args, **CASES[case]))


def projected(x: Tensor, offsets: Tensor) -> Tensor:
    """Queries, keys and values of one projection, heads put together behind."""
    q, k, v = (part.unflatten(-1, (2, 8)) for part in x.split(16, -1))
    return hotfuse.packed_attention(q, k, v, offsets).reshape(-1, 16)


@BOTH_WAYS
def test_views_around_it_cost_nothing(execute: Callable[..., None], core: Core) -> None:
    x = numbers(30, 48)
    graph = graph_of(projected, [x, torch.tensor([0, 9, 30])], [{0: "t"}, {0: "n"}])
    lowered = lower(graph, core)
    for rows, offsets in ((30, [0, 9, 30]), (17, [0, 16]), (1, [0, 1]), (0, [0, 0])):
        args = [numbers(rows, 48, seed=3), torch.tensor(offsets)]
        check(call(graph, lowered, args, execute), projected(args[0].double(), args[1]))


def test_a_group_takes_in_views_of_projections_but_not_of_offsets() -> None:
    def function(x: Tensor, lengths: Tensor) -> Tensor:
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return projected(x, offsets[:])

    graph = graph_of(function, [numbers(30, 48), torch.tensor([9, 21])], [{0: "t"}, {0: "n"}])
    (found,) = (g for g in group(graph) if g.kind == "attention")
    ops = [graph.nodes[i].op.split(".")[1] for i in found.nodes]
    assert "packed_attention" in ops and "split" in ops and "reshape" in ops
    assert not {"cumsum", "pad", "constant_pad_nd"} & set(ops)


@BOTH_WAYS
def test_nan_and_infinity_stay_in_their_sequence(execute: Callable[..., None], core: Core) -> None:
    q, k, v = operands(2, 16)
    k[3, 0, 2], v[25, 1, 0], q[60, 1, 4] = torch.nan, torch.inf, torch.nan
    graph = _graph("plain", 2, 16, 2, 16, torch.int64)
    args = [q, k, v, torch.tensor([0, 10, 20, 40, 61])]
    result = call(graph, lower_packed(graph, core), args, execute)
    assert bool(result[:10, 0].isnan().all()) and bool(result[10:20].isfinite().all())
    assert bool((result[20:40, 1, 0] == torch.inf).all()) and bool(result[20:40, 0].isfinite().all())
    assert bool(result[60, 1].isnan().all()) and bool(result[40:60].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype: torch.dtype) -> None:
    args = [*(x.to(dtype) for x in operands(2, 16)), torch.tensor([0, 30, 61])]
    graph = graph_of(hotfuse.packed_attention, args, ON_ANY)
    got = artifact(graph, low := lower(graph, AVX512), load_kernel(compile_kernel(low.kernel)), {}, "").run(*args)[0]
    assert got.dtype is dtype
    check(got.float(), formula(*args), 4e-3 if dtype is torch.float16 else 3e-2)


WRONG = ([0, 40, 30, 61], [-1, 61], [0, 62], [0, 2**40], [5, 4], [-(2**62), 2**62])


@pytest.mark.parametrize("offsets", WRONG, ids=str)
def test_wrong_offsets_are_a_fault_and_nothing_outside_is_read_or_written(offsets: list[int]) -> None:
    args = [*operands(2, 16), torch.tensor(offsets)]
    graph = _graph("plain", 2, 16, 2, 16, torch.int64)
    lowered = lower_packed(graph, AVX512)
    native = artifact(graph, lowered, load_kernel(compile_kernel(lowered.kernel)), {}, "")
    with pytest.raises(CallFault):
        native.run(*args)
    with pytest.raises(hotfuse.HotfuseError, match="require"):
        call(graph, lowered, args, interpreted)
    with pytest.raises(InputError, match="do not ascend within the 61 rows"):
        hotfuse.packed_attention(*args)


def test_no_offsets_at_all() -> None:
    args = [*operands(2, 16), torch.tensor([], dtype=torch.int64)]
    graph = _graph("plain", 2, 16, 2, 16, torch.int64)
    lowered = lower_packed(graph, AVX512)
    with pytest.raises(CallFault):
        artifact(graph, lowered, load_kernel(compile_kernel(lowered.kernel)), {}, "").run(*args)
    with pytest.raises(InputError, match="do not ascend"):
        hotfuse.packed_attention(*args)


def test_offsets_of_queries_must_fit_keys_where_they_are_shared() -> None:
    """Passed twice, they are one operand, and there may be fewer keys than queries."""

    def function(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        return hotfuse.packed_attention(q, k, v, offsets, offsets)

    q, k, v = operands(2, 8)
    graph = graph_of(function, [q, k[:40], v[:40], torch.tensor([0, 9, 40])], [{0: "t"}, {0: "s"}, {0: "s"}, {0: "n"}])
    lowered = lower_packed(graph, AVX512)
    native = artifact(graph, lowered, load_kernel(compile_kernel(lowered.kernel)), {}, "")
    good = [q, k[:40], v[:40], torch.tensor([0, 9, 40])]
    check(native.run(*good)[0], formula(*good))
    with pytest.raises(CallFault):
        native.run(q, k[:40], v[:40], torch.tensor([0, 9, 50]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: [a[0][0], *a[1:]], "takes query as"),
        (lambda a: [a[0], a[1].double(), *a[2:]], "key is torch.float64"),
        (lambda a: [*a[:3], a[3].float()], "dims of torch.float32"),
        (lambda a: [*a[:3], a[3][None]], "2 dims"),
        (lambda a: [a[0], a[1][:, :1], *a[2:]], "heads do not fit"),
        (lambda a: [a[0], a[1][..., :3], *a[2:]], "heads do not fit"),
        (lambda a: [a[0][:, :3], *a[1:]], "heads do not fit"),
        (lambda a: [a[0], a[1][:5], *a[2:]], "5 rows of keys and 61 of values"),
        (lambda a: [a[0], a[1][:5], a[2][:5], a[3]], "pass offsets_k"),
        (lambda a: [*a, a[3][:1]], "2 offsets, and 1 of keys"),
    ],
)
def test_what_does_not_fit_is_said(change: Callable[[list[Tensor]], list[Tensor]], message: str) -> None:
    args = [*operands(4, 8, 2), torch.tensor([0, 61])]
    with pytest.raises(InputError, match=message):
        hotfuse.packed_attention(*change(args))
    with pytest.raises(InputError, match=r"bias is torch.float32 of \(61, 2, 5\)"):
        hotfuse.packed_attention(*args, bias=torch.zeros(61, 2, 5))
    with pytest.raises(InputError, match="reaches 3 keys ahead"):
        hotfuse.packed_attention(*args, causal=True, window=(-1, 3))


def test_what_cannot_be_lowered_is_said() -> None:
    args = [*operands(2, 300), torch.tensor([0, 61])]
    with pytest.raises(CannotLower, match="2 heads of 300"):
        lower(graph_of(hotfuse.packed_attention, args, ON_ANY), AVX512)
    args = [*(x.double() for x in operands(2, 8)), torch.tensor([0, 61])]
    with pytest.raises(CannotLower, match="of f64"):
        lower(graph_of(hotfuse.packed_attention, args, ON_ANY), AVX512)


def test_its_cost_follows_from_sizes() -> None:
    graph = _graph("plain", 2, 16, 2, 16, torch.int64)
    (node,) = graph.nodes
    env = bind(graph, [(60, 2, 16)] * 3 + [(7,)])
    assert isinstance(env, dict)
    assert evaluate(lookup(node.op).flops(node), env) == 60 * 2 * 10 * (2 * 16 + 2 * 16 + 8)
