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

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True", "ignore:Support for mismatched",
)
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
        case "nothing is real":
            hidden[:] = True
        case _:
            pass
    return hidden if dtype == torch.bool else torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, dead)


def check(fast: Any, model: nn.Module, x: torch.Tensor, hidden: torch.Tensor) -> None:
    """The same numbers, or the same words where eager has none."""
    if bool((hidden != 0).all()) and _raised(model, x, hidden):
        assert _raised(fast, x, hidden) == _raised(model, x, hidden)
        return
    served, expected = fast(x, hidden), model(x, hidden)
    torch.testing.assert_close(served, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert served.stride() == expected.stride(), "callers take views of results, which depend on their order in memory"


def _raised(call: Any, x: torch.Tensor, hidden: torch.Tensor) -> str:
    try:
        call(x, hidden)
    except RuntimeError as e:
        return str(e)
    return ""


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
    plans, kinds = [entry.plan], ("behind", "holes", "left", "an empty sequence", "none", "nothing is real")
    for i in range(48):  # every call another kind
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
    for kind in ("behind", "behind", "holes", "behind", "behind", "left", "an empty sequence", "nothing is real"):
        check(fast, model, torch.randn(ROWS, LENGTH, WIDTH), hiding(kind, torch.float32, dead))
    assert entry_of(fast).plan.tier >= 1, str(fast.explain())


@pytest.mark.parametrize(("heads", "first"), [(3, False), (2, True)], ids=["odd heads", "norms first"])
def test_encoders_that_eager_does_not_pack_show_what_they_compute(heads: int, first: bool) -> None:
    model = Encoder(heads=heads, first=first).eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    width = heads * WIDTH // 2
    for _ in range(5):
        check(fast, model, torch.randn(ROWS, LENGTH, width), hiding("behind"))
    for kind in ("an empty sequence", "holes", "nothing is real"):
        check(fast, model, torch.randn(ROWS, LENGTH, width), hiding(kind))
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


class Attended(nn.Module):
    """Attention alone, which eager fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]


class Layer(nn.Module):
    """A layer by itself, causal as well where that is asked."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if causal else None)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(x, src_mask=self.later, src_key_padding_mask=hidden)


@pytest.mark.parametrize("model", [Attended(), Layer(causal=False), Layer(causal=True)], ids=["attention", "layer", "causal layer"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["bools", "numbers"])
def test_queries_without_keys_are_nan_as_in_eagers_fused_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Whatever the tier; with gradients they are 0, as eager's own."""
    model.eval()
    fast: Any = hotfuse.jit(model, settings=INLINE)
    for kind in ("behind", "an empty sequence", "left") * 2 + ("behind", "behind", "an empty sequence", "left", "nothing is real"):
        check(fast, model, torch.randn(ROWS, LENGTH, WIDTH), hiding(kind, dtype, -2.0))
    assert entry_of(fast).plan.tier >= 1, str(fast.explain())
    with torch.enable_grad():
        check(fast, model, torch.randn(ROWS, LENGTH, WIDTH), hiding("an empty sequence", dtype))


def test_a_function_of_a_layer_is_traced_as_eager_runs_it() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True).eval()

    def model(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return layer(x, src_key_padding_mask=hidden)

    fast: Any = hotfuse.jit(model, settings=INLINE)
    for kind in ("behind", "behind", "an empty sequence", "behind"):
        check(fast, model, torch.randn(ROWS, LENGTH, WIDTH), hiding(kind))  # type: ignore[arg-type]
    plan = entry_of(fast).plan
    assert plan is not None and fast.stats()["calls_per_tier"][str(plan.tier)] > 0, str(fast.explain())
    assert "forward" not in vars(layer), "the caller's layer is as it was"
