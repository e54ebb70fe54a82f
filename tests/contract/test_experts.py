"""Rows by expert: the order, the product, the graph they are found in; kernels against float64, for any routing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotfuse
from hotfuse import Settings
from hotfuse.analysis.experts import expert_products
from hotfuse.base.errors import CallFault
from hotfuse.fusion.groups import group
from hotfuse.lower import lower
from hotfuse.lower.cpu.tiling import Core
from hotfuse.ops.own.experts import ORDER, PRODUCT
from hotfuse.ops.table import packet
from hotfuse.simplify.experts import experts_in_order
from tests.contract.lowering import group_of, run_native
from tests.races import every_kernel_wins

CORES = (Core(16, 32), Core(8, 16), Core(8, 16, threads=2))
EXPERTS, K, N = 5, 37, 46
ROUTES = ([8, 0, 1, 20, 2], [0, 0, 31, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [3, 0, 4, 0, 0], [0, 0, 0, 0, 1])
"""Rows of each expert; the kernels are for 31 rows, of which the last may belong to nobody."""
ROWS = 31
LAST = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
Function = Callable[..., Any]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5).to(dtype)


def by_hand(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Row by row in float64."""
    out = torch.zeros(x.shape[0], weight.shape[2], dtype=torch.float64)
    expert = 0
    for row in range(int(ends[-1])):
        while row >= ends[expert]:
            expert += 1
        out[row] = x[row].double() @ weight[expert].double()
    return out


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The operator of transformers, which importing this module of it adds."""
    pytest.importorskip("transformers.integrations.moe")
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)


def gated(y: Tensor) -> Tensor:
    a, b = y.chunk(2, -1)
    return F.silu(a) * b


def interleaved(y: Tensor) -> Tensor:
    return y[:, ::2].sigmoid() * (y[:, 1::2] + 1)


EPILOGUES: dict[str, Function] = {
    "plain": lambda y: y, "gated": gated, "interleaved": interleaved, "scaled": lambda y: (y * 2 - 1).relu(),
}  # fmt: skip


@pytest.mark.parametrize("core", CORES, ids=str)
@pytest.mark.parametrize("name", EPILOGUES)
def test_a_product_by_expert_with_any_routing(name: str, core: Core) -> None:
    weight, x, finish = numbers(EXPERTS, K, N), numbers(ROWS, K, seed=1), EPILOGUES[name]
    ends = torch.tensor(ROUTES[0]).cumsum(0).int()
    found = group_of(lambda x, e: finish(torch.ops.hotfuse.grouped_mm(x, weight, e)), [x, ends], constants=True)
    groups = [g for g in group(found.graph) if g.kind == "experts"]
    assert [len(g.nodes) for g in groups] == [len(found.graph.nodes)], "one kernel, with the epilogue"
    lowered = lower(found.graph, core)
    for route in ROUTES:
        ends = torch.tensor(route).cumsum(0).int()
        (got,) = run_native(lowered, found, [x, ends])
        torch.testing.assert_close(got.double(), finish(by_hand(x, weight, ends)), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_element_types(dtype: torch.dtype) -> None:
    weight, x = numbers(EXPERTS, K, N, dtype=dtype), numbers(ROWS, K, seed=1, dtype=dtype)
    ends = torch.tensor(ROUTES[0]).cumsum(0)
    found = group_of(lambda x, e: torch.ops.hotfuse.grouped_mm(x, weight, e), [x, ends], constants=True)
    (got,) = run_native(lower(found.graph, CORES[0]), found, [x, ends])
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), by_hand(x, weight, ends), rtol=0, atol=1e-14 if dtype is torch.float64 else 2e-2)


def test_sizes_at_run_time_rows_apart_and_numbers_that_are_none() -> None:
    weight, ends = numbers(EXPERTS, K, N), torch.tensor([2, 2, 5, 9, 12], dtype=torch.int32)
    found = group_of(lambda x, e: torch.ops.hotfuse.grouped_mm(x, weight, e), [numbers(12, K), ends], True, constants=True)
    lowered = lower(found.graph, CORES[0])
    for rows in (0, 1, 12, 70):
        x = numbers(max(rows, 1), K, seed=rows)[:rows]
        if rows > 1:
            x[1, 3], x[rows - 1, 0] = torch.nan, torch.inf
        ends = torch.tensor([2, 2, 5, 9, 12], dtype=torch.int32).clamp(max=rows)
        (got,) = run_native(lowered, found, [x, ends])
        torch.testing.assert_close(got.double(), by_hand(x, weight, ends), rtol=0, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("ends", [[3, 2, 5, 9, 12], [0, 0, 0, 0, 32], [-1, 0, 0, 0, 1]], ids=str)
def test_ends_that_no_rows_can_have_are_a_fault(ends: list[int]) -> None:
    weight, x, good = numbers(EXPERTS, K, N), numbers(ROWS, K, seed=1), torch.tensor(ROUTES[0]).cumsum(0)
    found = group_of(lambda x, e: torch.ops.hotfuse.grouped_mm(x, weight, e), [x, good], constants=True)
    with pytest.raises(CallFault):
        run_native(lower(found.graph, CORES[0]), found, [x, torch.tensor(ends)])


@pytest.mark.parametrize("rows", [0, 1, 2, 33])
def test_the_order_is_that_of_a_stable_sort(rows: int) -> None:
    found = group_of(lambda i: torch.ops.hotfuse.expert_order(i, 6), [torch.randint(0, 6, (9,))], True)
    lowered = lower(found.graph, CORES[0])
    ids = torch.randint(0, 6, (rows,), generator=torch.Generator().manual_seed(rows))
    order, rank, ends = run_native(lowered, found, [ids])
    assert torch.equal(order, torch.sort(ids, stable=True).indices)
    assert torch.equal(order[rank], torch.arange(rows))
    assert torch.equal(ends, torch.bincount(ids, minlength=6).cumsum(0).int())
    for wanted, got in zip(torch.ops.hotfuse.expert_order(ids, 6), (order, rank, ends), strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize("bad", [6, -1])
def test_an_id_that_is_no_experts_is_a_fault(bad: int) -> None:
    found = group_of(lambda i: torch.ops.hotfuse.expert_order(i, 6), [torch.zeros(9, dtype=torch.int64)])
    with pytest.raises(CallFault):
        run_native(lower(found.graph, CORES[0]), found, [torch.tensor([0, 1, 2, bad, 4, 5, 0, 0, 0])])


class Experts(nn.Module):
    """As transformers spells a mixture of experts."""

    def __init__(self, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.top = experts, top
        self.gate = nn.Linear(24, experts, bias=False)
        self.up, self.down = (nn.Parameter(numbers(experts, *s, seed=i)) for i, s in enumerate(((64, 24), (24, 32))))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), self.top)
        ids = chosen.reshape(-1)
        ordered, order = torch.sort(ids)
        counts = torch.histc(ordered.float(), bins=self.experts, min=0, max=self.experts - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        y = grouped(x[order // self.top], self.up.transpose(-2, -1), ends)
        y = grouped(gated(y), self.down.transpose(-2, -1), ends) * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        return y[back].view(x.shape[0], self.top, 24).sum(1)

    def exact(self, x: Tensor) -> Tensor:
        """Token by token in float64."""
        weights, chosen = torch.topk(self.gate(x).softmax(-1), self.top)
        out = torch.zeros(x.shape, dtype=torch.float64)
        for t in range(x.shape[0]):
            for w, e in zip(weights[t].double(), chosen[t].tolist(), strict=True):
                out[t] += w * (self.down[e].double() @ gated(self.up[e].double() @ x[t].double()))
        return out


def test_a_sort_with_a_histogram_becomes_an_order() -> None:
    model = Experts().eval()
    graph = group_of(model, [numbers(6, 24)], constants=True).graph
    made = experts_in_order(graph)
    ops = [packet(n.op) for n in made.nodes]
    assert ops.count(ORDER) == 1 and ops.count(PRODUCT) == 2
    assert not {"aten.cumsum", "aten.index_put", "aten.empty_like", "transformers.grouped_mm_fallback", "aten.sort"} & set(ops)
    assert len(expert_products(made)) == 0, "weights are still views of parameters here; freezing makes constants of them"


@pytest.mark.parametrize(
    "other",
    [
        lambda ids: torch.histc(torch.sort(ids)[0].float(), bins=4, min=0, max=4),
        lambda ids: torch.histc(torch.sort(ids, descending=True)[0].float(), bins=4, min=0, max=3),
        lambda ids: torch.histc(torch.sort(ids)[0].float(), bins=1, min=0, max=0),
    ],
)
def test_other_histograms_stay_what_they_are(other: Function) -> None:
    weight = numbers(4, 3, 5)

    def fn(ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ends = torch.cumsum(other(ids), 0, dtype=torch.int32)
        return ends, grouped(x, weight, LAST)

    made = experts_in_order(group_of(fn, [torch.randint(0, 4, (8,)), numbers(8, 3)], constants=True).graph)
    assert ORDER not in [packet(n.op) for n in made.nodes]


@pytest.fixture
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    every_kernel_wins(monkeypatch)
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("kernels_always_win")
def test_served_with_any_routing() -> None:
    model = Experts().eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=1))
    for seed in range(12):
        x = numbers(7, 24, seed=seed) * 5
        torch.testing.assert_close(fast(x).double(), model.exact(x), rtol=0, atol=5e-6)
    fast.wait(60)
    plans = [p for s in fast.explain().to_dict()["sites"] for p in s["plans"] if p["tier"] == 1]
    kernels = [part["kernel"] for p in plans for part in p["partitions"] if part["backend"] == "llvm"]
    assert sum("grouped_mm" in k for k in kernels) == 2 and sum("expert_order" in k for k in kernels) == 1
    alike = numbers(7, 24, seed=3)
    alike[:] = alike[0]  # all rows go to the same two experts
    for x in (alike, numbers(7, 24, seed=77), torch.zeros(7, 24)):
        torch.testing.assert_close(fast(x).double(), model.exact(x), rtol=0, atol=5e-6)
