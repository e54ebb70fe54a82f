"""Tokens a second of a Llama-shaped model on a CUDA device, batch 1: eager, torch.compile, and Hotfuse.

    python -m benchmarks.cuda_decode [--layers 16] [--tokens 96] [--seconds 40] [--tiers 2] [--peers default] [--steps] [--exact]

fp16, random weights, 1 B parameters. Every token is read on the host before the next step, as a program does that looks for the end
of a sentence. "Static" caches have room for 512 tokens from the beginning; eager's default grows by concatenation. Texts are
generated until steps are replayed (of tier 2: in generated kernels), or `--seconds` are over; then contenders take turns, a text
each. `--steps` says what a step spends where: the host until everything is launched, the device's kernels, and all of it.
`--exact` gives all of them, and the model in float64, the same tokens, and says how far each one's logits are from those.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import hotfuse
from hotfuse.base.settings import Settings

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
    options.add_argument("--seconds", type=float, default=40.0, help="texts until steps are replayed, at most")
    options.add_argument("--tiers", type=int, default=2)
    options.add_argument("--static", action=argparse.BooleanOptionalAction, default=True, help="static caches, too")
    options.add_argument("--peers", default="", help="modes of torch.compile, between commas: default,reduce-overhead")
    options.add_argument("--steps", action="store_true", help="what a step spends where")
    options.add_argument("--exact", action="store_true", help="how far logits are from those of float64")
    asked = options.parse_args()
    config = t.LlamaConfig(hidden_size=2048, num_hidden_layers=asked.layers, intermediate_size=5632, num_attention_heads=32,
                           num_key_value_heads=8)  # fmt: skip
    with torch.device("cuda"):
        model: Any = t.LlamaForCausalLM(config)
    model = model.eval().half()
    prompt = torch.randint(5, 30000, (1, PROMPT), device="cuda")
    settings = replace(Settings(), tiers=asked.tiers)
    with torch.no_grad(), hotfuse.jit(model, settings=settings) as fast, hotfuse.jit(model, settings=settings) as other:
        contenders: dict[str, tuple[Callable[..., Any], bool]] = {"eager": (model, False), "ours": (fast, False)}
        served = [("ours", fast, False)]
        if asked.static:
            contenders |= {"eager, static": (model, True), "ours, static": (other, True)}
            served += [("ours, static", other, True)]
        want = one_text(model, config, prompt, asked.tokens, static=False)[0]
        for name, jit, static in served:
            begin, texts = time.perf_counter(), list[str]()
            when: float | None = None
            made = generated if asked.tiers > 1 and not static else replays
            while time.perf_counter() - begin < asked.seconds and not (replays(jit) and made(jit)):
                _, rate = one_text(jit, config, prompt, asked.tokens, static=static)
                when = time.perf_counter() - begin if when is None and replays(jit) else when
                texts.append(f"{time.perf_counter() - begin:.1f} s {rate:.0f}")
            print(f"{name}: replayed after {when} s, {replays(jit)} replays and {generated(jit)} generated kernels after "
                  f"{time.perf_counter() - begin:.1f} s; tokens/s: {', '.join(texts)}", flush=True)  # fmt: skip
        print_rates(in_turns(contenders, config, prompt, asked), want)
        if asked.exact:
            print_errors(contenders, config, model, asked.tokens)
        if asked.steps:
            for name, (run, static) in contenders.items():
                print(f"{name}: {a_step(run, config, prompt, static=static)}", flush=True)
        for _, jit, _ in served:
            told = jit.explain().to_dict()
            print({k: v for k, v in told["own_recordings"].items() if k != "kinds"},
                  [(k["state"], k["because"][:80], k["race"]) for k in told["own_recordings"].get("kinds", ())],
                  [(p["tier"], p["counters"], p["notes"][:40]) for s in told["sites"] for p in s["plans"]])  # fmt: skip
            print(*[f"{d['at']:.1f} {d['action']}: {d['why']} {d['evidence']}"[:300] for d in told["decisions"]][-30:], sep="\n  ")
        for mode in filter(None, asked.peers.split(",")):
            contenders[f"{mode}, static"] = (torch.compile(model, mode=mode), True)
            begin = time.perf_counter()
            one_text(contenders[f"{mode}, static"][0], config, prompt, asked.tokens, static=True)
            print(f"{mode}: first text after {time.perf_counter() - begin:.1f} s", flush=True)
        if asked.peers:  # the eager ones have been
            print_rates(in_turns({k: v for k, v in contenders.items() if "eager" not in k}, config, prompt, asked), want)


Texts = dict[str, list[tuple[list[int], float]]]


def in_turns(
    contenders: dict[str, tuple[Callable[..., Any], bool]], config: Any, prompt: torch.Tensor, asked: argparse.Namespace
) -> Texts:
    """Texts of each, and tokens a second."""
    found: Texts = {name: [] for name in contenders}
    for _ in range(asked.rounds):
        for name, (run, static) in contenders.items():
            found[name].append(one_text(run, config, prompt, asked.tokens, static=static))
    return found


def print_rates(found: Texts, want: list[int]) -> None:
    """One line a contender."""
    for name, texts in found.items():
        rates = [rate for _, rate in texts]
        same = sum(a == b for a, b in zip(texts[-1][0], want, strict=True)) / len(want)
        print(f"{name}: {median(rates):.0f} tokens/s ({', '.join(f'{r:.0f}' for r in rates)}), {same:.0%} of the tokens as eager's",
              flush=True)  # fmt: skip


def print_errors(
    contenders: dict[str, tuple[Callable[..., Any], bool]], config: Any, model: torch.nn.Module, tokens: int
) -> None:
    """Of every step's logits, the distance to those of float64 over their norm: random tokens, the same for everybody."""
    import transformers as t

    with torch.device("cuda"):
        exact: Any = t.LlamaForCausalLM(config)
    exact.load_state_dict(model.state_dict())
    exact = exact.eval().double()
    given = [torch.randint(5, 30000, (1, PROMPT if step == 0 else 1), device="cuda") for step in range(tokens)]

    def logits(run: Callable[..., Any], *, static: bool) -> list[torch.Tensor]:
        cache = t.StaticCache(config=config, max_cache_len=ROOM) if static else t.DynamicCache(config=config)
        found: list[torch.Tensor] = []
        for step, ids in enumerate(given):
            at = torch.arange(PROMPT, device="cuda") if step == 0 else torch.tensor([PROMPT - 1 + step], device="cuda")
            found.append(run(input_ids=ids, past_key_values=cache, cache_position=at).logits[0, -1].double())
        return found

    want = logits(exact, static=False)
    for name, (run, static) in contenders.items():
        got = logits(run, static=static)
        errors = [float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]
        same = sum(int(g.argmax()) == int(w.argmax()) for g, w in zip(got, want, strict=True))
        print(f"{name}: against float64 median {median(errors):.2e}, most {max(errors):.2e}; "
              f"{same} of {tokens} tokens as float64's", flush=True)  # fmt: skip


def replays(jit: hotfuse.Jit) -> int:
    """Of steps that serve, not of those in a race."""
    told = jit.explain().to_dict()
    own = told["own_recordings"]
    found = sum(p["counters"].get("replays", 0) for s in told["sites"] for p in s["plans"] if "moved_in" in p["counters"])
    return found + (own["replays"] if any(k["state"] == "replayed" for k in own.get("kinds", ())) else 0)


def generated(jit: hotfuse.Jit) -> int:
    return sum(p["counters"].get("generated_kernels", 0) for s in jit.explain().to_dict()["sites"] for p in s["plans"])


def a_step(model: Callable[..., Any], config: Any, prompt: torch.Tensor, *, static: bool) -> str:
    """Microseconds of steps behind a text of some length: the host's part, the device's, and both until it is done."""
    import transformers as t
    from torch.profiler import ProfilerActivity, profile

    cache = t.StaticCache(config=config, max_cache_len=ROOM) if static else t.DynamicCache(config=config)
    at = torch.arange(PROMPT, device="cuda")
    token = model(input_ids=prompt, past_key_values=cache, cache_position=at).logits[:, -1:].argmax(-1)
    host, whole = list[float](), list[float]()
    for step in range(64):
        at = torch.tensor([PROMPT + step], device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model(input_ids=token, past_key_values=cache, cache_position=at)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        whole.append((time.perf_counter() - begin) * 1e6)
        host.append((launched - begin) * 1e6)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for step in range(8):
            model(input_ids=token, past_key_values=cache, cache_position=torch.tensor([PROMPT + 64 + step], device="cuda"))
        torch.cuda.synchronize()
    kernels = [(e.key, e.count / 8, e.self_device_time_total / 8) for e in seen.key_averages() if e.self_device_time_total]
    kernels.sort(key=lambda k: -k[2])
    top = "; ".join(f"{name[:50]} x{n:.0f} {us:.0f}" for name, n, us in kernels[:8])
    return (f"host {median(host):.0f} us, whole {median(whole):.0f} us, kernels {sum(k[2] for k in kernels):.0f} us in "
            f"{sum(k[1] for k in kernels):.0f} launches ({top})")  # fmt: skip


if __name__ == "__main__":
    main()
