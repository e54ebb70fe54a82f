"""Weights that torch's hooks compute before every call: such models are served, and follow the parameters behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")


class Vocoder(nn.Module):
    """As most published vocoders are written."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.first, self.last = kind(nn.Conv1d(4, 8, 3, padding=1)), kind(nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)).mT)


@pytest.mark.parametrize("kind", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("locked", [False, True])
def test_weights_that_hooks_compute(kind: Any, locked: bool) -> None:
    model = Vocoder(kind).eval()
    if locked:  # not sendable: captured where it is
        model.handle = (open(__file__),)  # type: ignore[assignment]  # noqa: SIM115
    fast = hotfuse.jit(model, settings=Settings(capture="inline"))
    with torch.no_grad():
        for turn in range(2):
            for _ in range(4):
                x = torch.randn(2, 4, 7)
                torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)  # its own calls set attributes meanwhile
            assert fast.stats()["calls_per_tier"]["0"] >= 3 + 3 * turn, str(fast.explain(full=True))
            next(model.first.parameters()).add_(1.0)
    assert isinstance(model.first._forward_pre_hooks, dict) and model.first._forward_pre_hooks and hasattr(model.first, "weight")
    if locked:
        model.handle[0].close()  # type: ignore[union-attr, operator]
