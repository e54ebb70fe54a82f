"""Small batches on a CUDA device: eager and Hotfuse, in turns.

    python -m benchmarks.cuda [--rounds 60] [--seconds 30] [--only bert]

Models have random weights and run in fp16. A call is timed until the device is done with it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import hotfuse

Inputs = dict[str, torch.Tensor]


def image(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.half)}


def text(batch: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(0, 30000, (batch, length), device="cuda")}


def cases() -> dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], Inputs]]]:
    import transformers as t

    small = t.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    return {
        "bert-base b1 s128": (lambda: t.BertModel(t.BertConfig()), lambda: text(1, 128)),
        "minilm-shaped b1 s64": (lambda: t.BertModel(small), lambda: text(1, 64)),
        "resnet-50 b1": (lambda: t.ResNetModel(t.ResNetConfig()), lambda: image(1)),
        "vit-base b1": (lambda: t.ViTModel(t.ViTConfig()), lambda: image(1)),
        "vit-base b32": (lambda: t.ViTModel(t.ViTConfig()), lambda: image(32)),
    }


def timed(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds, in turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 5):
        for name, run in contenders.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if number >= 5:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: median(took) for name, took in times.items()}


def replays(fast: hotfuse.Jit) -> int:
    return sum(p["counters"].get("replays", 0) for s in fast.explain().to_dict()["sites"] for p in s["plans"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--seconds", type=float, default=30.0, help="calls until a plan replays, at most")
    options.add_argument("--only", default="")
    asked = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    with torch.inference_mode():
        for name, (make, inputs) in cases().items():
            if asked.only not in name:
                continue
            model, x = make().eval().cuda().half(), inputs()
            with hotfuse.jit(model) as fast:
                begin = time.perf_counter()
                while not replays(fast) and time.perf_counter() - begin < asked.seconds:
                    for _ in range(20):
                        fast(**x)
                        torch.cuda.synchronize()
                until = time.perf_counter() - begin if replays(fast) else None
                took = timed({"eager": lambda m=model, x=x: m(**x), "ours": lambda f=fast, x=x: f(**x)}, asked.rounds)
                got, want = fast(**x)[0], model(**x)[0]
                error = float((got - want).abs().max() / want.abs().max())
            said = "never replayed" if until is None else f"replays after {until:.1f} s"
            print(f"{name:22s} eager {took['eager']:.3f} ms, ours {took['ours']:.3f}: {took['eager'] / took['ours']:.2f}x; "
                  f"{said}, error {error:.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
