"""Pictures of `benchmarks.inputs`: how many times as fast as each of the others ours is, along the lines of every case's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OVER = "over "
"""Columns with that in their names are ratios: of others' times over ours."""


def lines(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, list[float | None]]]:
    """What the lines of a table are called, by their first columns of words, and the ratios of each, by column."""
    ratios = dict.fromkeys(name for row in rows for name in row if OVER in name)
    labels = [", ".join(str(v) for n, v in row.items() if isinstance(v, str) and n not in ("error", "deployed")) for row in rows]
    return labels, {name: [row.get(name) for row in rows] for name in ratios}


def draw(tables: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> list[Path]:
    """A picture a table that has ratios; at 1 it makes no difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"] = "none"
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for case, rows in tables.items():
        labels, ratios = lines(rows)
        if not ratios:
            continue
        figure, axes = pyplot.subplots(figsize=(2.5 + 0.6 * len(labels), 4.5))
        for name, values in ratios.items():
            there = [(i, v) for i, v in enumerate(values) if v is not None]
            axes.plot([i for i, _ in there], [v for _, v in there], marker="o", label=name)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_yscale("log", base=2)
        axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
        axes.set(title=case, ylabel="times as fast")
        axes.legend()
        path = folder / f"inputs-{case}.svg"
        figure.savefig(path, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)
    return written
