"""`hotfuse run`: a model on given or made-up inputs, with what came out, how long it took and what ran."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from hotfuse.base.errors import InputError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.cli.model_inputs import Array, make_feeds, owning_up
from hotfuse.cli.output import heading, pairs, print_json, reports_errors, rows
from hotfuse.cli.torch_models import is_torch_name, load_torch, owning_errors


@reports_errors
def run(
    model: Annotated[str, typer.Argument(help="An ONNX model, or package.module:name of a PyTorch one.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="name=file.npy, or name=number to fill the input; random otherwise. PyTorch: 2x16:int64."),
    ] = None,
    outputs: Annotated[list[str] | None, typer.Option("--output", help="name=file.npy: save an output.")] = None,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="name=size of a dynamic dim.")] = None,
    calls: Annotated[int, typer.Option(min=1, help="How often to run it.")] = 1,
    wait: Annotated[bool, typer.Option(help="After the first call, wait until background work is done.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of random inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run a model and summarize its outputs, its timing and what ran it."""
    save = pairs(outputs or [], "--output")
    if is_torch_name(model):
        if dims:
            raise InputError("--dim is for ONNX models", hint="--input 2x16 for each input of a PyTorch model")
        done = _torch(model, inputs or [], calls, wait=wait, threads=threads, seed=seed)
    else:
        given, sizes = pairs(inputs or [], "--input"), pairs(dims or [], "--dim")
        done = _onnx(Path(model), given, sizes, list(save), calls, wait=wait, threads=threads, seed=seed)
    for name, file in save.items():
        if name not in done.results:
            raise InputError(f"the model has no output {name!r}", hint="one of " + ", ".join(done.results))
        _save(name, done.results[name], file)
    if as_json:
        print_json(done.report)
    else:
        _show(done)


@dataclass(frozen=True, slots=True)
class DoneRun:
    """What running a model gave."""

    report: dict[str, Any]
    results: dict[str, Any]
    """Outputs by name."""
    explained: str


def _timed(call: Callable[[], Any], calls: int, wait: Callable[[], object] | None) -> tuple[Any, list[float]]:
    """The last result, and what each call took; `wait` is called behind the first."""
    result, times_ms = None, list[float]()
    for i in range(calls):
        start = time.perf_counter()
        result = call()
        times_ms.append((time.perf_counter() - start) * 1e3)
        if wait is not None and i == 0:
            wait()
    return result, times_ms


def _onnx(
    model: Path, given: dict[str, str], sizes: dict[str, str], wanted: list[str], calls: int, *, wait: bool, threads: int | None,
    seed: int,
) -> DoneRun:  # fmt: skip
    from hotfuse.session import InferenceSession, SessionOptions

    options = SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    with InferenceSession(model, options) as session:
        names = [o.name for o in session.get_outputs()]
        for name in wanted:
            if name not in names:
                raise InputError(f"the model has no output {name!r}", hint="one of " + ", ".join(names))
        feeds = make_feeds(session.get_inputs(), given, sizes, seed)
        with owning_up(feeds):
            results, times_ms = _timed(lambda: session.run(None, feeds.arrays), calls, session.wait if wait else None)
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
        return DoneRun(report, dict(zip(names, results, strict=True)), str(session.explain()))


def _torch(name: str, inputs: list[str], calls: int, *, wait: bool, threads: int | None, seed: int) -> DoneRun:
    """A PyTorch model, called without gradients on the inputs it brings or on made-up ones."""
    import torch
    from torch.utils import _pytree as pytree

    from hotfuse.api import jit

    def named(tree: Any, alone: str) -> dict[str, Any]:
        """What of a structure is a tensor, by where it is in it."""
        found = {pytree.keystr(path).strip("[]'.") or alone: leaf for path, leaf in pytree.tree_flatten_with_path(tree)[0]}
        return {k: _array(v) if isinstance(v, torch.Tensor) else v for k, v in found.items()}

    torch.manual_seed(seed)
    target, args, _ = load_torch(name, inputs)
    with torch.no_grad(), jit(target, threads=threads) as fast:
        with owning_errors(name):
            result, times_ms = _timed(lambda: fast(*args), calls, fast.wait if wait else None)
        results = named(result, "output")
        source = "made up here" if inputs else "the model's own"
        report: dict[str, Any] = {
            "model": name,
            "inputs": [_describe(k, v) | {"from": source} for k, v in named(args, "input").items()],
            "dims": {},
            "dims_chosen": [],
            "outputs": [_describe(k, v) for k, v in results.items()],
            "calls": calls,
            "times_ms": [round(t, 4) for t in times_ms],
            "stats": fast.stats(),
            "explain": fast.explain().to_dict(),
        }
        return DoneRun(report, results, str(fast.explain()))


def _array(t: Any) -> Array:
    """A tensor's numbers; types that arrays do not have become float32."""
    import torch

    plain = t.detach().cpu()
    return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()


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


def _show(done: DoneRun) -> None:
    report = done.report
    columns = ("name", "dtype", "shape", "min", "max", "mean")
    heading("inputs")
    origins = [d["from"] for d in report["inputs"]]
    rows((*columns, "from"), [(*line, o) for line, o in zip(_lines(report["inputs"]), origins, strict=True)])
    if report["dims_chosen"]:
        listed = ", ".join(f"{name}={report['dims'][name]}" for name in report["dims_chosen"])
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
    typer.echo(done.explained)
