"""Products that leave out zeros within rows: native code and the interpreter against float64, and which side ran."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hotfuse.lower.common.errors import CannotLower
from hotfuse.lower.cpu.gemm.product_group import lower_contraction
from hotfuse.lower.cpu.gemm.sparse import BAND, PART
from hotfuse.lower.cpu.tiling import Core
from hotfuse.lower.run.kernel_state import NEVER, ROWS_TOGETHER, WHOLE
from tests.contract.lowering import group_of
from tests.contract.test_skipping import Native, interpreted, weights

K, N = 75, 52
CORES = (Core(16, 32), Core(8, 16, threads=2))


def zeros(rows: int, share: float, seed: int = 0, *, channels: bool = False, k: int = K) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    kept = torch.rand(1 if channels else rows, k, generator=g) >= share
    return torch.randn(rows, k, generator=g) * kept


def exact(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.linear(x.double(), w.double(), b.double()))


@pytest.mark.parametrize("core", CORES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 7, 30])
def test_both_sides_are_right_whatever_is_zero(rows: int, core: Core) -> None:
    w, b = weights(N, K)
    group = group_of(lambda x: torch.relu(F.linear(x, w, b)), [zeros(rows, 0)], constants=True)
    made = lower_contraction(group.graph, core, sparse=ROWS_TOGETHER)
    native = Native(made, group)
    for share in (0.0, 0.5, 0.95, 1.0):
        for channels in (False, True):
            x = zeros(rows, share, channels=channels)
            for limit in (0, 500, WHOLE, NEVER):
                (got,) = native.at(limit, x)
                torch.testing.assert_close(got.double(), exact(x, w, b), rtol=0, atol=3e-5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("k", [PART, 2 * PART + 76])
def test_parts_of_k_and_bands_of_rows(k: int, dynamic: bool) -> None:
    """Sums of more rows than are kept at once, over parts of K of which the last is short, and some without anything in them."""
    w, b = weights(N, k)
    rows = BAND + 7
    group = group_of(lambda x: torch.relu(F.linear(x, w, b)), [zeros(rows, 0, k=k)], dynamic, constants=True)
    native = Native(lower_contraction(group.graph, CORES[1], sparse=ROWS_TOGETHER), group)
    for many in (rows, 2 * BAND, 1) if dynamic else (rows,):
        x = zeros(many, 0.9, k=k)
        x[: many // 2, :PART] = 0
        (got,) = native.at(0, x)
        assert native.state.skipped
        torch.testing.assert_close(got.double(), exact(x, w, b), rtol=0, atol=2e-4)


def test_the_interpreter_says_the_same() -> None:
    w, b = weights(N, K)
    group = group_of(lambda x: torch.relu(F.linear(x, w, b)), [zeros(6, 0)], constants=True)
    made = lower_contraction(group.graph, CORES[0], sparse=ROWS_TOGETHER)
    for limit, skipped in ((0, 1), (NEVER, 0)):
        (got,), state = interpreted(made, group, [zeros(6, 0.8)], limit)
        torch.testing.assert_close(got.double(), exact(zeros(6, 0.8), w, b), rtol=0, atol=3e-5)
        assert list(state[1:]) == [skipped, 1 - skipped]


def test_the_share_of_steps_decides() -> None:
    w, b = weights(N, K)
    group = group_of(lambda x: torch.relu(F.linear(x, w, b)), [zeros(8, 0)], constants=True)
    native = Native(lower_contraction(group.graph, CORES[0], sparse=ROWS_TOGETHER), group)
    dead = zeros(8, 0)
    dead[:, : K // 2] = 0  # 493 of 1,000 steps of both groups of rows
    native.at(450, dead)
    assert (native.state.skipped, native.state.dense) == (1, 0)
    native.at(550, dead)
    assert (native.state.skipped, native.state.dense) == (1, 1)
    half = zeros(8, 0)
    half[:ROWS_TOGETHER] = 0  # the first rows promise more than all keep
    native.at(550, half)
    assert (native.state.skipped, native.state.dense) == (1, 2)


def test_what_is_not_zero_stays_and_zero_of_either_sign_goes() -> None:
    w, b = weights(N, K)
    group = group_of(lambda x: torch.relu(F.linear(x, w, b)), [zeros(5, 0)], constants=True)
    native = Native(lower_contraction(group.graph, CORES[0], sparse=ROWS_TOGETHER), group)
    x = zeros(5, 0.9)
    x[x == 0] = -0.0
    x[0, 3], x[4, 7], x[2, 5] = torch.nan, torch.inf, 1e-45
    (got,) = native.at(0, x)
    torch.testing.assert_close(got.double(), exact(x, w, b), rtol=0, atol=3e-5, equal_nan=True)
    assert got[0].isnan().all()


@pytest.mark.parametrize("shape", [(0, K), (3, K), (17, K), (2, 5, K)], ids=str)
def test_rows_that_a_call_tells_and_batches(shape: tuple[int, ...]) -> None:
    w, b = weights(N, K)
    sample = zeros(6, 0) if len(shape) == 2 else zeros(6, 0).reshape(2, 3, K)
    group = group_of(lambda x: torch.relu(F.linear(x, w, b)), [sample], len(shape) == 2, constants=True)
    if len(shape) == 3:
        group = group_of(lambda x: torch.relu(F.linear(x, w, b)), [zeros(10, 0).reshape(shape)], constants=True)
    native = Native(lower_contraction(group.graph, CORES[0], sparse=ROWS_TOGETHER), group)
    x = zeros(max(1, torch.Size(shape[:-1]).numel()), 0.7)[: torch.Size(shape[:-1]).numel()].reshape(shape)
    for limit in (0, NEVER):
        (got,) = native.at(limit, x)
        torch.testing.assert_close(got.double(), exact(x, w, b), rtol=0, atol=3e-5)


def test_rows_that_are_computed_on_the_way_are_not_looked_at() -> None:
    w, _ = weights(N, K)
    group = group_of(lambda x: F.linear(torch.relu(x), w), [zeros(6, 0)], constants=True)
    with pytest.raises(CannotLower, match="as they lie"):
        lower_contraction(group.graph, CORES[0], sparse=ROWS_TOGETHER)
