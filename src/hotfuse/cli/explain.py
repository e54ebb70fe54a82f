"""`hotfuse explain`: serve a model for some calls and say what runs now and why.

    hotfuse explain model.onnx                     about ten lines; --full has partitions, kernels and every decision too
    hotfuse explain mymodels:encoder --input 2x16  a PyTorch model, named as something to import (`cli.torch_models`)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotfuse.base.errors import InputError
from hotfuse.cli.model_inputs import make_feeds, owning_up
from hotfuse.cli.output import pairs, print_json, reports_errors
from hotfuse.cli.torch_models import is_torch_name, load_torch, owning_errors

if TYPE_CHECKING:
    from hotfuse.explain import Explanation


@reports_errors
def explain(
    model: Annotated[str, typer.Argument(help="An ONNX model, or package.module:name of a PyTorch one.")],
    calls: Annotated[int, typer.Option(min=1, help="How often to run it.")] = 64,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="name=file.npy, or name=number to fill the input; random otherwise. PyTorch: 2x16:int64."),
    ] = None,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="name=size of a dynamic dim; name=8,16 takes turns.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use.")] = None,
    wait: Annotated[bool, typer.Option(help="Now and then, wait until background work is done.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of random inputs.")] = 0,
    full: Annotated[bool, typer.Option(help="All of it: partitions, kernels, guards, every decision.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write it as a page.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Also write a trace for Chrome's or Perfetto's viewer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Serve a model for some calls; print what serves, how fast, what is tried, what is in the way; with --full everything."""
    if is_torch_name(model):
        found = _torch(model, inputs or [], calls, threads, wait=wait, seed=seed, full=full)
    else:
        found = _onnx(Path(model), inputs or [], dims or [], calls, threads, wait=wait, seed=seed, full=full)
    for path, write in ((html, found.to_html), (trace, found.to_trace)):
        if path is not None:
            try:
                write(path)
            except OSError as e:
                raise InputError(f"cannot write {path}", because=str(e)) from e
    if as_json:
        print_json(found.to_dict())
    else:
        typer.echo(str(found))


def _torch(name: str, inputs: list[str], calls: int, threads: int | None, *, wait: bool, seed: int, full: bool) -> Explanation:
    """A PyTorch model, called without gradients on the inputs it brings or on made-up ones."""
    import torch

    from hotfuse.api import jit

    torch.manual_seed(seed)
    target, args, _ = load_torch(name, inputs)
    with torch.no_grad(), jit(target, threads=threads) as fast:
        for i in range(calls):
            with owning_errors(name):
                fast(*args)
            if wait and i & (i + 1) == 0:  # after 1, 2, 4, 8, ... calls
                fast.wait()
        return fast.explain(full=full)


def _onnx(
    model: Path, inputs: list[str], dims: list[str], calls: int, threads: int | None, *, wait: bool, seed: int, full: bool
) -> Explanation:
    from hotfuse.session import InferenceSession, SessionOptions

    options = SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    given, sizes = pairs(inputs, "--input"), _turns(pairs(dims, "--dim"))
    with InferenceSession(model, options) as session:
        declared = session.get_inputs()
        feeds = [make_feeds(declared, given, turn, seed + i) for i, turn in enumerate(sizes)]
        for i in range(calls):
            with owning_up(feeds[i % len(feeds)]):
                session.run(None, feeds[i % len(feeds)].arrays)
            if wait and i & (i + 1) == 0:  # after 1, 2, 4, 8, ... calls
                session.wait()
        return session.explain(full=full)


def _turns(dims: dict[str, str]) -> list[dict[str, str]]:
    """One set of sizes per turn: a dim with several sizes takes them in turn, the others stay."""
    listed = {name: text.split(",") for name, text in dims.items()}
    turns = max(map(len, listed.values()), default=1)
    return [{name: sizes[i % len(sizes)] for name, sizes in listed.items()} for i in range(turns)]
