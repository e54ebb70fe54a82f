"""Softmax of dense rows, three rows in hand: interpreted and native, against torch in float64.

Bound: within 1e-6 of the exact result, relative to it, as far as fp32 has normal numbers for it.
"""

from __future__ import annotations

import math

import pytest
import torch

from hotfuse.ir.text import parse
from hotfuse.lower import lower
from hotfuse.lower.cpu.group import Options, lower_group
from hotfuse.lower.cpu.softmax_rows import BLOCK_ROWS, is_rows
from hotfuse.lower.cpu.tiling import core_for
from tests.contract.lowering import Group, group_of, interpret, run_native

CORE = core_for(16, many_registers=True)


def hardening_jobs(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def right(got: list[torch.Tensor], x: torch.Tensor) -> None:
    """A difference from the maximum under 64 is rounded by 2**-19 at most: its power is off by that, and two units more."""
    want = hardening_jobs(x.double())
    assert got[0].shape == x.shape and got[0].dtype is torch.float32
    torch.testing.assert_close(got[0].double(), want, rtol=2**-19 + 2 * 2**-20, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("columns", [32, 33, 47, 64, 100, 768])
@pytest.mark.parametrize("rows", [0, 1, 2, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 3])
def test_rows_and_tails(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns) * 4
    group = group_of(hardening_jobs, [x])
    assert is_rows(group.graph, CORE)
    lowered = lower(group.graph, CORE)
    if rows < BLOCK_ROWS + 2:
        right(interpret(lowered, group, [x]), x)
    right(run_native(lowered, group, [x]), x)


def test_what_is_in_one_row_stays_there() -> None:
    """Rows that are NaN, infinite, or nothing but -inf, between ordinary ones, at both ends of blocks."""
    x = torch.randn(3 * BLOCK_ROWS, 70)
    odd = {
        0: -math.inf,
        BLOCK_ROWS - 1: math.nan,
        BLOCK_ROWS: math.inf,
        2 * BLOCK_ROWS: -math.inf,
        len(x) - 1: math.nan,
    }
    for row, number in odd.items():
        x[row] = number
    x[3, 5], x[7, 66], x[9, :69] = math.nan, math.inf, -math.inf
    x[11], x[13] = 3e38, -3e38
    group = group_of(hardening_jobs, [x])
    lowered = lower(group.graph, CORE)
    for got in (interpret(lowered, group, [x]), run_native(lowered, group, [x])):
        right(got, x)


@pytest.mark.parametrize("threads", [1, 3])
def test_one_kernel_serves_any_number_of_rows(threads: int) -> None:
    group = Group(parse("graph g(%x: f32[a, b, 96]) { %y: f32[a, b, 96] = aten.softmax.int(%x, 2)\n return %y }"), {})
    assert is_rows(group.graph, CORE)
    lowered = lower(group.graph, CORE)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((3, 400, 96), (1, 1, 96), (0, 4, 96), (2, BLOCK_ROWS, 96)):
            x = torch.randn(shape)
            right(run_native(lowered, group, [x]), x)
    finally:
        torch.set_num_threads(before)


def test_others_are_ordinary_groups() -> None:
    narrow, wide, turned = torch.randn(4, 31), torch.randn(2, 1 << 15), torch.randn(40, 40)
    assert not is_rows(group_of(hardening_jobs, [narrow]).graph, CORE)
    assert not is_rows(group_of(hardening_jobs, [wide]).graph, CORE)
    assert not is_rows(group_of(lambda x: torch.softmax(x, 0), [turned]).graph, CORE)
    assert not is_rows(group_of(hardening_jobs, [turned.double()]).graph, CORE)
    assert not is_rows(group_of(lambda x: torch.softmax(x * 2, -1), [turned]).graph, CORE)
    assert not is_rows(group_of(hardening_jobs, [torch.randn(4, 64)], symbolic=True).graph, CORE)


def test_both_ways_agree() -> None:
    """The group's own three loops and the one loop give the same numbers up to the order of the sum."""
    x = torch.randn(37, 200)
    group = group_of(hardening_jobs, [x])
    one, three = lower(group.graph, CORE), lower_group(group.graph, Options())
    torch.testing.assert_close(run_native(one, group, [x]), run_native(three, group, [x]), rtol=1e-6, atol=0)
