"""What a model of other machines is off by on this one, from its first measurements.

    log(measured / predicted) = everything + family + what binds + a smooth function of the features + problem + chance

Each part is small before anything is known (`USUAL`), so a few samples move predictions a little and many move them where they were
taken: a Gaussian process. `hpm.online` asks which part of a machine has changed since its own model was trained, and says nothing
where no part explains what is seen; a machine that the model never saw differs in all of them a little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import field

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.features import Features
from hotfuse.hpm.model import Correction, Vector, binding
from hotfuse.hpm.work import Matrix

MIN_SAMPLES = 10
"""Fewer say nothing."""
WINDOW = 200
"""The newest samples count."""
CLIP = 1.5
"""Log factors beyond this are hiccups."""
EVERYTHING, FAMILY, BINDING, NEAR, PROBLEM, CHANCE = 0.15, 0.145, 0.06, 0.2, 0.05, 0.1
"""How far, in log time, each part usually lies from what the model says."""
LEAST_SPREAD = 0.3
"""Features that hardly differ among the samples are measured by this: elsewhere they may, and what is far away says little."""


@dataclass(frozen=True, slots=True)
class _Sample:
    x: npt.NDArray[np.float64]
    family: int
    level: int
    off: float
    problem: int


@dataclass(slots=True)
class Nearby(Correction):
    """Samples of one host beside a model of others, and the correction they support."""

    before: Correction
    """What corrects while there are too few."""
    _samples: deque[_Sample] = field(default_factory=lambda: deque[_Sample](maxlen=WINDOW))
    _solved: tuple[Matrix, Matrix, Vector, Vector] | None = None
    """The samples' features and spreads, families with levels, and what each of them adds; None until it is asked for."""

    def observe(self, found: Features, off: Vector, problems: Sequence[Hashable]) -> None:
        """Measurements next to what the uncorrected model predicted for them."""
        x, levels, clipped = _plain(found), binding(found), np.clip(off, -CLIP, CLIP)
        for i, problem in enumerate(problems):
            self._samples.append(_Sample(x[i], int(found.family[i]), int(levels[i]), float(clipped[i]), hash(problem)))
        self._solved = None

    def of(self, found: Features, level: npt.NDArray[np.int64]) -> Vector:
        """Log factors for predictions."""
        if len(self._samples) < MIN_SAMPLES:
            return self.before.of(found, level)
        if self._solved is None:
            self._solved = self._solve()
        x, kinds, spread, adds = self._solved
        asked = np.stack([found.family.astype(np.float64), level.astype(np.float64)], 1)
        return _alike(_plain(found) / spread, asked, x, kinds) @ adds

    def _solve(self) -> tuple[Matrix, Matrix, Vector, Vector]:
        samples = list(self._samples)
        raw = np.stack([s.x for s in samples])
        spread = np.maximum(raw.std(0), LEAST_SPREAD)
        x, kinds = raw / spread, np.array([[s.family, s.level] for s in samples], np.float64)
        problem, off = np.array([s.problem for s in samples]), np.array([s.off for s in samples])
        known = _alike(x, kinds, x, kinds) + PROBLEM**2 * (problem[:, None] == problem) + CHANCE**2 * np.eye(len(off))
        return x, kinds, spread, np.linalg.solve(known, off).astype(np.float64)


def _plain(found: Features) -> Matrix:
    return np.nan_to_num(found.x.astype(np.float64))


def _alike(x: Matrix, kinds: Matrix, other: Matrix, others: Matrix) -> Matrix:
    """How much of what two kernels are off by they have in common, each with each."""
    family, bound = (kinds[:, i, None] == others[None, :, i] for i in range(2))
    apart = (x**2).sum(1)[:, None] + (other**2).sum(1) - 2 * x @ other.T
    near = np.exp(-np.sqrt(np.maximum(apart, 0.0) / x.shape[1]))
    return EVERYTHING**2 + family * (FAMILY**2 + NEAR**2 * near) + BINDING**2 * bound
