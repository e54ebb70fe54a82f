"""Batches that are mostly padding are served by live rows alone, whatever the next mask is."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
import hotfuse.runtime.site as site_module
import hotfuse.runtime.tierup.padding as padding_module
from hotfuse import Settings
from hotfuse.base.events import Action, Why
from hotfuse.runtime.samples import CallSamples
from hotfuse.runtime.serve.packing import PackedRun
from hotfuse.runtime.tierup import proposals
from hotfuse.runtime.tierup.alongside import JobAlongside
from hotfuse.runtime.tierup.layers.compose import composer_of
from hotfuse.runtime.tierup.padding import MIN_SEQUENCES, PaddedTraffic, PaddingLayer, may_be_padded, padded_traffic
from hotfuse.runtime.tierup.tier2 import PACKED, PACKED_BY_LIBRARY, PADDED_CALLS
from hotfuse.specialize.table import PADDING, AttemptKey
from tests.padded import TOKENS, WIDTH, Compared, LookedUp, MaskedInside, PaddedEncoder, PooledRows, batch
from tests.races import new_plans_win

INLINE = Settings(capture="inline", hot_calls=2)


@pytest.fixture(autouse=True)
def clocks_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    new_plans_win(monkeypatch)
    monkeypatch.setattr(padding_module, "paying_share", lambda *_a, **_k: 0.8)
    with torch.no_grad():
        yield


def serve(fast: Any, model: torch.nn.Module, calls: int, sizes: tuple[int, int] = (3, 16), share: float = 0.4) -> None:
    for _ in range(calls):
        inputs = batch(*sizes, share)
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


def entry_of(fast: Any) -> Any:
    return next(iter(fast._engine.sites.values())).entries[0]


@pytest.mark.budget_s(10)
def test_padded_batches_are_packed_and_other_masks_are_served_right() -> None:
    model = PaddedEncoder().eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    serve(fast, model, 40)
    entry = entry_of(fast)
    assert entry.plan.layers == (AttemptKey(PADDING),) and entry.plan.tier == 2, str(fast.explain())
    plans = [entry.plan]  # whole batches may have kernels made for them, by a plan with counters of its own

    def counted(what: str) -> int:
        plans.extend([entry.plan] if entry.plan is not plans[-1] else [])
        return sum(plan.counters().get(what, 0) for plan in plans)

    for _ in range(5):  # every call another kind; the rounds of a race in a call count as calls of the plan that served
        for share, kind in ((0.2, "packed_calls"), (1.0, "padded_share")):
            before = counted(kind)
            serve(fast, model, 1, share=share)
            assert counted(kind) > before, (kind, str(fast.explain(full=True)))
    ids, mask = batch(3, 16)
    mask[1] = 0
    before = counted("padded_empty")
    got, want = fast(ids, mask), model(ids, mask)  # a sequence without any key: what the model makes of it
    assert torch.equal(torch.isnan(got), torch.isnan(want)) and bool(torch.isnan(want[1]).all())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert counted("padded_empty") > before
    shown = str(fast.explain(full=True))
    assert "rows that" in shown and "are not computed where at most 80% live" in shown, shown
    deployed = [d for d in fast._engine.log.decisions if d.action is Action.DEPLOY and d.evidence.get("mask")]
    assert deployed and 0.2 < float(deployed[0].evidence["live"]) < 0.7
    fast.close()


@pytest.mark.parametrize("made", ["not padding", "longer"])
def test_masks_that_a_model_makes_by_itself_are_packed(made: str) -> None:
    model = MaskedInside(made).eval()
    exact = MaskedInside(made).double().eval()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    fast: Any = hotfuse.jit(model, settings=INLINE)

    def right(*inputs: torch.Tensor) -> None:
        torch.testing.assert_close(fast(*inputs).double(), exact(*inputs), rtol=1e-4, atol=1e-5, equal_nan=True)

    for _ in range(40):
        right(*model.batch(3, 16))
    entry = entry_of(fast)
    assert entry.plan.layers == (AttemptKey(PADDING),) and entry.plan.tier == 2, str(fast.explain())
    for _ in range(10):
        right(*model.batch(3, 16, 0.1))
        right(*model.batch(3, 16, 1.0))
    empty = [t.clone() for t in model.batch(3, 16)]
    empty[-1][1] = 0  # a sequence of which nothing lives
    right(*empty)
    (bet,) = fast.explain().to_dict()["sites"][0]["plans"][0]["bets"]
    assert bet["row"] == PADDING and bet["held"] >= 10 and bet["missed"] >= 1, bet
    told = "tensors_1" if made == "longer" else "tensors_0"  # the input that a user knows, not what the graph makes of it
    assert f"bet on: packed rows ({told}): held in" in str(fast.explain()), "people read the first lines"
    assert bet["values"] == [told] and f"rows that a mask made of {told} hides" in str(fast.explain(full=True))
    fast.close()


@pytest.mark.parametrize("pools", ["mean", "largest", "chosen"])
def test_rows_that_are_pooled_without_attention_are_packed(pools: str) -> None:
    model = PooledRows(pools).eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    serve(fast, model, 40)
    assert entry_of(fast).plan.layers == (AttemptKey(PADDING),), str(fast.explain())
    for share in (0.1, 0.5, 1.0) * 4:
        serve(fast, model, 1, share=share)
    ids, mask = batch(3, 16)
    mask[1] = 0
    torch.testing.assert_close(fast(ids, mask), model(ids, mask), rtol=1e-4, atol=1e-5)
    fast.close()


def test_graphs_that_hide_no_rows_are_not_looked_at_for_padding() -> None:
    """Looking holds up tier 1 and sorts what may be masks, so it is for graphs that make something of an input which hides rows."""
    gated = nn.ModuleList((nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))

    class Gated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(gated[0](x)) * gated[1](x)

    gated_call = (torch.randn(4, WIDTH),)
    for model, inputs, may in ((Gated(), gated_call, False), (PooledRows("mean"), batch(3, 16), True)):
        fast: Any = hotfuse.jit(model.eval(), settings=INLINE.with_(tiers=0))
        for _ in range(3):
            fast(*inputs)
        assert may_be_padded(entry_of(fast).baseline.graph) is may
        fast.close()


def test_two_padded_batches_of_a_call_are_packed_in_one_plan() -> None:
    model = Compared().eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    for _ in range(40):
        inputs = model.batch(3, 16)
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert entry_of(fast).plan.layers == (AttemptKey(PADDING),), str(fast.explain(full=True))
    shown = str(fast.explain(full=True))
    assert "tensors_3, tensors_1 hides are not computed" in shown and "10 products and attentions on packed rows" in shown, shown
    for share, asked in ((0.1, 1.0), (1.0, 0.1), (1.0, 1.0), (0.3, 0.3)) * 3:
        inputs = model.batch(3, 16, share, asked)
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    for i in (1, 3):
        empty = model.batch(3, 16)
        empty[i][1] = 0
        torch.testing.assert_close(fast(*empty), model(*empty), rtol=1e-4, atol=1e-5, equal_nan=True)
    fast.close()


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_a_session_packs_what_its_file_masks_by_itself() -> None:
    model, file = MaskedInside("not padding").eval(), io.BytesIO()
    torch.onnx.export(model, model.batch(3, 16), file, input_names=["ids"], dynamic_axes={"ids": {0: "b", 1: "s"}}, dynamo=False)
    session: Any = hotfuse.InferenceSession(file.getvalue(), settings=INLINE)
    for _ in range(30):
        (ids,) = model.batch(3, 16)
        (got,) = session.run(None, {"ids": ids.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(ids), rtol=1e-4, atol=1e-5)
    assert entry_of(session).plan.counters().get("packed_calls", 0) > 0, str(session.explain(full=True))
    session.close()


def test_what_outputs_show_is_computed_unless_the_user_says_otherwise() -> None:
    model = PaddedEncoder(pools="nothing").eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    serve(fast, model, 30)
    refused = [d for d in fast._engine.log.decisions if d.why is Why.NOT_PACKED]
    assert refused and "shows padded rows" in str(refused[0].evidence["because"]), str(fast.explain())
    fast.close()
    fast = hotfuse.jit(model, settings=INLINE.with_(padding="ignore"))
    for _ in range(30):
        ids, mask = batch(3, 16)
        live = mask.bool()
        torch.testing.assert_close(fast(ids, mask)[live], model(ids, mask)[live], rtol=1e-4, atol=1e-5)
    assert entry_of(fast).plan.layers == (AttemptKey(PADDING),), str(fast.explain())
    fast.close()


def test_a_user_who_needs_no_exact_result_allows_rounding_and_empty_padded_rows() -> None:
    model = PaddedEncoder(pools="nothing").eval()
    fast: Any = hotfuse.jit(model, exact=False, settings=INLINE)
    assert fast._engine.settings == INLINE.with_(precision="bf16", padding="ignore")
    for _ in range(30):
        ids, mask = batch(3, 16)
        live = mask.bool()
        got, want = fast(ids, mask)[live], model(ids, mask)[live]
        torch.testing.assert_close(got, want, rtol=0, atol=2e-2 * float(want.abs().max()))
    assert entry_of(fast).plan.layers == (AttemptKey(PADDING),), str(fast.explain())
    assert fast.explain().to_dict()["exact"] is False and hotfuse.jit(model).explain().to_dict()["exact"] is True
    fast.close()


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_a_session_packs_what_its_file_pads() -> None:
    model, file = PaddedEncoder("indexed").eval(), io.BytesIO()
    dynamic = {name: {0: "b", 1: "s"} for name in ("ids", "mask")}
    torch.onnx.export(model, batch(3, 16), file, input_names=["ids", "mask"], dynamic_axes=dynamic, dynamo=False)
    session: Any = hotfuse.InferenceSession(file.getvalue(), settings=INLINE)
    for _ in range(30):
        ids, mask = batch(3, 16)
        (got,) = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), model(ids, mask), rtol=1e-4, atol=1e-5)
    assert entry_of(session).plan.counters().get("packed_calls", 0) > 0, str(session.explain(full=True))
    session.close()


def about(fast: Any, what: AttemptKey) -> list[Any]:
    return [d for d in fast._engine.log.decisions if d.evidence.get("what") == str(what)]


def test_packing_comes_before_tier_1_and_kernels_for_other_calls_when_they_come() -> None:
    model = PaddedEncoder(layers=1).eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    serve(fast, model, 6)
    entry = entry_of(fast)
    assert entry.layers == (PaddingLayer(False, compiled=False),), str(fast.explain(full=True))
    deployed = [d.evidence for d in fast._engine.log.decisions if d.action is Action.DEPLOY]
    assert [e["tier"] for e in deployed] == [0, 2] and about(fast, PACKED)[0].evidence["before_tier_1"]
    assert "else on library kernels" in str(fast.explain(full=True))
    for _ in range(60):
        serve(fast, model, 1, share=0.2)
        serve(fast, model, 1, share=1.0)
        if entry.layers == (PaddingLayer(False),):
            break
    assert entry.layers == (PaddingLayer(False),), str(fast.explain(full=True))  # and so packed calls are still packed
    assert about(fast, PADDED_CALLS)[0].evidence["share"] >= proposals.MIN_OTHERS
    serve(fast, model, 2, share=0.2)
    assert entry.plan.counters()["packed_calls"] > 0
    fast.close()


def test_kernels_for_other_calls_come_soon_where_no_such_call_was_kept_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "NOT_KEPT_RETRY_S", 0.0)
    model = PaddedEncoder(layers=1).eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    serve(fast, model, 6)
    entry = entry_of(fast)
    assert entry.layers == (PaddingLayer(False, compiled=False),), str(fast.explain(full=True))
    kept = [batch(3, 16, 0.4) for _ in range(4)]
    with monkeypatch.context() as before:
        before.setattr(CallSamples, "several", lambda _samples, most: kept[:most])
        for _ in range(100):
            serve(fast, model, 1, share=1.0)
            if PADDED_CALLS in entry.retries:
                break
    assert PADDED_CALLS in entry.retries and not entry.layers[0].compiled, str(fast.explain(full=True))
    for _ in range(100):
        serve(fast, model, 1, share=0.2)
        serve(fast, model, 1, share=1.0)
        if entry.layers == (PaddingLayer(False),):
            break
    assert entry.layers == (PaddingLayer(False),), str(fast.explain(full=True))
    fast.close()


def test_masks_that_hide_little_leave_tier_1_the_first() -> None:
    model = PaddedEncoder(layers=1).eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    serve(fast, model, 6, share=0.9)
    deployed = [d.evidence for d in fast._engine.log.decisions if d.action is Action.DEPLOY]
    assert [e["tier"] for e in deployed][:2] == [0, 1], str(fast.explain(full=True))
    fast.close()


def test_traffic_that_turns_to_whole_batches_gets_tier_1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "MIN_OTHERS", 0.95)  # so that no kept call is padded any more
    model = PaddedEncoder(layers=1).eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    serve(fast, model, 6)
    entry = entry_of(fast)
    assert entry.layers
    for _ in range(400):
        serve(fast, model, 1, share=1.0)
        if not entry.layers:
            break
    assert entry.plan.tier == 1 and not entry.layers, str(fast.explain(full=True))
    fast.close()


def test_live_rows_are_served_by_library_kernels_while_others_are_made() -> None:
    model = PaddedEncoder(layers=1).eval()
    fast: Any = hotfuse.jit(model, settings=Settings(hot_calls=2))
    until = time.monotonic() + 120
    while time.monotonic() < until and not entry_layers(fast):
        serve(fast, model, 1, (MIN_SEQUENCES, 16))  # a single kept call tells what masks are like, however early that is asked
        fast.wait(1)  # rounds while nobody calls decide: live calls of so small a model have no winner by construction
    tried = [d for d in about(fast, PACKED_BY_LIBRARY) if d.action is Action.SPECIALIZE]
    assert tried and entry_layers(fast), str(fast.explain(full=True))
    assert fast.wait(120)
    serve(fast, model, 4, (MIN_SEQUENCES, 16))
    assert isinstance(entry_layers(fast)[0], PaddingLayer)
    fast.close()


@pytest.mark.parametrize("large", [1e4, torch.nan])
def test_weights_that_are_written_while_a_plan_is_made_are_looked_at_again(large: float) -> None:
    """A row of a table that a mask of -10,000 does not hide, or that is not finite: padding may hold its index."""
    model = LookedUp(-1e4 if large == 1e4 else -1e9).eval()
    calls = [(ids.clamp(max=TOKENS - 2), mask == 0) for ids, mask in (batch(3, 16) for _ in range(4))]
    fast: Any = hotfuse.jit(model, settings=INLINE.with_(tiers=1))
    for call in calls * 3:
        fast(*call)
    entry = entry_of(fast)
    graph, composer = entry.baseline.graph, composer_of(fast._engine._improver._context, entry)

    def built(found: PaddedTraffic) -> bool:
        layer = PaddingLayer(ignore=False, compiled=False, by_library=True, known=[found])
        return isinstance(layer.build(graph, calls, (), composer).run, PackedRun)

    found = padded_traffic(graph, entry.weights, calls, ignore_outputs=False)
    assert built(found)
    model.tokens.weight[TOKENS - 1] *= large
    assert not built(found), "what was found of other weights holds no more"
    fast.close()


def test_what_is_said_while_library_kernels_serve_and_others_are_made() -> None:
    model = PaddedEncoder(layers=1).eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    serve(fast, model, 3)
    entry = entry_of(fast)
    entry.layers, entry.trying, entry.meanwhile = (PaddingLayer(ignore=False, by_library=True),), PACKED, PACKED_BY_LIBRARY
    said = str(fast.explain())
    assert "being tried: packed rows, meanwhile packed rows: on library kernels\n" in said, said
    assert "tier 2 (library kernels for what recurs)" in said, said
    entry.layers, entry.meanwhile = (PaddingLayer(ignore=False),), None
    said = str(fast.explain())
    assert "being tried: packed rows\n" in said and "generated kernels for what recurs" in said, said


def entry_layers(fast: Any) -> Any:
    return next((e.layers for s in fast._engine.sites.values() for e in s.entries), ())


def test_a_job_alongside_is_over_before_the_other_goes_on_or_never_begins() -> None:
    threads: list[threading.Thread] = []
    done: list[str] = []

    def later(job: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=job))

    begun = threading.Event()

    def slow() -> None:
        begun.set()
        time.sleep(0.05)
        done.append("slow")

    job = JobAlongside(later, slow)
    threads[0].start()
    assert begun.wait(10)
    job.finish()
    assert done == ["slow"]
    never = JobAlongside(later, lambda: done.append("never"))
    never.finish()
    threads[1].start()
    threads[1].join()
    assert done == ["slow"]
