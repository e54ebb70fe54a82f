"""Models whose code converts their own layers to what they are, call by call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hotfuse
from hotfuse import Settings
from tests.races import kernels_win, slow_library

INLINE = Settings(capture="inline", hot_calls=1)


class Router(nn.Module):
    """As mixtures of transformers do it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.classifier, self.table = nn.Linear(16, 4), nn.Embedding(10, 16)
        self.register_buffer("shares", torch.linspace(0.5, 1.0, 4))

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        if self.how == "layers":
            self.classifier = self.classifier.to(x.dtype)
            self.table.to(x.device)
        else:
            self.to(x.device, x.dtype)
        return torch.relu(self.classifier(x + self.table(i))).softmax(-1) * self.shares


@pytest.mark.parametrize("how", ["layers", "itself"])
def test_a_model_that_converts_its_layers_to_what_they_are_is_served(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_library(monkeypatch)
    kernels_win(monkeypatch)
    model = Router(how).eval()
    fast = hotfuse.jit(model, settings=INLINE)
    with torch.no_grad():
        for _ in range(12):
            x, i = torch.randn(2, 5, 16), torch.randint(0, 10, (2, 5))
            torch.testing.assert_close(fast(x, i), model(x, i))
        assert any(p.tier == 1 and p.kernels for p in fast.plans()), str(fast.explain(full=True))
        y = x.double()
        served, expected = fast(y, i), model(y, i)
    assert served.dtype == expected.dtype == torch.float64 and model.classifier.weight.dtype == torch.float64
    torch.testing.assert_close(served, expected)
    fast.close()


def test_a_conversion_that_changes_something_is_no_graph() -> None:
    class Widening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            narrow = self.scale.weight.dtype == torch.float32
            self.scale.to(torch.float64 if narrow else torch.float32)
            return self.scale(x.to(self.scale.weight.dtype))

    model, own = Widening().eval(), Widening().eval()
    own.load_state_dict(model.state_dict())
    fast = hotfuse.jit(model, settings=INLINE)
    with torch.no_grad():
        for n in range(12):
            x = torch.randn(3, 8)
            served, expected = fast(x), own(x)
            assert served.dtype == expected.dtype == (torch.float64, torch.float32)[n % 2]
            torch.testing.assert_close(served, expected)
    fast.close()
