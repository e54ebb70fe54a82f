"""Corrections per host from what serving measures: the machine drifts, the model need not be trained again for that.

    log(measured / predicted) = everything + family + memory level + noise

Weighted ridge over the newest samples, nothing before there are ten. A part counts only as far as the samples support it, and
the whole only when it explains them better than no correction: a machine that did not change is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hotfuse.hpm.model import Correction, Vector
from hotfuse.hpm.work import FAMILIES
from hotfuse.machine.peaks import LEVELS

LEAST = 10
"""Samples before anything is corrected: fewer do more harm than good."""
WINDOW = 64
HALF_LIFE = 16.0
"""Samples after which one counts half."""
CLIP = 1.5
"""Log factors beyond this are hiccups."""
PRIOR = {"everything": 0.25, "family": 2.0, "level": 2.0}
"""Samples' worth of belief that a part has not changed."""
GAIN = 0.25
"""The part of the squared error that a correction must explain."""
FLOOR = 0.02
"""Log factors smaller than this are nothing."""
_COLUMNS = 1 + len(FAMILIES) + len(LEVELS)


@dataclass(frozen=True, slots=True)
class Drifted:
    """What has changed, as log factors."""

    everything: float
    family: dict[str, float]
    level: dict[str, float]
    samples: int

    @property
    def any(self) -> bool:
        """Whether something has."""
        return bool(self.everything or self.family or self.level)


@dataclass(slots=True)
class Online(Correction):
    """Samples of one host and the correction they support."""

    _samples: deque[tuple[int, int, float]] = field(default_factory=lambda: deque[tuple[int, int, float]](maxlen=WINDOW))
    _parts: Vector = field(default_factory=lambda: np.zeros(_COLUMNS))
    seen: int = 0

    def observe(self, family: int, level: int, predicted_s: float, measured_s: float) -> None:
        """One measurement next to what the *uncorrected* model predicted for it."""
        if predicted_s > 0 and measured_s > 0:
            self.observe_all([(family, level, float(np.log(measured_s / predicted_s)))])

    def observe_all(self, residuals: Iterable[tuple[int, int, float]]) -> None:
        """Several: family, level (-1: arithmetic), log(measured / predicted)."""
        for family, level, off in residuals:
            self._samples.append((family, level, float(np.clip(off, -CLIP, CLIP))))
            self.seen += 1
        self._parts = self._solved()

    def _solved(self) -> Vector:
        n = len(self._samples)
        if n < LEAST:
            return np.zeros(_COLUMNS)
        family, level, off = (np.array(c) for c in zip(*self._samples, strict=True))
        weight = 0.5 ** (np.arange(n)[::-1] / HALF_LIFE)
        design = _design(family.astype(np.int64), level.astype(np.int64))
        prior = np.repeat([PRIOR["everything"], PRIOR["family"], PRIOR["level"]], (1, len(FAMILIES), len(LEVELS)))
        best, least = np.zeros(_COLUMNS), float((weight * off**2).sum()) * (1 - GAIN)
        # The simplest account that explains enough wins: everything alone, then with families, with levels, with both.
        for parts in ((True, False, False), (False, True, False), (False, False, True), (True, True, True)):
            use = np.repeat(parts, (1, len(FAMILIES), len(LEVELS)))
            solved = _robust(design[:, use], off, weight, prior[use])
            error = float((weight * np.minimum((off - design[:, use] @ solved) ** 2, 0.25)).sum())
            if error < least * 0.85 or (not best.any() and error < least):
                best = np.zeros(_COLUMNS)
                best[use] = solved
                least = error
        best[np.abs(best) < FLOOR] = 0.0
        return best

    def shift(self, family: npt.NDArray[np.int64], level: npt.NDArray[np.int64]) -> Vector:
        """Log factors for predictions."""
        return _design(family, level) @ self._parts if self._parts.any() else np.zeros(len(family))

    @property
    def drifted(self) -> Drifted:
        """What the samples say has changed."""
        p = self._parts
        families = {n: float(p[1 + i]) for i, n in enumerate(FAMILIES) if p[1 + i]}
        levels = {n: float(p[1 + len(FAMILIES) + i]) for i, n in enumerate(LEVELS) if p[1 + len(FAMILIES) + i]}
        return Drifted(float(p[0]), families, levels, len(self._samples))


def _design(family: npt.NDArray[np.int64], level: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    design = np.zeros((len(family), _COLUMNS))
    design[:, 0] = 1.0
    own = np.arange(len(family))
    design[own, 1 + family] = 1.0
    known = level >= 0
    design[own[known], 1 + len(FAMILIES) + level[known]] = 1.0
    return design


def _robust(design: npt.NDArray[np.float64], off: Vector, weight: Vector, prior: Vector) -> Vector:
    """Ridge with outliers weighted down, twice."""
    solved = np.zeros(design.shape[1])
    trust = weight
    for _ in range(3):
        normal = (design * trust[:, None]).T @ design + np.diag(prior)
        solved = np.asarray(np.linalg.solve(normal, design.T @ (trust * off)), np.float64)
        apart = np.abs(off - design @ solved)
        scale = max(float(np.median(apart)) * 3.0, 0.05)
        trust = weight * np.minimum(1.0, scale / np.maximum(apart, 1e-9))
    return solved
