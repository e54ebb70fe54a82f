"""Memory of a served file under mixed sizes, over ONNX Runtime's: each in a process of its own, children that are idle included.

    python -m benchmarks.memory [--models ppocr-v4-rec] [--seconds 25] [--json]

What counts is what a process holds beyond what importing its runtime took: behind calls of many sizes, and behind ten seconds in
which a server without calls gives back what it does not need. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import zoo
from benchmarks.corpus.child import grown_bytes

IDLE_S = 10.0
BATCHES, WIDTHS = (1, 1, 1, 2, 4), range(5, 75)


def grown_mb(who: str, name: str, seconds: float) -> float:
    """In this process: megabytes beyond what importing took."""
    import torch

    torch.set_num_threads(1)
    path, sizes = str(zoo.load(name).path), random.Random(1)
    if who == "ort":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        before = grown_bytes()
        session: Any = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    else:
        import hotfuse

        open_session = hotfuse.InferenceSession  # what importing it takes does not count
        before = grown_bytes()
        session = open_session(path, settings=hotfuse.Settings(threads=1))
    (feed_name,) = [i.name for i in session.get_inputs()]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        shape = (sizes.choice(BATCHES), 3, 48, sizes.choice(WIDTHS) * 8)
        session.run(None, {feed_name: torch.randn(shape).numpy()})
    if who != "ort":
        session.wait(60)
        time.sleep(IDLE_S)
    return (grown_bytes() - before) / 1e6


def apart(who: str, name: str, seconds: float) -> float:
    """The same in a fresh process with an empty home."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "benchmarks.memory", "--child", who, "--models", name, "--seconds", str(seconds)]
        env = {**os.environ, "HOTFUSE_CACHE_DIR": home, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, {who}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    """A line a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="ppocr-v4-rec", help="text recognizers of the zoo, comma-separated")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    parser.add_argument("--child", choices=["ort", "hotfuse"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(grown_mb(asked.child, asked.models, asked.seconds), flush=True)
        os._exit(0)  # what ends behind the figure is nobody's
    found: dict[str, dict[str, float]] = {}
    for name in asked.models.split(","):
        row = found[name] = {f"{who}_mb": apart(who, name, asked.seconds) for who in ("ort", "hotfuse")}
        ours, theirs = row["hotfuse_mb"], row["ort_mb"]
        print(f"{name}: {ours:.0f} MB, ONNX Runtime {theirs:.0f}: {ours / theirs:.1f} times", flush=True)
    if asked.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
