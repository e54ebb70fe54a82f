"""`hotfuse bench`: Hotfuse against what one would use instead, side by side on this machine.

The suites live in a checkout's `benchmarks` folder: they need models, peers and minutes, none of which belongs into the package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from hotfuse.base.errors import InputError
from hotfuse.cli.output import reports_errors


def checkout() -> Path:
    """The folder that holds the suites, where Hotfuse is installed from a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "side" / "__main__.py").is_file():
        raise InputError(
            "the benchmark suites are not part of the installed package",
            because=f"there is no folder benchmarks beside {Path(__file__).resolve().parents[1]}",
            hint="clone the repository, then: pip install -e '.[bench]' and hotfuse bench",
        )
    return root


@reports_errors
def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(help="kernels, models, overhead, startup, compile, traffic; all by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few cases and contenders: three minutes.")] = False,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="Threads of every contender; repeat for several.")] = None,
    contenders: Annotated[str, typer.Option(help="Comma-separated; all that a case knows by default.")] = "",
    cases: Annotated[str, typer.Option(help="Only cases whose name holds this text.")] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of turns; 0 is the suite's own number.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the results go, as JSON lines.")] = Path("build/bench/latest.jsonl"),
    compare: Annotated[
        Path | None, typer.Option(help="An earlier run: regressions beyond noise are flagged and make the exit status 1.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document: the summary.")] = False,
) -> None:
    """Measure Hotfuse and its peers side by side: each in its own process, in turns, outputs compared first."""
    root = checkout()
    if compare is not None and not compare.is_file():
        raise InputError(f"there is no earlier run {compare}", hint="hotfuse bench --out FILE writes one")
    command = [sys.executable, "-m", "benchmarks.side", *(suites or []), "--out", str(out.resolve())]
    command += ["--threads", *map(str, threads or [1]), "--contenders", contenders, "--cases", cases, "--rounds", str(rounds)]
    command += ["--quick"] if quick else []
    command += ["--compare", str(compare.resolve())] if compare is not None else []
    command += ["--json"] if as_json else []
    status = subprocess.run(command, cwd=root).returncode
    if status:
        raise typer.Exit(status)
