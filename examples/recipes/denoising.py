"""A denoising loop as diffusers writes it: a UNet predicts noise, a scheduler takes it away, step by step. Random weights.

The changed line is `unet = hotfuse.jit(unet)`. Needs `diffusers` (`pip install diffusers`).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import hotfuse
from examples.recipes.common import Outcome, compared

NEEDS = ("diffusers",)


def denoise(unet: Any, scheduler: Any, noise: torch.Tensor, steps: int) -> torch.Tensor:
    """From noise to a picture."""
    scheduler.set_timesteps(steps)
    with torch.inference_mode():
        picture = noise
        for t in scheduler.timesteps:
            picture = scheduler.step(unet(picture, t).sample, t, picture).prev_sample
    return picture


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    from diffusers import DDIMScheduler, UNet2DModel

    torch.manual_seed(0)
    channels, side = ((8, 16), 8) if tiny else ((32, 64, 64), 32)
    blocks = {"down_block_types": ("DownBlock2D",) * (len(channels) - 1) + ("AttnDownBlock2D",),
              "up_block_types": ("AttnUpBlock2D",) + ("UpBlock2D",) * (len(channels) - 1)}  # fmt: skip
    unet = UNet2DModel(sample_size=side, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=channels,
                       norm_num_groups=4, attention_head_dim=8, **blocks).eval()  # fmt: skip
    noise, steps = torch.randn(1, 3, side, side), 2 if tiny else 8
    fast, scheduler = hotfuse.jit(unet), DDIMScheduler()
    return compared("denoising", lambda: denoise(unet, scheduler, noise, steps), lambda: denoise(fast, scheduler, noise, steps),
                    fast, lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-3), 0.0 if tiny else 25.0)  # fmt: skip


if __name__ == "__main__":
    main("--tiny" in sys.argv)
