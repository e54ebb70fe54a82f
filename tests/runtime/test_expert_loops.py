# pyright: reportPrivateUsage=false
"""Loops over experts in a model's Python become products by expert, and answer what the loops do; anything like them that is not so
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.ops.own.experts import PRODUCT
from hotfuse.ops.table import packet
from tests.races import kernels_win

D, TOKENS = 24, 40


class Gated(nn.Module):
    """An expert with two layers, a gate and no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(a, b, bias=False) for a, b in ((D, 32), (D, 32), (32, D)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As decoders have it."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """A loop over experts, some of its parts to be chosen."""

    def __init__(self, expert: Callable[[], nn.Module], experts: int = 4, choices: int = 2, columns: int | None = None) -> None:
        super().__init__()
        self.scores, self.choices = nn.Linear(D, columns or experts, bias=False), choices
        self.experts = nn.ModuleList(expert() for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of each expert, picked, weighed and added."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        out = x * 0.5
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(ids == e)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * w[rows, k, None])
        return out


class Plain(Mixture):
    """The same without a question about rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Experts without rows add nothing."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(ids == e)
            out.index_add_(0, rows, expert(x[rows]) * w[rows, k, None])
        return out


class Hot(Mixture):
    """Experts are told by a mask of one-hot numbers, as models of `transformers` were written; `order`: of its axes."""

    def __init__(self, expert: Callable[[], nn.Module], order: tuple[int, int, int] = (2, 1, 0)) -> None:
        super().__init__(expert)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows and choices come in the order of the mask's axes."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(ids, num_classes=len(self.experts)).permute(self.order)
        for e, expert in enumerate(self.experts):
            at = torch.where(mask[e])
            rows, k = at if self.order[1] == 0 else at[::-1]
            out.index_add_(0, rows, expert(x[None, rows].reshape(-1, D)) * w[rows, k, None])
        return out


class Written(Mixture):
    """Rows are read, added to and written back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As Mistral's own code has it."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(ids == e)
            out[rows] += w[rows, k, None] * expert(x[rows])
        return out


class WrittenElsewhere(Mixture):
    """Rows are read at one place and written at another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What stands in the next row is added to."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        out = x * 0.5
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(ids == e)
            out[rows] = out[(rows + 1) % TOKENS] + w[rows, k, None] * expert(x[rows])
        return out


class HotInOrder(Hot):
    """What is computed depends on the order in which an expert's rows come."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over an expert's rows so far."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            k, rows = torch.where(mask[e])
            out.index_add_(0, rows, expert(x[rows]).cumsum(0) * w[rows, k, None])
        return out


class Uneven(Mixture):
    """One turn does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first expert's rows count twice."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(ids == e)
            if rows.numel() == 0:
                continue
            y = expert(x[rows]) * w[rows, k, None]
            out.index_add_(0, rows, y * 2 if e == 0 else y)
        return out


class Counted(Mixture):
    """What is asked of rows is more than whether there are some."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """An expert with many rows is scaled."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(ids == e)
            y = expert(x[rows]) * w[rows, k, None]
            out.index_add_(0, rows, y * 0.5 if rows.numel() > 12 else y)
        return out


class OverRows(Mixture):
    """Rows of an expert depend on each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A softmax over an expert's rows."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(ids == e)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, torch.softmax(expert(x[rows]), 0) * w[rows, k, None])
        return out


class ByNonzero(Mixture):
    """Pairs by `nonzero`, and what is done where there are some."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Weights add up to one."""
        w, ids = self.scores(x).softmax(-1).topk(self.choices, -1)
        w, out = w / w.sum(-1, keepdim=True), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, k = (ids == e).nonzero(as_tuple=True)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * w[rows, k, None])
        return out


def linear() -> nn.Module:
    return nn.Linear(D, D)


def served(model: nn.Module) -> Any:
    return hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2, race_s=0.01))


def entries(fast: Any) -> list[Any]:
    return [e for s in fast._engine.sites.values() for e in s.entries]


def by_expert(fast: Any) -> int:
    return sum(packet(n.op) == PRODUCT for e in entries(fast) for n in e.baseline.graph.nodes)


def agree(fast: Any, model: nn.Module, x: torch.Tensor) -> None:
    before = x.clone()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("model", "products"), [
    (lambda: Mixture(linear), 1), (lambda: Mixture(Gated), 3), (lambda: Mixture(linear, 6, 3), 1),
    (lambda: Mixture(linear, 3, 1), 1), (lambda: Plain(linear), 1), (lambda: Plain(Gated, 5, 2), 3),
    (lambda: Hot(Gated), 3), (lambda: Hot(linear, (2, 0, 1)), 1), (lambda: Written(Gated), 3),
    (lambda: ByNonzero(Gated), 3),
])  # fmt: skip
def test_a_loop_over_experts_is_products_by_expert(
    model: Callable[[], nn.Module], products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels_win(monkeypatch)
    torch.manual_seed(3)
    made = model().eval()
    with torch.no_grad(), served(made) as fast:
        for _ in range(12):
            agree(fast, made, torch.randn(TOKENS, D))
        assert by_expert(fast) == products
        assert any(e.plan.tier == 1 for e in entries(fast)), [e.refused for e in entries(fast)]
        assert "loops over experts are products by expert" in fast.explain(full=True).text(full=True)
        for _ in range(20):
            agree(fast, made, torch.randn(TOKENS, D))
        one = torch.randn(1, D).expand(TOKENS, D).contiguous()  # every row chooses the same experts: others have none
        agree(fast, made, one)
        agree(fast, made, torch.cat([one[:-1], torch.randn(1, D)]))
        agree(fast, made, torch.randn(TOKENS, D) * 1e4)


@pytest.mark.parametrize("model", [lambda: Mixture(linear), lambda: Plain(linear), lambda: Hot(Gated), lambda: Written(linear)])
def test_so_it_is_for_any_number_of_tokens(model: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_win(monkeypatch)
    torch.manual_seed(3)
    made = model().eval()
    with torch.no_grad(), served(made) as fast:
        for n in range(16):
            agree(fast, made, torch.randn(TOKENS + n % 5, D))
        (entry,) = [e for e in entries(fast) if e.symbols]
        assert by_expert(fast) and all(packet(n.op) != "aten.where" for n in entry.baseline.graph.nodes)
        assert entry.plan.tier == 1, entry.refused
        for n in (2, 3, 7, 64, 200):
            agree(fast, made, torch.randn(n, D))
            agree(fast, made, torch.randn(1, D).expand(n, D).contiguous())
        agree(fast, made, torch.randn(1, D))
        agree(fast, made, torch.randn(0, D))


@pytest.mark.parametrize("model", [
    lambda: Uneven(linear), lambda: Counted(linear), lambda: OverRows(linear), lambda: Mixture(linear, 3, 2, columns=4),
    lambda: WrittenElsewhere(linear), lambda: HotInOrder(linear),
])  # fmt: skip
def test_what_only_looks_like_one_stays(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    made = model().eval()
    with torch.no_grad(), served(made) as fast:
        for _ in range(12):
            agree(fast, made, torch.randn(TOKENS, D))
        assert by_expert(fast) == 0
