"""On a CUDA device: a model of the host runs there where the settings allow it and calls are faster so."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: make test-gpu", allow_module_level=True)

SETTINGS = Settings(record=False, idle=False, cache="off", devices="auto", tiers=2)


@torch.inference_mode()
def test_a_heavy_model_of_the_host_moves_and_answers_on_the_host() -> None:
    layers: list[nn.Module] = [m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.GELU())]
    model: Any = nn.Sequential(*layers).eval()
    with hotfuse.jit(model, settings=SETTINGS) as fast:
        until = time.monotonic() + 50
        placed = False
        while time.monotonic() < until and not placed:
            for _ in range(5):
                x = torch.randn(512, 2048)
                got = fast(x)
                assert got.device.type == "cpu"
            plans = [q for s in fast.explain().to_dict()["sites"] for q in s["plans"]]
            placed = any(p["backend"] == "transfer" for q in plans for p in q["partitions"])
        told = fast.explain().to_dict()
        print(*[d for d in told["decisions"] if "device" in str(d["evidence"])], sep="\n")
        assert placed, str(fast.explain(full=True))[-4000:]
        x = torch.randn(512, 2048)
        want = copy.deepcopy(model).double()(x.double())
        error = float((fast(x).double() - want).abs().max() / want.abs().max())
        assert error < 1e-4
