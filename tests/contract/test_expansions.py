"""Every rule that expands a composite op: it fires, and what the group computes stays the same on random tensors.

The kernel of the expanded group runs in the tile interpreter, against torch's operator in float64 (integers and indices exactly).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hotfuse.ir.rewrite import apply
from hotfuse.lower.cpu.group import lower_group
from hotfuse.lower.primitives.rules import expansions, rules
from tests.contract.lowering import group_of, interpret

aten = torch.ops.aten
R = torch.randn
Case = tuple[Callable[..., Any], list[torch.Tensor]]
LINE, IMAGE, VOLUME = (2, 3, 7), (2, 3, 6, 7), (1, 2, 5, 6, 4)
ROWS = (3, 10)
UP = {1: [14], 2: [12, 14], 3: [10, 12, 8]}
FRONT = {1: LINE, 2: IMAGE, 3: VOLUME}


def resized(name: str, rank: int, *more: Any) -> Case:
    return lambda x: getattr(aten, name).default(x, UP[rank], *more), [R(FRONT[rank])]


def padded(name: str, rank: int) -> Case:
    return lambda x: getattr(aten, f"{name}{rank}d").default(x, [2, 1] * rank), [R(FRONT[rank])]


def pooled(name: str, rank: int) -> Case:
    return lambda x: getattr(aten, f"{name}{rank}d").default(x, [2] * rank, [1] * rank, [1] * rank), [R(FRONT[rank])]


def averaged(name: str, rank: int) -> Case:
    return lambda x: getattr(aten, name).default(x, [1] * rank), [R(FRONT[rank])]


def convolved(rank: int) -> Case:
    """Depthwise: others stay whole."""
    shape = FRONT[rank]
    each, channels = [1] * rank, shape[1]
    fn = lambda x, w: getattr(aten, f"conv{rank}d").default(x, w, None, each, each, each, channels)  # noqa: E731
    return fn, [R(shape), R(channels, 1, *[3] * rank)]


def rowwise(name: str, *args: Any, overload: str = "default") -> Case:
    return lambda x: getattr(getattr(aten, name), overload)(x, *args), [R(ROWS)]


def normed(fn: Callable[..., Any]) -> Case:
    return fn, [R(IMAGE), R(3), R(3), R(3), R(3).abs() + 0.5]


CASES: dict[str, Case] = {
    **{f"upsample_nearest{r}d": resized(f"upsample_nearest{r}d", r) for r in (1, 2, 3)},
    **{f"_upsample_nearest_exact{r}d": resized(f"_upsample_nearest_exact{r}d", r) for r in (1, 2, 3)},
    "upsample_linear1d": resized("upsample_linear1d", 1, False),
    "upsample_bilinear2d": resized("upsample_bilinear2d", 2, False),
    "upsample_trilinear3d": resized("upsample_trilinear3d", 3, True),
    **{f"{name}{r}d": padded(name, r) for name in ("reflection_pad", "replication_pad") for r in (1, 2, 3)},
    **{f"{name}{r}d": pooled(name, r) for name in ("max_pool", "avg_pool") for r in (1, 2, 3)},
    **{f"adaptive_avg_pool{r}d": averaged(f"adaptive_avg_pool{r}d", r) for r in (1, 2, 3)},
    **{f"_adaptive_avg_pool{r}d": averaged(f"_adaptive_avg_pool{r}d", r) for r in (2, 3)},
    **{f"conv{r}d": convolved(r) for r in (1, 2, 3)},
    "one_hot": (lambda i: aten.one_hot.default(i, 5), [torch.randint(5, (4, 3))]),
    "scatter": (lambda x, i, s: aten.scatter.src(x, 1, i, s), [R(ROWS), torch.tensor([[1, 4], [0, 9], [3, 2]]), R(3, 2)]),
    "scatter_add": (lambda x, i, s: aten.scatter_add.default(x, 1, i, s), [R(ROWS), torch.randint(10, (3, 4)), R(3, 4)]),
    "index_put": (lambda x, i, s: aten.index_put.default(x, [i], s), [R(6, 5), torch.tensor([4, 0]), R(2, 5)]),
    "index_add": (lambda x, i, s: aten.index_add.default(x, 1, i, s), [R(ROWS), torch.tensor([4, 0, 4]), R(3, 3)]),
    "diff": (lambda x, p: aten.diff.default(x, 1, -1, p), [R(ROWS), R(3, 2)]),
    "roll": (lambda x: aten.roll.default(x, [2, 3], [0, 1]), [R(ROWS)]),
    "pixel_shuffle": (lambda x: aten.pixel_shuffle.default(x, 2), [R(2, 8, 3, 5)]),
    "pixel_unshuffle": (lambda x: aten.pixel_unshuffle.default(x, 2), [R(2, 3, 6, 4)]),
    "channel_shuffle": (lambda x: aten.channel_shuffle.default(x, 3), [R(2, 6, 3, 5)]),
    "native_channel_shuffle": (lambda x: aten.native_channel_shuffle.default(x, 3), [R(2, 6, 3, 5)]),
    "layer_norm": (lambda x, w, b: aten.layer_norm.default(x, [10], w, b), [R(ROWS), R(10), R(10)]),
    "native_layer_norm": (lambda x, w, b: aten.native_layer_norm.default(x, [10], w, b, 1e-5), [R(ROWS), R(10), R(10)]),
    "rms_norm": (lambda x, w: aten.rms_norm.default(x, [10], w, 1e-6), [R(ROWS), R(10)]),
    "_fused_rms_norm": (lambda x, w: aten._fused_rms_norm.default(x, [10], w, 1e-6)[0], [R(ROWS), R(10)]),
    "group_norm": (lambda x, w, b: aten.group_norm.default(x, 2, w, b), [R(2, 4, 5), R(4), R(4)]),
    "native_group_norm": (lambda x, w, b: aten.native_group_norm.default(x, w, b, 2, 4, 5, 2, 1e-5)[0], [R(2, 4, 5), R(4), R(4)]),
    "batch_norm": normed(lambda x, w, b, m, v: aten.batch_norm.default(x, w, b, m, v, False, 0.1, 1e-5, False)),
    "instance_norm": (
        lambda x, w, b: aten.instance_norm.default(x, w, b, None, None, True, 0.1, 1e-5, False), [R(IMAGE), R(3), R(3)]
    ),
    **{name: rowwise(name, [1], overload="dim_IntList" if name == "sum" else "dim") for name in ("sum", "mean")},
    "prod": rowwise("prod", 1, overload="dim_int"),
    **{name: rowwise(name, [1]) for name in ("amax", "amin", "logsumexp", "special_logsumexp")},
    **{name: rowwise(name, 1, overload="dim") for name in ("max", "min")},
    **{name: rowwise(name, 1) for name in ("argmax", "argmin", "glu")},
    **{name: (lambda x, name=name: getattr(aten, name).dim(x > 0, 1), [R(ROWS)]) for name in ("any", "all")},
    "count_nonzero": (lambda x: aten.count_nonzero.dim_IntList(x > 0, [1]), [R(ROWS)]),
    **{name: (lambda x, name=name: getattr(aten, name).correction(x, [1], correction=1), [R(ROWS)])
       for name in ("var", "std", "var_mean", "std_mean")},
    "linalg_vector_norm": rowwise("linalg_vector_norm", 2, [1]),
    "norm": rowwise("norm", 2, [1], overload="ScalarOpt_dim"),
    "frobenius_norm": rowwise("frobenius_norm", [1], overload="dim"),
    **{name: rowwise(name, 1, overload="int") for name in ("softmax", "log_softmax")},
    **{name: rowwise(name, 1, False) for name in ("_softmax", "_log_softmax")},
    **{name: rowwise(name, 1) for name in ("special_softmax", "_safe_softmax", "special_log_softmax")},
    "prelu": (lambda x, w: aten.prelu.default(x, w), [R(IMAGE), R(3)]),
    "constant_pad_nd": rowwise("constant_pad_nd", [1, 2], 0.5),
    "pad": (lambda x: aten.pad.default(x, [1, 2], "constant", 0.5), [R(ROWS)]),
    **{name: rowwise(name, 1) for name in ("cumsum", "cumprod", "cummax", "cummin")},
    "topk": rowwise("topk", 3),
    "sort": rowwise("sort", 1),
    "argsort": rowwise("argsort", 1),
}  # fmt: skip


def test_every_rule_has_a_case() -> None:
    assert {f"aten.{name}" for name in CASES} == expansions().keys()


@pytest.mark.budget_s(10)
@pytest.mark.parametrize("name", CASES)
def test_the_expanded_group_computes_the_same(name: str) -> None:
    fn, tensors = CASES[name]
    group = group_of(fn, tensors)
    _, steps = apply(group.graph, rules(group.graph, convolutions=True))
    assert f"expand-{name}" in [s.rule for s in steps]
    found = interpret(lower_group(group.graph), group, tensors)
    expected = fn(*(t.double() if t.is_floating_point() else t for t in tensors))
    for got, want in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        if want.is_floating_point():
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(got, want)
