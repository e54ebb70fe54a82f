"""Whole models in steady state: Hotfuse against eager, Inductor, ONNX Runtime and OpenVINO, side by side.

    python -m benchmarks.models [--threads 1 2] [--models a,b] [--without inductor] [--quick] [--rounds N] [--again] [--json FILE]
    python -m benchmarks.models --table         what there is, without measuring

Every model of the zoo, whole, on the shape it is timed with; fp32 everywhere. Each model and number of threads has a process of
its own, in which all contenders load the same weights, answer the same inputs, and then take turns round by round, each for the
same time after a rest and calls that do not count:

- hotfuse: `hotfuse.jit` or `hotfuse.InferenceSession`, after `wait()` until its best tier serves;
- tier 0: the same without generated kernels, which the plan must not be slower than; it is no contender;
- eager, and inductor (default mode, freezing) in a process of its own that has ten minutes to compile: torch models;
- ort, openvino: ONNX models as they are, torch models exported or converted. OpenVINO computes in f32, not bf16.

A contender that cannot load a model or answers something else is a line that says so, and does not count. The ratio is how many
times faster Hotfuse is than the best of the others, as the median over rounds.

Every row is kept (benchmarks/results/models), and a run that was broken off goes on where it was: rows measured with the same
sources, libraries, machine and options are not measured again, unless with `--again`. A run ends with the table over its models.
`--json` appends to a file, one JSON line a row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hotfuse
from benchmarks import zoo
from benchmarks.arrays import Arrays, difference, flat
from benchmarks.frozen import Frozen
from benchmarks.model_rows import OURS, STORED, TIER0, Row, all_kept, keep, kept, measured_with, summary, table
from benchmarks.peers import PEERS, Absent, Call, first_line
from benchmarks.timing import WARM_S, burst, in_turns, rest
from hotfuse.base.settings import Settings
from hotfuse.machine.fingerprint import fingerprint

RTOL = 1e-4
TURN_S = 0.02
"""Of each contender in each round, however long its call: hundreds of calls of the quickest model, one of the slowest."""
REST_S = 0.01
"""Between two contenders' turns: the thread pool of the one before stops spinning."""
SETTLE_S, CHILD_S = 600.0, 1800.0
INDUCTOR = "inductor"


# --- Hotfuse -------------------------------------------------------------------------------------


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


def measure(name: str, threads: int, peers: Sequence[str], rounds: int, reduced: bool) -> Row:
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
    for who in (*plans, *(p for p in peers if p != INDUCTOR)):
        try:
            if who in plans:
                settings = Settings().with_(threads=threads)
                call, plans[who] = settled(model, inputs, settings if who == OURS else settings.with_(tiers=0))
            else:
                call = PEERS[who](model, inputs, threads)
            call()
            calls[who] = call
        except Exception as e:  # a contender that fails in any way is a line that says so
            row.absent[who] = str(e) if isinstance(e, Absent) else first_line(e)
    row.plan = plans[OURS]
    reference = "ort" if model.kind == "onnx" else "eager"
    if INDUCTOR not in peers or model.kind == "onnx":
        time_agreeing(row, calls, reference, rounds)
        return row
    try:
        frozen = Frozen(name, threads, reduced=reduced)
    except Absent as e:
        row.absent[INDUCTOR] = str(e)
        time_agreeing(row, calls, reference, rounds)
        return row
    try:
        time_agreeing(row, calls, reference, rounds, {INDUCTOR: (frozen.answered, frozen.burst)})
    finally:
        frozen.close()
    return row


def time_agreeing(
    row: Row, calls: dict[str, Call], reference: str, rounds: int,
    apart: Mapping[str, tuple[Arrays, Callable[[float, float], float]]] | None = None,
) -> None:  # fmt: skip
    """Compare outputs with the reference's, then time who agrees, everybody for the same time.

    Those `apart` are given by what they answered, and how to time a burst of theirs (`timing.burst`, where they are).
    """
    if reference not in calls:
        reference = next((n for n in calls if n not in (OURS, TIER0)), OURS)
    want = flat(calls[reference]()) if calls else []
    agree = dict(calls)
    timed_apart = {n: pair[1] for n, pair in (apart or {}).items()}
    answers = {n: (lambda call=call: flat(call())) for n, call in calls.items()}
    answers |= {n: (lambda pair=pair: pair[0]) for n, pair in (apart or {}).items()}
    for name, answer in answers.items():
        row.errors[name] = difference(answer(), want)
        if not row.errors[name] <= RTOL:
            row.absent[name] = f"answers differ from {reference}'s by {row.errors[name]:.1e}"
            agree.pop(name, None)
            timed_apart.pop(name, None)
    if OURS not in agree:
        return
    bursts = {n: partial(burst, call) for n, call in agree.items()} | timed_apart
    timings, row.ratios = in_turns({n: partial(_turn, timed) for n, timed in bursts.items()}, rounds, row.spreads)
    row.timings = {n: t.to_dict() for n, t in timings.items()}


def _turn(timed: Callable[[float, float], float]) -> float:
    rest(REST_S)
    return timed(WARM_S, TURN_S)


# --- all of them ---------------------------------------------------------------------------------


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
    """Measure what has not been measured, keep it, and print the table."""
    options = _options()
    names: list[str] = options.models.split(",")
    rounds = 5 if options.quick else options.rounds
    left_out: list[str] = options.without
    if options.child:
        peers = [p for p in (*PEERS, INDUCTOR) if p not in left_out]
        with torch.inference_mode():
            row = measure(names[0], options.threads[0], peers, rounds, options.quick)
        print(json.dumps(asdict(row)))
        return 0
    folder = options.results / "quick" if options.quick else options.results
    if options.table:
        _end(all_kept(folder, names, options.threads))
        return 0
    machine = fingerprint().to_dict()
    key = measured_with(machine, rounds=rounds, without=sorted(left_out))
    passed = [*(["--without", *left_out] if left_out else []), *(["--quick"] if options.quick else [])]
    rows: list[Row] = []
    for threads in options.threads:
        for name in names:
            row = None if options.again else kept(folder, name, threads, key)
            if row is None:
                row = in_a_process(name, threads, [*passed, "--rounds", str(rounds)])
                keep(folder, row, key)
                if options.json:
                    _append(options.json, row, machine, quick=options.quick)
            rows.append(row)
            print("\n".join(row.lines()), flush=True)
    _end(rows)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", default=",".join(zoo.names()), help="comma-separated names; all by default")
    parser.add_argument("--without", nargs="+", default=[], choices=[*PEERS, INDUCTOR], help="contenders to leave out")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="fewer layers and 5 rounds: does it work at all")
    parser.add_argument("--results", metavar="DIR", type=Path, default=STORED, help="where rows are kept")
    parser.add_argument("--again", action="store_true", help="measure what has been measured already, too")
    parser.add_argument("--table", action="store_true", help="print what has been measured, whenever it was")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := sorted(set(options.models.split(",")) - set(zoo.names())):
        parser.error(f"no model {unknown[0]!r}; one of {', '.join(zoo.names())}")
    return options


def _append(path: Path, row: Row, machine: dict[str, Any], *, quick: bool) -> None:
    best = {"best": row.best[0], "ratio": round(row.best[1], 4)} if row.best else {}
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps({"benchmark": "models", **asdict(row), **best, "quick": quick, "machine": machine}), file=file)


def _end(rows: Sequence[Row]) -> None:
    """The table, and what it comes to."""
    print("\n".join(["", *table(rows), "", *summary(rows)]))


if __name__ == "__main__":
    sys.exit(main())
