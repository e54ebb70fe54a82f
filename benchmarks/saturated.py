"""A saturated server: as many calling threads as cores, mixed sizes. Do plans come under load, how soon, and at what price?

    python -m benchmarks.saturated [--models ppocr-v4-rec,encoder] [--seconds 60] [--json]

Every run is a process of its own with empty caches, and bytecode as an installed package has it; calls have one thread each.

    own        the model's own code (captures off), as many threads as cores: what there is to lose
    idle       one call at a time with pauses three times as long, so that cores are idle: how soon the plan of kernels serves
    saturated  as many threads as cores, one call after another: how soon then; requests until it serves, against `own`
    peer       ONNX Runtime for a session, torch for a module: requests a second, against the last five seconds of `saturated`

The aims: the plan within three times what it takes on idle cores, at most a tenth of the requests lost until then, and 1.2 times
the peer's requests after a minute. With `--json` the last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import zoo
from benchmarks.bytecode import as_installed
from hotfuse.base.settings import Settings
from hotfuse.machine.cores import usable_cores

REFERENCE_S = 10.0
"""Of `own` and `peer`."""
LAST_S = 5.0
PAUSES = 3.0
"""Seconds of rest for each second of a call, in an idle process."""
Call = Callable[[int], Any]


def _session(name: str, what: str) -> tuple[Call, Callable[[], Any] | None]:
    model = zoo.load(name)
    feeds = [model.inputs(seed, variant) for seed in range(4) for variant in range(model.variants)]
    if what == "peer":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = 1, 1, 3
        run: Any = onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"]).run
        return lambda n: run(None, feeds[n % len(feeds)]), None
    import hotfuse

    settings = Settings().with_(threads=1, capture="off" if what == "own" else "background")  # whose cache is the run's own
    session = hotfuse.InferenceSession(str(model.path), settings=settings)
    return lambda n: session.run(None, feeds[n % len(feeds)]), session.explain


def _encoder(what: str) -> tuple[Call, Callable[[], Any] | None]:
    """A small BERT on texts of three lengths."""
    import transformers

    import hotfuse

    config = transformers.BertConfig(hidden_size=384, num_hidden_layers=4, num_attention_heads=12, intermediate_size=1536)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    texts = [torch.randint(0, 30522, (1, n)) for n in (16, 48, 112)]
    fast: Any = model if what in ("peer", "own") else hotfuse.jit(model)

    def call(n: int) -> Any:
        with torch.inference_mode():
            return fast(texts[n % len(texts)])

    return call, None if fast is model else fast.explain


def run(name: str, what: str, seconds: float) -> dict[str, Any]:
    """In this process: requests second by second, and which plans were deployed when, since the model was loaded."""
    torch.set_num_threads(1)
    call, explain = _encoder(what) if name == "encoder" else _session(name, what)
    threads = 1 if what == "idle" else usable_cores()
    counts: list[list[int]] = [[0] * (int(seconds) + 2) for _ in range(threads)]
    begin = time.perf_counter()

    def serve(i: int) -> None:
        n = i
        while (at := time.perf_counter() - begin) < seconds:
            call(n)
            counts[i][int(at)] += 1
            n += 1
            if what == "idle":
                time.sleep(PAUSES * (time.perf_counter() - begin - at))

    workers = [threading.Thread(target=serve, args=(i,)) for i in range(threads)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    found: dict[str, Any] = {"requests": [sum(c) for c in zip(*counts, strict=True)][: int(seconds)]}
    if explain is not None:
        told = explain().to_dict()
        found["plans"] = [
            {"at": d["at"], "tier": d["evidence"].get("tier"), "part": d["evidence"].get("decided")}
            for d in told["decisions"] if d["action"] == "deploy"
        ]  # fmt: skip
        found |= {"background": told["background"], "concurrency": told["concurrency"]}
    return found


def whole_plan(found: dict[str, Any]) -> float | None:
    """Seconds until the whole plan of kernels served; None where it did not come."""
    return next((p["at"] for p in found.get("plans", ()) if p["tier"] == 1 and p["part"] is None), None)


def summary(own: dict[str, Any], idle: dict[str, Any], busy: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """The figures that are aimed at."""
    soon, late = whole_plan(idle), whole_plan(busy)
    rate = _mean(own["requests"][2:])
    until = busy["requests"][: max(1, round(late)) if late is not None else None]  # counted by the second
    last = _mean(busy["requests"][-int(LAST_S):])
    return {
        "own_per_s": round(rate, 1), "peer_per_s": round(_mean(peer["requests"][2:]), 1), "last_per_s": round(last, 1),
        "plan_s": late, "plan_idle_s": soon, "slower": None if soon is None or late is None else round(late / soon, 2),
        "lost": round(1 - _mean(until) / rate, 3), "over_peer": round(last / _mean(peer["requests"][2:]), 3),
        "background": busy["background"], "concurrency": busy["concurrency"], "requests": busy["requests"],
    }  # fmt: skip


def _mean(counts: list[int]) -> float:
    return sum(counts) / max(1, len(counts))


def _child(name: str, what: str, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.saturated", "--child", what, "--models", name, "--seconds", str(seconds)]
        env = {**os.environ, "HOTFUSE_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{name} {what}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="ppocr-v4-rec,encoder")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--idle-seconds", type=float, default=40.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(args.models, args.child, args.seconds)), flush=True)
        os._exit(0)
    as_installed()
    results: dict[str, Any] = {}
    for name in args.models.split(","):
        own, peer = (_child(name, what, REFERENCE_S) for what in ("own", "peer"))
        idle, busy = _child(name, "idle", args.idle_seconds), _child(name, "saturated", args.seconds)
        r = results[name] = summary(own, idle, busy, peer)
        plan, slower = f"{r['plan_s']} s" if r["plan_s"] else "none", f"{r['slower']}x" if r["slower"] else "-"
        print(f"{name:14} plan after {plan} (idle {r['plan_idle_s']} s: {slower}); {r['lost']:.0%} of requests lost until then; "
              f"{r['last_per_s']} requests/s at the end, own code {r['own_per_s']}, peer {r['peer_per_s']}: {r['over_peer']}x; "
              f"workers {r['background']['worker_cpu_s']} CPU s")  # fmt: skip
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
