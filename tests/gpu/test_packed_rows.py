"""On a CUDA device: rows that a mask hides are left out, right for any mask, one recording for many. `make test-gpu`."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from tests.padded import PaddedEncoder

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: make test-gpu", allow_module_level=True)

WAIT_S = 90.0
SEQUENCES, ROWS = 96, 256


def batch(live: float) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 50, (SEQUENCES, ROWS), device="cuda")
    lengths = (torch.rand(SEQUENCES, 1) * 2 * live * ROWS).long().clamp(1, ROWS)
    return ids, (torch.arange(ROWS)[None] < lengths).long().cuda()


def counters(fast: hotfuse.Jit) -> dict[str, int]:
    found: dict[str, int] = {}
    for s in fast.explain().to_dict()["sites"]:
        for p in s["plans"]:
            found |= p["counters"]
    return found


def error(got: Any, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.half, torch.float32])
def test_hidden_rows_are_left_out_and_results_are_the_models(dtype: torch.dtype) -> None:
    model: nn.Module = PaddedEncoder(layers=4, width=768, heads=12, longest=ROWS).cuda().to(dtype).eval()
    exact = copy.deepcopy(model).double()
    fast = hotfuse.jit(model)
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and not counters(fast).get("packed_replays"):
        for _ in range(30):
            fast(*batch(0.15))
            torch.cuda.synchronize()
    told = counters(fast)
    assert told.get("packed_replays", 0) > 0, str(fast.explain(full=True))
    allowed = 1e-2 if dtype is torch.half else 1e-4
    for live in (0.1, 0.15, 0.15, 0.2, 0.5, 1.0, 0.05):
        ids, mask = batch(live)
        want = exact(ids, mask)
        assert error(fast(ids, mask), want) <= max(allowed, 2 * error(model(ids, mask), want)), live
    empty = batch(0.15)
    empty[1][3] = 0  # a sequence without a live row is answered as the model answers it
    got, want = fast(*empty), model(*empty)
    assert torch.equal(got.isnan(), want.isnan()) and error(got.nan_to_num(), want.double().nan_to_num()) <= allowed
    assert counters(fast)["padded_empty"] >= 1
    fast.close()
