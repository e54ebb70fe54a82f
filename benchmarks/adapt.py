"""Throughput over time, from the first call on: BERT-base under traffic whose lengths change half-way.

    python -m benchmarks.adapt [--seconds 55] [--shift 40] [--threads 1] [--plot FILE] [--json]
    python -m benchmarks.adapt --only eager,hotfuse     # measure these pieces, keep them, and stop

Lengths are drawn from a log-normal around 24 tokens, from `--shift` seconds on around 80, at most 128. Every contender serves the
same seeded traffic in a process of its own, with empty caches, one call after another:

- eager: the module;  hotfuse: `hotfuse.jit(model)`;  ort: ONNX Runtime on the exported model with dynamic lengths;
- inductor, inductor-dynamic: `torch.compile(model, dynamic=None)` and `dynamic=True`.

Speed is the time eager needs for the calls of a second (the median of its own calls of those lengths) over the time they
took: 1.0 is eager, whatever the lengths. Steady is the median speed of the last third before the shift; a contender has got there
in the first second within 5% of that if the five seconds from it on are so, too. Further pieces, each in its own process:

- watching: a served model with sampling on and off, in turns (`benchmarks.watching`: BERT-base and magika);
- dispatch: what a call of a model with 10 inputs costs beyond its plan (`benchmarks.dispatch`);
- p99-1, p99-2: calls on library kernels while workers compile for another model, against the same with idle workers, on 1
  and on 2 threads.

Each piece is kept in a file (`--into`), so that a run that was broken off goes on where it was; one that was measured with other
sources, versions or options is measured again. With `--json` the last line of output is one JSON object of plain numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.adapt_report import Curve, Row, plot, row, table
from benchmarks.adapt_traffic import CONTENDERS, serve, while_compiling

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "benchmarks" / "results" / "adapt"
FURTHER = ("watching", "dispatch", "p99-1", "p99-2")
OURS = ("hotfuse", *FURTHER)
"""Pieces that depend on this package."""


@dataclass(frozen=True, slots=True)
class Options:
    """What all contenders share."""

    seconds: float
    shift: float
    threads: int


def measure(piece: str, o: Options) -> dict[str, Any]:
    """One piece, in processes of its own."""
    if piece == "watching":
        return _last_line("watching", "--json", "--models", "bert-base,magika", "--threads", str(o.threads))
    if piece == "dispatch":
        return _last_line("dispatch", "--json", "--models", "10 inputs")
    return _last_line(
        "adapt", "--child", piece, "--threads", str(o.threads), "--seconds", str(o.seconds), "--shift", str(o.shift)
    )


def _last_line(benchmark: str, *args: str) -> dict[str, Any]:
    """The last line of another process, which is JSON. Its caches are its own and empty: nobody starts from an earlier run."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "HOTFUSE_CACHE_DIR": f"{folder}/hotfuse"}
        command = [sys.executable, "-m", f"benchmarks.{benchmark}", *args]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **caches}, cwd=ROOT)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def child(piece: str, o: Options) -> dict[str, Any]:
    """In a piece's own process."""
    if piece.startswith("p99-"):
        return while_compiling(int(piece.removeprefix("p99-")))
    return serve(piece, o.seconds, o.shift, o.threads)


# --- pieces on disk ------------------------------------------------------------------------------


def measured_with(piece: str, o: Options) -> str:
    """A digest of what a piece's numbers depend on."""
    digest = hashlib.sha256(repr((piece, o, sys.version, os.cpu_count())).encode())
    for library in ("torch", "onnxruntime", "transformers"):
        digest.update(importlib.metadata.version(library).encode())
    sources = [ROOT / "benchmarks" / "adapt_traffic.py"]
    if piece in OURS:
        sources += sorted((ROOT / "src" / "hotfuse").rglob("*.py"))
        sources += [ROOT / "benchmarks" / f"{name}.py" for name in ("watching", "dispatch")]
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kept(piece: str, o: Options, folder: Path) -> dict[str, Any] | None:
    """What an earlier run measured, if it holds for this one."""
    path = folder / f"{piece}.json"
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    return stored["found"] if stored["with"] == measured_with(piece, o) else None


def keep(piece: str, o: Options, folder: Path, found: Mapping[str, Any]) -> None:
    """Write a piece down."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"piece": piece, "with": measured_with(piece, o), "found": found})
    beside = folder / f"{piece}.json.new"
    beside.write_text(text)
    beside.replace(folder / f"{piece}.json")


# --- putting it together -------------------------------------------------------------------------


def ratio(a: float | None, b: float | None) -> float:
    """a / b, or nan where there is no such thing."""
    return a / b if a is not None and b else math.nan


def p99(found: Mapping[str, Any]) -> tuple[float, float]:
    """(p99 while compiling over p99 when idle, the same of the idle calls before over those after: what is noise)."""
    if "failed" in found:
        return math.nan, math.nan
    before, during, after = (np.quantile(found[k], 0.99) for k in ("before", "compiling", "after"))
    return float(during / np.quantile([*found["before"], *found["after"]], 0.99)), float(before / after)


def combined(rows: Mapping[str, Row], further: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The plain numbers."""
    ours, eager = rows["hotfuse"], rows["eager"]
    compiled = [rows[n].time_to_steady_s for n in CONTENDERS if n.startswith("inductor") and n in rows]
    quantiles = {n: p99(further[n]) for n in ("p99-1", "p99-2")}
    return {
        "calls_first_30s_vs_eager": ratio(ours.calls_first_30s, eager.calls_first_30s),
        "time_to_steady_s": ours.time_to_steady_s,
        "time_to_steady_vs_inductor": ratio(ours.time_to_steady_s, min(compiled, default=None)),
        "worst_call_vs_eager_median": ours.worst_call,
        "worst_call_of_eager": eager.worst_call,
        "recovery_s": ours.recovery_s,
        "min_throughput_vs_eager_after_shift": ours.lowest_after,
        "min_throughput_of_eager_after_shift": eager.lowest_after,
        "watching_overhead": further["watching"].get("watching_overhead", math.nan),
        "watching_noise": further["watching"].get("watching_noise", math.nan),
        "dispatch_us": further["dispatch"].get("dispatch_us", math.nan),
        "p99_compiling_vs_idle": max(q[0] for q in quantiles.values()),
        "p99_compiling_vs_idle_1_thread": quantiles["p99-1"][0],
        "p99_compiling_vs_idle_2_threads": quantiles["p99-2"][0],
        "p99_idle_before_vs_after": quantiles["p99-1"][1],
    }


def main() -> None:
    """Measure what is missing, then say what all of it shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--shift", type=float, default=40.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="measure these pieces and stop")
    parser.add_argument("--again", action="store_true", help="measure anew what is kept from an earlier run")
    parser.add_argument("--into", type=Path, default=STORED)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    o = Options(args.seconds, args.shift, args.threads)
    if args.child:
        print(json.dumps(child(args.child, o)))
        return
    pieces = args.only.split(",") if args.only else [*CONTENDERS, *FURTHER]
    if unknown := set(pieces) - {*CONTENDERS, *FURTHER}:
        parser.error(f"no piece {sorted(unknown)[0]!r}: one of {', '.join((*CONTENDERS, *FURTHER))}")
    found: dict[str, dict[str, Any]] = {}
    for piece in pieces:
        before = None if args.again else kept(piece, o, args.into)
        found[piece] = before or measure(piece, o)
        if "failed" in found[piece]:
            print(f"{piece}: {found[piece]['failed']}", flush=True)
        elif before is None:
            keep(piece, o, args.into, found[piece])
            print(f"{piece}: measured", flush=True)
    if args.only:
        return
    report(found, o, args.plot, args.json)


def report(found: Mapping[str, Mapping[str, Any]], o: Options, picture: Path | None, as_json: bool) -> None:
    """Table, plot and numbers."""
    if "failed" in found["eager"] or "failed" in found["hotfuse"]:
        raise SystemExit("without eager and hotfuse there is nothing to compare")
    curve = Curve(found["eager"]["calls"])
    judged = {n: row(found[n]["calls"], curve, o.seconds, o.shift) for n in CONTENDERS if "failed" not in found[n]}
    rows = {n: r for n, (r, _) in judged.items()}
    print(
        f"BERT-base, {o.threads} threads, torch {torch.__version__}, lengths change after {o.shift:g} s; eager's speed is 1"
    )
    print(*table(rows), sep="\n")
    if picture is not None:
        plot(picture, {n: s for n, (_, s) in judged.items()}, o.shift)
    result = combined(rows, {n: found[n] for n in FURTHER})
    for name, value in result.items():
        print(f"{name}: {value:.4g}")
    if as_json:
        print(json.dumps({k: round(v, 5) for k, v in result.items()}))


if __name__ == "__main__":
    main()
