"""Detection with a YOLOS-shaped model of transformers, random weights: how many boxes are found depends on the picture.

The changed line is `model = hotfuse.jit(model)`. Whatever follows the model (a threshold, boxes in pixels) stays the program's own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import YolosConfig, YolosForObjectDetection

import hotfuse
from examples.recipes.common import Outcome, compared

Found = list[tuple[torch.Tensor, torch.Tensor]]


def detect(model: Any, pictures: torch.Tensor) -> Found:
    """Of each picture the boxes that are likelier to be something than nothing, in pixels, and what they are."""
    with torch.inference_mode():
        out = model(pixel_values=pictures)
        found: Found = []
        for logits, boxes in zip(out.logits, out.pred_boxes, strict=True):
            scores, labels = logits.softmax(-1)[:, :-1].max(-1)
            likely = scores > scores.mean()
            x, y, w, h = boxes[likely].unbind(-1)
            corners = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], -1)
            found.append((corners * pictures.shape[-1], labels[likely]))
    return found


def close(a: Found, b: Found) -> bool:
    return all(torch.equal(la, lb) and torch.allclose(xa, xb, rtol=1e-3, atol=1e-2)
               for (xa, la), (xb, lb) in zip(a, b, strict=True))  # fmt: skip


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    torch.manual_seed(0)
    side = 32 if tiny else 160
    width, layers, heads, patch = (32, 1, 2, 8) if tiny else (192, 8, 3, 16)
    size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width,
            "patch_size": patch}  # fmt: skip
    config = YolosConfig(image_size=[side, side], num_detection_tokens=10 if tiny else 50, num_labels=7, **size)
    model = YolosForObjectDetection(config).eval()
    for weight in (model.vit.embeddings.detection_tokens, model.class_labels_classifier.layers[-1].weight):
        torch.nn.init.normal_(weight)  # untrained ones are all equal, and so would be the scores that a threshold divides
    pictures = torch.randn(1, 3, side, side)
    fast = hotfuse.jit(model)
    return compared("detection", lambda: detect(model, pictures), lambda: detect(fast, pictures), fast, close,
                    0.0 if tiny else 20.0)  # fmt: skip


if __name__ == "__main__":
    main("--tiny" in sys.argv)
