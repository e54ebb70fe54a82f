"""`hotfuse db`: what the profile store holds, making it smaller, taking everything out."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from hotfuse.base.errors import InputError
from hotfuse.base.settings import from_env
from hotfuse.cli.output import heading, print_json, reports_errors, rows

if TYPE_CHECKING:
    from hotfuse.profile.store import Store

db = typer.Typer(
    help="The profile store: what it holds, making it smaller, taking everything out.", no_args_is_help=True
)

At = Annotated[
    str | None, typer.Option("--store", help="A path or sqlite:///path; the default is that of the settings.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def _open(at: str | None) -> Store:
    """A store that exists: looking at one must not begin it, nor put a damaged one aside unseen."""
    from hotfuse.profile.place import location
    from hotfuse.profile.store import Store

    place = at or location(from_env())
    if "://" not in place and not Path(place).expanduser().exists():
        raise InputError(f"there is no profile store at {place}", hint="--store, or HOTFUSE_PROFILES")
    return Store.open(place)


@db.command()
@reports_errors
def info(at: At = None, as_json: AsJson = False) -> None:
    """Where the store is, its version and size, rows per table, and what went wrong with it."""
    with _open(at) as store:
        found = store.info()
    if as_json:
        print_json(found)
        return
    facts = [
        ("place", found["path"]),
        ("bytes", found["bytes"]),
        ("schema", found["version"]),
        ("journal", found["journal"]),
    ]
    rows(("fact", "value"), facts, header=False)
    heading("\nrows")
    rows(("table", "rows"), found["rows"].items(), header=False)
    for note in found["notes"]:
        heading(note)


@db.command()
@reports_errors
def vacuum(
    at: At = None,
    keep: Annotated[
        int | None, typer.Option(help="Keep only the newest rows of tables that grow with use.", min=0)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Give unused room back to the system."""
    with _open(at) as store:
        before = store.info()["bytes"]
        dropped = {} if keep is None else store.prune(keep)
        store.vacuum()
        after = store.info()["bytes"]
    report = {"bytes_before": before, "bytes_after": after, "dropped": dropped}
    if as_json:
        print_json(report)
        return
    rows(
        ("fact", "value"),
        [("before", before), ("after", after), *((f"dropped {t}", n) for t, n in dropped.items())],
        header=False,
    )


def _target(out: Path | None) -> AbstractContextManager[TextIO]:
    if out is None:
        return nullcontext(sys.stdout)
    try:
        return out.open("w")
    except OSError as e:
        raise InputError(f"{out} cannot be written", because=e.strerror or str(e)) from e


@db.command()
@reports_errors
def export(
    at: At = None,
    out: Annotated[Path | None, typer.Option("--out", help="A file; the default is standard output.")] = None,
) -> None:
    """Every row as one line of JSON: {"table": ..., "row": {...}}."""
    with _open(at) as store, _target(out) as target:
        for table, values in store.export():
            target.write(json.dumps({"table": table, "row": values}) + "\n")
