"""A plain training loop around a frozen, jitted encoder: the head learns, the encoder only serves.

The changed line is `encoder = hotfuse.jit(encoder)`. Gradients are enabled throughout, and end where nothing requires them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel

import hotfuse
from examples.recipes.common import Outcome, compared


def train(encoder: Callable[..., Any], head: nn.Module, steps: int) -> torch.Tensor:
    """The losses of some steps, which begin with the same head and the same batches every time."""
    head, rng = copy.deepcopy(head), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        ids, labels = torch.randint(5, 500, (4, 24), generator=rng), torch.randint(0, 3, (4,), generator=rng)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(head(encoder(ids).last_hidden_state.mean(1)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    torch.manual_seed(0)
    width, layers = (32, 1) if tiny else (256, 4)
    size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * width}
    encoder = BertModel(BertConfig(vocab_size=500, **size)).eval().requires_grad_(False)
    head = nn.Linear(width, 3)
    fast = hotfuse.jit(encoder)
    steps = 4 if tiny else 10
    return compared("head on a frozen encoder", lambda: train(encoder, head, steps), lambda: train(fast, head, steps), fast,
                    lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-4), 0.0 if tiny else 20.0)  # fmt: skip


if __name__ == "__main__":
    main("--tiny" in sys.argv)
