"""How commands speak: rich on a terminal, plain text in a pipe, JSON when asked, errors in four parts.

A command computes one plain value first and presents it afterwards, so that all three forms show the same facts.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotfuse.base.errors import HotfuseError, InputError

P = ParamSpec("P")

EXIT_ERROR = 2
"""The exit code of a command that ended in one of our errors."""


def console() -> Console:
    """A console on whatever standard output is now (tests replace it)."""
    return Console(file=sys.stdout, highlight=False)


def print_json(value: object) -> None:
    """One JSON document on standard output. Non-finite numbers become text: JSON has none."""
    typer.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def heading(text: str) -> None:
    """A section's title."""
    out = console()
    if out.is_terminal:
        out.print(Text(text, style="bold"))
    else:
        typer.echo(text)


def rows(columns: Sequence[str], body: Iterable[Sequence[object]], *, header: bool = True) -> None:
    """A table: drawn on a terminal, aligned columns of plain text in a pipe."""
    texts = [[str(cell) for cell in row] for row in body]
    out = console()
    if out.is_terminal:
        table = Table(show_header=header, box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in texts:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        out.print(table)
        return
    lines = [list(columns), *texts] if header else texts
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())


_STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "yes": "green", "no": "dim"}


def reports_errors(command: Callable[P, None]) -> Callable[P, None]:
    """A command whose Hotfuse errors are printed in four parts (or as JSON) and end it with exit code 2. A file that the system
    does not let it read or write is such an error too.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (HotfuseError, OSError) as e:
            if isinstance(e, OSError) and e.filename is None:
                raise  # no file: a closed pipe, or a fault of ours
            told = e if isinstance(e, HotfuseError) else _unusable(e)
            if kwargs.get("as_json"):
                print_json(told.to_dict())
            else:
                typer.echo(f"hotfuse.{type(told).__name__}: {told}", err=True)
            raise typer.Exit(EXIT_ERROR) from e

    return wrapped


def _unusable(error: OSError) -> InputError:
    return InputError(f"{error.filename} cannot be used", because=error.strerror or "", hint="the path and its permissions")


def pairs(items: Sequence[str], option: str) -> dict[str, str]:
    """`name=value` options as a dict; a malformed or repeated one is the user's error."""
    found: dict[str, str] = {}
    for item in items:
        # The value is split off at the last `=`: ONNX names may hold one, numbers and most paths do not.
        name, equals, value = item.rpartition("=")
        if not equals or not name or not value:
            raise InputError(f"{option} {item!r} is not of the form name=value", hint=f"{option} x=...")
        if name in found:
            raise InputError(f"{option} names {name!r} twice")
        found[name] = value
    return found
