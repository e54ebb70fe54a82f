"""Pools, resizing and borders against torch in float64, row-major and channels last, with sizes as numbers and as symbols.

Bounds: 1e-5 of the largest element for f32 means and interpolations (places and weights are computed in f32, as torch does);
maxima, nearest pixels and borders exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.cpu.group import lower_group
from tests.contract.lowering import group_of, interpret, run_native

R = torch.randn
Tensor = torch.Tensor
Fn = Callable[..., Any]

EXACT: dict[str, Fn] = {
    "max 3/2 pad 1": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max 2": lambda x: F.max_pool2d(x, 2),
    "max 2, last window cut off": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "max 3/2 pad 1, last window cut off": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max dilated": lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2),
    "max uneven": lambda x: F.max_pool2d(x, (1, 4), (2, 3), (0, 2)),
    "max of many places": lambda x: F.max_pool2d(x[:1, :3], 7, 3, 3),
    "max, then more": lambda x: F.max_pool2d(x, 3, 2, 1).relu() * 2,
    "max of one element": lambda x: F.max_pool2d(x, 1, 2),
    "nearest, doubled": lambda x: F.interpolate(x, scale_factor=2),
    "nearest, tripled and doubled": lambda x: F.interpolate(x, scale_factor=(3.0, 2.0)),
    "nearest to a size": lambda x: F.interpolate(x, size=(13, 20)),
    "nearest, smaller": lambda x: F.interpolate(x, size=(4, 5)),
    "nearest exact": lambda x: F.interpolate(x, size=(13, 20), mode="nearest-exact"),
    "nearest and a sum": lambda x: F.interpolate(x, scale_factor=2) + 1,
    "reflect": lambda x: F.pad(x, (2, 3, 1, 4), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 3, 1, 4), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 3, 1, 4), mode="circular"),
    "reflect of an expression": lambda x: F.pad(x.relu() + 1, (2, 0, 0, 1), mode="reflect").transpose(1, 2),
}
NEAR: dict[str, Fn] = {
    "mean 3/2 pad 1": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "mean without padding": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "mean 2, last window cut off": lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    "mean 3/2 pad 1, last window cut off": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "mean by another number": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "mean of many places": lambda x: F.avg_pool2d(x[:1, :3], 7, 3, 3),
    "mean of all": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean of all, then more": lambda x: torch.sigmoid(F.adaptive_avg_pool2d(x, 1)) * x,
    "bilinear": lambda x: F.interpolate(x, size=(13, 20), mode="bilinear"),
    "bilinear, corners aligned": lambda x: F.interpolate(x, size=(13, 20), mode="bilinear", align_corners=True),
    "bilinear, doubled": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "bilinear, halved": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "bilinear to one": lambda x: F.interpolate(x, size=(1, 1), mode="bilinear", align_corners=True),
}
OTHER_RANKS: dict[str, tuple[Fn, Tensor]] = {
    "max 1d": (lambda x: F.max_pool1d(x, 3, 2, 1), R(2, 5, 37)),
    "mean 1d": (lambda x: F.avg_pool1d(x, 4, 3), R(2, 5, 37)),
    "max 3d": (lambda x: F.max_pool3d(x, 2, 2), R(1, 3, 4, 6, 5)),
    "mean 3d": (lambda x: F.avg_pool3d(x, 2, 1, 1), R(1, 3, 4, 6, 5)),
    "nearest 1d": (lambda x: F.interpolate(x, scale_factor=4), R(2, 5, 7)),
    "linear 1d": (lambda x: F.interpolate(x, size=17, mode="linear"), R(2, 5, 7)),
    "trilinear": (lambda x: F.interpolate(x, size=(5, 7, 3), mode="trilinear"), R(1, 2, 3, 4, 6)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), R(2, 5, 8, 9)),
    "reflect 1d": (lambda x: F.pad(x, (3, 2), mode="reflect"), R(2, 5, 7)),
    "without a batch": (lambda x: F.max_pool2d(x, 2), R(5, 8, 9)),
    "one pixel": (lambda x: F.max_pool2d(x, 3, 2, 1), R(2, 5, 1, 1)),
    "no image": (lambda x: F.max_pool2d(x, 3, 2, 1), R(0, 5, 8, 8)),
}


def _ordered(x: Tensor, order: str) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if order == "last" else x


def image(order: str) -> Tensor:
    return _ordered(R(1, 19, 9, 11), order)


def check(fn: Fn, x: Tensor, symbolic: bool, exact: bool) -> None:
    group = group_of(fn, [x], symbolic)
    lowered = lower_group(group.graph)
    expected = fn(x)
    reference = expected if exact else fn(x.double())
    for (got,) in (interpret(lowered, group, [x]), run_native(lowered, group, [x])):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        if exact:
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        elif got.numel():
            assert float((got.double() - reference.double()).abs().max()) <= 1e-5 * max(1.0, float(reference.abs().max()))


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("order", ["rows", "last"])
@pytest.mark.parametrize("name", [*EXACT, *NEAR])
def test_images(name: str, order: str, symbolic: bool) -> None:
    check({**EXACT, **NEAR}[name], image(order), symbolic, exact=name in EXACT)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", OTHER_RANKS)
def test_other_ranks(name: str, symbolic: bool) -> None:
    fn, x = OTHER_RANKS[name]
    if symbolic and name == "adaptive":  # whether the windows are alike depends on the size
        with pytest.raises(CannotLower):
            lower_group(group_of(fn, [x], symbolic).graph)
        return
    check(fn, x, symbolic, exact=False)


@pytest.mark.parametrize("order", ["rows", "last"])
def test_one_kernel_serves_other_sizes(order: str) -> None:
    fn = lambda x: F.interpolate(F.max_pool2d(x, 3, 2, 1), scale_factor=2)  # noqa: E731
    pool = lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)  # noqa: E731
    group = group_of(pool, [_ordered(R(2, 19, 9, 11), order)], symbolic=True)
    lowered = lower_group(group.graph)
    for shape in ((1, 2, 2, 2), (3, 19, 5, 17), (2, 33, 64, 3)):
        x = _ordered(R(shape), order)
        for (got,) in (interpret(lowered, group, [x]), run_native(lowered, group, [x])):
            torch.testing.assert_close(got, pool(x), rtol=1e-5, atol=1e-5)
    resized = lambda x: F.interpolate(fn(x), size=(5, 7))  # noqa: E731  # the pixels of a pool at places that are data
    check(resized, image(order), symbolic=False, exact=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_maxima_of_other_types(dtype: torch.dtype) -> None:
    x = (R(2, 5, 9, 11) * 10).to(dtype)
    check(lambda t: F.max_pool2d(t, 3, 2, 1), x, symbolic=False, exact=True)
    check(lambda t: F.max_pool2d(t, 3, 2, 1), x, symbolic=True, exact=True)


def test_nan_and_infinity() -> None:
    x = R(1, 3, 8, 8)
    x[0, 0, 2, 3], x[0, 1, 4, 4], x[0, 2] = torch.nan, torch.inf, -torch.inf
    for symbolic in (False, True):
        check(lambda t: F.max_pool2d(t, 3, 2, 1), x, symbolic, exact=True)


def test_indices_stay_with_the_library() -> None:
    with pytest.raises(CannotLower):
        lower_group(group_of(lambda x: F.max_pool2d(x, 2, return_indices=True), [R(1, 2, 4, 4)]).graph)
