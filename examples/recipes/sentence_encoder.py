"""Sentence embeddings as sentence-transformers computes them: a BERT, the mean over real tokens, unit length. Random weights.

The changed line is `model = hotfuse.jit(model)`. Batches have other lengths all the time.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import BertConfig, BertModel

import hotfuse
from examples.recipes.common import Outcome, compared


def encode(model: Any, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """One vector of unit length for each sentence."""
    found = []
    with torch.inference_mode():
        for batch in batches:
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            found.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64} if tiny else {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertModel(BertConfig(vocab_size=1000, **size)).eval()
    batches = []
    for longest in (12, 7) if tiny else (64, 40, 23):
        lengths = torch.randint(3, longest + 1, (4,))
        mask = (torch.arange(longest) < lengths[:, None]).long()
        batches.append({"input_ids": torch.randint(0, 1000, (4, longest)) * mask, "attention_mask": mask})
    fast = hotfuse.jit(model)
    return compared("sentence encoder", lambda: encode(model, batches), lambda: encode(fast, batches), fast,
                    lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-4), 0.0 if tiny else 20.0)  # fmt: skip


if __name__ == "__main__":
    main("--tiny" in sys.argv)
