"""Attention written as products and a softmax: recognized, and one kernel with the same special values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from hotfuse.analysis.attention import written
from hotfuse.fusion.groups import group
from hotfuse.lower.cpu.attention.attention_group import lower_attention
from hotfuse.lower.cpu.tiling import Core
from tests.contract.test_lower_attention import (
    BOTH_WAYS,
    both,
    call,
    check,
    exact,
    graph_of,
    heads,
    inputs,
    merged,
    numbers,
)

Tensor = torch.Tensor
Step = Callable[[Tensor], Tensor]
INF = math.inf


def spelled(n: int, *, before: Step = lambda q: q, keys: Step = lambda k: k, scores: Step = lambda s: s,
            weights: Step = lambda p: p, softmax: Step = lambda s: s.softmax(-1)) -> Callable[..., Tensor]:  # fmt: skip
    """Attention as an exporter writes it; the steps say what is done in between."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = scores(before(heads(q, n)) @ keys(heads(k, n).transpose(-1, -2)))
        return merged(weights(softmax(s)) @ heads(v, n))

    return function


@BOTH_WAYS
@pytest.mark.parametrize("d", [15, 16, 40])
@pytest.mark.parametrize("s", [1, 5, 40])
def test_scales_on_either_side(s: int, d: int, execute: Callable[..., None], core: Core) -> None:
    args = inputs(2, s, s, 2, d)
    for function in (
        spelled(2, before=lambda q: q * 0.3),
        spelled(2, before=lambda q: q / 3.5 + 0.0, keys=lambda k: k * 0.7),
        spelled(2, scores=lambda s: s / math.sqrt(17.0)),
        spelled(2),
    ):
        both(function, args, core=core, execute=execute, tolerance=1e-5)


def masked(n: int, step: Callable[[Tensor, Tensor], Tensor], *, safe: bool = False) -> Callable[..., Tensor]:
    """Attention with a mask among its inputs."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        p = step(heads(q, n) @ heads(k, n).transpose(-1, -2), mask).softmax(-1)
        return merged((torch.ops.aten.where.ScalarSelf(p.isnan(), 0.0, p) if safe else p) @ heads(v, n))

    return function


MASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "added": (lambda s, m: s * 0.25 + m, False),
    "added to": (lambda s, m: m + s / 4, False),
    "filled": (lambda s, m: (s * 0.25).masked_fill(m, -INF), True),
    "kept": (lambda s, m: torch.ops.aten.where.ScalarOther(m, s, -INF), True),
    "hidden": (lambda s, m: torch.ops.aten.where.ScalarSelf(m, -INF, s), True),
    "made": (lambda s, m: s * 0.5 + torch.ops.aten.where.Scalar(m, 0.0, -INF), True),
    "made the other way": (lambda s, m: torch.ops.aten.where.Scalar(m, -INF, 0.0) + s, True),
}


@BOTH_WAYS
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str, execute: Callable[..., None], core: Core) -> None:
    step, bools = MASKS[kind]
    for shape in ((2, 1, 1, 9), (2, 2, 9, 9), (9, 9), (9,)):
        mask = numbers(*shape) > 0.3 if bools else numbers(*shape)
        if bools:
            mask[..., 4], mask[..., 5] = True, False
        args = [*inputs(2, 9, 9, 2, 16), mask]
        graph = graph_of(masked(2, step), args)
        (found,) = written(graph)
        assert found.mask is not None and found.mask.name == graph.inputs[3].name
        both(masked(2, step), args, core=core, execute=execute, expected=masked(2, step)(*args), tolerance=1e-5)


@BOTH_WAYS
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("queries", [3, 20])
def test_a_query_without_keys(queries: int, safe: bool, execute: Callable[..., None], core: Core) -> None:
    """NaN after a plain softmax; 0 where the graph says so, also for NaN that came in."""
    function = masked(1, MASKS["added"][0], safe=safe)
    mask = numbers(1, 1, queries, 20)
    mask[:, :, 1] = -INF
    args = [*inputs(1, queries, 20, 1, 16), mask]
    args[0][0, 2, 3] = math.nan
    result = both(function, args, core=core, execute=execute, expected=function(*args), tolerance=1e-5)
    gone = result[0, 1:3]
    assert bool((gone == 0).all()) if safe else bool(gone.isnan().all())


@BOTH_WAYS
@pytest.mark.parametrize("sizes", [(1, 1), (3, 7), (2, 40), (5, 0)])
def test_three_dims_and_any_batch(sizes: tuple[int, int], execute: Callable[..., None], core: Core) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.2).softmax(-1), v)

    dynamic = [{0: "b", 1: "s"}] * 3
    graph = graph_of(function, [numbers(3, 11, 12), numbers(3, 11, 12), numbers(3, 11, 20)], dynamic)
    lowered = lower_attention(graph, core)
    b, s = sizes
    args = [numbers(b, s, 12), numbers(b, s, 12, seed=1), numbers(b, s, 20, seed=2)]
    check(call(graph, lowered, args, execute), exact(function, args), 1e-5)


def test_keys_that_lie_turned() -> None:
    both(lambda q, k, v: (q @ k).softmax(-1) @ v, [numbers(2, 5, 8), numbers(2, 8, 6), numbers(2, 6, 8)])


def test_a_group_of_its_own() -> None:
    graph = graph_of(spelled(2, before=lambda q: q * 0.25), inputs(1, 5, 5, 2, 16))
    (one,) = (g for g in group(graph) if g.kind == "attention")
    assert len(one.nodes) == len(graph.nodes)


def test_what_is_seen_outside_is_no_attention() -> None:
    def weights_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        p = (q @ k.mT).softmax(-1)
        return p @ v, p

    for function in (
        weights_too,
        lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
        lambda q, k, v: (q @ k.mT).relu().softmax(-1) @ v,
        lambda q, k, v: ((q @ k.mT + 1.5) * 2.0).softmax(-1) @ v,
    ):
        args = [numbers(2, 8, 8) for _ in range(3)]
        assert written(graph_of(function, args)) == ()  # type: ignore[arg-type]
