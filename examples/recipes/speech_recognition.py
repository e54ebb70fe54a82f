"""Speech recognition with a Whisper-shaped model of transformers, random weights: spectrograms in, tokens out, by `generate`.

The changed line is `model = hotfuse.jit(model)`. The decoder's steps run in plans; the encoder, which `generate` calls by itself
and once a recording, runs the model's own code.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import hotfuse
from examples.recipes.common import Outcome, compared


def transcribe(model: Any, spectrogram: torch.Tensor, tokens: int) -> torch.Tensor:
    """The likeliest tokens, one after the other."""
    with torch.inference_mode():
        return model.generate(spectrogram, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    torch.manual_seed(0)
    width, layers, positions = (32, 1, 16) if tiny else (384, 4, 400)
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder")
             for name, n in (("layers", layers), ("attention_heads", 4), ("ffn_dim", 4 * width))}  # fmt: skip
    model = WhisperForConditionalGeneration(WhisperConfig(
        vocab_size=200 if tiny else 4000, d_model=width, num_mel_bins=16, max_source_positions=positions, max_target_positions=64,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
        **sides)).eval()  # fmt: skip
    spectrogram, tokens = torch.randn(1, 16, 2 * positions), 4 if tiny else 24
    fast = hotfuse.jit(model)
    return compared("speech recognition", lambda: transcribe(model, spectrogram, tokens),
                    lambda: transcribe(fast, spectrogram, tokens), fast, torch.equal, 0.0 if tiny else 25.0)  # fmt: skip


if __name__ == "__main__":
    main("--tiny" in sys.argv)
