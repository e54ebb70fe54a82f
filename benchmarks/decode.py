"""Tokens a second of `generate`, one prompt at a time, against eager and Inductor, and the fraction of the memory roof.

    python -m benchmarks.decode [--sizes 25 160] [--dtypes float32 bfloat16] [--threads 1 2] [--tokens 48] [--prompt 32]
                                [--seconds 40] [--inductor] [--json]

Steady state is what is measured: before it, background work gets pauses between calls. A token reads every weight once: the roof is
what a sum over as many bytes of memory takes, measured beside. Contenders take turns; medians. Tokens that differ from eager's are
counted, not hidden: the two may add in another order and meet a tie.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch

import hotfuse

SHAPES: dict[int, dict[str, int]] = {
    25: {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
         "num_key_value_heads": 4},
    160: {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
          "num_key_value_heads": 12},
    1000: {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
           "num_attention_heads": 32, "num_key_value_heads": 4},
}  # fmt: skip
"""Llama shapes by their millions of parameters."""
ROUNDS = 5


def bytes_per_token(model: Any) -> int:
    """What one token reads: all weights but the table of embeddings, of which it reads one row."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not table or p is head)


def roof_ms(size: int) -> float:
    """The milliseconds that reading so many bytes of memory takes at least."""
    data = torch.ones(size // 4)
    data.sum()
    times: list[float] = []
    for _ in range(15):
        begin = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One model on so many threads."""

    size: int
    dtype: str
    threads: int
    tokens: int
    prompt: int


def measured(case: DecodeCase, seconds: float, *, inductor: bool) -> dict[str, Any]:
    """Milliseconds a token of each contender."""
    import transformers as T

    T.logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(case.threads)
    tokens, shape = case.tokens, SHAPES[case.size]
    dtype = getattr(torch, case.dtype)
    model = T.LlamaForCausalLM(T.LlamaConfig(**shape, max_position_embeddings=8192)).eval().to(dtype)
    prompt = torch.randint(2, shape["vocab_size"], (1, case.prompt))
    how: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def generate(m: Any, count: int = tokens, **more: Any) -> torch.Tensor:
        return m.generate(prompt, min_new_tokens=count, max_new_tokens=count, **how, **more)

    with torch.inference_mode():
        want = generate(model)
        fast = hotfuse.jit(model)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            generate(fast)
            fast.wait(20)
        contenders: dict[str, Callable[[int], torch.Tensor]] = {
            "eager": lambda n: generate(model, n), "hotfuse": lambda n: generate(fast, n)}  # fmt: skip
        if inductor:
            other = T.LlamaForCausalLM(model.config).eval().to(dtype)
            other.load_state_dict(model.state_dict())
            other.forward = torch.compile(other.forward)
            contenders["inductor"] = lambda n: generate(other, n, cache_implementation="static")
        spent: dict[str, list[float]] = {name: [] for name in contenders}
        for name in contenders:
            for count in (tokens, 1):
                contenders[name](count)
        for _ in range(ROUNDS):
            for name, run in contenders.items():
                times: list[float] = []
                for count in (tokens, 1):
                    begin = time.perf_counter()
                    run(count)
                    times.append(time.perf_counter() - begin)
                spent[name].append(1e3 * (times[0] - times[1]) / (tokens - 1))
        differ = int((generate(fast) != want).sum())
        roof = roof_ms(bytes_per_token(model))
    found = {name: median(times) for name, times in spent.items()}
    tiers = fast.stats()["calls_per_tier"]
    fast.close()
    return {"ms": found, "roof_ms": roof, "differ": differ, "tiers": tiers}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 160], choices=list(SHAPES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=40.0, help="of calls before anything is measured")
    parser.add_argument("--inductor", action="store_true", help="compile with Inductor and a static cache, too: minutes")
    parser.add_argument("--json", action="store_true", help="behind each case a line of JSON")
    asked = parser.parse_args()
    print("| M params | weights | threads | contender | tokens/s | over eager | of the memory roof | tokens that differ | tiers |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for size, dtype, threads in product(asked.sizes, asked.dtypes, asked.threads):
        row = measured(DecodeCase(size, dtype, threads, asked.tokens, asked.prompt), asked.seconds, inductor=asked.inductor)
        for name, ms in row["ms"].items():
            ours = f"{row['differ']} | {row['tiers']}" if name == "hotfuse" else "|"
            print(f"| {size} | {dtype} | {threads} | {name} | {1e3 / ms:.1f} | {row['ms']['eager'] / ms:.2f} "
                  f"| {row['roof_ms'] / ms:.0%} | {ours} |", flush=True)  # fmt: skip
        if asked.json:
            print(json.dumps({"size": size, "dtype": dtype, "threads": threads, **row}), flush=True)


if __name__ == "__main__":
    main()
