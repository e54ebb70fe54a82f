"""A real sentence encoder through `hotfuse.jit`: first call, capture beside it, takeover, explain.

Run with `make demo`. Without a network (and with nothing cached) a small BERT with random weights stands in.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the zoo, which is not installed

import torch

import hotfuse
from benchmarks import zoo

QUERY = "How do I make a neural network run faster?"
SENTENCES = [
    "Fusing operations saves trips to memory.",
    "A just-in-time compiler specializes code while it runs.",
    "The cat sat on the warm window sill.",
    "Quantization trades a little accuracy for speed.",
    "Simmer the tomatoes with garlic for twenty minutes.",
    "It rained all day in the mountains.",
]


def say(text: str = "") -> None:
    """Print at once, so that the order on a slow machine is the order of events."""
    print(text, flush=True)


def encoder() -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """The model, and one call's arguments per sentence: real ones, or stand-ins when offline."""
    try:
        model = zoo.load("minilm").module
        tokenizer = zoo.sentence_tokenizer()
        tokenizer.no_padding()
        encoded = [tokenizer.encode(text).ids for text in [QUERY, *SENTENCES]]
        say("model: all-MiniLM-L6-v2, a real sentence encoder")
    except zoo.ZooUnavailable as e:
        say(f"The real model is not available, a small BERT with random weights stands in.\n{e}")
        model = zoo.load("bert-base", reduced=True).module
        encoded = [[101, *(ord(c) for c in text), 102] for text in [QUERY, *SENTENCES]]
    assert model is not None
    ids = [torch.tensor([tokens]) for tokens in encoded]
    return model, [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]


def embed(model: torch.nn.Module, call: dict[str, torch.Tensor]) -> torch.Tensor:
    """A unit vector: the mean over the tokens."""
    return torch.nn.functional.normalize(model(**call).last_hidden_state.mean(1), dim=-1)[0]


def milliseconds(start: float) -> str:
    """Time since then."""
    return f"{(time.perf_counter() - start) * 1e3:.1f} ms"


@torch.inference_mode()
def main() -> None:
    """The demonstration."""
    model, calls = encoder()
    embed(model, calls[0])  # torch's own warming up is nobody's merit
    start = time.perf_counter()
    expected = embed(model, calls[0])
    say(f"\neager call:                {milliseconds(start)}")

    with hotfuse.jit(model) as fast:
        start = time.perf_counter()
        first = embed(fast, calls[0])
        say(f"first call of hotfuse.jit: {milliseconds(start)}, on your own module: no call waits for a capture")

        start = time.perf_counter()
        served = 0
        deadline = start + 40
        while not fast.wait(0) and time.perf_counter() < deadline:
            embed(fast, calls[served % len(calls)])
            served += 1
        say(f"capturing beside {served} served calls took {milliseconds(start)}")

        vectors = [embed(fast, call) for call in calls]
        start = time.perf_counter()
        again = embed(fast, calls[0])
        say(f"a call on the captured graph: {milliseconds(start)}")
        worst = max((first - expected).abs().max().item(), (again - expected).abs().max().item())
        say(f"largest difference from eager: {worst:.1e}")

        say(f"\n{QUERY}")
        scores = [float(v @ vectors[0]) for v in vectors[1:]]
        for score, text in sorted(zip(scores, SENTENCES, strict=True), reverse=True):
            say(f"  {score:5.2f}  {text}")

        say(f"\n{fast.explain()}")
        say("\ncounters: " + ", ".join(f"{k}={v}" for k, v in sorted(fast.stats().items())))


if __name__ == "__main__":
    main()
