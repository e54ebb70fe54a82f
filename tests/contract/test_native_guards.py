"""A site's decision against the plain meaning of its facts: in Python step by step, and as native code."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hotfuse.analysis.call_facts import (
    Aligned,
    AllEqual,
    Dense,
    Fact,
    Facts,
    Holds,
    Outer,
    Plain,
    Ranked,
    Sized,
    Typed,
    fact_text,
    facts_of,
    outer_facts,
    place,
    sized,
)
from hotfuse.analysis.decision import Ask, DecisionDag, decide, describe
from hotfuse.base.errors import InternalError
from hotfuse.ir.dims import Sym, parse
from hotfuse.ir.text import parse as parse_graph
from hotfuse.ir.types import DType
from hotfuse.native import tensors
from hotfuse.native.guard import native_select
from hotfuse.ops.torch_dtypes import torch_dtype
from hotfuse.runtime.serve.fact_checks import failed, python_select

pytestmark = pytest.mark.skipif(tensors.unavailable() != "", reason="native code cannot read tensors")


def basics(i: int, rank: int, dtype: DType = DType.F32, dense: bool = True) -> Facts:
    return (Plain(i), Typed(i, dtype), Ranked(i, rank), Dense(i, rank, None, dense))


def predicate(text: str) -> Holds:
    p = parse(text)
    assert isinstance(p, Sym)
    return Holds(p)


def first_fit(plans: Sequence[Facts], leaves: Sequence[Any]) -> int | None:
    """What the decision means: plans asked one after another, facts in order."""
    return next((i for i, facts in enumerate(plans) if failed(facts, leaves) is None), None)


def agree(plans: Sequence[Facts], calls: Sequence[Sequence[Any]]) -> DecisionDag:
    decision = decide(plans)
    native, python = native_select(decision), python_select(decision)
    hits, misses = 0, 0
    for leaves in calls:
        want, got = first_fit(plans, leaves), native.select(*leaves)
        assert got == python(*leaves), [str(getattr(t, "shape", t)) for t in leaves]
        if want is None:
            assert got < 0
            assert any(decision.facts[-1 - got] in p for p in plans)
            misses += 1
        else:
            assert got == want
            hits += 1
    assert sum(native.hits(decision.plans)) == hits and sum(native.misses(decision.plans)) == misses
    return decision


def test_one_plan_and_everything_that_can_be_wrong_with_a_call() -> None:
    facts = (*basics(0, 2), *basics(1, 1, DType.I64), Sized(0, 1, 4), predicate("(t0.0 == t1.0)"))
    ids = torch.arange(3)
    freed = torch.randn(3, 4)
    freed.untyped_storage().resize_(0)
    calls: list[tuple[Any, Any]] = [
        (torch.randn(3, 4), ids), (nn.Parameter(torch.randn(3, 4)), ids), (torch.randn(3, 4).double(), ids),
        (torch.randn(3, 4), ids.int()), (torch.randn(3, 5), ids), (torch.randn(2, 4), ids), (torch.randn(4, 3).t(), ids),
        (torch.randn(3, 4, 1), ids), (torch.randn(4), ids), (torch.randn(()), ids), (None, ids), (torch.randn(3, 4), 3),
        (torch.randn(3, 4), ids[None]), (torch.empty(0, 4), ids[:0]), (torch.empty(3, 4, device="meta"), ids),
        (torch.eye(3).to_sparse(), ids), (freed, ids), (torch.randn(3, 8)[:, ::2], ids),
        (torch.randn(3, 4, dtype=torch.complex64).conj().imag, ids),
        (torch.randn(3, 4).as_subclass(type("S", (torch.Tensor,), {})), ids),
    ]  # fmt: skip
    agree([facts], calls)


def test_the_failed_fact_is_told() -> None:
    facts = (*basics(0, 2), Sized(0, 1, 4))
    decision = decide([facts])
    select = native_select(decision).select

    def said(x: Any) -> str:
        return fact_text(decision.facts[-1 - select(x)], ["x"])

    assert said(torch.randn(3, 5)) == "size 1 of x is 4"
    assert said(torch.randn(3, 4).half()) == "x is f32"
    assert said(torch.randn(3)) == "x has rank 2"
    assert said(torch.randn(4, 3).t()) == "x is row-major"
    assert said("x") == "x is an ordinary tensor on cpu"


def test_the_first_plan_that_fits_is_taken() -> None:
    generic = basics(0, 2)
    plans = [(*generic, Sized(0, 0, 8), Sized(0, 1, 4)), (*generic, Sized(0, 0, 8)), (*generic, Sized(0, 0, 16)), generic]
    decision = agree(plans, [(torch.randn(a, b),) for a in (8, 16, 3) for b in (4, 5)])
    assert decision.common == 4
    select = native_select(decision).select
    assert [select(torch.randn(*s)) for s in ((8, 4), (8, 5), (16, 4), (1, 1))] == [0, 1, 2, 3]


def test_shared_facts_are_checked_once_and_exclusive_ones_not_at_all() -> None:
    generic = basics(0, 2)
    decision = decide([(*generic, Sized(0, 0, n)) for n in range(8)])
    tests = [s for s in decision.steps if isinstance(s, Ask)]
    assert len(tests) == 4 + 8, describe(decision)
    other = decide([(*basics(0, 2), Sized(0, 0, 5)), (*basics(0, 3), Sized(0, 0, 5))])
    kinds = [type(other.facts[s.fact]).__name__ for s in other.steps if isinstance(s, Ask)]
    assert kinds.count("Plain") == 1 and kinds.count("Typed") == 1
    assert kinds.index("Sized") > kinds.index("Ranked")  # a size is read when the rank is known
    agree([(*basics(0, 2), Sized(0, 0, 5)), (*basics(0, 3), Sized(0, 0, 5))],
          [(torch.randn(5, 1),), (torch.randn(5, 1, 1),), (torch.randn(5),), (torch.randn(()),), (torch.randn(4, 1, 1),)])


@pytest.mark.parametrize(
    "text",
    ["(t0.0 <= 4)", "(t0.0 < t0.1)", "(t0.0 != t0.1)", "((t0.0 + t0.1) == 7)", "((t0.0 * t0.1 * 3) <= 40)",
     "((t0.0 // t0.1) == 1)", "((t0.0 % t0.1) == 0)", "(ceildiv(t0.0, t0.1) == 2)", "(max(t0.0, t0.1) == 3)",
     "(min(t0.0, t0.1, 2) == 2)",
     "((t0.0 ** 2) < 10)", "and((1 < t0.0), (1 < t0.1))", "or((t0.0 == 1), (t0.1 == 1))", "not((t0.0 == 2))",
     "(((t0.0 + -5) // 2) == -2)",
     "(((t0.0 + -5) % 3) == 1)", "((t0.0 // (t0.1 + -3)) == -2)", "((t0.0 % (t0.1 + -3)) == -1)",
     "(ceildiv((t0.0 + -5), t0.1) == -1)"],
)  # fmt: skip
def test_arithmetic_of_predicates(text: str) -> None:
    calls = [(torch.empty(a, b),) for a in range(6) for b in range(6)]
    decision = agree([(*basics(0, 2), predicate(text))], calls)
    select = native_select(decision).select
    assert {select(*c) >= 0 for c in calls} == {True, False}  # the predicate tells calls apart


def test_numbers_beyond_64_bits_do_not_hold() -> None:
    facts = (*basics(0, 2, dense=False), predicate("(0 <= (t0.0 * t0.0 * t0.0 * t0.0))"))
    select = native_select(decide([facts])).select
    assert select(torch.empty(1, 2).expand(3, 2)) == 0
    assert select(torch.empty(1, 2).expand(1 << 17, 2)) < 0


@pytest.mark.parametrize(
    "dtype", [DType.F32, DType.F64, DType.F16, DType.I64, DType.I32, DType.I16, DType.I8, DType.U8, DType.BOOL]
)
@pytest.mark.parametrize("count", [0, 1, 7, 64, 65, 300])
def test_values(dtype: DType, count: int) -> None:
    for value in (True, False) if dtype is DType.BOOL else (1, 0, 3):
        facts = (*basics(0, 1, dtype), AllEqual(0, dtype, value))
        good = torch.full((count,), value, dtype=torch_dtype(dtype))
        calls = [(good,)]
        for at in {0, count // 2, count - 1} if count else ():
            bad = good.clone()
            bad[at] = not value if dtype is DType.BOOL else value + 1
            calls.append((bad,))
        agree([facts], calls)


def test_values_by_bits() -> None:
    zero = native_select(decide([(*basics(0, 1), AllEqual(0, DType.F32, 0.0))])).select
    assert zero(torch.zeros(5)) == 0 and zero(-torch.zeros(5)) < 0 and zero(torch.full((5,), float("nan"))) < 0
    nan = native_select(decide([(*basics(0, 1), AllEqual(0, DType.F32, float("nan")))])).select
    assert nan(torch.full((3,), float("nan"))) == 0 and nan(torch.zeros(3)) < 0
    odd = torch.tensor([1, 2, 255], dtype=torch.uint8).view(torch.bool)
    assert native_select(decide([(*basics(0, 1, DType.BOOL), AllEqual(0, DType.BOOL, True))])).select(odd) == 0


def test_values_need_a_known_layout_and_type() -> None:
    with pytest.raises(InternalError, match="row-major"):
        decide([(*basics(0, 1, dense=False), AllEqual(0, DType.F32, 1.0))])
    with pytest.raises(InternalError, match="not checked"):
        decide([(Plain(0), Sized(0, 0, 3))])
    with pytest.raises(InternalError, match="is no"):
        native_select(decide([(*basics(0, 1, DType.I8), AllEqual(0, DType.I8, 300))]))


def test_layouts_and_alignment() -> None:
    last = (0, 2, 3, 1)
    x = torch.randn(2, 3, 4, 5)
    calls = [(x,), (x.contiguous(memory_format=torch.channels_last),), (x[:, :, ::2],), (x.transpose(0, 1),), (x[:0],),
             (x[:1, :1],), (torch.randn(2, 1, 4, 5),), (torch.randn(2, 3, 1, 1),)]  # fmt: skip
    start = (Plain(0), Typed(0, DType.F32), Ranked(0, 4))
    agree([(*start, Dense(0, 4, last)), (*start, Dense(0, 4, None)), (*start, Dense(0, 4, None, False))], calls)
    y = torch.randn(64)
    agree([(*basics(0, 1), Aligned(0, 64))], [(y,), (y[1:],), (y[16:],), (y[8:],)])


def test_facts_of_a_graph() -> None:
    graph = parse_graph("""graph g(%x: f32[s0, (s0 * 2), 3], %y: i64[s0]{*}) where (2 <= s0) {
  return %x
}
""")
    facts = facts_of(graph, (True, False))
    assert Sized(0, 2, 3) in facts and Dense(1, 1, None, False) in facts
    assert [fact_text(f) for f in facts if isinstance(f, Holds)] == [
        "(t0.1 == (t0.0 * 2)) holds", "(t1.0 == t0.0) holds", "(2 <= t0.0) holds"]  # fmt: skip
    special = (*facts, *sized(graph, {"s0": 4}))
    assert special[-1] == Sized(0, 0, 4)
    y = torch.arange(40)[::2]
    decision = agree([special, facts], [(torch.randn(n, m, 3), y[:k]) for n in range(6) for m in (2 * n, 3) for k in (n, 2)])
    assert decision.common == len(facts)


def random_facts(rng: random.Random, inputs: int) -> Facts:
    found: list[Fact] = []
    places: list[str] = []
    for i in range(inputs):
        rank = rng.choice((1, 2, 2, 3))
        dtype, dense = rng.choice((DType.F32, DType.F32, DType.I64)), rng.random() < 0.8
        found += basics(i, rank, dtype, dense)
        for d in range(rank):
            places.append(place(i, d))
            if rng.random() < 0.5:
                found.append(Sized(i, d, rng.choice((1, 2, 3))))
        if dense and rng.random() < 0.2:
            found.append(AllEqual(i, dtype, 0))
    if rng.random() < 0.5:
        a, b = rng.choice(places), rng.choice(places)
        if a != b:
            found.append(predicate(f"({a} == {b})"))
    return tuple(dict.fromkeys(found))


@pytest.mark.parametrize("seed", range(25))
def test_random_sites(seed: int) -> None:
    rng = random.Random(seed)
    inputs = rng.choice((1, 2, 3))
    plans = [random_facts(rng, inputs) for _ in range(rng.choice((1, 2, 4, 6)))]

    def tensor() -> torch.Tensor:
        shape = [rng.choice((1, 2, 3)) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
        t = torch.zeros(shape, dtype=rng.choice((torch.float32, torch.int64)))
        if t.dim() and rng.random() < 0.3:
            t = t.transpose(0, -1)
        return t + 1 if rng.random() < 0.3 else t

    agree(plans, [[tensor() for _ in range(inputs)] for _ in range(120)])


def test_wrong_numbers_of_arguments_raise() -> None:
    select = native_select(decide([basics(0, 1)])).select
    with pytest.raises(TypeError):
        select()
    with pytest.raises(TypeError):
        select(torch.ones(1), torch.ones(1))


def test_counts_are_exact_over_threads() -> None:
    native = native_select(decide([basics(0, 1)]))
    good, bad = torch.ones(3), torch.ones(3, 3)

    def call() -> None:
        for _ in range(5000):
            native.select(good)
            native.select(bad)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert native.hits(1) == [20000] and sum(native.misses(1)) == 20000


def test_the_function_outlives_everything_else() -> None:
    import gc

    select = native_select(decide([basics(0, 1)])).select
    gc.collect()
    junk = [bytearray(1000) for _ in range(1000)]
    assert select(torch.ones(3)) == 0 and select(torch.ones(3, 1)) < 0 and junk


def test_which_dims_lie_outside_of_which() -> None:
    calls = [torch.randn(6, 8), torch.randn(8, 6).t(), torch.randn(1, 8).expand(6, 8), torch.randn(6, 1).expand(6, 8),
             torch.randn(12, 8)[::2], torch.randn(8, 12).t()[::2], torch.randn(1, 30)[:, :8], torch.empty(0, 8)]  # fmt: skip
    plans = [(*basics(0, 2, dense=False), Outer(0, a, b)) for a, b in ((0, 1), (1, 0))]
    agree(plans, [(t,) for t in calls])
    graph = parse_graph("graph g(%x: f32[6, 8]{*}) {\n  %y: f32[6, 8] = aten.relu.default(%x)\n  return %y\n}")
    for t, want in ((calls[2], (0, 1)), (calls[4], (0, 1)), (calls[5], (1, 0))):
        assert outer_facts(graph, [(t.shape, t.stride())]) == [Outer(0, *want)]
    assert fact_text(Outer(0, 1, 0)) == "dim 1 of input 0 lies outside of dim 0"
