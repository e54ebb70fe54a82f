"""Image classification with timm: any of its models, random weights. Needs `timm` (`pip install timm`).

The changed line is `model = hotfuse.jit(model)`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import hotfuse
from examples.recipes.common import Outcome, compared

NEEDS = ("timm", "torchvision")


def classify(model: Any, pictures: torch.Tensor) -> torch.Tensor:
    """Probabilities of the likeliest classes."""
    with torch.inference_mode():
        return model(pictures).softmax(-1).topk(3).values


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model("mobilenetv3_small_050" if tiny else "efficientnet_b0", pretrained=False, num_classes=10).eval()
    pictures = torch.randn(1, 3, 32, 32) if tiny else torch.randn(1, 3, 160, 160)
    fast = hotfuse.jit(model)
    return compared("timm classification", lambda: classify(model, pictures), lambda: classify(fast, pictures), fast,
                    lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-4), 0.0 if tiny else 20.0)  # fmt: skip


if __name__ == "__main__":
    main("--tiny" in sys.argv)
