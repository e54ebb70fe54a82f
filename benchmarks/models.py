"""Whole models in steady state: Hotfuse against eager, Inductor, ONNX Runtime and OpenVINO, side by side.

    python -m benchmarks.models [--threads 1 2] [--models a,b] [--inductor] [--quick] [--rounds N] [--json FILE]

Every model of the zoo, whole, on the shape it is timed with; fp32 everywhere. Each model and number of threads has a process of
its own, in which all contenders load the same weights, answer the same inputs, and then take turns round by round:

- hotfuse: `hotfuse.jit` or `hotfuse.InferenceSession`, after `wait()` until its best tier serves;
- tier 0: the same without generated kernels, which the plan must not be slower than; it is no contender;
- eager, inductor (default mode, freezing; only with `--inductor`: it needs a C++ compiler and minutes): torch models;
- ort, openvino: ONNX models as they are, torch models exported or converted. OpenVINO computes in f32, not bf16.

A contender that cannot load a model or answers something else is a line that says so, and does not count. The ratio is how many
times faster Hotfuse is than the best of the others, as the median over rounds. `--json` appends to a file, one JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import hotfuse
from benchmarks import zoo
from benchmarks.gemm import geomean
from benchmarks.peers import PEERS, Absent, Call, first_line
from benchmarks.timing import interleave
from hotfuse.base.settings import Settings, from_env
from hotfuse.machine.fingerprint import fingerprint

RTOL = 1e-4
BURST_MS = 4.0
"""Shorter calls are timed several at once."""
REST_S = 0.01
"""Between two contenders' turns: the thread pool of the one before stops spinning."""
SETTLE_S, CHILD_S = 600.0, 1800.0
OURS, TIER0 = "hotfuse", "tier 0"


@dataclass(slots=True)
class Row:
    """One model on one number of threads."""

    model: str
    threads: int
    shapes: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    timings: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    ratios: dict[str, float] = field(default_factory=dict[str, float])
    """Per contender: its time divided by Hotfuse's in the same round."""
    errors: dict[str, float] = field(default_factory=dict[str, float])
    """Per contender: the largest relative difference from the reference's outputs."""
    absent: dict[str, str] = field(default_factory=dict[str, str])
    plan: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest of the others, and how many times faster Hotfuse is."""
        others = {n: r for n, r in self.ratios.items() if n not in (OURS, TIER0)}
        return min(others.items(), key=lambda pair: pair[1]) if others and OURS in self.ratios else None

    def lines(self) -> list[str]:
        """The row as people read it."""
        best = self.best
        verdict = f"{best[1]:.2f}x the best ({best[0]})" if best else "nothing to compare with"
        shapes = ", ".join(f"{n} {'x'.join(map(str, s)) or 'scalar'}" for n, s in self.shapes.items())
        out = [f"{self.model}, {self.threads} threads, {shapes}: {verdict}; {told(self.plan)}"]
        for name, t in self.timings.items():
            spread = f"{t['median_ms']:10.4f} ms ({t['p10_ms']:.4f} - {t['p90_ms']:.4f})"
            out.append(f"    {name:<9}{spread}  {self.ratios[name]:5.2f}x  error {self.errors[name]:.0e}")
        return out + [f"    {name:<9}absent: {why}" for name, why in self.absent.items()]


def told(plan: Mapping[str, Any]) -> str:
    """What Hotfuse served with, in words."""
    if not plan:
        return "no plan"
    why = "" if plan["tier"] else f" ({plan['refused'] or 'not tried'})"
    return (
        f"tier {plan['tier']}{why}, {plan['native']} native, {plan['library']} library, {plan['branches']} branching parts, "
        f"{plan['library_nodes']} of {plan['nodes']} nodes with the library"
    )


# --- Hotfuse -------------------------------------------------------------------------------------


def flat(result: Any) -> list[np.ndarray[Any, Any]]:
    """Outputs of whatever structure as arrays."""
    leaves = result if isinstance(result, list) else pytree.tree_flatten(result)[0]
    return [v.detach().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for v in leaves]


def difference(got: list[np.ndarray[Any, Any]], want: list[np.ndarray[Any, Any]]) -> float:
    """The largest error relative to the largest magnitude of each output; infinite where shapes differ."""
    if [g.shape for g in got] != [w.shape for w in want]:
        return math.inf
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if w.size:
            error = float(np.abs(g.astype(np.float64) - w).max())
            worst = max(worst, error / (float(np.abs(w).max()) or 1.0) if error == error else math.inf)
    return worst


def settled(model: zoo.ZooModel, inputs: dict[str, Any], settings: Settings) -> tuple[Call, dict[str, Any]]:
    """Hotfuse, called until its best tier serves, and what that is."""
    if model.path is not None:
        fast: Any = hotfuse.InferenceSession(model.path, settings=settings)
        call: Call = lambda: fast.run(None, inputs)  # noqa: E731
    else:
        assert model.module is not None
        fast = hotfuse.jit(model.module, settings=settings)
        call = lambda: fast(**inputs)  # noqa: E731
    for _ in range(3):
        for _ in range(settings.hot_calls + 1):
            call()
        if not fast.wait(SETTLE_S):
            raise Absent(f"still compiling after {SETTLE_S:g} s")
    return call, served(fast.explain().to_dict())


def served(found: dict[str, Any]) -> dict[str, Any]:
    """From an explanation: the tier that serves, and what stayed with the library."""
    plans = [p for site in found["sites"] for p in site["plans"]]
    refusals = [d for d in found["decisions"] if d["action"] == "refuse"]
    refused = f"{refusals[-1]['why']}: {refusals[-1]['evidence']}"[:300] if refusals else ""
    if not plans:
        raise Absent(f"no captured graph: {refused or 'no reason given'}")
    plan = max(plans, key=lambda p: p["calls"])
    kinds = Counter(p["backend"] for p in plan["partitions"])
    return {
        "tier": plan["tier"], "native": kinds["llvm"], "library": kinds["library"], "branches": kinds["branches"],
        "nodes": plan["nodes"], "refused": refused, "notes": plan["notes"],
        "library_nodes": sum(p["nodes"] for p in plan["partitions"] if p["backend"] == "library"),
    }  # fmt: skip


# --- one model -----------------------------------------------------------------------------------


def measure(name: str, threads: int, peers: list[str], rounds: int, reduced: bool) -> Row:
    """Load every contender, compare what they answer, and time those that agree."""
    torch.set_num_threads(threads)
    row = Row(name, threads)
    try:
        model = zoo.load(name, reduced=reduced)
    except zoo.ZooUnavailable as e:
        row.absent[OURS] = str(e).splitlines()[0]
        return row
    inputs = model.inputs(seed=0, variant=model.timed)
    row.shapes = {n: list(v.shape) for n, v in inputs.items()}
    calls: dict[str, Call] = {}
    plans: dict[str, dict[str, Any]] = {OURS: {}, TIER0: {}}
    for name in (*plans, *peers):
        try:
            if name in plans:
                settings = from_env().with_(threads=threads)
                call, plans[name] = settled(model, inputs, settings if name == OURS else settings.with_(tiers=0))
            else:
                call = PEERS[name](model, inputs, threads)
            call()
            calls[name] = call
        except Exception as e:  # a contender that fails in any way is a line that says so
            row.absent[name] = str(e) if isinstance(e, Absent) else first_line(e)
    row.plan = plans[OURS]
    time_agreeing(row, calls, "ort" if model.kind == "onnx" else "eager", rounds)
    return row


def time_agreeing(row: Row, calls: dict[str, Call], reference: str, rounds: int) -> None:
    """Compare outputs with the reference's, then time who agrees; Hotfuse sets the pace."""
    if reference not in calls:
        reference = next((n for n in calls if n not in (OURS, TIER0)), OURS)
    want = flat(calls[reference]()) if calls else []
    for name, call in list(calls.items()):
        row.errors[name] = difference(flat(call()), want)
        if not row.errors[name] <= RTOL:
            row.absent[name] = f"answers differ from {reference}'s by {row.errors[name]:.1e}"
            del calls[name]
    if OURS not in calls:
        return
    start = time.perf_counter()
    calls[OURS]()
    inner = max(1, math.ceil(BURST_MS / 1e3 / (time.perf_counter() - start)))
    timings, row.ratios = interleave(calls, rounds=rounds, inner=inner, warm_up=1, rest_s=REST_S)
    row.timings = {n: t.to_dict() for n, t in timings.items()}


# --- all of them ---------------------------------------------------------------------------------


def summary(rows: list[Row]) -> list[str]:
    """One line per number of threads, over the models that have a ratio."""
    out: list[str] = []
    for threads in dict.fromkeys(r.threads for r in rows):
        found = {r.model: r.best[1] for r in rows if r.threads == threads and r.best}
        if found:
            worst = min(found, key=lambda n: found[n])
            counted = f"{len(found)} of {sum(r.threads == threads for r in rows)} models"
            out.append(
                f"{threads} threads: geomean {geomean(list(found.values())):.3f}x the best over {counted}, "
                f"worst {found[worst]:.2f}x ({worst})"
            )
    return out


def in_a_process(name: str, threads: int, arguments: list[str]) -> Row:
    """Measure one model in a fresh process: what crashes there is a row."""
    command = [sys.executable, "-m", "benchmarks.models", "--child", "--models", name, "--threads", str(threads)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, env=env, timeout=CHILD_S)
    except subprocess.TimeoutExpired:
        return Row(name, threads, absent={OURS: f"not done after {CHILD_S:g} s"})
    if done.returncode:
        return Row(name, threads, absent={OURS: f"the process ended with status {done.returncode}"})
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Measure and print; with --json, also append the rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", default=",".join(zoo.names()), help="comma-separated names; all by default")
    parser.add_argument("--inductor", action="store_true", help="compile with Inductor too")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="fewer layers and 5 rounds: does it work at all")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names: list[str] = options.models.split(",")
    rounds = 5 if options.quick else options.rounds
    if unknown := sorted(set(names) - set(zoo.names())):
        parser.error(f"no model {unknown[0]!r}; one of {', '.join(zoo.names())}")
    if options.child:
        peers = [p for p in PEERS if p != "inductor" or options.inductor]
        with torch.inference_mode():
            row = measure(names[0], options.threads[0], peers, rounds, options.quick)
        print(json.dumps(asdict(row)))
        return 0
    machine = fingerprint().to_dict()
    passed = [*(["--inductor"] if options.inductor else []), *(["--quick"] if options.quick else [])]
    rows: list[Row] = []
    for name in names:
        for threads in options.threads:
            row = in_a_process(name, threads, [*passed, "--rounds", str(rounds)])
            rows.append(row)
            print("\n".join(row.lines()), flush=True)
            if options.json:
                best = {"best": row.best[0], "ratio": round(row.best[1], 4)} if row.best else {}
                line = {"benchmark": "models", **asdict(row), **best, "quick": options.quick, "machine": machine}
                with options.json.open("a", encoding="utf-8") as file:
                    print(json.dumps(line), file=file)
    print("\n".join(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
