"""Means and sums over all pixels of images with channels innermost: interpreted and native, against torch in float64.

Bound: sums of n numbers of magnitude 1, in blocks of 64 pixels and then of blocks, are within (64 + n / 64 + 16) units of 2**-24
of the sum of magnitudes.
"""

from __future__ import annotations

import math

import pytest
import torch

from hotfuse.backends.llvm.native import compile_kernel, load_kernel
from hotfuse.backends.llvm.runs.kernel_call import artifact
from hotfuse.ir.text import parse
from hotfuse.lower import lower
from hotfuse.lower.cpu.averages import BLOCK_PIXELS, MAX_VECTORS, MIN_VECTORS, cut, is_average
from hotfuse.lower.cpu.group import lower_group
from hotfuse.lower.cpu.tiling import Core, core_for
from hotfuse.tile.program import Loop, LoopKind
from tests.contract.lowering import Group, interpret, run_native

CORE = core_for(16, many_registers=True)
SMALL = Core(4, 16)


def images(channels: int, op: str = "mean.dim", keep: bool = True) -> Group:
    """Any number of images of any size."""
    shape = f"n, {channels}, 1, 1" if keep else f"n, {channels}"
    text = f"graph g(%x: f32[n, {channels}, h, w]{{0,2,3,1}}) {{ %y: f32[{shape}] = aten.{op}(%x, [2, 3], {keep})\n return %y }}"
    return Group(parse(text), {})


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def right(got: torch.Tensor, x: torch.Tensor, op: str, keep: bool = True) -> None:
    exact, pixels = x.double(), x.shape[2] * x.shape[3]
    want = exact.mean((2, 3), keepdim=keep) if op == "mean.dim" else exact.sum((2, 3), keepdim=keep)
    assert got.shape == want.shape and got.dtype is torch.float32
    units = BLOCK_PIXELS + pixels / BLOCK_PIXELS + 16
    allowed = units * 2.0**-24 * exact.abs().sum((2, 3), keepdim=keep) / (max(pixels, 1) if op == "mean.dim" else 1)
    assert torch.equal(got.isnan(), want.isnan())
    assert bool(((got - want).abs() <= allowed + 1e-45)[~want.isnan()].all())


@pytest.mark.parametrize(
    ("channels", "op", "core"),
    [
        (12, "mean.dim", CORE),
        (24, "mean.dim", CORE),
        (96, "mean.dim", CORE),
        (16, "sum.dim_IntList", CORE),
        (24, "mean.dim", SMALL),
    ],
)
def test_pixels_that_fill_no_block_and_no_width(channels: int, op: str, core: Core) -> None:
    group = images(channels, op)
    assert is_average(group.graph, core)
    lowered = lower(group.graph, core)
    native = artifact(group.graph, lowered, load_kernel(compile_kernel(lowered.kernel)), {}, "").run
    for shape in ((1, 1, 1), (2, 7, 9), (1, 8, 8), (1, 5, 13), (3, 10, 20), (0, 3, 3), (2, 0, 5)):
        n, h, w = shape
        x = drawn(n, channels, h, w)
        for got in (interpret(lowered, group, [x]), native(x)):
            right(got[0], x, op)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_share_the_pixels_of_one_image(threads: int) -> None:
    group = images(48, keep=False)
    lowered = lower(group.graph, CORE)
    shared = lowered.kernel.body[0]
    assert isinstance(shared, Loop) and shared.kind is LoopKind.PARALLEL
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for h, w in ((81, 83), (160, 160)):
            x = drawn(1, 48, h, w)
            right(run_native(lowered, group, [x])[0], x, "mean.dim", keep=False)
    finally:
        torch.set_num_threads(before)


def test_what_is_in_one_channel_of_one_image_stays_there() -> None:
    group = images(24)
    x = drawn(2, 24, 9, 15)
    x[0, 3, 8, 14], x[1, 5, 0, 0], x[1, 23, 4, 4] = math.nan, math.inf, -math.inf
    x[0, 7, 0, 1], x[0, 7, 8, 13] = math.inf, -math.inf
    want = x.double().mean((2, 3), keepdim=True)
    for got in (interpret(lower(group.graph, CORE), group, [x]), run_native(lower(group.graph, CORE), group, [x])):
        torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_one_dim_and_three() -> None:
    for dims, order in (("l", "{0,2,1}"), ("d, h, w", "{0,2,3,4,1}")):
        rank = order.count(",") + 1
        reduced = ", ".join(map(str, range(2, rank)))
        group = Group(
            parse(
                f"graph g(%x: f32[2, 32, {dims}]{order}) {{ %y: f32[2, 32] = aten.mean.dim(%x, [{reduced}])\n return %y }}"
            ),
            {},
        )
        assert is_average(group.graph, CORE)
        x = torch.randn(2, *range(5, 3 + rank), 32).movedim(-1, 1)
        want = x.double().mean(tuple(range(2, rank)))
        for got in (interpret(lower(group.graph, CORE), group, [x]), run_native(lower(group.graph, CORE), group, [x])):
            torch.testing.assert_close(got[0].double(), want, rtol=0, atol=1e-6)


def test_few_pixels_fill_vectors() -> None:
    for lanes in (4, 8, 16):
        for channels in range(1, 600):
            found = cut(channels, lanes)
            if found is None:
                continue
            assert BLOCK_PIXELS % found.pixels == 0 and MIN_VECTORS <= found.vectors <= MAX_VECTORS
            assert found.pixels * channels % (found.vectors * lanes) == 0


def test_others_are_ordinary_groups() -> None:
    planes = "graph g(%x: f32[2, 32, 4, 4]) { %y: f32[2, 32] = aten.mean.dim(%x, [2, 3])\n return %y }"
    one = "graph g(%x: f32[2, 32, 4, 4]{0,2,3,1}) { %y: f32[2, 32, 4] = aten.mean.dim(%x, [3])\n return %y }"
    channels = "graph g(%x: f32[2, 32, 4, 4]{0,2,3,1}) { %y: f32[2] = aten.mean.dim(%x, [1, 2, 3])\n return %y }"
    odd = "graph g(%x: f32[2, 31, 4, 4]{0,2,3,1}) { %y: f32[2, 31] = aten.mean.dim(%x, [2, 3])\n return %y }"
    double = "graph g(%x: f64[2, 32, 4, 4]{0,2,3,1}) { %y: f64[2, 32] = aten.mean.dim(%x, [2, 3])\n return %y }"
    symbol = "graph g(%x: f32[2, c, 4, 4]{0,2,3,1}) { %y: f32[2, c] = aten.mean.dim(%x, [2, 3])\n return %y }"
    assert not any(is_average(parse(text), CORE) for text in (planes, one, channels, double, symbol))
    assert is_average(parse(odd), CORE) == (cut(31, CORE.lanes) is not None)


def test_both_ways_agree() -> None:
    group = images(32)
    x = drawn(2, 32, 20, 11)
    ours, ordinary = lower(group.graph, CORE), lower_group(group.graph)
    torch.testing.assert_close(run_native(ours, group, [x]), run_native(ordinary, group, [x]), rtol=0, atol=1e-6)
