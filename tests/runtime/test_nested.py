"""Encoders of torch that pack their batches into nested tensors are served, padded rows included, whatever the next mask is."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hotfuse
import hotfuse.runtime.tierup.padding as padding_module
from hotfuse import Settings
from hotfuse.specialize.table import PADDING, AttemptKey
from tests.races import new_plans_win

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True")
INLINE = Settings(capture="inline", hot_calls=2)
ROWS, LENGTH, WIDTH = 4, 16, 32


@pytest.fixture(autouse=True)
def clocks_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    new_plans_win(monkeypatch)
    monkeypatch.setattr(padding_module, "paying_share", lambda *_a, **_k: 0.8)
    with torch.no_grad():
        yield


class Encoder(nn.Module):
    """As torch's documentation has it: every row is a result."""

    def __init__(self, *, heads: int = 2, norm: bool = False, first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(heads * WIDTH // 2, heads, 64, batch_first=True, norm_first=first)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(heads * WIDTH // 2) if norm else None)
        if norm:  # rows of zeros are not zeros behind it
            nn.init.normal_(self.encoder.norm.bias)  # type: ignore[union-attr, arg-type]

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=hidden)


def hiding(kind: str, dtype: torch.dtype = torch.bool, dead: float = -math.inf) -> torch.Tensor:
    """A padding mask of a kind."""
    lengths = torch.randint(1, LENGTH // 2, (ROWS,))
    hidden = torch.arange(LENGTH)[None] >= lengths[:, None]
    match kind:
        case "holes":
            hidden[0, 0], hidden[0, -1] = True, False
        case "left":
            hidden = hidden.flip(1)
        case "an empty sequence":
            hidden[1] = True
        case "none":
            hidden[:] = False
        case _:
            pass
    return hidden if dtype == torch.bool else torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, dead)


def check(fast: Any, model: nn.Module, x: torch.Tensor, hidden: torch.Tensor) -> None:
    torch.testing.assert_close(fast(x, hidden), model(x, hidden), rtol=1e-4, atol=1e-5, equal_nan=True)


def entry_of(fast: Any) -> Any:
    return next(iter(fast._engine.sites.values())).entries[0]


@pytest.mark.budget_s(20)
@pytest.mark.parametrize("norm", [False, True])
def test_what_eager_packs_is_packed_and_its_padded_rows_are_eagers(norm: bool) -> None:
    model = Encoder(norm=norm).eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    for _ in range(12):
        check(fast, model, torch.randn(ROWS, LENGTH, WIDTH), hiding("behind"))
    entry = entry_of(fast)
    assert AttemptKey(PADDING) in entry.plan.layers, str(fast.explain())
    plans, kinds = [entry.plan], ("behind", "holes", "left", "an empty sequence", "none")
    for i in range(40):  # every call another kind
        check(fast, model, torch.randn(ROWS, LENGTH, WIDTH), hiding(kinds[i % len(kinds)]))
        plans.extend([entry.plan] if entry.plan is not plans[-1] else [])
    counted = sum((Counter(plan.counters()) for plan in plans), Counter[str]())
    assert counted["packed_calls"] > 8 and counted["padded_not_in_front"] > 0, counted
    assert "forward" not in vars(model.encoder), "the user's module stays as it is"


@pytest.mark.parametrize("dead", [-math.inf, -1e4, -2.0])
def test_a_mask_of_numbers_hides_what_eager_hides(dead: float) -> None:
    """Any number but 0 is padding, where eager packs and in its fused layers."""
    model = Encoder().eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    for kind in ("behind", "behind", "holes", "behind", "behind", "left", "behind", "behind"):
        check(fast, model, torch.randn(ROWS, LENGTH, WIDTH), hiding(kind, torch.float32, dead))
    assert entry_of(fast).plan.tier >= 1, str(fast.explain())


@pytest.mark.parametrize(("heads", "first"), [(3, False), (2, True)], ids=["odd heads", "norms first"])
def test_encoders_that_eager_does_not_pack_show_what_they_compute(heads: int, first: bool) -> None:
    model = Encoder(heads=heads, first=first).eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    width = heads * WIDTH // 2
    for _ in range(5):
        check(fast, model, torch.randn(ROWS, LENGTH, width), hiding("behind"))
    assert bool(fast(torch.randn(ROWS, LENGTH, width), hiding("behind"))[:, -1].any())


def test_calls_with_gradients_show_what_eager_shows_with_them() -> None:
    model = Encoder().eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    for i in range(16):
        x, hidden = torch.randn(ROWS, LENGTH, WIDTH), hiding("behind")
        check(fast, model, x, hidden)
        with torch.set_grad_enabled(i % 2 == 0):
            check(fast, model, x, hidden)


def test_a_model_that_cannot_be_sent_is_traced_on_a_twin() -> None:
    model = Encoder().eval()
    model.lock = threading.Lock()  # type: ignore[assignment]
    fast: Any = hotfuse.jit(model, settings=INLINE)
    for _ in range(6):
        check(fast, model, torch.randn(ROWS, LENGTH, WIDTH), hiding("behind"))
    assert entry_of(fast).plan.tier >= 1, str(fast.explain())
    assert "forward" not in vars(model.encoder)
