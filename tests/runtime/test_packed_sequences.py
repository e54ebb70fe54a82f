"""Recurrent layers over packed sequences are served, whatever the lengths are; what looks into the packing keeps its own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import hotfuse
from hotfuse import Settings
from tests.races import new_plans_win

ROWS, STEPS, WIDTH = 4, 9, 5
LENGTHS = ([9, 7, 7, 2], [9, 9, 9, 9], [8, 3, 2, 1], [4, 4, 1, 1])


class Tagger(nn.Module):
    """A recurrent layer over a padded batch; its outputs padded again, its last states."""

    def __init__(self, kind: type[nn.RNNBase], *, sides: int, batch_first: bool, is_sorted: bool, total: bool) -> None:
        super().__init__()
        self.layer: Any = kind(WIDTH, 8, 3 - sides, batch_first=batch_first, bidirectional=sides == 2)  # type: ignore[call-arg, arg-type]
        self.batch_first, self.is_sorted, self.total = batch_first, is_sorted, total

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, self.batch_first, self.is_sorted)
        found, last = self.layer(packed)
        whole, told = pad_packed_sequence(found, self.batch_first, -1.0, STEPS if self.total else None)
        return whole, told, last[0] if isinstance(last, tuple) else last


def call(model: Tagger, lengths: list[int]) -> tuple[Tensor, Tensor]:
    shape = (ROWS, STEPS, WIDTH) if model.batch_first else (STEPS, ROWS, WIDTH)
    return torch.randn(shape), torch.tensor(lengths if model.is_sorted else lengths[::-1])


@pytest.mark.parametrize(("kind", "sides", "batch_first", "is_sorted", "total"), [
    (nn.GRU, 2, True, False, True), (nn.LSTM, 2, False, True, False), (nn.RNN, 1, True, True, True),
])  # fmt: skip
def test_packed_sequences(kind: Any, sides: int, batch_first: bool, is_sorted: bool, total: bool, monkeypatch: Any) -> None:
    new_plans_win(monkeypatch)
    model = Tagger(kind, sides=sides, batch_first=batch_first, is_sorted=is_sorted, total=total).eval()
    fast = hotfuse.jit(model, settings=Settings(capture="inline", hot_calls=2))
    exact = Tagger(kind, sides=sides, batch_first=batch_first, is_sorted=is_sorted, total=total).double().eval()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        for _ in range(2):
            for lengths in LENGTHS:
                x, n = call(model, lengths)
                torch.testing.assert_close(fast(x, n), exact(x.double(), n), rtol=1e-5, atol=1e-5, check_dtype=False)
            assert fast.wait(60)
        tiers = fast.stats()["calls_per_tier"]
        assert tiers["0"] + tiers["1"] >= 7 and tiers["1"], fast.explain()
        for wrong in ([9, 3, 1, 0], [10, 3, 2, 1], *([[2, 9, 1, 1]] if is_sorted else [])):
            x, n = call(model, wrong)
            with pytest.raises(RuntimeError) as told:
                model(x, n)
            with pytest.raises(RuntimeError) as ours:
                fast(x, n)
            assert str(ours.value) == str(told.value)


def reads_cell_states(layer: nn.LSTM, packed: PackedSequence) -> Tensor:
    return layer(packed)[1][1] * 2


def sums_what_is_packed(layer: nn.LSTM, packed: PackedSequence) -> Tensor:
    return layer(packed)[0].data.sum()


def counts_rows(_layer: nn.LSTM, packed: PackedSequence) -> Tensor:
    return packed.batch_sizes.sum()


@pytest.mark.parametrize("reads", [reads_cell_states, sums_what_is_packed, counts_rows])
def test_what_looks_into_the_packing_keeps_its_own_code(reads: Any) -> None:
    layer = nn.LSTM(WIDTH, 8)

    def model(x: Tensor, lengths: Tensor) -> Tensor:
        return reads(layer, pack_padded_sequence(x, lengths))

    fast = hotfuse.jit(model, settings=Settings(capture="inline"))
    with torch.no_grad():
        for lengths in LENGTHS:
            x, n = torch.randn(STEPS, ROWS, WIDTH), torch.tensor(lengths)
            torch.testing.assert_close(fast(x, n), model(x, n))
    assert fast.stats()["calls_per_tier"]["0"] == 0
    assert any("packed sequence" in str(d["evidence"]) for d in fast.explain().to_dict()["decisions"] if d["action"] == "refuse")
