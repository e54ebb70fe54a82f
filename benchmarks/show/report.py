"""The demonstration's report: one HTML file with its pictures inside."""

from __future__ import annotations

import html
import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.show.run import Run

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1b1f24 }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem } svg { max-width: 100%; height: auto }
table { border-collapse: collapse } td, th { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid #d8dee4 }
pre { background: #f6f8fa; padding: 1rem; overflow: auto; font-size: 12px }
"""
INTRODUCTION = """A text recognizer read lines of print, one after another. Hotfuse began with the model as it is, so the first
answer came at once. While it served, another process captured the model, generated fused kernels for it and tried them; each was
proven against the model's own answers and had to be faster before it was swapped in, between two calls. At the dotted line the
traffic changed: the lines became longer."""


def write(folder: Path, run: Run, explanation: Any) -> Path:
    """The report's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(f"<tr><td>{html.escape(line)}</td></tr>" for line in run.events(200))
    parts = [
        "<h1>Hotfuse: a model that gets faster while it serves</h1>", f"<p>{INTRODUCTION}</p>",
        f"<pre>{html.escape(run.verdict())}</pre>", *pictures(run), "<h2>What was decided, and why</h2>", f"<table>{rows}</table>",
        "<h2>explain(full=True)</h2>",
        f"<details><summary>everything</summary><pre>{html.escape(explanation.text(full=True))}</pre></details>",
    ]  # fmt: skip
    path = folder / "report.html"
    path.write_text(
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Hotfuse</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>", encoding="utf-8",
    )  # fmt: skip
    return path


def pictures(run: Run) -> list[str]:
    """Speed over time and latencies, as SVG; a sentence where they cannot be drawn."""
    if not run.calls:
        return ["<p>No call was served.</p>"]
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as e:
        return [f"<p>No pictures: {html.escape(str(e))} (pip install hotfuse[plots])</p>"]
    figure, (over_time, spread) = pyplot.subplots(2, 1, figsize=(9, 8))
    edges = np.linspace(0, run.seconds, 61)
    middle = (edges[1:] + edges[:-1]) / 2
    for b in run.baselines:
        speeds = [run.against(b, begin, end) or np.nan for begin, end in itertools.pairwise(edges)]
        over_time.plot(middle, speeds, label=f"over {b.name}")
    over_time.axhline(1, color="black", linewidth=0.8)
    over_time.axvline(run.shift * run.seconds, color="grey", linestyle=":")
    for d in run.decisions:
        if d["action"] == "deploy" and d["at"] < run.seconds:
            over_time.axvline(d["at"], color="tab:green", alpha=0.25, linewidth=1)
    over_time.set(xlabel="seconds since the first call", ylabel="times faster", ylim=(0, None),
                  title="speed (green: something was swapped in)")
    over_time.legend()
    phases = (("first tenth", 0.0, 0.1), ("before the lines got longer", 0.1, run.shift), ("afterwards", run.shift, 2.0))
    for name, begin, end in phases:
        ms = np.sort([c.seconds * 1e3 for c in run.recent(begin * run.seconds, end * run.seconds)])
        if len(ms):
            spread.plot(ms, 1 - np.arange(len(ms)) / len(ms), label=name)
    spread.set(xscale="log", yscale="log", xlabel="milliseconds", ylabel="share of calls that took longer", title="latencies")
    spread.legend()
    figure.tight_layout()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    pyplot.close(figure)
    text = drawn.getvalue()
    return [text[text.index("<svg") :]]
