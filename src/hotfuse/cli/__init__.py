"""The command line: one file a command, every one with `--json`.

Commands import what they need when they run, so that `hotfuse --help` does not wait for torch.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from hotfuse.cli import bench, build_bundle, cache, calibrate, db, doctor, explain, hpm, run, show, watch

app = typer.Typer(
    name="hotfuse",
    help="A tiered, profile-guided JIT for neural-network inference.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _command in (
    run.run, explain.explain, watch.watch, show.show, bench.bench, build_bundle.build, doctor.doctor, calibrate.calibrate, hpm.hpm,
    cache.keys,
):  # fmt: skip
    app.command()(_command)
app.add_typer(db.db, name="db")
app.add_typer(cache.cache, name="cache")


def _print_version(wanted: bool) -> None:  # noqa: FBT001  (typer calls it with the option's value)
    if wanted:
        typer.echo(f"hotfuse {version('hotfuse')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """A tiered, profile-guided JIT for neural-network inference."""


def main() -> None:
    """The `hotfuse` command."""
    app()
