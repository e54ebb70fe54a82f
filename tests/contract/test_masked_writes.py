"""Numbers that are written where a mask says so are choices between two values: the same bits, and nothing is written any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hotfuse.base.settings import Settings
from hotfuse.ops.table import packet
from hotfuse.pipeline import compile_tier0
from hotfuse.simplify import simplify_captured
from tests.contract.lowering import group_of

Write = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def written(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[m] = -7
    return y + 1


def added(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.index_put(x, (m,), torch.tensor(2.0), accumulate=True) + 1


def rows(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.index_put(x, (m,), torch.arange(5.0)) + 1


def axes_of(m: torch.Tensor, rank: int) -> torch.Tensor:
    return m if rank == 3 else m[..., 0] if rank == 2 else m[:, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_same_bits(rank: int, symbolic: bool, dtype: torch.dtype) -> None:
    x = torch.randn(4, 5, 6)
    x[0, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    given = [x.nan_to_num(1, 2).to(dtype) if dtype is not torch.float32 else x, axes_of(torch.rand(4, 5, 6) < 0.4, rank)]
    group = group_of(written, given, symbolic=symbolic)
    graph, _ = simplify_captured(group.graph)
    ops = [packet(n.op) for n in graph.nodes]
    assert "aten.index_put" not in ops and "aten.where" in ops
    for turned in (False, True):
        y = given[0].transpose(0, 1).contiguous().transpose(0, 1) if turned and symbolic else given[0]
        (got,) = compile_tier0(graph, group.weights, Settings()).run(y, given[1])
        torch.testing.assert_close(got, written(y, given[1]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("write", [added, rows])
def test_other_writes_stay(write: Write) -> None:
    given = [torch.randn(4, 5), axes_of(torch.rand(4, 5, 6) < 0.4, 1)]
    group = group_of(write, given)
    graph, _ = simplify_captured(group.graph)
    assert "aten.index_put" in [packet(n.op) for n in graph.nodes]
    (got,) = compile_tier0(graph, group.weights, Settings()).run(*given)
    torch.testing.assert_close(got, write(*given))


def test_views_of_what_was_written_lie_as_in_the_model() -> None:
    """A choice lies as its mask does: the caller of a model would see other strides."""

    def turned(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        y = x.transpose(1, 2) * 2
        y[m] = 0
        return y[:, 0]

    given = [torch.randn(2, 3, 4), torch.rand(2, 4, 3) < 0.5]
    group = group_of(turned, given)
    graph, _ = simplify_captured(group.graph)
    (got,) = compile_tier0(graph, group.weights, Settings()).run(*given)
    want = turned(*given)
    assert torch.equal(got, want) and got.stride() == want.stride()
