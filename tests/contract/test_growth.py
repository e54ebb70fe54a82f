"""Caches that grow in place: a token copies no past, whoever holds an older one sees it unchanged, all other pasts are copied."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hotfuse
from hotfuse import Settings
from hotfuse.analysis.call_facts import Dense, facts_of
from hotfuse.analysis.growth import growing, read_anywhere
from hotfuse.compile.unit import units
from hotfuse.pipeline import compile_tier0, compile_tier1
from hotfuse.runtime.plan import Plan
from tests.contract.lowering import group_of
from tests.races import kernels_win

INLINE = Settings(capture="inline", hot_calls=1)
HEADS, KV, WIDTH = 4, 2, 16
WQ, WK = (torch.randn(64, n, generator=torch.Generator().manual_seed(n)) / 8 for n in (HEADS * WIDTH, KV * WIDTH))


def step(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A decode step with grouped heads."""
    b, t, _ = x.shape
    wq, wk = WQ.to(x.dtype), WK.to(x.dtype)
    q = (x @ wq).reshape(b, t, HEADS, WIDTH).transpose(1, 2)
    new = (x @ wk).reshape(b, t, KV, WIDTH).transpose(1, 2)
    keys, values = torch.cat((keys, torch.sin(new)), 2), torch.cat((values, new), 2)
    seen = F.scaled_dot_product_attention(q, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1))
    return seen.transpose(1, 2).reshape(b, t, -1), keys, values


def inputs(past: int, batch: int = 1, tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(batch, tokens, 64), torch.randn(batch, KV, past, WIDTH), torch.randn(batch, KV, past, WIDTH)


@pytest.fixture(autouse=True)
def kernels_always_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clocks decide nothing here."""
    kernels_win(monkeypatch)
    monkeypatch.setattr(units, "measuring", lambda _sizes: None)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def plan() -> Plan:
    with torch.no_grad():
        found = group_of(step, inputs(7, 3), symbolic=True, constants=True)
        with pytest.MonkeyPatch.context() as patch:
            kernels_win(patch)
            patch.setattr(units, "measuring", lambda _sizes: None)
            made = compile_tier1(read_anywhere(found.graph, range(3)), found.weights, inputs(7, 3), INLINE)
    assert made.runs and any(o.grows for r in made.runs for o in r.code.outputs), made.notes
    return made


def grown(plan: Plan) -> tuple[int, int]:
    found = plan.counters()
    return found["appended_in_place"], found["moved_to_grow"]


def right(plan: Plan, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, ...]:
    """A call's results, which are those of float64, and whose past is the very bytes that it was given."""
    before = keys.clone(), values.clone()
    got, want = plan.run(x, keys, values), step(x.double(), keys.double(), values.double())
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == x.dtype
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1][:, :, : keys.shape[2]], before[0]) and torch.equal(got[2][:, :, : keys.shape[2]], before[1])
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])
    assert plan.counters()["fell_back"] == 0
    return got


def test_a_token_copies_no_past(plan: Plan) -> None:
    _, k, v = inputs(40, 3)
    _, k, v = right(plan, torch.randn(3, 1, 64), k, v)
    at, held = k.data_ptr(), list[tuple[torch.Tensor, torch.Tensor]]()
    begin = grown(plan)
    for _ in range(50):
        held.append((k, k.clone()))
        _, k, v = right(plan, torch.randn(3, 1, 64), k, v)
        assert k.data_ptr() == at
    assert grown(plan) == (begin[0] + 100, begin[1])
    assert all(torch.equal(a, b) for a, b in held)  # whoever kept an older one still sees it


def test_a_block_that_is_full_is_left_for_a_larger_one(plan: Plan) -> None:
    _, k, v = inputs(4, 3)
    places: set[int] = set()
    for _ in range(200):
        _, k, v = plan.run(torch.randn(3, 1, 64), k, v)
        places.add(k.data_ptr())
    right(plan, torch.randn(3, 1, 64), k, v)
    assert 2 <= len(places) <= 4
    assert k.untyped_storage().nbytes() <= 4 * 2 * k.numel()


def test_two_continuations_of_one_past(plan: Plan) -> None:
    _, k, v = right(plan, *inputs(9, 3))
    one = right(plan, torch.randn(3, 1, 64), k, v)
    kept = [t.clone() for t in one]
    begin = grown(plan)
    other = right(plan, torch.randn(3, 1, 64), k, v)
    assert grown(plan) == (begin[0], begin[1] + 2) and other[1].data_ptr() != one[1].data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(one, kept, strict=True))
    right(plan, torch.randn(3, 1, 64), one[1], one[2])
    right(plan, torch.randn(3, 1, 64), other[1], other[2])
    assert torch.equal(one[1], kept[1])


@pytest.mark.parametrize("how", ["clone", "deepcopy", "crop", "view", "detached", "swapped", "exchanged", "transposed", "expanded"])
def test_what_is_not_the_very_result_is_copied(plan: Plan, how: str) -> None:
    _, k, v = right(plan, *inputs(12, 3))
    _, k, v = right(plan, torch.randn(3, 1, 64), k, v)
    keep = k.clone()
    begin = grown(plan)
    given = k
    match how:
        case "clone":
            given = k.clone()
        case "deepcopy":
            given = copy.deepcopy(k)
        case "crop":
            given = k[:, :, :-3]
        case "view":
            given = k[:]
        case "detached":
            given = k.detach()
        case "swapped":
            given = v
        case "exchanged":
            k.data = torch.randn(k.shape)  # the same object on other memory
            keep = k.clone()
        case "transposed":
            given = k.transpose(0, 1).contiguous().transpose(0, 1)
        case _:
            given = k[:, :, :1].expand(-1, -1, k.shape[2], -1)
    values = v[:, :, : given.shape[2]] if how == "crop" else v
    _, k2, _ = right(plan, torch.randn(3, 1, 64), given, values)
    if how != "swapped":  # one that is a result of a plan has its room wherever it comes back
        assert grown(plan)[1] > begin[1]
    assert k2.data_ptr() != given.data_ptr() or how == "swapped"
    assert torch.equal(k, keep)


def test_a_past_of_the_callers_own_is_never_written_behind(plan: Plan) -> None:
    mine = torch.randn(3, KV, 40, WIDTH)
    before = mine.clone()
    for n in (1, 2, 17, 39):
        right(plan, torch.randn(3, 1, 64), mine[:, :, :n], mine[:, :, :n])
    outermost = torch.randn(40, 3, KV, WIDTH).permute(1, 2, 0, 3)  # it lies as a plan's results do
    kept = outermost.clone()
    right(plan, torch.randn(3, 1, 64), outermost[:, :, :20], outermost[:, :, :20])
    assert torch.equal(mine, before) and torch.equal(outermost, kept)


@pytest.mark.parametrize("past", [0, 1, 2])
def test_short_pasts(plan: Plan, past: int) -> None:
    _, k, v = inputs(past, 3)
    for _ in range(4):
        _, k, v = right(plan, torch.randn(3, 1, 64), k, v)


def test_results_of_inference_mode_stay_so(plan: Plan) -> None:
    with torch.inference_mode():
        _, k, v = plan.run(*inputs(12, 3))
        _, k, v = plan.run(torch.randn(3, 1, 64), k, v)
        assert k.is_inference()
    begin = grown(plan)
    _, k2, _ = right(plan, torch.randn(3, 1, 64), k, v)
    assert not k2.is_inference() and grown(plan)[1] == begin[1] + 2
    with torch.inference_mode():
        _, k3, _ = plan.run(torch.randn(3, 1, 64), k2, v)
        assert k3.is_inference()


def test_memory_goes_when_nobody_holds_a_result(plan: Plan) -> None:
    _, k, v = right(plan, *inputs(12, 3))
    _, k2, v2 = right(plan, torch.randn(3, 1, 64), k, v)
    gone = [weakref.ref(t.untyped_storage()) for t in (k2, v2)]
    del k, v, k2, v2
    gc.collect()
    assert all(r() is None for r in gone)


def test_threads_that_continue_one_past(plan: Plan) -> None:
    _, k, v = right(plan, *inputs(30, 3))
    problems: list[BaseException] = []

    def go(seed: int) -> None:
        make = torch.Generator().manual_seed(seed)
        mine, ours = k, v
        try:
            with torch.no_grad():
                for _ in range(40):
                    x = torch.randn(3, 1, 64, generator=make)
                    _, mine, ours = right(plan, x, mine, ours)
        except BaseException as e:
            problems.append(e)

    threads = [threading.Thread(target=go, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems, problems[0]


def several(x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
    return torch.cat((past, x * 2), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_other_types_dims_and_several_rows(dtype: torch.dtype) -> None:
    def some(*shape: int) -> torch.Tensor:
        return (torch.rand(shape) > 0.5).to(dtype) if dtype is torch.bool else torch.randint(-50, 50, shape).to(dtype)

    def of(x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        return torch.cat((past, ~x if x.dtype is torch.bool else x * 2), 1)

    found = group_of(of, [some(2, 3, 5), some(2, 7, 5)], symbolic=True)
    graph = read_anywhere(found.graph, range(3))
    assert growing(graph)
    plan = compile_tier1(graph, {}, [some(2, 3, 5), some(2, 7, 5)], INLINE)
    past = want = some(2, 7, 5)
    for n in (3, 2, 6, 3, 3):
        x = some(2, n, 5)
        (past,), want = plan.run(x, past), of(x, want)
        assert torch.equal(past, want)
    if plan.runs:
        assert grown(plan)[0] > 0


def test_what_does_not_grow() -> None:
    def graph_of(fn: Any) -> Any:
        return group_of(fn, [torch.randn(2, 3, 5), torch.randn(2, 7, 5)], symbolic=True).graph

    assert growing(graph_of(several))
    assert not growing(graph_of(lambda x, past: (several(x, past), past.sum())))  # somebody else reads the past
    assert not growing(graph_of(lambda x, past: several(x, past).sum()))  # it is no result
    assert not growing(graph_of(lambda x, past: (several(x, past), past)))
    assert not growing(graph_of(lambda x, past: torch.cat((x, past), 1).sum(0)))
    assert not growing(group_of(several, [torch.randn(2, 3, 5), torch.randn(2, 7, 5)]).graph)  # sizes are numbers

    def viewed(x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = several(x, past)
        return both, both.view(2, -1).sum(1)

    assert not growing(graph_of(viewed))  # a view asks for the strides of the model's own code


def test_only_a_cache_that_grows_is_guarded_without_strides() -> None:
    graph = group_of(step, inputs(7, 3), symbolic=True, constants=True).graph
    assert sum(isinstance(f, Dense) for f in facts_of(graph, (True,) * 3)) == 3
    assert [f.input for f in facts_of(read_anywhere(graph, range(3)), (True,) * 3) if isinstance(f, Dense)] == [0]


def test_the_library_reads_what_a_plan_gave(plan: Plan) -> None:
    found = group_of(step, inputs(7, 3), symbolic=True, constants=True)
    library = compile_tier0(read_anywhere(found.graph, range(3)), found.weights, INLINE)
    _, k, v = right(plan, *inputs(12, 3))
    x = torch.randn(3, 1, 64)
    got, want = library.run(x, k, v), step(x.double(), k.double(), v.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


class Held:
    """A cache as libraries have them: an object that a call changes."""

    def __init__(self) -> None:
        self.keys, self.values = torch.randn(2, KV, 5, WIDTH), torch.randn(2, KV, 5, WIDTH)


class Decoder(torch.nn.Module):
    def forward(self, x: torch.Tensor, cache: Held) -> torch.Tensor:
        out, cache.keys, cache.values = step(x, cache.keys, cache.values)
        return out


class Handing(torch.nn.Module):
    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return step(x, keys, values)


def appended_by(fast: hotfuse.Jit) -> int:
    plans = [p for s in fast.explain().to_dict()["sites"] for p in s["plans"]]
    assert any(p["tier"] >= 1 for p in plans)
    return sum(p["counters"].get("appended_in_place", 0) for p in plans)


def test_caches_in_objects_grow_and_tensors_in_a_programs_hands_lie_as_the_models() -> None:
    cache, (x, keys, values) = Held(), inputs(5, 2)
    with hotfuse.jit(Decoder(), settings=INLINE) as held, hotfuse.jit(Handing(), settings=INLINE) as handing:
        for _ in range(12):
            past = cache.keys, cache.values
            torch.testing.assert_close(held(x, cache), step(x, *past)[0])
            want = step(x, keys, values)
            _, keys, values = got = handing(x, keys, values)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b)
                assert a.stride() == b.stride() and torch.equal(a.view(2, -1), a.reshape(2, -1))
        assert appended_by(held) > 0 and appended_by(handing) == 0


HOLDING: dict[str, Any] = {
    "the tensor": lambda t: t,
    "a view": lambda t: t[:, :, 1:3],
    "the same memory without its history": lambda t: t.detach(),
    "an array": lambda t: t.numpy(),
}


@pytest.mark.parametrize("how", HOLDING)
def test_who_holds_an_older_cache_writes_to_that_one_alone(how: str) -> None:
    x, mine, theirs = inputs(5, 2)[0], Held(), Held()
    theirs.keys, theirs.values = mine.keys.clone(), mine.values.clone()
    model = Decoder()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        in_place = 0
        for i in range(24):
            held = [HOLDING[how](c.keys) for c in (mine, theirs)] if i % 4 == 3 else []
            before = mine.keys.data_ptr()
            torch.testing.assert_close(fast(x, mine), model(x, theirs))
            in_place += mine.keys.data_ptr() == before
            assert not held or mine.keys.data_ptr() != before
            for older in held:
                older[...] = 7.0
            del held
            torch.testing.assert_close(mine.keys, theirs.keys)
            torch.testing.assert_close(mine.values, theirs.values)
        assert in_place >= 5, "nobody held it, and it was copied"
