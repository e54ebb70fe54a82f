"""What Hotfuse costs before it gains anything: the first result, and steady tier 0, against eager.

    python -m benchmarks.overhead [--threads N] [--rounds N] [--json]

- first result: `hotfuse.jit(model)(x)`, from making the wrapper to having the outputs, against the first eager call of
  an equal model, loading what `hotfuse.jit` needs included; each in a fresh process, because only a fresh process has a
  first call.
- steady: after `wait()`, with the captured graph in place, call by call in turns with eager.

The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import zoo
from benchmarks.timing import Timing, interleave, summarize

FIRST_LIMIT, BERT_LIMIT, MLP_LIMIT = 1.1, 1.1, 1.25


def bert(length: int = 128) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """BERT-base with random weights on one sequence."""
    model = zoo.load("bert-base").module
    assert model is not None
    ids = torch.randint(0, 30522, (1, length), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def mlp(width: int = 64) -> tuple[torch.nn.Module, torch.Tensor]:
    """Two small layers: next to nothing to compute, so all that shows is overhead."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)).eval()
    return model, torch.randn(1, width)


def first_call(contender: str, threads: int) -> float:
    """In this process: the first result of one contender, in milliseconds, after a call that wakes torch up."""
    torch.set_num_threads(threads)
    model, inputs = bert()
    with torch.inference_mode():
        # The very first matrix product of a process starts thread pools and picks kernels, whoever asks for it.
        torch.nn.functional.linear(torch.randn(128, 768), torch.randn(768, 768))
        if contender == "eager":
            start = time.perf_counter()
            model(**inputs)
            return (time.perf_counter() - start) * 1e3
        from hotfuse import jit  # imports are paid once, like torch's own

        start = time.perf_counter()
        fast = jit(model)
        fast(**inputs)
        taken = (time.perf_counter() - start) * 1e3
        fast.close()
        return taken


def first_results(threads: int, rounds: int) -> tuple[dict[str, Timing], dict[str, float]]:
    """First results in fresh processes, the contenders in turns."""
    times: dict[str, list[float]] = {"eager": [], "hotfuse": []}
    for i in range(rounds):
        for name in list(times) if i % 2 == 0 else list(times)[::-1]:
            command = [sys.executable, "-m", "benchmarks.overhead", "--first", name, "--threads", str(threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            times[name].append(float(done.stdout.split()[-1]))
    ratio = statistics.median(h / e for h, e in zip(times["hotfuse"], times["eager"], strict=True))
    return {n: summarize(t) for n, t in times.items()}, {"eager": 1.0, "hotfuse": ratio}


def steady(
    model: torch.nn.Module, call: Callable[[Any], object], rounds: int, inner: int
) -> tuple[dict[str, Timing], dict[str, float], dict[str, Any]]:
    """Eager against the captured graph."""
    import hotfuse

    with torch.inference_mode(), hotfuse.jit(model) as fast:
        call(fast)
        fast.wait()
        call(fast)
        timings, ratios = interleave(
            {"eager": lambda: call(model), "hotfuse": lambda: call(fast)}, rounds=rounds, inner=inner
        )
        stats = dict(fast.stats())
        if stats["graph_calls"] < rounds * inner:
            raise RuntimeError(f"the captured graph did not serve:\n{fast.explain(full=True)}")
        return timings, ratios, stats


def row(name: str, timings: dict[str, Timing], ratio: float, limit: float) -> str:
    """A line of the table."""
    cells = [f"{t.median:9.4f} ({t.low:.4f} – {t.high:.4f})" for t in timings.values()]
    return f"{name:<22} {cells[0]:<32} {cells[1]:<32} {ratio:5.3f} of {limit:.2f} {'ok' if ratio <= limit else 'OVER'}"


def main() -> None:
    """Measure, print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the steady BERT measurement")
    parser.add_argument("--first-rounds", type=int, default=5, help="pairs of fresh processes")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--first", choices=("eager", "hotfuse"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first:
        print(first_call(options.first, options.threads))
        return
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"benchmark": "overhead", "threads": options.threads, "torch": torch.__version__}
    lines = [f"{'':<22} {'eager ms (p10 – p90)':<32} {'hotfuse ms (p10 – p90)':<32} ratio"]

    def record(name: str, timings: dict[str, Timing], ratio: float, limit: float, stats: Any = None) -> None:
        report[name] = {n: t.to_dict() for n, t in timings.items()}
        report[name] |= {"ratio": round(ratio, 4), "limit": limit, "stats": stats}
        lines.append(row(name, timings, ratio, limit))

    timings, ratios = first_results(options.threads, options.first_rounds)
    record("bert-base first", timings, ratios["hotfuse"], FIRST_LIMIT)
    model, inputs = bert()
    timings, ratios, stats = steady(model, lambda f: f(**inputs), options.rounds, 1)
    record("bert-base steady", timings, ratios["hotfuse"], BERT_LIMIT, stats)
    small, x = mlp()
    timings, ratios, stats = steady(small, lambda f: f(x), options.rounds * 10, 100)
    record("mlp 64 steady", timings, ratios["hotfuse"], MLP_LIMIT, stats)
    if not options.json:
        print(f"threads {options.threads}, torch {torch.__version__}; medians of interleaved calls")
        print("\n".join(lines))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
