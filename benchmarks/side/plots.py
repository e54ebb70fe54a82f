"""The pictures of a run: ratios, the speed of traffic over time, how latencies are distributed, the roofline."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.side.records import OURS, PER_REQUEST, Record, cases
from hotfuse.machine.peaks import MachinePeaks

PARTS = 24


def draw(
    records: Sequence[Record], peaks: MachinePeaks | None, folder: Path, formats: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Every picture there is something to show on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, figure in _figures(pyplot, records, peaks):
        for kind in formats:
            path = folder / f"{name}.{kind}"
            figure.savefig(path, dpi=120, bbox_inches="tight")
            written.append(path)
        pyplot.close(figure)
    return written


def _figures(pyplot: Any, records: Sequence[Record], peaks: MachinePeaks | None) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for (suite, threads), group in itertools.groupby(records, key=lambda r: (r.suite, r.threads)):
        timed = [r for r in group if r.ratio is not None]
        if any(not r.contender.startswith(OURS) for r in timed):
            found.append((f"ratios-{suite}-{threads}", ratio_bars(pyplot, suite, timed)))
    for (_, case, threads), group in cases(r for r in records if r.unit == PER_REQUEST and r.extra.get("calls")).items():
        found.append((f"traffic-{case}-{threads}", traffic(pyplot, case, group)))
    if peaks is not None and any(r.roofline for r in records):
        found.append(("roofline", roofline(pyplot, records, peaks)))
    return found


def ratio_bars(pyplot: Any, suite: str, records: Sequence[Record]) -> Any:
    """Each contender's time over Hotfuse's, with its interval; on a logarithmic axis, 1 is a draw."""
    names = list(dict.fromkeys(r.case for r in records))
    others = [n for n in dict.fromkeys(r.contender for r in records) if not n.startswith(OURS)]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.28 * len(names) * max(2, len(others))))
    height = 0.8 / len(others)
    for i, other in enumerate(others):
        rows = [r for r in records if r.contender == other and r.ratio is not None]
        at = [names.index(r.case) + i * height for r in rows]
        found = [r.ratio for r in rows if r.ratio is not None]
        middle = np.array([e.median for e in found])
        spread = np.array([[max(0.0, e.median - e.low), max(0.0, e.high - e.median)] for e in found])
        axes.barh(at, middle - 1, height=height * 0.9, left=1, xerr=spread.T, label=other, error_kw={"linewidth": 0.8})
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks([i + 0.4 - height / 2 for i in range(len(names))], names)
    axes.invert_yaxis()
    axes.set(xlabel="time over Hotfuse's: to the right of 1 Hotfuse is faster", title=suite)
    axes.legend(fontsize=8)
    return figure


def traffic(pyplot: Any, case: str, records: Sequence[Record]) -> Any:
    """Requests a second over the serving time, and how many requests took longer than what."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4))
    for r in records:
        calls = np.array(r.extra["calls"])
        ends = calls[:, 0] + calls[:, 1] / 1e3
        edges = np.linspace(0, ends.max(), PARTS + 1)
        done, _ = np.histogram(ends, edges)
        width = 2.4 if r.contender == OURS else 1.2
        left.plot((edges[1:] + edges[:-1]) / 2, done / np.diff(edges), label=r.contender, linewidth=width)
        ordered = np.sort(calls[:, 1])
        right.plot(ordered, 1 - np.arange(len(ordered)) / len(ordered), label=r.contender, linewidth=width)
    left.set(xlabel="seconds of serving, loading included", ylabel="requests a second", title=f"{case}: throughput")
    right.set(xlabel="milliseconds", ylabel="share of requests that took longer", xscale="log", yscale="log",
              title=f"{case}: latencies")
    left.legend(fontsize=8)
    return figure


def roofline(pyplot: Any, records: Sequence[Record], peaks: MachinePeaks) -> Any:
    """What was reached, over operations per byte, under what the machine reaches."""
    figure, axes = pyplot.subplots(figsize=(8, 5))
    x = np.logspace(-1, 3, 100)
    for threads in sorted({r.threads for r in records if r.roofline}):
        rate = peaks.rate("f32", threads)
        for level, style in (("L2", ":"), ("memory", "-")):
            width = peaks.bandwidth(level, "read", threads)
            if rate and width:
                label = f"{level}, {threads} thread{'s' if threads > 1 else ''}"
                axes.plot(x, np.minimum(rate, x * width) / 1e9, style, color="grey", label=label)
    for name, points in reached(records).items():
        axes.scatter(*zip(*points, strict=True), label=name, s=60 if name == OURS else 20, zorder=3 if name == OURS else 2)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="Gop/s", title="roofline (measured peaks)")
    axes.legend(fontsize=8)
    return figure


def reached(records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """Per contender, operations per byte and Gop/s of what is held against the roof: starts and compiling are not."""
    found: dict[str, list[tuple[float, float]]] = {}
    for r in records:
        if r.roofline is not None and r.time is not None and (work := _work(records, r)) is not None:
            point = (work["flops"] / work["bytes"], work["flops"] / r.time.median / 1e6)
            found.setdefault(r.contender, []).append(point)
    return found


def _work(records: Sequence[Record], of: Record) -> dict[str, float] | None:
    """Operations and bytes of a case, as its eager contender counted them; none where there was nothing to multiply."""
    for r in records:
        if (r.suite, r.case) == (of.suite, of.case) and r.extra.get("flops"):
            return r.extra
    return None
