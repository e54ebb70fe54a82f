"""On a CUDA device: kernels generated for a model's groups serve where they won, and give what the model gives. `make test-gpu`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse.backends import registry
from hotfuse.base.settings import Settings
from hotfuse.specialize.table import TUNED_KERNELS

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: make test-gpu", allow_module_level=True)
if why := registry.device_kernels().unavailable():
    pytest.skip(why, allow_module_level=True)

WAIT_S = 90.0


def encoder() -> nn.Module:
    """Of classes that a fresh worker can import."""
    layer = nn.TransformerEncoderLayer(256, 4, 512, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def generated(fast: hotfuse.Jit) -> int:
    return sum(p["counters"].get("generated_kernels", 0) for s in fast.explain().to_dict()["sites"] for p in s["plans"])


def served(model: nn.Module, x: torch.Tensor, **settings: Any) -> hotfuse.Jit:
    """Until a plan with generated kernels serves."""
    fast = hotfuse.jit(model, settings=Settings().with_(**settings))
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and not generated(fast):
        for _ in range(50):
            fast(x)
            torch.cuda.synchronize()
    return fast


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_generated_kernels_serve_and_are_right(dtype: torch.dtype) -> None:
    model = encoder().cuda().to(dtype)
    exact = encoder().cuda().double()
    exact.load_state_dict(model.state_dict())
    with served(model, torch.randn(2, 60, 256, device="cuda", dtype=dtype)) as fast:
        assert generated(fast) > 0, str(fast.explain(full=True))
        allowed = 1e-2 if dtype is torch.half else 6e-2
        for _ in range(5):
            x = torch.randn(2, 60, 256, device="cuda", dtype=dtype)
            want = exact(x.double())
            assert error(fast(x), want) <= max(allowed, 2 * error(model(x), want))
        other = torch.randn(3, 17, 256, device="cuda", dtype=dtype)  # sizes that no kernel was made for
        assert error(fast(other), exact(other.double())) <= allowed
        turned = torch.randn(256, 60, 2, device="cuda", dtype=dtype).permute(2, 1, 0)
        for _ in range(4):
            assert error(fast(turned), exact(turned.double())) <= allowed


@torch.inference_mode()
def test_the_first_plan_has_the_likeliest_kernels_and_is_followed_by_one_of_all(tmp_path: Path) -> None:
    model, x = encoder().cuda().half(), torch.randn(3, 44, 256, device="cuda", dtype=torch.half)
    with served(model, x, cache_dir=tmp_path) as fast:
        told = str(fast.explain(full=True))
        assert "of each group the likeliest kernels alone were made" in told, told
        until = time.monotonic() + 2 * WAIT_S
        while time.monotonic() < until and not any(str(TUNED_KERNELS) in str(d) or "exchanged for others" in str(d)
                                                   for d in (fast.explain(full=True),)):
            for _ in range(50):
                fast(x)
                torch.cuda.synchronize()
        told = str(fast.explain(full=True))
        assert str(TUNED_KERNELS) in told or "exchanged for others" in told, told
        assert error(fast(x), model(x).double()) <= 1e-2


@torch.inference_mode()
def test_weights_changed_in_place_are_read() -> None:
    model = encoder().cuda().half()
    x = torch.randn(2, 60, 256, device="cuda", dtype=torch.half)
    with served(model, x) as fast:
        assert generated(fast) > 0, str(fast.explain(full=True))
        model.layers[0].linear1.weight.mul_(-2)
        want = model(x)
        assert error(fast(x), want.double()) <= 1e-2
