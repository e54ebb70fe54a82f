"""How a session starts: calls answered in its first seconds, loading included, against ONNX Runtime.

    python -m benchmarks.start [--models ppocr-v4-rec,silero-vad] [--seconds 5] [--threads 1] [--json]

Every contender loads the file and answers one call after another in a process of its own, with empty caches; sizes vary from
call to call as the zoo's variants do. Importing the library does not count: an application does that before it loads a model.
With `--json` the last line of output is one JSON object: calls of Hotfuse over calls of ONNX Runtime, by model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import zoo


def served(contender: str, name: str, seconds: float, threads: int) -> dict[str, Any]:
    """In this process: how many calls were answered, and by what."""
    model = zoo.load(name)
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
        import hotfuse

        begin = time.perf_counter()
        session = hotfuse.InferenceSession(str(model.path), settings=hotfuse.Settings(threads=threads))
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


def child(*args: str) -> dict[str, Any]:
    """The last line of another process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.start", *args]
        env = {**os.environ, "HOTFUSE_CACHE_DIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
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
    args = parser.parse_args()
    if args.child:
        print(json.dumps(served(args.child, args.models, args.seconds, args.threads)))
        return
    ratios: dict[str, float] = {}
    for name in args.models.split(","):
        common = ("--models", name, "--seconds", str(args.seconds), "--threads", str(args.threads))
        found = {c: child("--child", c, *common) for c in ("ort", "hotfuse")}
        ratios[name] = round(found["hotfuse"]["calls"] / found["ort"]["calls"], 4)
        ours, theirs = found["hotfuse"], found["ort"]
        print(
            f"{name:14} {ours['calls']} calls in {args.seconds:g} s, ONNX Runtime {theirs['calls']}: {ratios[name]:.2f}x; "
            f"first after {ours['first_ms']} ms, {theirs['first_ms']} ms; by tier {ours['per_tier']}"
        )
    if args.json:
        print(json.dumps(ratios))


if __name__ == "__main__":
    main()
