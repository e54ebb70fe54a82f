"""`hotfuse run`: a model on given or made-up inputs, with what came out, how long it took and what ran."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hotfuse.base.errors import InputError
from hotfuse.cli.feeds import Array, Feeds, make_feeds, owning_up
from hotfuse.cli.output import heading, pairs, print_json, reports_errors, rows


@reports_errors
def run(
    model: Annotated[Path, typer.Argument(help="An ONNX model.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="name=file.npy, or name=number to fill the input; random otherwise."),
    ] = None,
    outputs: Annotated[list[str] | None, typer.Option("--output", help="name=file.npy: save an output.")] = None,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="name=size of a dynamic dim.")] = None,
    calls: Annotated[int, typer.Option(min=1, help="How often to run it.")] = 1,
    wait: Annotated[bool, typer.Option(help="After the first call, wait until background work is done.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run an ONNX model and summarize its outputs, its timing and what ran it."""
    from hotfuse.session import InferenceSession, SessionOptions

    save = pairs(outputs or [], "--output")
    given, sizes = pairs(inputs or [], "--input"), pairs(dims or [], "--dim")
    options = SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    with InferenceSession(model, options) as session:
        names = [o.name for o in session.get_outputs()]
        for name in save:
            if name not in names:
                raise InputError(f"the model has no output {name!r}", hint="one of " + ", ".join(names))
        feeds = make_feeds(session.get_inputs(), given, sizes, seed)
        results: list[Any] = []
        times_ms: list[float] = []
        for i in range(calls):
            start = time.perf_counter()
            with owning_up(feeds):
                results = session.run(None, feeds.arrays)
            times_ms.append((time.perf_counter() - start) * 1e3)
            if wait and i == 0:
                session.wait()
        report: dict[str, Any] = {
            "model": str(model),
            "inputs": [_describe(name, feeds.arrays[name]) | {"from": feeds.sources[name]} for name in feeds.arrays],
            "dims": feeds.dims,
            "dims_chosen": sorted(feeds.chosen),
            "outputs": [_describe(name, value) for name, value in zip(names, results, strict=True)],
            "calls": calls,
            "times_ms": [round(t, 4) for t in times_ms],
            "stats": session.stats(),
            "explain": session.explain().to_dict(),
        }
        explained = str(session.explain())
    for name, file in save.items():
        _save(name, results[names.index(name)], file)
    if as_json:
        print_json(report)
    else:
        _show(report, feeds, explained)


def _describe(name: str, value: Any) -> dict[str, Any]:
    """An array in a line: dtype, shape, and what its numbers look like."""
    if not isinstance(value, np.ndarray):
        kind = type(value).__name__
        size = f"[{len(value)}]" if isinstance(value, (list, dict)) else ""
        return {"name": name, "dtype": kind + size, "shape": None}
    array: Array = value
    found: dict[str, Any] = {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
    if array.size and array.dtype.kind in "fiubV":
        wide = array.astype(np.float64)
        found |= {"min": float(wide.min()), "max": float(wide.max()), "mean": float(wide.mean())}
        if not np.isfinite(wide).all():
            found["non_finite"] = int((~np.isfinite(wide)).sum())
    return found


def _save(name: str, value: Any, file: str) -> None:
    if not isinstance(value, np.ndarray):
        raise InputError(f"output {name!r} is a {type(value).__name__}, not an array", hint="save arrays only")
    try:
        with Path(file).open("wb") as f:
            np.save(f, value, allow_pickle=False)
    except (OSError, ValueError) as e:
        raise InputError(f"cannot write output {name!r} to {file}", because=str(e)) from e


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _lines(described: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for d in described:
        shape = "" if d["shape"] is None else "x".join(map(str, d["shape"])) or "scalar"
        lines.append((d["name"], d["dtype"], shape, *(_number(d.get(k, "")) for k in ("min", "max", "mean"))))
    return lines


def _show(report: dict[str, Any], feeds: Feeds, explained: str) -> None:
    columns = ("name", "dtype", "shape", "min", "max", "mean")
    heading("inputs")
    origins = [d["from"] for d in report["inputs"]]
    rows((*columns, "from"), [(*line, o) for line, o in zip(_lines(report["inputs"]), origins, strict=True)])
    if feeds.chosen:
        listed = ", ".join(f"{name}={feeds.dims[name]}" for name in sorted(feeds.chosen))
        typer.echo(f"dynamic dims chosen: {listed} (set with --dim name=size)")
    heading("\noutputs")
    rows(columns, _lines(report["outputs"]))
    times: list[float] = report["times_ms"]
    heading("\ntime per call")
    typer.echo(
        f"first {times[0]:.3f} ms, median {statistics.median(times):.3f} ms, "
        f"min {min(times):.3f} ms, max {max(times):.3f} ms over {len(times)} calls"
    )
    heading("\nwhat ran")
    typer.echo(explained)
