"""Residual and layer norm, residual and rms norm, softmax: generated kernels against eager and ONNX Runtime.

    python -m benchmarks.norms [--threads 1 2] [--rounds N] [--only NAME] [--seconds S] [--json]

The layer norm is of a sum that nobody else reads (BERT), the rms norm's sum is a result too (Llama). Ours is a plan for any
number of rows (the rows are a symbol, the columns a number), called with tensors and giving new ones. ONNX Runtime
computes the residual forms with its own fused operators and is called twice, with `run` and with bound inputs and outputs.
Contenders take turns, after a rest until the threads of whoever came before have stopped spinning (`timing.rest`)
and some milliseconds of calls that are not counted: results of megabytes are in cache then, as where one call follows the other. A
ratio above 1 means that ours is faster; it is the median over rounds of the times of one round. Cells are kept
(`benchmarks.cells`): with `--seconds` the grid is measured in slices.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from benchmarks.cells import Cells, add_options, cells
from benchmarks.gemm import geomean
from benchmarks.served import Served, served
from benchmarks.timing import REST_S, WARM_S, interleave
from hotfuse.ir.text import parse
from hotfuse.native.target import host

ROWS, COLUMNS = (1, 16, 128, 384), (768, 1024, 4096)
EPSILON = 1e-5
BAR = 1.5
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work: how torch, the graph and ONNX say it."""

    name: str
    eager: Callable[..., Any]
    graph: str
    onnx_op: str
    """Of `com.microsoft` where it reads a residual."""
    outputs: tuple[str, ...]
    """Of that operator: the sum comes fourth."""
    inputs: int
    weights: tuple[str, ...]


WORKS = (
    Work(
        "layer norm",
        lambda x, r, w, b: (F.layer_norm(x + r, w.shape, w, b, EPSILON),),
        """graph norm(%x: f32[rows, C], %r: f32[rows, C]) {
          param %w: f32[C] = "w"
          param %b: f32[C] = "b"
          %h: f32[rows, C] = aten.add.Tensor(%x, %r)
          %y: f32[rows, C] = aten.layer_norm.default(%h, [C], %w, %b, 1e-05)
          return %y }""",
        "SkipLayerNormalization", ("y",), 2, ("w", "b"),
    ),
    Work(
        "rms norm",
        lambda x, r, w: (F.rms_norm(h := x + r, w.shape, w, EPSILON), h),
        """graph norm(%x: f32[rows, C], %r: f32[rows, C]) {
          param %w: f32[C] = "w"
          %h: f32[rows, C] = aten.add.Tensor(%x, %r)
          %y: f32[rows, C] = aten.rms_norm.default(%h, [C], %w, 1e-05)
          return %y, %h }""",
        "SkipSimplifiedLayerNormalization", ("y", "", "", "h"), 2, ("w",),
    ),
    Work(
        "softmax",
        lambda x: (torch.softmax(x, -1),),
        """graph soft(%x: f32[rows, C]) {
          %y: f32[rows, C] = aten.softmax.int(%x, -1)
          return %y }""",
        "Softmax", ("y",), 1, (),
    ),
)  # fmt: skip


def ours(work: Work, columns: int, weights: dict[str, torch.Tensor]) -> Served:
    """A plan for any number of rows."""
    graph = parse(work.graph.replace("C]", f"{columns}]"))
    return served(graph, weights, [torch.randn(ROWS[-2], columns) for _ in range(work.inputs)])


def runtime(work: Work, inputs: list[torch.Tensor], weights: dict[str, torch.Tensor], threads: int) -> dict[str, Call]:
    """ONNX Runtime, called both ways."""
    names = [f"x{i}" for i in range(work.inputs)]
    skips = work.inputs == 2
    outs = list(work.outputs)
    attrs: dict[str, Any] = {"epsilon": EPSILON} if skips else {"axis": -1}
    node = helper.make_node(
        work.onnx_op, [*names, *work.weights], outs, domain="com.microsoft" if skips else "", **attrs
    )
    shape = list(inputs[0].shape)
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in (*names, *filter(None, outs))]
    constants = [onnx.numpy_helper.from_array(weights[w].numpy(), w) for w in work.weights]
    graph = helper.make_graph([node], "work", info[: work.inputs], info[work.inputs :], constants)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    model = helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {n: t.numpy() for n, t in zip(names, inputs, strict=True)}
    bound = session.io_binding()
    for n, array in feeds.items():
        bound.bind_cpu_input(n, array)
    results = [torch.empty(shape) for o in outs if o]
    for n, t in zip(filter(None, outs), results, strict=True):
        bound.bind_output(n, "cpu", 0, "float32", shape, t.data_ptr())

    def with_bound(keep: object = (feeds, results)) -> None:
        session.run_with_iobinding(bound)

    return {"ort run": lambda: session.run(None, feeds), "ort bound": with_bound}


def cell(work: Work, rows: int, columns: int, threads: int, rounds: int, plan: Served,
         weights: dict[str, torch.Tensor]) -> dict[str, Any]:  # fmt: skip
    """One size: checked, then timed."""
    generator = torch.Generator().manual_seed(rows + columns)
    inputs = [torch.randn(rows, columns, generator=generator) for _ in range(work.inputs)]
    given = [weights[w] for w in work.weights]
    exact = work.eager(*(t.double() for t in (*inputs, *given)))
    run = plan.run
    for got, want in zip(run(*inputs), exact, strict=True):
        worst = float((got - want).abs().max())
        if not worst < 1e-5 * max(1.0, float(want.abs().max())):
            raise SystemExit(f"{work.name} of {rows} x {columns} is wrong by {worst}")
    calls: dict[str, Call] = {
        "ours": lambda: run(*inputs),
        "eager": lambda: work.eager(*inputs, *given),
        **runtime(work, inputs, weights, threads),
    }
    inner = max(1, min(100, 200_000 // (rows * columns)))
    times, ratios = interleave(calls, rounds=rounds, inner=inner, rest_s=REST_S, warm_s=WARM_S)
    return {
        "work": work.name, "rows": rows, "columns": columns, "threads": threads,
        "us": {n: round(t.median * 1e3, 2) for n, t in times.items()},
        "ratio": {n: round(r, 3) for n, r in ratios.items() if n != "ours"}, "native": plan.native,
    }  # fmt: skip


def report(c: dict[str, Any]) -> None:
    """One line."""
    shape = f"{c['rows']}x{c['columns']}"
    ratios = "  ".join(f"{n} {r:.2f}x" for n, r in c["ratio"].items())
    print(f"t{c['threads']} {c['work']:10} {shape:9} us {c['us']}  {ratios}{'' if c['native'] else '  (the library)'}", flush=True)


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Geometric means per work, rival and number of threads, and the least ratio of each."""
    found: dict[str, float] = {}
    for threads in sorted({c["threads"] for c in cells}):
        for name in dict.fromkeys(c["work"] for c in cells):
            mine = [c for c in cells if c["work"] == name and c["threads"] == threads]
            for rival in mine[0]["ratio"]:
                ratios = [c["ratio"][rival] for c in mine]
                found[f"{threads} threads, {name}, {rival}"] = round(geomean(ratios), 3)
                found[f"{threads} threads, {name}, {rival}, least"] = min(ratios)
    return found


def grid(kept: Cells, options: argparse.Namespace) -> None:
    """All cells, as far as the slice goes; a plan serves all cells of its columns, and is made for the first that is measured."""
    for work in (w for w in WORKS if options.only in w.name):
        for columns in COLUMNS:
            generator = torch.Generator().manual_seed(columns)
            weights = {w: torch.randn(columns, generator=generator) for w in work.weights}
            plan = functools.cache(functools.partial(ours, work, columns, weights))
            for threads in options.threads:
                torch.set_num_threads(threads)
                for rows in ROWS:
                    name = f"t{threads} {work.name} {rows}x{columns}"
                    one = functools.partial(_measured, work, rows, columns, threads, options.rounds, plan, weights)
                    found = kept.measured(name, one)
                    if found is not None:
                        report(found)


def _measured(
    work: Work, rows: int, columns: int, threads: int, rounds: int, plan: Callable[[], Served],
    weights: dict[str, torch.Tensor],
) -> dict[str, Any]:  # fmt: skip
    return cell(work, rows, columns, threads, rounds, plan(), weights)


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default="", help="works whose name contains this")
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    add_options(parser)
    options = parser.parse_args()
    kept = cells("norms", options, rounds=options.rounds)
    with torch.no_grad():
        grid(kept, options)
    means = summary(kept.found)
    for name, value in means.items():
        print(f"# {name}: {value}x{'' if value >= BAR else '  below the bar'}")
    if kept.left:
        print(kept.remaining())
    if options.json:
        print(json.dumps({"target": host().name, "summary": means, "cells": kept.found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
