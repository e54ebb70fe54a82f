"""LSTM and GRU sequences: generated kernels against torch's own and ONNX Runtime's, over hidden sizes, steps and batches.

    python -m benchmarks.recurrent [--threads 1 2] [--rounds N] [--cells lstm gru] [--quick] [--seconds S] [--cpu] [--json]

Contenders take turns in short bursts: the torch module, ONNX Runtime (results bound to memory once, its fastest way), and our
plan, called with tensors and giving new ones. All get input and initial states and give all outputs. With several threads each
turn begins with a rest until the threads of whoever came before have stopped spinning (`timing.rest`), and a call that is not
counted. Ratios above 1 mean that ours is faster; `low` compares the best tenth of the bursts, which other load disturbs least,
`least` the shortest ones. `gflops` is what ours reaches. Cells are kept (`benchmarks.cells`): with `--seconds` the grid is measured
in slices.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from benchmarks.cells import add_options, cells
from benchmarks.gemm import BURST, geomean, low
from benchmarks.served import Served, served
from benchmarks.timing import rest
from hotfuse.ir.text import parse
from hotfuse.native.target import host

HIDDEN, STEPS, BATCHES = (64, 128, 256, 512), (1, 16, 100), (1, 8)
_MODULES: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}
_ORDER = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}
"""Where ONNX's gates are among torch's."""


@dataclass(frozen=True, slots=True)
class Job:
    """One size of one cell; inputs are as wide as the hidden state."""

    cell: str
    hidden: int
    steps: int
    batch: int


def ours(job: Job, weights: dict[str, torch.Tensor], inputs: list[torch.Tensor]) -> Served:
    """A plan for these sizes."""
    state = f"f32[1, {job.batch}, {job.hidden}]"
    sequence = f"f32[{job.steps}, {job.batch}, {job.hidden}]"
    states = ["h", "c"][: 2 if job.cell == "lstm" else 1]
    params = "\n".join(f'param %{n}: f32{list(w.shape)} = "{n}"' for n, w in weights.items())
    given = ", ".join(f"%{s}" for s in states)
    graph = parse(f"""graph recurrent(%x: {sequence}, {", ".join(f"%{s}: {state}" for s in states)}) {{
      {params}
      %y: {sequence}, {", ".join(f"%{s}n: {state}" for s in states)} = aten.{job.cell}.input(%x,
        {f"[{given}]" if job.cell == "lstm" else given}, [{", ".join(f"%{n}" for n in weights)}], True, 1, 0.0, False, False, False)
      return %y, {", ".join(f"%{s}n" for s in states)}
    }}""")
    return served(graph, weights, inputs)


def runtime(job: Job, weights: dict[str, torch.Tensor], inputs: list[torch.Tensor], threads: int) -> Callable[[], Any]:
    """ONNX Runtime's operator with everything bound once."""

    def ordered(w: torch.Tensor) -> torch.Tensor:
        parts = w.chunk(len(_ORDER[job.cell]))
        return torch.cat([parts[i] for i in _ORDER[job.cell]])

    wi, wh, bi, bh = (ordered(w) for w in weights.values())
    constants = {"w": wi[None], "r": wh[None], "b": torch.cat([bi, bh])[None]}
    names = ["x", "h", "c"][: len(inputs)]
    outs = ["y", "hn", "cn"][: len(inputs)]
    attrs: dict[str, Any] = {"hidden_size": job.hidden, **({"linear_before_reset": 1} if job.cell == "gru" else {})}
    node = helper.make_node(job.cell.upper(), ["x", "w", "r", "b", "", *names[1:]], outs, **attrs)
    shapes = [[job.steps, 1, job.batch, job.hidden], *[[1, job.batch, job.hidden]] * (len(outs) - 1)]
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, list(t.shape))
            for n, t in zip(names, inputs, strict=True)
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(outs, shapes, strict=True)],
        [numpy_helper.from_array(t.numpy(), n) for n, t in constants.items()],
    )
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    results = [np.empty(s, np.float32) for s in shapes]
    for n, t in zip(names, inputs, strict=True):
        binding.bind_cpu_input(n, t.numpy())
    for n, a in zip(outs, results, strict=True):
        binding.bind_output(n, "cpu", 0, np.float32, a.shape, a.ctypes.data)

    def call() -> list[np.ndarray[Any, Any]]:
        session.run_with_iobinding(binding)
        return results

    return call


def contenders(job: Job, threads: int) -> tuple[dict[str, Callable[[], Any]], Served]:
    """Everyone on the same data, checked against torch in double precision."""
    torch.manual_seed(0)
    module = _MODULES[job.cell](job.hidden, job.hidden).eval()
    weights = {n: w.detach() for n, w in module.named_parameters()}
    x = torch.randn(job.steps, job.batch, job.hidden)
    states = [torch.randn(1, job.batch, job.hidden) for _ in range(2 if job.cell == "lstm" else 1)]
    plan = ours(job, weights, [x, *states])
    run = plan.run
    hx: Any = tuple(states) if job.cell == "lstm" else states[0]
    calls: dict[str, Callable[[], Any]] = {
        "eager": lambda: module(x, hx),
        "onnxruntime": runtime(job, weights, [x, *states], threads),
        "ours": lambda: run(x, *states),
    }
    exact_module = _MODULES[job.cell](job.hidden, job.hidden).double().eval()
    exact_module.load_state_dict({n: w.double() for n, w in weights.items()})
    exact_hx: Any = tuple(s.double() for s in states) if job.cell == "lstm" else states[0].double()
    exact = exact_module(x.double(), exact_hx)[0]
    for name, call in calls.items():
        worst = (torch.as_tensor(call()[0]).reshape(exact.shape).double() - exact).abs().max().item()
        if not worst < 1e-4:
            raise SystemExit(f"{name} is wrong by {worst} for {job}")
    return calls, plan


def turns(
    calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float], several: bool
) -> dict[str, list[float]]:
    """Seconds per call, burst by burst."""
    inner: dict[str, int] = {}
    for name, call in calls.items():
        if several:
            rest()
        call()
        start = clock()
        call()
        inner[name] = max(1, int(BURST / max(clock() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in list(calls) if i % 2 == 0 else list(calls)[::-1]:
            call, count = calls[name], inner[name]
            if several:
                rest()
                call()
            start = clock()
            for _ in range(count):
                call()
            times[name].append((clock() - start) / count)
    return times


def measured(job: Job, threads: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """One cell of the grid."""
    torch.set_num_threads(threads)
    calls, plan = contenders(job, threads)
    times = turns(calls, rounds, clock, threads > 1)
    picks: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "low": low, "least": min}
    micro = {label: {n: round(pick(t) * 1e6, 2) for n, t in times.items()} for label, pick in picks.items()}
    ratios = {
        label: {n: float(f"{us / found['ours']:.3g}") for n, us in found.items() if n != "ours"}
        for label, found in micro.items()
    }
    flops = 4 * job.hidden**2 * len(_ORDER[job.cell]) * job.steps * job.batch
    gflops = round(flops / micro["median"]["ours"] / 1e3, 1)
    return {
        "threads": threads, "cell": job.cell, "hidden": job.hidden, "steps": job.steps, "batch": job.batch,
        "us": micro, "ratio": ratios, "gflops": gflops, "made_ms": round(plan.made_ms, 1), "native": plan.native,
    }  # fmt: skip


def report(c: dict[str, Any]) -> None:
    """One line."""
    print(
        f"t{c['threads']} {c['cell']:4} hidden {c['hidden']:3} steps {c['steps']:3} batch {c['batch']}  median us "
        f"{c['us']['median']}  ratio {c['ratio']['median']}  low {c['ratio']['low']}  {c['gflops']} GFLOP/s  made in "
        f"{c['made_ms']:.0f} ms{'' if c['native'] else '  (the library)'}",
        flush=True,
    )


def main() -> int:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cells", nargs="+", choices=list(_MODULES), default=list(_MODULES))
    parser.add_argument("--quick", action="store_true", help="hidden 128 and 512 only")
    parser.add_argument("--cpu", action="store_true", help="processor time of the calling thread; needs --threads 1")
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    add_options(parser)
    options = parser.parse_args()
    if options.cpu and options.threads != [1]:
        parser.error("--cpu counts one thread's time: add --threads 1")
    clock = time.thread_time if options.cpu else time.perf_counter
    hidden = (128, 512) if options.quick else HIDDEN
    jobs = [Job(c, h, s, b) for c in options.cells for h in hidden for s in STEPS for b in BATCHES]
    kept = cells("recurrent", options, rounds=options.rounds, cpu=options.cpu)
    with torch.inference_mode():
        for threads in options.threads:
            for job in jobs:
                name = f"t{threads} {job.cell} {job.hidden} {job.steps} {job.batch}"
                found = kept.measured(name, functools.partial(measured, job, threads, options.rounds, clock))
                if found is not None:
                    report(found)
    summary: dict[str, Any] = {}
    for threads in options.threads:
        for other in ("eager", "onnxruntime"):
            for label in ("median", "low", "least"):
                ratios = [c["ratio"][label][other] for c in kept.found if c["threads"] == threads]
                if ratios:
                    summary[f"t{threads} {other} {label}"] = {"geomean": round(geomean(ratios), 2), "minimum": min(ratios)}
    print("# " + ", ".join(f"{n}: {v}" for n, v in summary.items()))
    if kept.left:
        print(kept.remaining())
    if options.json:
        print(json.dumps({"target": host().name, "summary": summary, "cells": kept.found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
