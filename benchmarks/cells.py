"""Cells of a grid that is measured in slices: each is kept in a file, so that a run that was broken off goes on where it was.

    python -m benchmarks.conv --threads 1 2 --seconds 100      again and again, until it says that all cells are there

A cell is kept under what it was measured with: the sources of the package and of the benchmark, the libraries' versions, the
machine, the rounds. What was measured with anything else is measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.model_rows import ROOT, measured_with
from hotfuse.machine.fingerprint import fingerprint

Cell = dict[str, Any]
STORED = ROOT / "benchmarks" / "results"
_COMMON = ("src/hotfuse", "benchmarks/gemm.py", "benchmarks/served.py", "benchmarks/timing.py")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every grid is told about its slices."""
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no cell after so long; the next run goes on"
    )
    parser.add_argument("--again", action="store_true", help="measure what has been measured already, too")
    parser.add_argument("--results", metavar="DIR", type=Path, default=STORED, help="where cells are kept")


@dataclass(slots=True)
class Cells:
    """The cells of one grid: those kept, and those that this run measures."""

    folder: Path
    key: str
    seconds: float = float("inf")
    again: bool = False
    clock: Callable[[], float] = time.monotonic
    found: list[Cell] = field(default_factory=list[Cell])
    """In the order of the grid."""
    left: list[str] = field(default_factory=list[str])
    """What there was no time for."""
    begun: float = 0.0

    def __post_init__(self) -> None:
        self.begun = self.clock()

    def measured(self, name: str, measure: Callable[[], Cell]) -> Cell | None:
        """A cell that was kept, or is measured now; None where the slice is over."""
        path = self.folder / f"{re.sub('[^A-Za-z0-9.]+', '-', name)}.json"
        if not self.again and path.exists():
            kept: Cell = json.loads(path.read_text(encoding="utf-8"))
            if kept.get("key") == self.key:
                self.found.append(kept["cell"])
                return kept["cell"]
        if self.clock() - self.begun >= self.seconds:
            self.left.append(name)
            return None
        cell = measure()
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"key": self.key, "name": name, "cell": cell}), encoding="utf-8")
        temporary.replace(path)
        self.found.append(cell)
        return cell

    def remaining(self) -> str:
        """How much is still to be measured, in words; empty where everything is there."""
        return f"# {len(self.left)} cells still to be measured: run this again" if self.left else ""


def cells(grid: str, options: argparse.Namespace, sources: Sequence[str] = (), **measured: Any) -> Cells:
    """The cells of a grid, whose file is named like it; `measured` is what else its numbers depend on."""
    key = measured_with(fingerprint().to_dict(), (*_COMMON, f"benchmarks/{grid}.py", *sources), **measured)
    return Cells(options.results / grid, key, options.seconds, options.again)
