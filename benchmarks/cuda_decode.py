"""Tokens a second of a Llama-shaped model on a CUDA device, batch 1: eager, torch.compile, and Hotfuse.

    python -m benchmarks.cuda_decode [--layers 16] [--tokens 96] [--peers reduce-overhead]

fp16, random weights, 1 B parameters. Every token is read on the host before the next step, as a program does that looks for the end
of a sentence. "Static" caches have room for 512 tokens from the beginning; eager's default grows by concatenation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import hotfuse

PROMPT, ROOM = 32, 512


def one_text(model: Callable[..., Any], config: Any, prompt: torch.Tensor, tokens: int, *, static: bool) -> tuple[list[int], float]:
    """The tokens, and tokens a second without the prompt."""
    import transformers as t

    cache = t.StaticCache(config=config, max_cache_len=ROOM) if static else t.DynamicCache(config=config)
    at = torch.arange(PROMPT, device="cuda")
    token = model(input_ids=prompt, past_key_values=cache, cache_position=at).logits[:, -1:].argmax(-1)
    found = [int(token)]
    begin = time.perf_counter()
    for step in range(tokens):
        at = torch.tensor([PROMPT + step], device="cuda")
        token = model(input_ids=token, past_key_values=cache, cache_position=at).logits[:, -1:].argmax(-1)
        found.append(int(token))
    return found, tokens / (time.perf_counter() - begin)


def main() -> None:
    """One line a contender."""
    import transformers as t

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--tokens", type=int, default=96)
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--peers", default="", help="modes of torch.compile, between commas: default,reduce-overhead")
    asked = options.parse_args()
    config = t.LlamaConfig(hidden_size=2048, num_hidden_layers=asked.layers, intermediate_size=5632, num_attention_heads=32,
                           num_key_value_heads=8)  # fmt: skip
    model: Any = t.LlamaForCausalLM(config)
    model = model.eval().cuda().half()
    prompt = torch.randint(5, 30000, (1, PROMPT), device="cuda")
    with torch.no_grad(), hotfuse.jit(model) as fast:
        contenders: dict[str, tuple[Callable[..., Any], bool]] = {
            "eager": (model, False), "eager, static": (model, True), "ours, static": (fast, True), "ours": (fast, False),
        }  # fmt: skip
        for mode in filter(None, asked.peers.split(",")):
            contenders[f"{mode}, static"] = (torch.compile(model, mode=mode), True)
        want = one_text(model, config, prompt, asked.tokens, static=False)[0]
        for name, (run, static) in contenders.items():
            begin = time.perf_counter()
            rates = [one_text(run, config, prompt, asked.tokens, static=static) for _ in range(asked.rounds)]
            same = sum(a == b for a, b in zip(rates[-1][0], want, strict=True)) / len(want)
            print(f"{name}: {median([r for _, r in rates[1:]]):.0f} tokens/s, first text {rates[0][1]:.0f}, all "
                  f"{time.perf_counter() - begin:.1f} s, {same:.0%} of the tokens as eager's", flush=True)  # fmt: skip
        told = fast.explain().to_dict()["own_recordings"]
        kinds = [(k["state"], k["because"][:80], k["race"]) for k in told.get("kinds", ())]
        print({k: v for k, v in told.items() if k != "kinds"}, kinds)


if __name__ == "__main__":
    main()
