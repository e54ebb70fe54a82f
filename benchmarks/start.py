"""How a session starts: calls answered in its first seconds, loading included, against ONNX Runtime.

    python -m benchmarks.start [--models ppocr-v4-rec,bert.int8-dynamic] [--seconds 5] [--threads 1] [--json]

Models are ONNX files of the zoo or of the corpus. Every contender loads the file and answers one call after another in a process of
its own, with empty caches and bytecode as an installed package has it (`benchmarks.bytecode`); sizes vary from call to call as the
zoo's variants do. Importing the library does not count: an application does that before it loads a model.
With `--json` the last line of output is one JSON object: calls of Hotfuse over calls of ONNX Runtime, by model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import zoo
from benchmarks.bytecode import as_installed
from benchmarks.corpus import entries


def served(contender: str, name: str, seconds: float, threads: int, folder: Path) -> dict[str, Any]:
    """In this process: how many calls were answered, and by what. What Hotfuse keeps lies in `folder`; model files do not."""
    model = zoo.load(name) if name in zoo.names("onnx") else entries.find(name).load()
    feeds = [model.inputs(seed, variant) for seed in range(8) for variant in range(model.variants)]
    torch.set_num_threads(threads)
    told: Callable[[], dict[str, Any]] | None = None
    if contender == "ort":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        begin = time.perf_counter()
        session = onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    else:
        from hotfuse import InferenceSession, Settings

        begin = time.perf_counter()
        session = InferenceSession(str(model.path), settings=Settings(threads=threads, cache_dir=folder))
        told = session.stats
    calls, first = 0, 0.0
    while time.perf_counter() - begin < seconds:
        session.run(None, feeds[calls % len(feeds)])
        calls += 1
        first = first or time.perf_counter() - begin
    found: dict[str, Any] = {"calls": calls, "first_ms": round(first * 1e3, 1)}
    if told is not None:
        found["per_tier"] = told()["calls_per_tier"]
    return found


def teach(name: str, threads: int, folder: Path, most_s: float = 120.0) -> dict[str, Any]:
    """In this process: the same traffic until compiled code answers calls of all sizes, as a process does that serves for long."""
    from hotfuse import InferenceSession, Settings

    model = zoo.load(name) if name in zoo.names("onnx") else entries.find(name).load()
    kinds = [model.inputs(0, variant) for variant in range(model.variants)]
    torch.set_num_threads(threads)
    begin, all_compiled = time.perf_counter(), False
    with InferenceSession(str(model.path), settings=Settings(threads=threads, cache_dir=folder)) as session:
        while time.perf_counter() - begin < most_s and not all_compiled:
            before = session.stats()["calls_per_tier"]
            for feeds in kinds:
                session.run(None, feeds)
            now = session.stats()["calls_per_tier"]
            all_compiled = sum(now[t] - before[t] for t in ("1", "2")) == len(kinds)
        session.wait(60)
    return {"all_compiled": all_compiled, "seconds": round(time.perf_counter() - begin, 1)}


def child(*args: str) -> dict[str, Any]:
    """The last line of another process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.start", *args, "--folder", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(args)}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="ppocr-v4-rec,silero-vad")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/hotfuse"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "teach":
        print(json.dumps(teach(args.models, args.threads, args.folder)))
        return
    if args.child:
        print(json.dumps(served(args.child, args.models, args.seconds, args.threads, args.folder)))
        return
    as_installed()
    ratios: dict[str, float] = {}
    for name in args.models.split(","):
        common = ("--models", name, "--seconds", str(args.seconds), "--threads", str(args.threads))
        found = {c: child("--child", c, *common) for c in ("ort", "hotfuse")}
        ratios[name] = round(found["hotfuse"]["calls"] / found["ort"]["calls"], 4)
        ours, theirs = found["hotfuse"], found["ort"]
        print(
            f"{name:26} {ours['calls']} calls in {args.seconds:g} s, ONNX Runtime {theirs['calls']}: {ratios[name]:.2f}x; "
            f"first after {ours['first_ms']} ms, {theirs['first_ms']} ms; by tier {ours['per_tier']}"
        )
    print(f"geometric mean {statistics.geometric_mean(ratios.values()):.2f}x, worst {min(ratios.values()):.2f}x")
    if args.json:
        print(json.dumps(ratios))


if __name__ == "__main__":
    main()
