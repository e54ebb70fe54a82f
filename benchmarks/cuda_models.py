"""Models for `benchmarks.cuda` that a fresh worker process can import."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SentenceEncoder(nn.Module):
    """A BERT whose result is the mean over real tokens, as services that embed texts have it: no output shows padded rows."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        import transformers

        self.encoder = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        rows = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(rows.dtype)
        return (rows * weight).sum(1) / weight.sum(1)
