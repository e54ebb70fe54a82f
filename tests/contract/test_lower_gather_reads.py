"""Reading at places that data say: embedding, index_select, gather, index; and indexes that point outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hotfuse
from hotfuse.backends.llvm.runs import kernel_faults
from hotfuse.base.errors import CallFault, HotfuseError
from hotfuse.base.settings import Settings
from hotfuse.fusion.groups import group
from hotfuse.lower.cpu.group import lower_group
from tests.contract.lowering import group_of, interpret, run_native

R = torch.randn
Tensor = torch.Tensor


def I(high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:  # noqa: E743
    return torch.randint(low, high, shape, dtype=dtype)


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "embedding": (lambda w, i: F.embedding(i, w), [R(7, 33), I(7, 2, 5)]),
    "embedding of one": (lambda w, i: F.embedding(i, w), [R(7, 33), torch.tensor(3)]),
    "embedding of none": (lambda w, i: F.embedding(i, w), [R(7, 33), I(7, 0)]),
    "embedding of one column": (lambda w, i: F.embedding(i, w), [R(7, 1), I(7, 40)]),
    "embedding by i32": (lambda w, i: F.embedding(i, w) * 2, [R(7, 33), I(7, 9, dtype=torch.int32)]),
    "embedding by an expression": (lambda w, i: F.embedding((i * 2 + 1) % 7, w), [R(7, 33), I(7, 2, 5)]),
    "embedding, turned": (lambda w, i: F.embedding(i, w).transpose(1, 2) + 1, [R(7, 33), I(7, 2, 5)]),
    "sum of embeddings and norm": (
        lambda w, v, t, i, j: F.layer_norm(
            F.embedding(i, w) + F.embedding(torch.arange(5), v) + F.embedding(j, t), (33,)
        ),
        [R(7, 33), R(9, 33), R(2, 33), I(7, 2, 5), I(2, 2, 5)],
    ),
    "index_select of rows": (lambda x, i: x.index_select(0, i), [R(7, 33), I(7, 50)]),
    "index_select of columns": (lambda x, i: x.index_select(1, i) * 2, [R(7, 33), I(33, 50)]),
    "index_select of a middle dim": (lambda x, i: x.index_select(1, i), [R(3, 7, 9), I(7, 5)]),
    "gather of columns": (lambda x, i: x.gather(1, i) + 1, [R(7, 33), I(33, 6, 21)]),
    "gather of rows": (lambda x, i: x.gather(0, i), [R(7, 33), I(7, 9, 21)]),
    "gather and reduce": (lambda x, i: x.gather(1, i).sum(-1), [R(7, 33), I(33, 7, 21)]),
    "index": (lambda x, i: x[i], [R(7, 33), I(7, 6, low=-7)]),
    "index by two": (lambda x, i, j: x[i, j], [R(7, 33), I(7, 6, low=-7), I(33, 4, 1, low=-33)]),
    "index with a dim between": (
        lambda x, i, j: torch.ops.aten.index(x, [i, None, j]), [R(7, 3, 33), I(7, 6, low=-7), I(33, 4, 1)]
    ),
    "index of integers": (lambda x, i: x[i] + 1, [I(99, 7, 5), I(7, 6, low=-7)]),
    "index of bools": (lambda x, i: x[i], [I(2, 7, 5).bool(), I(7, 6)]),
    "a strided table": (lambda x, i: x.index_select(0, i), [R(33, 7).t(), I(7, 50)]),
    "masked": (lambda w, i, m: F.embedding(i, w).masked_fill(m, 0.0), [R(7, 33), I(7, 2, 5), R(2, 5, 1) > 0]),
}


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, symbolic: bool) -> None:
    fn, tensors = CASES[name]
    if symbolic and name == "embedding of one column":
        return  # a dim of one is no symbol; nothing differs
    traced = group_of(fn, tensors, symbolic)
    lowered = lower_group(traced.graph)
    want = fn(*tensors)
    for (got,) in (interpret(lowered, traced, tensors), run_native(lowered, traced, tensors)):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [7, -1, 2**62, -(2**63)])
@pytest.mark.parametrize("many", [1, 5, 70])
def test_outside_is_a_fault_and_is_not_read(wrong: int, many: int) -> None:
    fn = lambda w, i: F.embedding(i, w)  # noqa: E731
    index = I(7, many)
    traced = group_of(fn, [R(7, 33), index])
    lowered = lower_group(traced.graph)
    index[many // 2] = wrong
    before = kernel_faults.count()
    with pytest.raises(HotfuseError, match="points outside"):
        interpret(lowered, traced, [R(7, 33), index])
    with pytest.raises(CallFault):
        run_native(lowered, traced, [R(7, 33), index])
    assert kernel_faults.count() > before


def test_lanes_that_do_not_exist_are_no_fault() -> None:
    fn = lambda x, i: x.gather(1, i - 5)  # noqa: E731
    tensors = [R(3, 9), I(14, 3, 7, low=5)]
    traced = group_of(fn, tensors)
    (got,) = run_native(lower_group(traced.graph), traced, tensors)
    torch.testing.assert_close(got, fn(*tensors), rtol=0, atol=0)


@pytest.mark.parametrize("table", [(0, 33), (0, 1)])
def test_a_table_without_rows_is_not_read(table: tuple[int, int]) -> None:
    fn = lambda w, i: F.embedding(i, w)  # noqa: E731
    traced = group_of(fn, [R(7, 33), I(7, 5)], symbolic=True)
    lowered = lower_group(traced.graph)
    with pytest.raises(CallFault):
        run_native(lowered, traced, [R(table), torch.zeros(5, dtype=torch.int64)])


def test_what_is_indexed_lies_in_memory() -> None:
    """In one kernel it is stored first; grouping does not ask for that."""
    fn, args = lambda x, i: x.relu()[i] + 1, [R(7, 33), I(7, 6)]
    traced = group_of(fn, args)
    lowered = lower_group(traced.graph)
    for way in (interpret, run_native):
        torch.testing.assert_close(way(lowered, traced, args)[0], fn(*args))
    assert [len(g.nodes) for g in group(traced.graph)] == [1, 2]


class Tokens(torch.nn.Module):
    """The first layers of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(50, 64), torch.nn.Embedding(32, 64)
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, ids: Tensor) -> Tensor:
        """Words and places, normalized."""
        return self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1])))


def test_a_served_model_raises_what_torch_raises() -> None:
    model = Tokens().eval()
    settings = Settings(hot_calls=4)
    with torch.no_grad(), hotfuse.jit(model, settings=settings) as fast:
        ids = I(50, 16, 32)
        for _ in range(3):
            for _ in range(6):
                fast(ids)
            assert fast.wait(120)
        torch.testing.assert_close(fast(ids), model(ids), rtol=1e-5, atol=1e-5)
        bad = ids.clone()
        bad[3, 4] = 50
        with pytest.raises(IndexError, match="out of range"):
            fast(bad)
        torch.testing.assert_close(fast(ids), model(ids), rtol=1e-5, atol=1e-5)
