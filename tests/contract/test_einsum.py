"""Einsums of two tensors as products: the same numbers, and none is left where letters are batches, rows, columns and sums."""

from __future__ import annotations

import pytest
import torch

import hotfuse
from hotfuse.base.settings import Settings
from hotfuse.ops.table import packet
from hotfuse.pipeline import compile_tier0
from hotfuse.simplify import simplify_captured
from tests.contract.lowering import group_of

SIZES = dict(zip("bhqkdsnij", (2, 3, 5, 7, 4, 6, 8, 5, 3), strict=True))
TAKEN = (
    "bqd,kd->bqk", "bhqd,bhkd->bhqk", "bhqk,bhkd->bqhd", "bsd,dhk->bshk", "bshk,hkd->bsd", "qd,kd", "bqd,bkd->bkq",
    "bhqid,bhkd->bhqik", "bhqd,qkd->bhqk", "dk,bsd->bsk", "b s d, d n -> n b s",
    "bshk,hkd,bsh->bsd", "bh,bqhd,hdk->bqk", "bqd,q,bkd->bkq", "hkd,bshk,s->bsd", "bqd,kd,bqd->bqk",
)  # fmt: skip
LEFT = (
    "bqd,bqd->bqd", "bqd->bq", "bqq,bqd->bd", "bqd,kd->b", "...qd,kd->...qk", "bq,kd->bqkd", "bd,bd->b",
    "hd,bqhd->bqh", "bq,qd,dk->bk", "bqd,bqd,bq->bqd", "bqd,bqd,bq->b", "bqd,kd,qq->bqk", "bq,kd,b->bqkd",
)  # fmt: skip


def operands(equation: str) -> list[torch.Tensor]:
    left = equation.replace(" ", "").partition("->")[0].replace("...", "b")
    return [torch.randn([SIZES[c] for c in term]) for term in left.split(",")]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("equation", [*TAKEN, *LEFT])
def test_the_same_numbers(equation: str, symbolic: bool) -> None:
    xs = operands(equation)

    def fn(*ts: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *ts).relu() * 2

    group = group_of(fn, xs, symbolic=symbolic)
    graph, _ = simplify_captured(group.graph)
    left = sum(packet(n.op) == "aten.einsum" for n in graph.nodes)
    if not symbolic:
        assert left == (equation in LEFT)
    (got,) = compile_tier0(graph, group.weights, Settings()).run(*xs)
    want = torch.einsum(equation, *[x.double() for x in xs]).relu() * 2
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert got.stride() == fn(*xs).stride()


@pytest.mark.parametrize("path", [None, [0, 1, 0, 1], [1, 2, 0, 1]])
def test_an_order_of_contraction_that_torch_chose_changes_nothing(path: list[int] | None) -> None:
    xs = operands("bhqd,bhkd,bhq->bhqk")
    group = group_of(lambda *ts: torch.ops.aten.einsum.default("bhqd,bhkd,bhq->bhqk", ts, path=path).relu(), xs)
    graph, _ = simplify_captured(group.graph)
    assert not any(packet(n.op) == "aten.einsum" for n in graph.nodes)
    (got,) = compile_tier0(graph, group.weights, Settings()).run(*xs)
    torch.testing.assert_close(got, torch.einsum("bhqd,bhkd,bhq->bhqk", *xs).relu(), rtol=1e-4, atol=1e-5)


def test_a_stretched_operand_stays_an_einsum() -> None:
    """A size of 1 that is stretched is no batch of a product."""
    xs = [torch.randn(1, 5, 4), torch.randn(3, 7, 4)]
    group = group_of(lambda a, b: torch.einsum("bqd,bkd->bqk", a, b) + 1, xs)
    graph, _ = simplify_captured(group.graph)
    assert [packet(n.op) for n in graph.nodes] == ["aten.einsum", "aten.add"]


def test_sizes_that_data_decide_keep_no_product_from_being_one() -> None:
    """No call says such a size: it is in nobody's way where nothing that is written anew has it, and thought of where it does."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kept = x[x[:, 0] > 0]
        return torch.einsum("bd,kd->bk", x, w).relu(), torch.einsum("bd,kd->kb", kept, w), kept.sum(0)

    fast = hotfuse.jit(fn, settings=Settings(capture="inline", tiers=0, watch=False))
    w = torch.randn(5, 4)
    with torch.no_grad():
        for rows in (6, 6, 6, 3, 0):
            x = torch.randn(rows, 4) if rows != 3 else -torch.rand(3, 4)
            for got, want in zip(fast(x, w), fn(x, w), strict=True):
                torch.testing.assert_close(got, want)
                assert got.stride() == want.stride()
    plans = [e.plan for s in fast._engine.sites.values() for e in s.entries]
    assert plans and not any(packet(n.op) == "aten.einsum" for p in plans for n in p.graph.nodes), str(fast.explain(full=True))
