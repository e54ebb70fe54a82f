"""Rows of a batch that come twice are computed once: exact whatever the next batch is, and given up where none does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.serve import distinct_rows as serving
from hotfuse.runtime.serve.distinct_rows import MAX_ROWS, DistinctRowsRun, distinct_rows
from hotfuse.specialize.distinct_rows import rowwise
from hotfuse.specialize.row_demands import CannotPack
from hotfuse.specialize.table import DUPLICATES, AttemptKey
from tests.padded import TOKENS, PaddedEncoder
from tests.races import new_plans_win

INLINE = Settings(capture="inline", hot_calls=2, watch_rate=2)
ROWS, LENGTH = 12, 48


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def batch(distinct: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, TOKENS, (distinct, LENGTH))[torch.randint(0, distinct, (rows,))]
    return ids, torch.ones(rows, LENGTH, dtype=torch.int64)


def assert_right(fast: Any, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    want = copy.deepcopy(model).double()(*inputs)
    torch.testing.assert_close(fast(*inputs).double(), want, rtol=1e-4, atol=1e-5)


def test_twelve_rows_of_two_kinds_are_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    new_plans_win(monkeypatch)
    model = PaddedEncoder("indexed", pools="nothing").eval()  # a mask that is read as transformers reads it
    with hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(120):
            assert_right(fast, model, batch(2))
            entry = next(iter(fast._engine.sites.values())).entries[0] if fast._engine.sites else None
            if entry is not None and any(x.key.row == DUPLICATES for x in entry.layers):
                break
        assert entry is not None and AttemptKey(DUPLICATES) in entry.plan.layers, str(fast.explain(full=True))
        before = entry.plan.counters()["distinct_calls"]
        for call in range(20):  # every other batch has distinct rows
            assert_right(fast, model, batch(2) if call % 2 else (torch.randint(0, TOKENS, (ROWS, LENGTH)), batch(1)[1]))
        assert entry.plan.counters()["distinct_calls"] >= before + 10
        ids, mask = batch(1)
        assert_right(fast, model, (ids, mask))
        ids[3, -1] = (ids[3, -1] + 1) % TOKENS  # one id of all
        assert_right(fast, model, (ids, mask))
        mask[5, 7] = 0  # the same ids, another mask
        assert_right(fast, model, (ids, mask))
        assert_right(fast, model, (ids.t().contiguous().t(), mask))  # lies otherwise
        shown = str(fast.explain(full=True))
        assert "come twice are computed once" in shown and DUPLICATES in shown, shown


def test_batches_of_distinct_rows_are_soon_left_alone() -> None:
    ran: list[int] = []

    def some(x: torch.Tensor) -> tuple[torch.Tensor]:
        ran.append(len(x))
        return (x * 2,)

    run = DistinctRowsRun((0,), (0,), some, lambda x: (x * 2,), 0.75)
    for _ in range(2000):
        x = torch.randn(4, 3)
        assert torch.equal(run(x)[0], x * 2)
    assert not ran and run.missed < 50 and run.unread == 2000 - run.missed
    for _ in range(200):
        x = torch.randn(2, 3)[[0, 1, 1, 0]]
        assert torch.equal(run(x)[0], x * 2)
    assert run.held > 70 and set(ran) == {2}
    assert torch.equal(run(torch.ones(4, 3))[0], torch.full((4, 3), 2.0)) and ran[-1] == 2, "never a single row"


def test_rows_that_come_twice_again_are_seen_at_once_where_a_look_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def whole(x: torch.Tensor) -> tuple[torch.Tensor]:
        now[0] += call_s
        return (x * 2,)

    def clock() -> float:
        now[0] += 1e-5  # what a look takes, between two readings
        return now[0]

    monkeypatch.setattr(serving, "time", SimpleNamespace(perf_counter=clock))
    for call_s, pauses in ((0.5, False), (1e-4, True)):
        run = DistinctRowsRun((0,), (0,), whole, whole, 0.75)
        for _ in range(500):
            run(torch.randn(4, 3))
        x = torch.randn(2, 3)[[0, 1, 1, 0]]
        assert torch.equal(run(x)[0], x * 2)
        assert (run.unread > 0) is pauses and (run.held == 1) is not pauses, (call_s, run)


def test_batches_of_very_many_rows_are_left_alone() -> None:
    """Half a million numbers are as many rows: comparing them kept one call for three seconds."""
    assert distinct_rows([torch.zeros(MAX_ROWS)], 4) is not None
    assert distinct_rows([torch.zeros(MAX_ROWS + 1)], 4) is None


def test_bytes_decide_which_rows_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.tensor([[1.0], [-0.0], [0.0], [1.0]]), torch.tensor([[1], [2], [2], [1]])
    found = distinct_rows([x, y], 4)
    assert found is not None and found.first == (0, 1, 2) and found.which == (0, 1, 2, 0)
    assert distinct_rows([x, y], 2) is None
    assert distinct_rows([x.t().contiguous().t()], 4) is not None  # one column lies as any
    assert distinct_rows([torch.zeros(4, 0)], 4) is None and distinct_rows([torch.zeros(4, 2).t()], 4) is None
    long = torch.zeros(5, serving.LONG_ROW, dtype=torch.uint8)
    long[2, 1] = long[4, 1] = 1  # where no sample is taken
    found = distinct_rows([long], 5)
    assert found is not None and found.which[1] == 0 and found.which[2] != 0 and found.which[3] == 0 and found.which[4] != 0


class Mixes(nn.Module):
    def __init__(self, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.how, self.linear, self.each = how, nn.Linear(8, 8), nn.Parameter(torch.randn(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.linear(x)) + (self.each if self.how is torch.relu else 0)


@pytest.mark.parametrize("how", [
    lambda x: x - x.mean(0), lambda x: x.softmax(0), lambda x: x.flip(0), lambda x: x.cumsum(0), lambda x: x @ x.t(),
    lambda x: x.reshape(-1, 4).softmax(-1).sum(0, keepdim=True).expand(6, 4), torch.relu,
])  # fmt: skip
def test_rows_that_depend_on_each_other_stay(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = Mixes(how).eval()
    fast: Any = hotfuse.jit(model, settings=Settings(capture="inline", tiers=0))
    for _ in range(2):
        fast(torch.randn(6, 8))
    entry = next(iter(fast._engine.sites.values())).entries[0]
    with pytest.raises(CannotPack):
        rowwise(entry.baseline.graph, entry.weights)
    fast.close()


def test_one_graph_for_any_number_of_rows() -> None:
    model = PaddedEncoder("lowest", pools="nothing").eval()
    fast: Any = hotfuse.jit(model, settings=Settings(capture="inline", tiers=0))
    for _ in range(2):
        fast(*batch(4))
    entry = next(iter(fast._engine.sites.values())).entries[0]
    found = rowwise(entry.baseline.graph, entry.weights)
    plan = compile_tier0(found.graph, entry.weights, Settings())
    for rows in (1, 2, 5, 20):
        assert_right(lambda *x: plan.run(*x)[0], model, batch(rows, rows))
    fast.close()
