"""Static caches: every step of a generation is one recording, right for any past; on the CPU a recording is the run itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotfuse import Settings
from hotfuse.analysis.growth import read_anywhere
from hotfuse.base.errors import CaptureError
from hotfuse.base.structure import TENSOR
from hotfuse.compile.device.static_caches import with_static_caches
from hotfuse.ir.graph import Graph
from hotfuse.pipeline import compile_tier0
from hotfuse.runtime.serve.answering import alike
from hotfuse.runtime.serve.device_caches import MAX_SETS, MIN_ROWS, StaticCacheRun, static_cache_library
from hotfuse.runtime.serve.effects import Effects, held_elsewhere
from hotfuse.runtime.tierup.agreement import disagreement
from hotfuse.runtime.tierup.turns import Turns
from tests.contract.lowering import group_of
from tests.runtime.test_own_recordings import OnCpu

HEADS, KV, WIDTH = 4, 2, 8
DRAW = torch.Generator().manual_seed(3)
WQ, WK = (torch.randn(16, n, generator=DRAW) / 4 for n in (HEADS * WIDTH, KV * WIDTH))
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def step(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Call:
    """A step with grouped heads and positions, which looks at everything before it."""
    b, t, _ = x.shape
    past = keys.shape[2]
    at = torch.arange(past, past + t)
    turned = torch.sin(at[:, None] * torch.arange(1, WIDTH + 1)).to(x.dtype)
    q = (x @ WQ.to(x.dtype)).reshape(b, t, HEADS, WIDTH).transpose(1, 2) + turned
    new = (x @ WK.to(x.dtype)).reshape(b, t, KV, WIDTH).transpose(1, 2) + turned
    keys, values = torch.cat((keys, new), 2), torch.cat((values, new * 0.5), 2)
    seen = torch.arange(past + t) <= at[:, None]
    wide = [y[:, :, None].expand(b, KV, HEADS // KV, past + t, WIDTH).reshape(b, HEADS, past + t, WIDTH) for y in (keys, values)]
    return F.scaled_dot_product_attention(q, *wide, attn_mask=seen).transpose(1, 2).reshape(b, t, -1), keys, values


def inputs(past: int, tokens: int = 1) -> Call:
    return torch.randn(1, tokens, 16), torch.randn(1, KV, past, WIDTH), torch.randn(1, KV, past, WIDTH)


class LargeDevice(OnCpu):
    def total(self) -> int:
        return 1 << 40


def made(
    fn: Callable[..., Any] = step, sample: Call | None = None, *, background: bool = False,
    clock: Callable[[], float] = time.perf_counter, device: Any = None,
) -> StaticCacheRun:
    found = group_of(fn, sample or inputs(7), symbolic=True, constants=True)
    graph = read_anywhere(found.graph, range(3))
    plain = compile_tier0(graph, found.weights, Settings()).run
    device = device or LargeDevice()
    if background:
        device.may_record = lambda: False
    graphs = static_cache_library(graph, found.weights)
    return StaticCacheRun(plain, graphs, device, lambda got, want: disagreement(got, want, 1e-5), lambda: background, clock=clock)


def static_graph(sample: Sequence[torch.Tensor], fn: Callable[..., Any] = step, rows: int = 256) -> Graph:
    found = group_of(fn, tuple(sample), symbolic=True, constants=True)
    return with_static_caches(read_anywhere(found.graph, range(3)), rows).graph


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def run() -> StaticCacheRun:
    return made()


def right(run: StaticCacheRun, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Call:
    """A call's results, which are those of float64; what it was given is as it was."""
    before = keys.clone(), values.clone()
    got, want = run(x, keys, values), step(x.double(), keys.double(), values.double())
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and torch.allclose(g.double(), w, atol=1e-5), run.counts
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])
    x, keys, values = got
    return x, keys, values


def test_every_step_is_a_replay_until_its_buffer_is_full_and_then_in_a_larger_one(run: StaticCacheRun) -> None:
    _, keys, values = inputs(5)
    for _ in range(3 * MIN_ROWS):
        _, keys, values = right(run, torch.randn(1, 1, 16), keys, values)
    assert run.counts["recorded"] == 3 and run.counts["moved_in"] == 3  # buffers of 128, 256 and 512 rows
    assert run.counts["replays"] == 3 * MIN_ROWS - 6 and not run.refused
    assert keys.data_ptr() == right(run, torch.randn(1, 1, 16), keys, values)[1].data_ptr()


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_short_floats_have_attention_without_a_mask_where_it_hides_nothing(dtype: torch.dtype) -> None:
    sample = [t.to(dtype) for t in inputs(7)]
    run = made(sample=(sample[0], sample[1], sample[2]))
    graph = static_graph(sample)
    assert [n.op for n in graph.nodes if "attention" in n.op] == ["hotfuse.bounded_packed_attention"]
    assert not [n.op for n in graph.nodes if n.op in ("aten.le.Tensor", "aten.expand.default")]
    _, keys, values = (t.to(dtype) for t in inputs(5))
    allowed = 4e-3 if dtype is torch.half else 3e-2
    for _ in range(2 * MIN_ROWS):
        x = torch.randn(1, 1, 16).to(dtype)
        got, want = run(x, keys, values), step(x.double(), keys.double(), values.double())
        for g, w in zip(got, want, strict=True):
            assert float((g.double() - w).abs().max() / w.abs().max()) < allowed, run.counts
        _, keys, values = got
    assert run.counts["replays"] > MIN_ROWS


def test_a_mask_that_hides_something_stays() -> None:
    def near(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Call:
        past = keys.shape[2]
        new = (x @ WK.to(x.dtype)).reshape(1, 1, KV, WIDTH).transpose(1, 2)
        keys, values = torch.cat((keys, new), 2), torch.cat((values, new), 2)
        seen = torch.arange(past + 1) >= torch.arange(1)[:, None] + past - 3
        return F.scaled_dot_product_attention(new, keys, values, attn_mask=seen), keys, values

    sample = tuple(t.half() for t in inputs(7))
    run = made(near, (sample[0], sample[1], sample[2]))
    assert [n.op for n in static_graph(sample, near).nodes if "attention" in n.op] == ["aten.scaled_dot_product_attention.default"]
    _, keys, values = sample
    for _ in range(30):
        x = torch.randn(1, 1, 16).half()
        got, want = run(x, keys, values), near(x.double(), keys.double(), values.double())
        assert all(torch.allclose(g.double(), w, atol=5e-3) for g, w in zip(got, want, strict=True))
        _, keys, values = got


def test_older_pasts_stay_and_other_continuations_of_one_are_apart(run: StaticCacheRun) -> None:
    _, keys, values = inputs(9)
    for _ in range(6):
        _, keys, values = right(run, torch.randn(1, 1, 16), keys, values)
    first, second = (right(run, torch.randn(1, 1, 16), keys, values) for _ in range(2))
    held = [t.clone() for t in (*first, *second)]
    a, b = first[1:], second[1:]
    for _ in range(5):
        _, *a = right(run, torch.randn(1, 1, 16), *a)
        _, *b = right(run, torch.randn(1, 1, 16), *b)
    assert all(torch.equal(x, y) for x, y in zip((*first, *second), held, strict=True))
    for past in ((keys[:, :, :4], values[:, :, :4]), (keys.clone(), values.clone()), (keys * 2, values)):
        right(run, torch.randn(1, 1, 16), *past)


def test_a_buffer_is_used_again_and_nothing_of_its_last_text_is_read(run: StaticCacheRun) -> None:
    for text in range(6):
        _, keys, values = inputs(5 + text)
        for step_ in range(12):
            x = torch.randn(1, 1, 16)
            if text % 2 == 0 and step_ > 8:
                _, keys, values = run(x * float("inf"), keys, values)
            else:
                _, keys, values = right(run, x, keys, values)
    assert run.counts["recorded"] == 1 and run.counts["moved_in"] == 6


def test_more_texts_at_once_than_sets_are_answered_kernel_by_kernel(run: StaticCacheRun) -> None:
    texts: list[Sequence[torch.Tensor]] = [inputs(5 + i)[1:] for i in range(MAX_SETS + 3)]
    for _ in range(6):
        for i, (keys, values) in enumerate(texts):
            _, *texts[i] = right(run, torch.randn(1, 1, 16), keys, values)
    assert run.counts["recorded"] <= MAX_SETS + 3 and run.counts["kernel_by_kernel"] > 3
    assert run.let_go() and not run.let_go()
    right(run, torch.randn(1, 1, 16), *texts[0])


def test_asking_for_memory_is_time_of_recording() -> None:
    """Where no more buffers may be had, a call in a hundred or so asks again, not each of them: a device takes milliseconds."""
    now, asked = [0.0], [0]

    class FullDevice(LargeDevice):
        def free(self) -> int:
            asked[0] += 1
            now[0] += 0.005
            return 0

    run = made(clock=lambda: now[0], device=FullDevice())
    _, keys, values = inputs(5)
    for _ in range(600):
        now[0] += 0.001
        right(run, torch.randn(1, 1, 16), keys, values)
    assert run.counts["kernel_by_kernel"] == 600 and 100 <= asked[0] <= 115 and not run.refused


def test_who_holds_an_older_result_is_found(run: StaticCacheRun) -> None:
    _, keys, values = inputs(5)
    for _ in range(5):
        _, keys, values = right(run, torch.randn(1, 1, 16), keys, values)

    now = [keys, values]
    del keys, values

    def continued() -> bool:
        leaves = [torch.randn(1, 1, 16), *now]
        now.clear()
        _, *grown = run(*leaves)
        now.extend(grown)
        return held_elsewhere(grown[0], leaves, 1)

    assert not continued()
    kept = now[0]
    assert continued()
    del kept
    row = now[0][0, 0]
    assert continued()
    del row
    assert not continued()


def test_beside_calls_the_same_kernels_run_unrecorded() -> None:
    run = made(background=True)
    for past in (2, 5, MIN_ROWS - 1, MIN_ROWS, 300):
        right(run, *inputs(past))
    assert not any(run.counts.values())


def test_several_rows_at_once() -> None:
    def of_three(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Call:
        assert x.shape[1] == 3
        return step(x, keys, values)

    run = made(of_three, inputs(7, 3))
    _, keys, values = inputs(6, 3)
    for _ in range(60):
        _, keys, values = right(run, torch.randn(1, 3, 16), keys, values)
    assert run.counts["replays"] > 50


def test_a_mask_as_long_as_everything_sums_and_the_last_rows_of_it() -> None:
    def masked(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Call:
        past = keys.shape[2]
        new = (x @ WK.to(x.dtype)).reshape(1, 1, KV, WIDTH).transpose(1, 2)
        place = torch.ones(past + 1, dtype=torch.long).cumsum(0)[past:]
        keys, values = torch.cat((keys, new + place), 2), torch.cat((values, new), 2)
        bias = -(torch.arange(past + 1) - past).abs().to(x.dtype)
        return F.scaled_dot_product_attention(new, keys, values, attn_mask=bias[None]), keys, values

    run = made(masked)
    _, keys, values = inputs(5)
    for _ in range(20):
        x = torch.randn(1, 1, 16)
        want = masked(x.double(), keys.double(), values.double())
        got = run(x, keys, values)
        assert all(torch.allclose(g.double(), w, atol=1e-5) for g, w in zip(got, want, strict=True))
        _, keys, values = got
    assert run.counts["replays"] > 15


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.sum, "softmax": lambda k: k.softmax(2).amax(2)[..., None, :1], "flip": lambda k: k.flip(2)[:, :1, :1, :1],
    "slice": lambda k: k[:, :1, 2:3, :1], "select": lambda k: k[:, :1, 1, :1],
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_what_reads_more_than_attention_hides_is_a_reason_not_to(name: str) -> None:
    def also(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Call:
        y, keys, values = step(x, keys, values)
        return y + READERS[name](keys).reshape(-1)[:1], keys, values

    with pytest.raises(CaptureError) as told:
        made(also)
    assert f"aten.{name}" in (told.value.because or ""), told.value


def test_every_size_is_a_number_and_no_past_is_read() -> None:
    graph = static_graph(inputs(7))
    assert all(isinstance(n, int) for node in graph.nodes for v in node.outs for n in v.type.shape)  # type: ignore[union-attr]
    assert not [n for n in graph.nodes if n.op == "aten.cat.default" and len(n.outs[0].type.shape) == 4]  # type: ignore[union-attr]


def test_steps_of_a_text_make_rounds_together_and_other_calls_of_other_sizes_do_not() -> None:
    turns = Turns()
    for grown, ended in ((((1, 1),), True), ((), False)):
        entry: Any = SimpleNamespace(effects=Effects(TENSOR, grown=grown), counted=False)
        rounds = [turns.took((1, alike(entry, (length,)), False), k % 2, 1.0) for k, length in enumerate(range(70, 80))]
        assert any(r is not None for r in rounds) is ended
    assert alike(SimpleNamespace(effects=None, counted=False), (70,)) == (70,)  # pyright: ignore[reportArgumentType]
