"""Throughput over time, from the first call on: BERT-base under traffic whose lengths change half-way.

    python -m benchmarks.adapt [--seconds 60] [--shift 40] [--threads 1] [--contenders a,b] [--plot FILE] [--json]

Lengths are drawn from a log-normal around 24 tokens, from `--shift` seconds on around 80, at most 128. Every contender serves the
same seeded traffic in a process of its own, one call after another:

- hotfuse: `hotfuse.jit(model)`;  eager: the module;  ort: ONNX Runtime on the exported model with dynamic lengths;
- inductor, inductor-dynamic: `torch.compile(model, dynamic=None)` and `dynamic=True`.

Speed is the time eager needs for the calls of a second (its median for those lengths, measured beforehand) over the time they
took: 1.0 is eager, whatever the lengths. Steady is the median of the last third before the shift; a contender has got there when
its speed is within 5% of that for good, up to single outlying seconds. Further measures, each in its own process:

- watching: the same served model with sampling on and off, in turns (`benchmarks.watching`: BERT-base and magika);
- dispatch: guards of 10 inputs over 8 plans (`benchmarks.guards`);
- p99 while compiling: calls on library kernels while workers compile other plans, against the same with idle workers.

With `--json` the last line of output is one JSON object of plain numbers.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import zoo
from benchmarks.peers import Positional

CONTENDERS = ("hotfuse", "eager", "ort", "inductor", "inductor-dynamic")
LONGEST, SHORTEST = 128, 4
WINDOW_S = 1.0
NEAR = 0.95
GRID = (4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128)


def lengths(phase: int) -> Iterator[int]:
    """Seeded lengths: short texts at first, then long ones."""
    rng = np.random.default_rng((7, phase))
    middle = (24.0, 80.0)[phase]
    while True:
        yield int(np.clip(rng.lognormal(math.log(middle), 0.5), SHORTEST, LONGEST))


def tokens(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 30522, (1, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def bert() -> torch.nn.Module:
    module = zoo.load("bert-base").module
    assert module is not None
    return module


def contender(name: str, model: torch.nn.Module, threads: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    """How one contender answers a call; what it prepares before the first call counts as part of that call."""
    if name == "eager":
        return lambda feed: model(**feed)
    if name == "hotfuse":
        import hotfuse

        fast = hotfuse.jit(model)
        return lambda feed: fast(**feed)
    if name.startswith("inductor"):
        compiled = torch.compile(model, dynamic=True if name.endswith("dynamic") else None)
        return lambda feed: compiled(**feed)
    import onnxruntime

    example = tokens(32)
    length = torch.export.Dim("length", min=2, max=512)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bert.onnx"
        shapes = ({1: length}, {1: length})
        torch.onnx.export(
            Positional(model, list(example)).eval(), tuple(example.values()), str(path), input_names=list(example),
            dynamic_shapes={"args": shapes}, dynamo=True, verbose=False,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, {n: t.numpy() for n, t in feed.items()})


def serve(name: str, seconds: float, shift: float, threads: int) -> dict[str, Any]:
    """In this process: calls until the time is up, as [begin, length, seconds] each."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = bert()
    with torch.inference_mode():
        torch.nn.functional.linear(torch.randn(128, 768), torch.randn(768, 768))  # thread pools start, whoever asks for it
        phases = lengths(0), lengths(1)
        calls: list[list[float]] = []
        call: Callable[[dict[str, torch.Tensor]], Any] | None = None
        start = time.perf_counter()
        while (now := time.perf_counter() - start) < seconds:
            length = next(phases[now >= shift])
            feed = tokens(length)
            begin = time.perf_counter()
            if call is None:
                call = contender(name, model, threads)
            call(feed)
            end = time.perf_counter()
            calls.append([begin - start, length, end - begin])
    return {"calls": calls}


def eager_curve(threads: int, rounds: int = 7) -> dict[int, float]:
    """Eager's median seconds per length, the lengths in turns."""
    torch.set_num_threads(threads)
    model = bert()
    times: dict[int, list[float]] = {n: [] for n in GRID}
    with torch.inference_mode():
        for r in range(rounds + 1):
            for n in GRID:
                feed = tokens(n)
                begin = time.perf_counter()
                model(**feed)
                if r:
                    times[n].append(time.perf_counter() - begin)
    return {n: statistics.median(t) for n, t in times.items()}


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds that eager takes, by length."""

    seconds: dict[int, float]

    def __call__(self, length: int) -> float:
        i = max(1, min(bisect.bisect_left(GRID, length), len(GRID) - 1))
        a, b = GRID[i - 1], GRID[i]
        part = (length - a) / (b - a)
        return self.seconds[a] * (1 - part) + self.seconds[b] * part


def speeds(calls: list[list[float]], curve: Curve, seconds: float) -> list[float]:
    """Per second of the run: eager's time for the calls that ended in it over the time they took; 0 where none ended."""
    work, spent = [0.0] * math.ceil(seconds / WINDOW_S), [0.0] * math.ceil(seconds / WINDOW_S)
    for begin, length, taken in calls:
        first, last = int(begin / WINDOW_S), min(int((begin + taken) / WINDOW_S), len(work) - 1)
        share = curve(int(length)) / (last - first + 1)
        for w in range(first, last + 1):  # a call that spans windows did part of its work in each
            work[w] += share
            spent[w] += max(0.0, min(begin + taken, (w + 1) * WINDOW_S) - max(begin, w * WINDOW_S))
    return [w / s if s else 0.0 for w, s in zip(work, spent, strict=True)]


def settled(window_speeds: list[float]) -> tuple[float, float]:
    """(seconds until within 5% of steady for good, steady speed)."""
    smooth = [statistics.median(window_speeds[max(0, i - 1) : i + 2]) for i in range(len(window_speeds))]
    steady = statistics.median(window_speeds[-max(3, len(window_speeds) // 3) :])
    late = [i for i, s in enumerate(smooth) if s < NEAR * steady]
    return (late[-1] + 1) * WINDOW_S if late else 0.0, steady


def p99_compiling(threads: int, calls: int = 300) -> float:
    """p99 of calls on library kernels while workers compile, over the same with idle workers; in turns of 50 calls."""
    import hotfuse
    from hotfuse.base.settings import Settings

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, feed = bert(), tokens(16)
    times: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode():
        served = hotfuse.jit(model, settings=Settings(tiers=0))
        for _ in range(3):
            served(**feed)
        served.wait()
        for turn in range(2 * calls // 50):
            busy = turn % 2 == 1
            other = hotfuse.jit(model, settings=Settings(hot_calls=1)) if busy else None
            if other is not None:
                other(**feed)  # its capture, and then its compilation, run while the others are timed
            for i in range(50):
                if other is not None and i % 10 == 0:
                    other(**feed)
                begin = time.perf_counter()
                served(**feed)
                times[busy].append(time.perf_counter() - begin)
            if other is not None:
                other.wait()
                other.close()
    return float(np.quantile(times[True], 0.99) / np.quantile(times[False], 0.99))


def _child(*args: str, benchmark: str = "adapt") -> Any:
    """The last line of another process, which is JSON."""
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{benchmark}", *args], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def plot(path: Path, found: dict[str, list[float]], shift: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for name, values in found.items():
        axes.plot([i * WINDOW_S for i in range(len(values))], values, label=name, linewidth=2.2 if name == "hotfuse" else 1.2)
    axes.axvline(shift, color="grey", linestyle=":", label="lengths change")
    axes.set(xlabel="seconds since the first call", ylabel="speed (eager's median = 1)", ylim=(0, None),
             title="BERT-base, one request after another, random lengths")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--shift", type=float, default=40.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    threads = args.threads
    if args.child == "curve":
        print(json.dumps(eager_curve(threads)))
        return
    if args.child == "p99":
        print(json.dumps(p99_compiling(threads)))
        return
    if args.child:
        print(json.dumps(serve(args.child, args.seconds, args.shift, threads)))
        return
    common = ("--threads", str(threads), "--seconds", str(args.seconds), "--shift", str(args.shift))
    curve = Curve({int(n): t for n, t in _child("--child", "curve", *common).items()})
    found: dict[str, list[float]] = {}
    rows: dict[str, dict[str, float]] = {}
    for name in args.contenders.split(","):
        ran = _child("--child", name, *common)
        if "failed" in ran:
            print(f"{name}: {ran['failed']}")
            continue
        calls = ran["calls"]
        found[name] = speeds(calls, curve, args.seconds)
        cut = int(args.shift / WINDOW_S)
        to_steady, steady = settled(found[name][:cut])
        recovery, after = settled(found[name][cut:])
        rows[name] = {
            "calls_first_30s": sum(b + t <= 30.0 for b, _, t in calls), "calls": len(calls), "time_to_steady_s": to_steady,
            "steady": steady, "recovery_s": recovery, "after": after, "lowest_after": min(found[name][cut:-1]),
            "worst_call": max(t / curve(int(n)) for _, n, t in calls),
        }
        print(f"{name:17} " + "  ".join(f"{k} {v:.2f}" for k, v in rows[name].items()), flush=True)
    if args.plot:
        plot(args.plot, found, args.shift)
    ours, eager = rows["hotfuse"], rows.get("eager")
    compiled = [rows[n]["time_to_steady_s"] for n in ("inductor", "inductor-dynamic") if n in rows]
    result = {
        "calls_first_30s_vs_eager": ours["calls_first_30s"] / eager["calls_first_30s"] if eager else math.nan,
        "time_to_steady_s": ours["time_to_steady_s"],
        "time_to_steady_vs_inductor": ours["time_to_steady_s"] / min(compiled) if compiled and min(compiled) else math.nan,
        "worst_call_vs_eager_median": ours["worst_call"],
        "recovery_s": ours["recovery_s"],
        "min_throughput_vs_eager_after_shift": ours["lowest_after"],
        "watching_overhead": _child("--json", "--models", "bert-base,magika", "--threads", str(threads),
                                    benchmark="watching").get("watching_overhead"),
        "dispatch_us": _child("--json", "--inputs", "10", "--plans", "8", benchmark="guards").get("dispatch_us"),
        "p99_compiling_vs_idle": _child("--child", "p99", *common),
    }
    for name, value in result.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float | int) else f"{name}: {value}")
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
