"""A request that runs out of time is cut and answered with what there is; the plan says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotfuse.base.errors import CaptureError
from hotfuse.base.events import Why
from hotfuse.base.settings import Settings
from hotfuse.compile import fetch
from hotfuse.compile.request_bodies import RequestBody
from hotfuse.pipeline import compile_tier1
from tests.contract.lowering import group_of


@pytest.mark.parametrize("why", [Why.TIMEOUT, Why.WORKER_DIED])
def test_kernels_serve_one_by_one_where_runs_took_too_long(monkeypatch: pytest.MonkeyPatch, why: Why) -> None:
    def late(request: RequestBody, *_: Any) -> Any:
        raise CaptureError(f"a request of kind {request.kind} took longer than 300 s", why=why)

    monkeypatch.setattr(fetch, "ask", late)
    x = torch.randn(64, 512)
    made = group_of(lambda t: torch.softmax(t * 2, -1) + t.mean(-1, keepdim=True), [x])
    plan = compile_tier1(made.graph, {}, [x], Settings(capture="inline", record=False))
    assert any("every kernel is entered from Python: a request of kind runs took longer" in n for n in plan.notes)
    (got,) = plan.run(x)
    torch.testing.assert_close(got, torch.softmax(x * 2, -1) + x.mean(-1, keepdim=True))
