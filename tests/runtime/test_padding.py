"""Batches that are mostly padding are served by live rows alone, whatever the next mask is."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hotfuse
import hotfuse.runtime.tierup.padding as padding_module
from hotfuse import Settings
from hotfuse.base.events import Action, Why
from hotfuse.specialize.table import PADDING, AttemptKey
from tests.padded import PaddedEncoder, batch
from tests.races import new_plans_win

INLINE = Settings(capture="inline", hot_calls=2)


@pytest.fixture(autouse=True)
def clocks_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    new_plans_win(monkeypatch)
    monkeypatch.setattr(padding_module, "paying_share", lambda *_a: 0.8)
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
    before = entry.plan.counters()
    for _ in range(5):  # every call another kind
        serve(fast, model, 1, share=0.2)
        serve(fast, model, 1, share=1.0)
    ids, mask = batch(3, 16)
    mask[1] = 0
    got, want = fast(ids, mask), model(ids, mask)  # a sequence without any key: what the model makes of it
    assert torch.equal(torch.isnan(got), torch.isnan(want)) and bool(torch.isnan(want[1]).all())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    after = entry.plan.counters()
    assert after["packed_calls"] == before["packed_calls"] + 5
    assert after["padded_share"] == 5 and after["padded_empty"] == 1
    shown = str(fast.explain(full=True))
    assert "rows that" in shown and "are not computed where at most 80% live" in shown, shown
    deployed = [d for d in fast._engine.log.decisions if d.action is Action.DEPLOY and d.evidence.get("mask")]
    assert deployed and 0.2 < float(deployed[0].evidence["live"]) < 0.7
    fast.close()


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
