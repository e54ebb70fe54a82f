"""While the machine was slower than it is: calibration takes minutes, and neighbours or the clock slow a machine for some of them.

Everything that is measured within the same seconds is slowed alike. So the rows are cut into windows of time, and each window's
median of measured over predicted times is taken, with models that saw other problems. A window whose median lies above that of the
quickest windows was slow, and its times are divided by the ratio. Neighbours slow a machine and never speed it up, so the quickest
windows near in time show the machine itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
PAUSE_S, MAX_S = 0.2, 6.0
"""A window ends where nothing was measured for so long, and goes on for so long at most."""
MIN_ROWS, MIN_PROBLEMS = 30, 5
"""A window of fewer may lie apart because the model misses them."""
COMPARED_WITHIN_S = 300.0
"""Windows are held against those within so many seconds: a machine that has become slower for good is what it is now."""
QUICKEST = 0.3
"""So many of their rows lie in windows that are taken for the machine as it is."""
NOTHING = 0.03
"""Log factors below this are left alone: predictions miss whole windows by so much."""


def windows(at: Vector) -> Whole:
    """The number of each row's window."""
    found = np.zeros(len(at), np.int64)
    number, rows, begun, last = 0, 0, -np.inf, -np.inf
    for i in np.argsort(at, kind="stable"):
        if (at[i] - last > PAUSE_S and rows >= MIN_ROWS) or at[i] - begun > MAX_S:
            number, rows, begun = number + 1, 0, at[i]
        found[i], rows, last = number, rows + 1, at[i]
    return found


def slowed(at: Vector, off: Vector, problem: Whole) -> Vector:
    """Log factors by which rows were slowed, 0 for most; `off` is log(measured / predicted)."""
    found, window = np.zeros(len(at)), windows(at)
    known = [own for w in np.unique(window) if _tells(own := np.flatnonzero(window == w), problem)]
    when = np.array([np.median(at[own]) for own in known])
    middle = np.array([np.median(off[own]) for own in known])
    count = np.array([len(own) for own in known])
    for own, t, m in zip(known, when, middle, strict=True):
        near = np.abs(when - t) <= COMPARED_WITHIN_S
        slower = m - _quickest(middle[near], count[near])
        if slower > NOTHING:
            found[own] = slower
    return found


def summary(slow: Vector) -> dict[str, float]:
    """Which part of all rows was slowed, and by how much as a rule."""
    by = float(np.expm1(np.median(slow[slow > 0]))) if slow.any() else 0.0
    return {"rows": float((slow > 0).mean()) if len(slow) else 0.0, "by": by}


def _tells(own: Whole, problem: Whole) -> bool:
    return len(own) >= MIN_ROWS and len(np.unique(problem[own])) >= MIN_PROBLEMS


def _quickest(middle: Vector, count: Whole) -> float:
    """Where the quickest windows end that hold so many of all rows."""
    order = np.argsort(middle)
    rows = np.cumsum(count[order])
    return float(middle[order][np.searchsorted(rows, QUICKEST * rows[-1])])
