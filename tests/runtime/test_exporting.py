"""Code that asks whether it is exported is captured along the branch that its calls take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.frontends.as_in_eager.exporting import not_exported


def _library_function() -> bool:
    return torch.compiler.is_exporting()


class Solves(nn.Module):
    """As recurrences with gates are solved: by an operator that few tools can take in, or row by row for those."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x @ x.mT
        if not _library_function():
            return torch.linalg.solve_triangular(a.tril(-1), x, upper=False, unitriangular=True)
        return x  # what a graph of the other branch would be seen by


class Compiled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.relu()
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return x.tanh()  # an operator of `torch.compile` alone
        return x.sigmoid()


class Both(nn.Module):
    """Whether it is compiled is asked first, and is forgotten behind the next operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if torch.compiler.is_compiling() else x + x
        return x.sinh() if not torch.compiler.is_exporting() else x.cosh()


@pytest.mark.parametrize("make", [Solves, Compiled, Both])
def test_a_graph_is_made_of_what_calls_run(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline", tiers=0))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(6, 6)
            torch.testing.assert_close(fast(x), model(x))
    assert fast.stats()["graph_calls"] >= 2, str(fast.explain(full=True))


def test_the_questions_are_torchs_own_again_behind_a_capture() -> None:
    exporting, compiling = torch.compiler.is_exporting, torch.compiler.is_compiling
    with not_exported():
        assert torch.compiler.is_exporting is not exporting and not torch.compiler.is_exporting()
    assert torch.compiler.is_exporting is exporting and torch.compiler.is_compiling is compiling
