"""Batches of a decoder are packed too: live rows keep their order, so that attention is causal among them."""

from __future__ import annotations

import copy
from typing import Any

import torch

import hotfuse
from hotfuse import Settings
from hotfuse.specialize.table import PADDING, AttemptKey
from tests.padded import PaddedEncoder, batch

INLINE = Settings(capture="inline", hot_calls=2)
SIZES = (8, 64)
FEW = 0.1


def assert_right(fast: Any, model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(fast(*inputs).double(), copy.deepcopy(model).double()(*inputs), rtol=1e-4, atol=1e-5)


def test_a_decoder_is_packed_and_right_when_masks_flip() -> None:
    model = PaddedEncoder("causal").eval()
    with torch.no_grad(), hotfuse.jit(model, settings=INLINE) as fast:
        for _ in range(40):  # a tenth of the rows live: the race is decided by more than a clock's noise
            assert_right(fast, model, batch(*SIZES, FEW))
        (entry,) = next(iter(fast._engine.sites.values())).entries
        assert entry.plan.layers == (AttemptKey(PADDING),), str(fast.explain(full=True))
        before, plans = entry.plan.counters()["packed_calls"], {id(entry.plan): entry.plan}
        for call in range(20):
            ids, mask = batch(*SIZES, (FEW, 1.0)[call % 2])
            if call % 4 == 2:  # padding on the left
                mask[:, :60] = 0
            assert_right(fast, model, (ids, mask))
            plans[id(entry.plan)] = entry.plan  # a better one may take its place meanwhile, and counts for itself
        counters = [plan.counters() for plan in plans.values()]
        assert sum(c["packed_calls"] for c in counters) >= before + 10, counters
        shown = str(fast.explain(full=True))
        assert "rows that" in shown and "packed rows" in shown
