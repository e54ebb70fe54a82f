"""Image classification with a vision transformer of transformers, random weights: the five likeliest classes of each picture.

The changed line is `model = hotfuse.jit(model)`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import ViTConfig, ViTForImageClassification

import hotfuse
from examples.recipes.common import Outcome, compared


def classify(model: Any, pictures: torch.Tensor) -> torch.Tensor:
    """Probabilities of the likeliest classes."""
    with torch.inference_mode():
        return model(pixel_values=pictures).logits.softmax(-1).topk(5).values


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
            "patch_size": 8} if tiny else {"num_hidden_layers": 6}  # fmt: skip
    model = ViTForImageClassification(ViTConfig(num_labels=20, **size)).eval()
    pictures = torch.randn(1, 3, 32, 32) if tiny else torch.randn(1, 3, 224, 224)
    fast = hotfuse.jit(model)
    return compared("image classification", lambda: classify(model, pictures), lambda: classify(fast, pictures), fast,
                    lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-4), 0.0 if tiny else 20.0)  # fmt: skip


if __name__ == "__main__":
    main("--tiny" in sys.argv)
