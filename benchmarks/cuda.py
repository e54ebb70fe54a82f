"""Models on a CUDA device: eager, torch.compile in two modes, and Hotfuse, in turns.

    python -m benchmarks.cuda [--rounds 60] [--seconds 60] [--only bert] [--peers default,reduce-overhead] [--notes]

Models have random weights and run in fp16. A call is timed until the device is done with it. Ours is called until kernels generated
for the device serve, or until `--seconds` are over; the table says what served, and after how many seconds. Peers compile in their
first call, which is timed too. Padded batches come with eight masks in turns. What calls took while plans were made is said as
p99 and longest, beside eager's own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import hotfuse
from benchmarks.cuda_models import SentenceEncoder

Inputs = dict[str, torch.Tensor]
MASKS = 8


def image(batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.half)}


def channels_last(inputs: Inputs) -> Inputs:
    return {name: x.to(memory_format=torch.channels_last) for name, x in inputs.items()}


def text(batch: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(0, 30000, (batch, length), device="cuda")}


def padded(batch: int, length: int, real: float) -> list[Inputs]:
    """Sentences whose lengths differ widely, `real` of all tokens among them; the longest fills its row."""
    found: list[Inputs] = []
    for seed in range(MASKS):
        torch.manual_seed(seed)
        lengths = torch.distributions.Beta(2 * real, 2 * (1 - real)).sample((batch,)) if real < 1 else torch.ones(batch)
        lengths = (lengths * length).long().clamp(4, length)
        lengths[0] = length
        lengths[1:] = (lengths[1:] * (real * batch - 1) * length / lengths[1:].sum()).long().clamp(4, length)
        mask = (torch.arange(length)[None] < lengths[:, None]).long().cuda()
        found.append({**text(batch, length), "attention_mask": mask})
    return found


def cases() -> dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], Inputs | list[Inputs]]]]:
    import transformers as t

    small = t.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    llama = t.LlamaConfig(hidden_size=2048, num_hidden_layers=16, intermediate_size=5632, num_attention_heads=32,
                          num_key_value_heads=8, use_cache=False)  # fmt: skip
    return {
        "bert-base b1 s128": (lambda: t.BertModel(t.BertConfig()), lambda: text(1, 128)),
        "bert-base b64 s512": (lambda: t.BertModel(t.BertConfig()), lambda: text(64, 512)),
        "sentence encoder b64 s512, 28% real": (lambda: SentenceEncoder(t.BertConfig()), lambda: padded(64, 512, 0.28)),
        "sentence encoder b64 s512, all real": (lambda: SentenceEncoder(t.BertConfig()), lambda: padded(64, 512, 1.0)),
        "minilm-shaped b1 s64": (lambda: t.BertModel(small), lambda: text(1, 64)),
        "minilm-shaped b32 s128": (lambda: t.BertModel(small), lambda: text(32, 128)),
        "vit-base b1": (lambda: t.ViTModel(t.ViTConfig()), lambda: image(1)),
        "vit-base b32": (lambda: t.ViTModel(t.ViTConfig()), lambda: image(32)),
        "resnet-50 b1": (lambda: t.ResNetModel(t.ResNetConfig()), lambda: image(1)),
        "resnet-50 b64, channels last": (
            lambda: t.ResNetModel(t.ResNetConfig()).to(memory_format=torch.channels_last), lambda: channels_last(image(64)),
        ),
        "llama-shaped 1B prefill b1 s256": (lambda: t.LlamaModel(llama), lambda: text(1, 256)),
    }


def timed(contenders: dict[str, Callable[[Inputs], Any]], xs: list[Inputs], rounds: int) -> dict[str, list[float]]:
    """Milliseconds, sorted, in turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 5):
        for name, run in contenders.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run(xs[number % len(xs)])
            torch.cuda.synchronize()
            if number >= 5:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: sorted(took) for name, took in times.items()}


def plans(fast: hotfuse.Jit) -> list[dict[str, Any]]:
    return [p for s in fast.explain().to_dict()["sites"] for p in s["plans"]]


def replays(fast: hotfuse.Jit) -> int:
    own = fast.explain().to_dict()["own_recordings"]
    if any(kind["state"] == "replayed" for kind in own.get("kinds", ())):
        return own["replays"]
    return sum(p["counters"].get("replays", 0) + p["counters"].get("packed_replays", 0) for p in plans(fast))


def generated(fast: hotfuse.Jit) -> int:
    return sum(p["counters"].get("generated_kernels", 0) for p in plans(fast))


def until(
    fast: hotfuse.Jit, xs: list[Inputs], reached: Callable[[hotfuse.Jit], int], seconds: float, took: list[float]
) -> float | None:
    """Call until something holds; seconds that it took. `took` gets the milliseconds of every call."""
    begin, number = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(20):
            at = time.perf_counter()
            fast(**xs[number % len(xs)])
            torch.cuda.synchronize()
            took.append((time.perf_counter() - at) * 1e3)
            number += 1
        if reached(fast):
            return time.perf_counter() - begin
    return None


def peers(
    model: torch.nn.Module, xs: list[Inputs], modes: list[str]
) -> tuple[dict[str, Callable[[Inputs], Any]], dict[str, float]]:
    """Compiled by torch, with the seconds of their first calls."""
    made: dict[str, Callable[[Inputs], Any]] = {}
    first: dict[str, float] = {}
    for name in modes:
        torch._dynamo.reset()
        compiled = torch.compile(model, mode=name)
        begin = time.perf_counter()
        compiled(**xs[0])
        torch.cuda.synchronize()
        first[name] = time.perf_counter() - begin
        made[name] = lambda x, c=compiled: c(**x)
        for x in (*xs, *xs, *xs)[:6]:
            made[name](x)
    return made, first


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--seconds", type=float, default=60.0, help="calls until generated kernels serve, at most")
    options.add_argument("--only", default="", help="parts of names, between commas")
    options.add_argument("--peers", default="", help="modes of torch.compile, between commas: default,reduce-overhead")
    options.add_argument("--notes", action="store_true", help="what became of every group")
    options.add_argument("--json", action="store_true", help="end with one JSON document: over the best other, by model")
    asked, found = options.parse_args(), dict[str, float]()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    with torch.inference_mode():
        for name, (make, inputs) in cases().items():
            if any(part in name for part in asked.only.split(",")):
                found[name] = one(name, make().eval().cuda().half(), inputs(), asked)
    if asked.json:
        print(json.dumps(found))


def at(sorted_ms: list[float], part: float) -> float:
    return sorted_ms[min(len(sorted_ms) - 1, int(part * len(sorted_ms)))]


def one(name: str, model: torch.nn.Module, given: Inputs | list[Inputs], asked: argparse.Namespace) -> float:
    """One line a model, and more where it is asked for; how many times as fast as the best other."""
    xs = given if isinstance(given, list) else [given]
    idle = timed({"eager": lambda x: model(**x)}, xs, 3 * asked.rounds)["eager"]
    meanwhile: list[float] = []
    more, first = peers(model, xs, asked.peers.split(",")) if asked.peers else ({}, dict[str, float]())
    with hotfuse.jit(model) as fast:  # behind the peers: compiling changes the environment, which models may read
        recorded = until(fast, xs, replays, asked.seconds, meanwhile)
        graphs = median(timed({"recorded": lambda x: fast(**x)}, xs, asked.rounds)["recorded"])
        made = until(fast, xs, generated, asked.seconds, meanwhile)
        for number in range(200):
            fast(**xs[number % len(xs)])
            torch.cuda.synchronize()
        contenders: dict[str, Callable[[Inputs], Any]] = {"eager": lambda x: model(**x), "ours": lambda x: fast(**x)}
        contenders |= more
        took = {k: median(v) for k, v in timed(contenders, xs, asked.rounds).items()}
        got, want = (r if isinstance(r, torch.Tensor) else r[0] for r in (fast(**xs[0]), model(**xs[0])))
        error = float((got - want).abs().max() / want.abs().max())
        if asked.notes:
            for p in plans(fast):
                print(p["counters"], *p.get("notes", []), sep="\n    ")
            print(*[str(d) for d in fast.explain().to_dict()["decisions"]][-12:], sep="\n  ")
    said = ", ".join(f"{k} {v:.3f} ms" + (f" (first call {first[k]:.1f} s)" if k in first else "") for k, v in took.items())
    best = min(v for k, v in took.items() if k != "ours")
    when = [f"after {s:.1f} s" if s is not None else "never" for s in (recorded, made)]
    meanwhile.sort()
    print(f"{name}: {said}; ours {took['eager'] / took['ours']:.2f}x eager, {best / took['ours']:.2f}x the best other; "
          f"recorded {when[0]} ({graphs:.3f} ms), generated {when[1]}; {len(meanwhile)} calls meanwhile: "
          f"p99 {at(meanwhile, 0.99):.1f}, longest {meanwhile[-1]:.1f} ms "
          f"(eager alone: p99 {at(idle, 0.99):.1f}, longest {idle[-1]:.1f}), error {error:.1e}",
          flush=True)  # fmt: skip
    return best / took["ours"]


if __name__ == "__main__":
    main()
