"""`hotfuse explain`: serve a model for some calls and say what runs now and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotfuse.base.errors import InputError
from hotfuse.cli.feeds import make_feeds, owning_up
from hotfuse.cli.output import pairs, print_json, reports_errors


@reports_errors
def explain(
    model: Annotated[Path, typer.Argument(help="An ONNX model.")],
    calls: Annotated[int, typer.Option(min=1, help="How often to run it.")] = 64,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="name=file.npy, or name=number to fill the input; random otherwise."),
    ] = None,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="name=size of a dynamic dim; name=8,16 takes turns.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use.")] = None,
    wait: Annotated[bool, typer.Option(help="Now and then, wait until background work is done.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of random inputs.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Also write it as a page.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Also write a trace for Chrome's or Perfetto's viewer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Serve an ONNX model for some calls; print tiers, kernels, guards and every decision with its reason."""
    from hotfuse.session import InferenceSession, SessionOptions

    options = SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    given, sizes = pairs(inputs or [], "--input"), _turns(pairs(dims or [], "--dim"))
    with InferenceSession(model, options) as session:
        declared = session.get_inputs()
        feeds = [make_feeds(declared, given, turn, seed + i) for i, turn in enumerate(sizes)]
        for i in range(calls):
            with owning_up(feeds[i % len(feeds)]):
                session.run(None, feeds[i % len(feeds)].arrays)
            if wait and i & (i + 1) == 0:  # after 1, 2, 4, 8, ... calls
                session.wait()
        found = session.explain()
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


def _turns(dims: dict[str, str]) -> list[dict[str, str]]:
    """One set of sizes per turn: a dim with several sizes takes them in turn, the others stay."""
    listed = {name: text.split(",") for name, text in dims.items()}
    turns = max(map(len, listed.values()), default=1)
    return [{name: sizes[i % len(sizes)] for name, sizes in listed.items()} for i in range(turns)]
