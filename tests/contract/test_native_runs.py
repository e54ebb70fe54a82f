"""Native runs against the library: chains and webs of kernels, views between them, sizes at run time, branches, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import hotfuse
from hotfuse import Settings
from hotfuse.backends.llvm.runs.enter import give_back_arenas, unavailable
from hotfuse.compile.unit import units
from hotfuse.ir.dims import Dim, evaluate, expr, sym
from hotfuse.lower.cpu.group import lower_group
from hotfuse.lower.run.arena import Live, allocate
from hotfuse.lower.run.description import OUTCOMES
from hotfuse.lower.run.inplace import may_overwrite
from hotfuse.pipeline import compile_tier0, compile_tier1
from hotfuse.runtime.plan import Plan
from hotfuse.runtime.serve import native_plan as native_plans
from tests.contract.lowering import group_of
from tests.races import kernels_win, slow_library
from tests.runtime.test_branches import model as nested_branches

INLINE = Settings(capture="inline", hot_calls=1)
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    kernels_win(monkeypatch)
    monkeypatch.setattr(units, "measuring", lambda _sizes: None)
    assert unavailable() == ""
    with torch.no_grad():
        yield


def plans(fn: Function, sample: Sequence[torch.Tensor], symbolic: bool = False) -> tuple[Plan, Plan]:
    """A function's tier-1 plan and its tier-0 plan."""
    found = group_of(fn, sample, symbolic, constants=True)
    return compile_tier1(found.graph, found.weights, sample, INLINE), compile_tier0(found.graph, found.weights, INLINE)


def agree(native: Plan, library: Plan, inputs: Sequence[torch.Tensor], exact: Function | None = None) -> tuple[Any, ...]:
    """Both plans on the same inputs: the same types, and numbers within the error of float32."""
    before = [t.clone() for t in inputs]
    got, want = native.run(*inputs), library.run(*inputs)
    for a, b in zip(inputs, before, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg="an input was written")
    reference = None if exact is None else exact(*(t.double() if t.is_floating_point() else t for t in inputs))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.dtype, a.shape, a.is_contiguous()) == (b.dtype, b.shape, b.is_contiguous())
        if not a.is_floating_point():
            assert torch.equal(a, b)
            continue
        truth = b.double() if reference is None else (reference if torch.is_tensor(reference) else reference[i])
        finite = truth[torch.isfinite(truth)].abs()
        scale = finite.max().item() if finite.numel() else 0.0
        torch.testing.assert_close(a.double(), truth.double(), rtol=2e-5, atol=2e-5 * (scale + 1e-3), equal_nan=True)
    return got


def one_call(plan: Plan) -> None:
    """Everything is one native run."""
    assert [u.native is not None for u in plan.units] == [True], [a.source for a in plan.artifacts]
    assert plan.counters()["fell_back"] == 0


def w(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


W1, W2, W3 = w(24, 16, seed=1), w(16, 24, seed=2), w(16, 16, seed=3)


def mlp(x: torch.Tensor) -> torch.Tensor:
    h = F.gelu(F.linear(x, W1.to(x.dtype)))
    h = F.linear(h, W2.to(x.dtype)) + x
    return torch.softmax(F.linear(F.layer_norm(h, (16,)), W3.to(x.dtype)), -1)


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_chain_is_one_call(symbolic: bool) -> None:
    native, library = plans(mlp, [torch.randn(5, 16)], symbolic)
    one_call(native)
    assert len(native.artifacts) >= 4
    for n in (5, 2, 17, 64, 1, 0, 5) if symbolic else (5, 5):
        agree(native, library, [torch.randn(n, 16)], mlp)
    one_call(native)


def webbed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    p = F.linear(a, W3.to(a.dtype))
    q = F.linear(b, W3.to(a.dtype)).transpose(0, 1)  # a view that the next kernels read as it lies
    r = torch.softmax(q, 0).t() * p
    s = r.reshape(-1, 4, 4).transpose(1, 2)
    t = s.sum(-1) + r.reshape(-1, 4, 4)[:, 1]
    u = F.layer_norm(t.unsqueeze(1).expand(-1, 4, 4).reshape(-1, 16) + p, (16,))
    return F.linear(u, W3.to(a.dtype)), r, s


@pytest.mark.parametrize("symbolic", [False, True])
def test_a_web_with_views_between(symbolic: bool) -> None:
    sample = [torch.randn(6, 16), torch.randn(6, 16)]
    native, library = plans(webbed, sample, symbolic)
    for n in (6, 3, 19, 2, 1, 0) if symbolic else (6,):
        agree(native, library, [torch.randn(n, 16), torch.randn(n, 16)], webbed)
        x = torch.randn(n, 16)
        agree(native, library, [x, x], webbed)  # the same memory twice
    assert native.counters()["fell_back"] == 0


def test_inputs_and_views_as_results() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.exp(F.linear(x, W3))
        k = F.linear(h, W3)
        return x, h[1:], h.t(), k.unsqueeze(0), y.transpose(0, 1), x[0]

    sample = [torch.randn(4, 16), torch.randn(3, 2)]
    native, library = plans(fn, sample)
    for _ in range(3):
        x, y = torch.randn(4, 16), torch.randn(3, 2)
        got = agree(native, library, [x, y])
        want = library.run(x, y)
        assert got[0] is x and got[4].data_ptr() == y.data_ptr() and got[5].data_ptr() == x.data_ptr()
        assert got[1].untyped_storage().data_ptr() == got[2].untyped_storage().data_ptr()  # views of one tensor, as in eager
        assert got[3].untyped_storage().data_ptr() != got[1].untyped_storage().data_ptr()
        assert [t.stride() for t in got] == [t.stride() for t in want]


def test_results_are_fresh_and_stay() -> None:
    native, library = plans(mlp, [torch.randn(5, 16)])
    xs = [torch.randn(5, 16) for _ in range(6)]
    kept = [native.run(x)[0] for x in xs]
    assert len({t.data_ptr() for t in kept}) == len(kept)
    for x, y in zip(xs, kept, strict=True):
        torch.testing.assert_close(y, library.run(x)[0], rtol=1e-4, atol=1e-5)


def test_tensors_that_lie_otherwise_fall_back_and_are_counted() -> None:
    native, library = plans(mlp, [torch.randn(5, 16)])
    agree(native, library, [torch.randn(16, 5).t()])
    agree(native, library, [torch.randn(5, 32)[:, ::2]])
    assert native.counters()["fell_back"] == 2
    negated = torch.complex(torch.randn(5, 16), torch.randn(5, 16)).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(native.run(negated)[0], library.run(negated)[0], rtol=1e-4, atol=1e-5)
    agree(native, library, [torch.randn(5, 16)])
    assert native.counters()["fell_back"] == 3


def test_strided_inputs_are_read_where_they_lie() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.exp(x) + 1, W3) * 2

    sample = torch.randn(5, 40)[:, 3:35:2]
    native, library = plans(fn, [sample])
    one_call(native)
    for x in (sample, torch.randn(5, 64)[:, ::4], torch.randn(5, 16), torch.randn(16, 5).t(), torch.randn(1, 16).expand(5, 16)):
        agree(native, library, [x], lambda t: F.linear(torch.exp(t) + 1, W3.double()) * 2)
    one_call(native)


def test_what_answers_calls_that_leave_a_run_is_made_for_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start links many runs, and few calls ever leave one."""
    made, chain = list[str](), native_plans.chained

    def noted(graph: Any, *rest: Any) -> Any:
        made.append(graph.name)
        return chain(graph, *rest)

    monkeypatch.setattr(native_plans, "chained", noted)
    native, library = plans(webbed, [torch.randn(6, 16), torch.randn(6, 16)])
    agree(native, library, [torch.randn(6, 16), torch.randn(6, 16)], webbed)
    assert made and not [name for name in made if name.endswith(".fallback")]
    for _ in range(2):
        agree(native, library, [torch.randn(16, 6).t(), torch.randn(6, 16)], webbed)
    assert native.counters()["fell_back"] == 2
    assert len([name for name in made if name.endswith(".fallback")]) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.bool])
def test_other_element_types(dtype: torch.dtype) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = (x > 0).t().contiguous()
        b = torch.where(a.t(), x, y)
        return torch.cumsum(b.float(), 0), b.flip(0), a

    make = (lambda: torch.randn(7, 5).to(dtype)) if dtype.is_floating_point else (lambda: torch.randint(0, 2, (7, 5)).to(dtype))
    native, library = plans(fn, [make(), make()])
    for _ in range(3):
        agree(native, library, [make(), make()])


def test_zero_rank_and_special_values() -> None:
    def fn(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.linear(x * s, W3)
        return h.amax(), torch.softmax(h, -1), h.mean() + s

    native, library = plans(fn, [torch.randn(4, 16), torch.tensor(2.0)])
    for scale in (1.0, 0.0, float("inf"), float("nan")):
        agree(native, library, [torch.randn(4, 16), torch.tensor(scale)])
    assert native.counters()["fell_back"] == 0


POINT: list[Function] = [torch.exp, torch.sigmoid, torch.relu, lambda x: x * 0.5 - 1, lambda x: x * x, torch.tanh]


def step(rng: np.random.Generator, values: list[torch.Tensor]) -> Function:
    """A random op on earlier values of shape [n, 16]."""
    i, j = (int(k) for k in rng.integers(0, len(values), 2))
    point = POINT[int(rng.integers(len(POINT)))]
    cases: list[Function] = [
        lambda v: point(torch.tanh(v[i])),
        lambda v: F.linear(v[i], W3.to(v[i].dtype)),
        lambda v: torch.tanh(v[i]) + v[j],
        lambda v: F.layer_norm(v[i], (16,)),
        lambda v: F.linear(v[i].reshape(-1, 4, 4).transpose(1, 2).reshape(-1, 16), W3.to(v[i].dtype)),
        lambda v: torch.softmax(v[i].view(-1, 2, 8), 1).flatten(1),
        lambda v: torch.cat([v[i][:, 8:], v[j][:, :8]], 1) * 0.5,
        lambda v: v[i] + v[j].mean(-1, keepdim=True),
        lambda v: v[i].select(1, 3).unsqueeze(1).expand(-1, 16) + v[j],
    ]
    return cases[int(rng.integers(len(cases)))]


@pytest.mark.parametrize("seed", range(12))
def test_random_webs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps: list[Function] = []
    probe = [torch.randn(3, 16), torch.randn(3, 16)]
    for _ in range(int(rng.integers(4, 12))):
        steps.append(step(rng, probe))
        probe.append(steps[-1](probe))
    wanted = sorted({len(probe) - 1, *(int(k) for k in rng.integers(0, len(probe), 2))})

    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [a, b]
        for s in steps:
            values.append(s(values))
        return tuple(values[k] for k in wanted)

    symbolic = bool(seed % 2)
    native, library = plans(fn, [torch.randn(5, 16), torch.randn(5, 16)], symbolic)
    assert any(u.native is not None for u in native.units), f"seed {seed}: {native.notes}"
    for n in (5, 2, 9, 33, 1, 0) if symbolic else (5, 5):
        agree(native, library, [torch.randn(n, 16), torch.randn(n, 16)], fn)
    assert native.counters()["fell_back"] == 0, f"seed {seed}"


def test_branches_nested_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_library(monkeypatch)
    session = hotfuse.InferenceSession(nested_branches(), settings=INLINE)
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((3, 16)).astype(np.float32), "positive": np.array(p), "deep": np.array(d)}
             for p in (True, False) for d in (True, False)]  # fmt: skip
    want = [hotfuse.InferenceSession(nested_branches(), settings=INLINE.with_(tiers=0)).run(None, f)[0] for f in feeds]
    for _ in range(3):
        for f, y in zip(feeds, want, strict=True):
            np.testing.assert_allclose(session.run(None, f)[0], y, rtol=1e-4, atol=1e-5)
    plan = session._engine.sites[next(iter(session._engine.sites))].entries[0].plan
    one_call(plan)  # which is all of it, branches in branches included
    native = plan.units[0].native
    assert native is not None and len(native.code.branches) == 2
    took: list[tuple[int, ...]] = []
    for f, y in zip(feeds, want, strict=True):
        values = {v.name: torch.from_numpy(f[n]) for v, n in zip(plan.graph.inputs, ("x", "positive", "deep"), strict=True)}
        (out,), inside = native.watched(OUTCOMES, *(values[i.name] for i in native.code.inputs))
        np.testing.assert_allclose(out.numpy(), y, rtol=1e-4, atol=1e-5)
        took.append(inside.outcomes)
    assert took == [(2, 0), (2, 0), (1, 2), (1, 1)]  # the outer branch's side, and the inner one's where it is reached
    assert plan.counters()["fell_back"] == 0


def test_many_threads_in_one_plan() -> None:
    native, library = plans(mlp, [torch.randn(64, 16)], symbolic=True)
    wrong: list[str] = []

    def serve(seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for n in (3, 64, 17, 5, 200) * 20:
                x = torch.randn(n, 16, generator=rng)
                if not torch.allclose(native.run(x)[0], library.run(x)[0], rtol=1e-4, atol=1e-5):
                    wrong.append(f"seed {seed}, {n} rows")

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[:3]
    counts = native.counters()
    assert counts["fell_back"] == 0 and 0 < counts["arena_bytes_kept"] <= 4 * (native.memory.arena * 16 + (1 << 20))


def test_time_per_partition() -> None:
    native, library = plans(webbed, [torch.randn(64, 16), torch.randn(64, 16)])
    inputs = [torch.randn(64, 16), torch.randn(64, 16)]
    for plan in (native, library):
        outs, ns = plan.timed(*inputs)
        for a, b in zip(outs, library.run(*inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert len(ns) == len(plan.artifacts) and all(n >= 0 for n in ns) and sum(ns) > 0


def test_a_timed_call_borrows_the_arena_that_other_calls_warmed() -> None:
    native, library = plans(webbed, [torch.randn(64, 16), torch.randn(64, 16)])
    inputs = [torch.randn(64, 16), torch.randn(64, 16)]
    native.run(*inputs)
    for _ in range(3):
        outs, _ = native.timed(*inputs)
        for a, b in zip(outs, library.run(*inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    native.run(*inputs)
    counts = native.counters()
    assert counts["arenas_allocated"] == 1 and counts["arena_bytes_kept"] > 0 and counts["fell_back"] == 0


def test_what_a_plan_says_of_its_memory() -> None:
    native, _ = plans(mlp, [torch.randn(128, 16)])
    memory = native.memory
    assert memory.eager_peak is not None and 0 < memory.arena < memory.eager_peak
    assert memory.constants >= 2 * 4 * 16 * 24
    native.run(torch.randn(128, 16))
    assert native.counters()["arenas_allocated"] == 1
    native.run(torch.randn(128, 16))
    assert native.counters()["arenas_allocated"] == 1


# --- memory -----------------------------------------------------------------------------------------------------------

SIZE: list[Dim] = [64, 100, 4096, 40000, expr("*", sym("n"), 4), expr("*", sym("n"), sym("m")), expr("+", sym("m"), 3)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12), st.integers(0, 6)), max_size=14), st.booleans(),
    st.integers(0, 300), st.integers(0, 300),
)  # fmt: skip
def test_values_that_meet_do_not_overlap(values: list[tuple[int, int, int]], fixed: bool, n: int, m: int) -> None:
    lives = [Live(i, SIZE[k % 4 if fixed else k], at, at + long) for i, (k, at, long) in enumerate(values)]
    pairs = [(b.name, a.name) for a in lives for b in lives if a.last == b.first and a is not b and a.first < b.first]
    env = {"n": n, "m": m}
    for inplace in ([], pairs):
        arena = allocate(lives, inplace, {"n": 50, "m": 20})
        assert set(arena.offsets) == {v.name for v in lives}
        placed = [(evaluate(arena.offsets[v.name], env), evaluate(v.bytes, env), v) for v in lives]
        for i, (a, size, v) in enumerate(placed):
            assert a % 64 == 0 and a + size <= evaluate(arena.bytes, env)
            for b, other, o in placed[i + 1:]:
                if v.first <= o.last and o.first <= v.last and a < b + other and b < a + size:
                    handed_over = (o.name, v.name) in inplace or (v.name, o.name) in inplace
                    assert handed_over and a == b and min(v.last, o.last) == max(v.first, o.first), (v, o)


def test_only_kernels_that_visit_each_element_once_write_in_place() -> None:
    def pointwise(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * x

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + x.roll(1, 0)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)

    found: dict[Function, bool] = {}
    for fn in (pointwise, shifted, normed):
        kernel = lower_group(group_of(fn, [torch.randn(37, 19)]).graph).kernel
        given, made = (next(b.name for b in kernel.buffers if b.kind.value == kind) for kind in ("input", "output"))
        found[fn] = may_overwrite(kernel, given, made)
    assert found[pointwise] and not found[shifted] and not found[normed]


def test_arenas_are_given_back_and_made_again() -> None:
    inputs = [torch.randn(64, 16), torch.randn(64, 16)]
    native, _ = plans(webbed, inputs)
    want = native.run(*inputs)
    assert native.counters()["arena_bytes_kept"] > 0
    assert give_back_arenas() > 0
    assert native.counters()["arena_bytes_kept"] == 0
    for got, ref in zip(native.run(*inputs), want, strict=True):
        assert torch.equal(got, ref)
    assert native.counters()["arena_bytes_kept"] > 0


def test_arenas_may_go_while_calls_are_in_them() -> None:
    inputs = [torch.randn(64, 16), torch.randn(64, 16)]
    native, _ = plans(webbed, inputs)
    want = native.run(*inputs)[0]
    wrong, stop = list[int](), threading.Event()

    def call() -> None:
        with torch.no_grad():
            while not stop.is_set():
                if not torch.equal(native.run(*inputs)[0], want):
                    wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(300):
        give_back_arenas()
    stop.set()
    for t in threads:
        t.join()
    assert not wrong
