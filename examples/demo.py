"""A real sentence encoder through `hotfuse.jit`: first call, capture beside it, takeover, explain.

Run with `make demo`. Without a network (and with nothing cached) a small BERT with random weights stands in.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the zoo, which is not installed

import torch

import hotfuse
from benchmarks import zoo

QUERY = "Which tricks speed up deep learning inference?"
SENTENCES = [
    "Fusing the layers of a neural network saves trips to memory.",
    "A just-in-time compiler specializes code while it runs.",
    "The cat sat on the warm window sill.",
    "Quantized models trade a little accuracy for speed.",
    "She planted tomatoes and garlic in the garden.",
    "It rained all day in the mountains.",
]


def say(text: str = "") -> None:
    """Print at once, so that the order on a slow machine is the order of events."""
    print(text, flush=True)


def encoder() -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]], bool]:
    """The model, one call's arguments per sentence, and whether they are real: stand-ins serve when offline."""
    real = True
    try:
        model = zoo.load("minilm").module
        tokenizer = zoo.sentence_tokenizer()
        tokenizer.no_padding()
        encoded = [tokenizer.encode(text).ids for text in [QUERY, *SENTENCES]]
        say("model: all-MiniLM-L6-v2, a real sentence encoder")
    except zoo.ZooUnavailable as e:
        real = False
        say(f"The real model is not available, a small BERT with random weights stands in.\n{e}")
        model = zoo.load("bert-base", reduced=True).module
        encoded = [[101, *(ord(c) for c in text), 102] for text in [QUERY, *SENTENCES]]
    assert model is not None
    ids = [torch.tensor([tokens]) for tokens in encoded]
    return model, [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids], real


def embed(model: Callable[..., Any], call: dict[str, torch.Tensor]) -> torch.Tensor:
    """A unit vector: the mean over the tokens."""
    return torch.nn.functional.normalize(model(**call).last_hidden_state.mean(1), dim=-1)[0]


def milliseconds(start: float) -> str:
    """Time since then."""
    return f"{(time.perf_counter() - start) * 1e3:.1f} ms"


def in_graph(fast: hotfuse.Jit, calls: list[dict[str, torch.Tensor]]) -> int:
    """Serve every sentence once; how many of the calls a captured graph took."""
    before = fast.stats()["graph_calls"]
    for call in calls:
        embed(fast, call)
        time.sleep(0.02)  # requests come one by one, and the worker shares the cores with them
    return fast.stats()["graph_calls"] - before


@torch.inference_mode()
def main() -> None:
    """The demonstration."""
    torch.set_num_threads(1)  # a small model, and the capture shares the cores
    model, calls, real = encoder()
    embed(model, calls[0])  # torch's own warming up is nobody's merit
    start = time.perf_counter()
    expected = embed(model, calls[0])
    say(f"\neager call:                {milliseconds(start)}")

    with hotfuse.jit(model) as fast:
        start = time.perf_counter()
        first = embed(fast, calls[0])
        say(f"first call of hotfuse.jit: {milliseconds(start)}, on your own module: no call waits for a capture")

        start = time.perf_counter()
        rounds, everywhere = 0, False
        while not everywhere and (left := start + 45 - time.perf_counter()) > 0:
            everywhere = in_graph(fast, calls) == len(calls)
            rounds += 1
            if left < 35:  # a busy machine: give the capture, which runs at the lowest priority, the cores
                fast.wait(left)
        say(f"served {rounds * len(calls)} more calls in {milliseconds(start)}, the capture running beside them")
        if not everywhere:
            say("this machine is busy: the capture has not finished, and the model's own code goes on serving")

        vectors = [embed(fast, call) for call in calls]
        start = time.perf_counter()
        again = embed(fast, calls[0])
        say(f"a call now:                {milliseconds(start)}")
        worst = max((first - expected).abs().max().item(), (again - expected).abs().max().item())
        say(f"largest difference from eager: {worst:.1e}")

        if real:  # random weights have no opinion
            say(f"\n{QUERY}")
            scores = [float(v @ vectors[0]) for v in vectors[1:]]
            for score, text in sorted(zip(scores, SENTENCES, strict=True), reverse=True):
                say(f"  {score:5.2f}  {text}")

        say(f"\n{fast.explain()}")
        counters = {k: v for k, v in fast.stats().items() if isinstance(v, int)}
        say("\ncounters: " + ", ".join(f"{k} {v}" for k, v in counters.items()))


if __name__ == "__main__":
    main()
