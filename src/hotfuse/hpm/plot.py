"""Predicted against measured times, as a picture: PNG, SVG or PDF by the file's ending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hotfuse.base.errors import InputError
from hotfuse.hpm.evaluation import HeldOut
from hotfuse.hpm.work import FAMILIES, families

ENDINGS = (".png", ".svg", ".pdf")


def draw(held: HeldOut, path: Path) -> None:
    """Write the picture; what it shows was predicted by models that had not seen it."""
    if path.suffix not in ENDINGS:
        raise InputError(f"{path} is no picture", hint="a file that ends in " + ", ".join(ENDINGS))
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window system, no global state
        from matplotlib.figure import Figure
    except ImportError as e:
        raise InputError("pictures need matplotlib", because=str(e), hint="pip install 'hotfuse[plots]'") from e
    figure = Figure(figsize=(7, 6.5))
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    measured, predicted = held.samples.seconds * 1e6, held.predicted * 1e6
    kind = families(held.samples.table)
    for i, name in enumerate(FAMILIES):
        if (kind == i).any():
            axes.scatter(measured[kind == i], predicted[kind == i], s=6, alpha=0.5, label=name)
    ends = np.array([max(min(measured.min(), predicted.min()) / 2, 1e-3), max(measured.max(), predicted.max()) * 2])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.8, 1.2):
        axes.plot(ends, ends * factor, color="gray", linewidth=0.6, linestyle=":")
    score = held.overall
    axes.set(xscale="log", yscale="log", xlabel="measured, µs", ylabel="predicted, µs", xlim=ends, ylim=ends)
    axes.set_title(
        f"{int(score['n'])} kernels over 5 µs, held out: MAPE {score['mape']:.1%}, within 20% {score['within20']:.0%}"
    )
    axes.legend(markerscale=2, fontsize=8)
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except OSError as e:
        raise InputError(f"{path} cannot be written", because=e.strerror or str(e)) from e
