"""Rows of the whole-model benchmark: what was measured of one model, kept in a file of its own, and the table over all of them.

A row is kept under what it was measured with: the sources of the package and of the benchmark, the libraries' versions, the
machine, the rounds. A run that was broken off goes on where it was; what was measured with anything else is measured again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.side.stats import geomean

OURS, TIER0 = "hotfuse", "tier 0"
ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "benchmarks" / "results" / "models"
_SOURCES = (
    "src/hotfuse",
    "benchmarks/zoo",
    "benchmarks/models.py",
    "benchmarks/peers.py",
    "benchmarks/quiet.py",
    "benchmarks/frozen.py",
    "benchmarks/timing.py",
)
_LIBRARIES = ("torch", "onnxruntime", "openvino", "transformers")


@dataclass(slots=True)
class Row:
    """One model on one number of threads."""

    model: str
    threads: int
    shapes: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    timings: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    ratios: dict[str, float] = field(default_factory=dict[str, float])
    """Per contender: its time divided by Hotfuse's in the same round."""
    spreads: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """The 10th and 90th percentile of these over rounds."""
    errors: dict[str, float] = field(default_factory=dict[str, float])
    """Per contender: the largest relative difference from the reference's outputs."""
    absent: dict[str, str] = field(default_factory=dict[str, str])
    plan: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest of the others, and how many times faster Hotfuse is."""
        others = {n: r for n, r in self.ratios.items() if n not in (OURS, TIER0)}
        return min(others.items(), key=lambda pair: pair[1]) if others and OURS in self.ratios else None

    def lines(self) -> list[str]:
        """The row as people read it."""
        best = self.best
        verdict = f"{best[1]:.2f}x the best ({best[0]})" if best else "nothing to compare with"
        shapes = ", ".join(f"{n} {'x'.join(map(str, s)) or 'scalar'}" for n, s in self.shapes.items())
        out = [f"{self.model}, {self.threads} threads, {shapes}: {verdict}; {told(self.plan)}"]
        for name, t in self.timings.items():
            spread = f"{t['median_ms']:10.4f} ms ({t['p10_ms']:.4f} - {t['p90_ms']:.4f})"
            out.append(f"    {name:<9}{spread}  {self.ratios[name]:5.2f}x  error {self.errors[name]:.0e}")
        return out + [f"    {name:<9}absent: {why}" for name, why in self.absent.items()]


def told(plan: Mapping[str, Any]) -> str:
    """What Hotfuse served with, in words."""
    if not plan:
        return "no plan"
    why = "" if plan["tier"] else f" ({plan['refused'] or 'not tried'})"
    return (
        f"tier {plan['tier']}{why}, {plan['native']} native, {plan['library']} library, {plan['branches']} branching parts, "
        f"{plan['library_nodes']} of {plan['nodes']} nodes with the library"
    )


def summary(rows: Sequence[Row]) -> list[str]:
    """One line per number of threads, over the models that have a ratio."""
    out: list[str] = []
    for threads in dict.fromkeys(r.threads for r in rows):
        found = {r.model: r.best[1] for r in rows if r.threads == threads and r.best}
        if found:
            worst = min(found, key=lambda n: found[n])
            counted = f"{len(found)} of {sum(r.threads == threads for r in rows)} models"
            out.append(
                f"{threads} threads: geomean {geomean(list(found.values())):.3f}x the best over {counted}, "
                f"worst {found[worst]:.2f}x ({worst})"
            )
    return out


def table(rows: Sequence[Row]) -> list[str]:
    """All rows as one table: milliseconds of ours, and how many times that everybody else takes."""
    names = [n for n in dict.fromkeys(n for r in rows for n in r.ratios) if n != OURS]
    out = [
        f"| model | threads | hotfuse, ms | {' | '.join(names)} | over the best |",
        "| --- " * (len(names) + 4) + "|",
    ]
    for r in rows:
        if OURS not in r.timings:
            out.append(f"| {r.model} | {r.threads} | {r.absent.get(OURS, 'not measured')} |{' |' * (len(names) + 1)}")
            continue
        others = " | ".join(f"{r.ratios[n]:.2f}" if n in r.ratios else "–" for n in names)
        best = f"{r.best[1]:.2f} ({r.best[0]})" if r.best else "–"
        out.append(f"| {r.model} | {r.threads} | {r.timings[OURS]['median_ms']:.4g} | {others} | {best} |")
    return out


# --- kept on disk --------------------------------------------------------------------------------


def measured_with(machine: Mapping[str, Any], sources: Iterable[str] = _SOURCES, **options: Any) -> str:
    """A digest of everything that a row's numbers depend on."""
    digest = hashlib.sha256()
    for source in sources:
        root = ROOT / source
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(path.read_bytes())
    versions = {n: _version(n) for n in _LIBRARIES}
    digest.update(json.dumps([versions, machine["identity"], options], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def keep(folder: Path, row: Row, key: str) -> None:
    """Write a row; whoever reads meanwhile sees the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _file(folder, row.model, row.threads)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"key": key, **asdict(row)}), encoding="utf-8")
    temporary.replace(path)


def kept(folder: Path, model: str, threads: int, key: str | None = None) -> Row | None:
    """The row of a model that was measured with this, or with anything where that is None."""
    path = _file(folder, model, threads)
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Row(**found) if found.pop("key") == key or key is None else None


def all_kept(folder: Path, models: Iterable[str], threads: Iterable[int]) -> list[Row]:
    """Every row there is of these, however it was measured."""
    several = list(threads)
    found = (kept(folder, m, t) for t in several for m in list(models))
    return [r for r in found if r is not None]


def _file(folder: Path, model: str, threads: int) -> Path:
    return folder / f"{model}.{threads}.json"
