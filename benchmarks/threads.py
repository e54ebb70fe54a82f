"""Whole models by number of threads: Hotfuse over the best of eager and ONNX Runtime, and how well each scales.

    python -m benchmarks.threads [--threads 1 2 4 8 16] [--models bert-b1 ...] [--seconds S] [--rounds N] [--every S] [--json]

BERT-base (batches of 1 and 8, 128 tokens), ResNet-50 and ViT-base with random weights, and the text detector and recognizer of the
zoo where their files can be had. Every model and number of threads has a process of its own; contenders take turns round by
round after a rest. Hotfuse serves calls with pauses until its best tier serves, or its part of `--seconds` is over. With `--every`
it serves them back to back for all of that, and a line on stderr says every so many seconds what calls took.

The table has, per model and number of threads: milliseconds of each (medians over rounds), the ratio (median over rounds of the
best peer's time over ours, so over 1 means that Hotfuse is faster), and parallel efficiency: the time on one thread over threads
times the time on these. A contender that is not installed or cannot load a model is left out, and the line says why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import hotfuse
from benchmarks.peers import PEERS, Absent, first_line
from benchmarks.timing import rest
from benchmarks.zoo import ZooModel, load

OURS = "hotfuse"
DEFAULT = ("bert-b1", "bert-b8", "resnet50", "vit")
FROM_ZOO = ("ppocr-v4-det", "ppocr-v4-rec")
Row = dict[str, Any]


def _bert(batch: int) -> ZooModel:
    from transformers import BertConfig, BertModel

    module = BertModel(BertConfig()).eval()
    ids = torch.randint(0, 30000, (batch, 128))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return ZooModel(f"bert-b{batch}", "torch", 1, lambda *_: dict(inputs), module=module)


def _image(name: str, module: torch.nn.Module) -> ZooModel:
    return ZooModel(name, "torch", 1, lambda *_: {"pixel_values": torch.randn(1, 3, 224, 224)}, module=module.eval())


def _resnet() -> ZooModel:
    from transformers import ResNetConfig, ResNetModel

    return _image("resnet50", ResNetModel(ResNetConfig()))


def _vit() -> ZooModel:
    from transformers import ViTConfig, ViTModel

    return _image("vit", ViTModel(ViTConfig()))


MODELS: Mapping[str, Callable[[], ZooModel]] = {
    "bert-b1": lambda: _bert(1), "bert-b8": lambda: _bert(8), "resnet50": _resnet, "vit": _vit,
    **{name: (lambda name=name: load(name)) for name in FROM_ZOO},
}  # fmt: skip


def _back_to_back(call: Callable[[], Any], served: Any, until: float, every: float) -> None:
    """Call without a pause, and tell what calls took meanwhile."""
    begin = time.monotonic()
    told, took = begin, list[float]()
    while (now := time.monotonic()) < until:
        call()
        took.append((time.monotonic() - now) * 1e3)
        if now - told > every:
            line = f"{now - begin:5.1f} s: median {statistics.median(took):.1f}, most {max(took):.1f} ms"
            print(f"  {line} {served.stats()['calls_per_tier']}", file=sys.stderr, flush=True)
            told, took = now, []
    served.wait(10.0)


def _ours(model: ZooModel, inputs: Mapping[str, Any], until: float, every: float) -> tuple[Callable[[], Any], Any]:
    """A served model, after its best tier came or time is up."""
    if model.module is not None:
        served: Any = hotfuse.jit(model.module)
        call: Callable[[], Any] = lambda: served(**inputs)  # noqa: E731
    else:
        served = hotfuse.InferenceSession(str(model.path))
        call = lambda: served.run(None, dict(inputs))  # noqa: E731
    if every:
        _back_to_back(call, served, until, every)
    while time.monotonic() < until:
        for _ in range(5):
            call()
        time.sleep(0.1)
        tiers = served.stats()["calls_per_tier"]
        if tiers.get("1", 0) + tiers.get("2", 0) > 40 and served.wait(1.0):
            break
    return call, served


def measured(name: str, threads: int, seconds: float, rounds: int, every: float) -> Row:
    """One cell, in this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = MODELS[name]()
    inputs = model.inputs(0, model.timed)
    with torch.inference_mode():
        ours, served = _ours(model, inputs, time.monotonic() + seconds, every)
        calls, absent = {OURS: ours}, dict[str, str]()
        for peer in ("eager", "ort"):
            try:
                calls[peer] = PEERS[peer](model, inputs, threads)
            except (Absent, ImportError) as e:
                absent[peer] = first_line(e)
        times: dict[str, list[float]] = {n: [] for n in calls}
        for _ in range(rounds):
            for n, call in calls.items():
                rest()
                call()
                begin = time.perf_counter()
                call()
                times[n].append((time.perf_counter() - begin) * 1e3)
        tiers = served.stats()["calls_per_tier"]
        served.close() if hasattr(served, "close") else None
    return {"model": name, "threads": threads, "ms": times, "absent": absent, "tiers": tiers}


def summary(row: Row) -> Row:
    """Medians and the ratio of one cell."""
    times: Mapping[str, Sequence[float]] = row["ms"]
    peers = [n for n in times if n != OURS]
    ratios = [min(times[p][i] for p in peers) / t for i, t in enumerate(times[OURS])] if peers else []
    medians = {n: statistics.median(t) for n, t in times.items()}
    return {**row, "ms": medians, "ratio": statistics.median(ratios) if ratios else math.nan}


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """Cells with the time on one thread over threads times their own; nothing where one thread was not measured."""
    alone = {r["model"]: r["ms"] for r in rows if r["threads"] == 1}
    found: list[Row] = []
    for r in rows:
        one = alone.get(r["model"], {})
        scaled = {n: one[n] / (r["threads"] * ms) for n, ms in r["ms"].items() if n in one}
        found.append({**r, "efficiency": scaled})
    return found


def table(rows: Sequence[Row]) -> str:
    """For a reader."""
    lines = [f"{'model':14}{'threads':>8}  {'ours':>9}{'eager':>9}{'ort':>9}   {'ratio':>6}  efficiency: ours, eager, ort   tiers"]
    for r in rows:
        ms = "".join(f"{r['ms'][n]:9.2f}" if n in r["ms"] else f"{'-':>9}" for n in (OURS, "eager", "ort"))
        scaled = ", ".join(f"{r['efficiency'][n]:.2f}" if n in r["efficiency"] else "-" for n in (OURS, "eager", "ort"))
        absent = "".join(f"; {n}: {why}" for n, why in r["absent"].items())
        lines.append(f"{r['model']:14}{r['threads']:8}  {ms}   {r['ratio']:5.2f}x  {scaled}   {r['tiers']}{absent}")
    ratios = [r["ratio"] for r in rows if r["ratio"] == r["ratio"]]
    if ratios:
        lines.append(f"geomean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}x, worst {min(ratios):.2f}x")
    return "\n".join(lines)


def main() -> None:
    """Cells one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=[n for n in (1, 2, 4, 8, 16) if n <= cores])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(DEFAULT))
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything; each cell has its part")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--every", type=float, default=0.0, help="serve back to back, and tell what calls took so often")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.cell:
        print(json.dumps(measured(o.cell[0], int(o.cell[1]), o.seconds, o.rounds, o.every)))
        return
    each, rows = o.seconds / (len(o.models) * len(o.threads)), list[Row]()
    for model in o.models:
        for n in o.threads:
            asked = [sys.executable, "-m", "benchmarks.threads", "--cell", model, str(n), "--seconds", str(0.6 * each),
                     "--rounds", str(o.rounds), "--every", str(o.every)]  # fmt: skip
            done = subprocess.run(asked, stdout=subprocess.PIPE, text=True, timeout=each + 300, check=False,
                                  stderr=None if o.every else subprocess.PIPE)  # fmt: skip
            if done.returncode:
                said = (done.stderr or "").strip().splitlines() or ["no answer"]
                print(f"{model}, {n} threads: {said[-1][:200]}", file=sys.stderr)
                continue
            rows.append(summary(json.loads(done.stdout.strip().splitlines()[-1])))
            ms = ", ".join(f"{n} {t:.2f}" for n, t in rows[-1]["ms"].items())
            print(f"{model}, {n} threads: {ms} ms, {rows[-1]['ratio']:.2f}x {rows[-1]['tiers']}", file=sys.stderr, flush=True)
    rows = with_efficiency(rows)
    print(json.dumps(rows) if o.json else table(rows))


if __name__ == "__main__":
    main()
