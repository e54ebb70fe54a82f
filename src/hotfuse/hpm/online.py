"""Corrections per host from what serving measures: the machine drifts, the model need not be trained again for that.

    observe   a measurement next to what the uncorrected model predicted for it
    shift     log factors for predictions, as far as the samples support them (`hpm.drifting`)

Nothing is corrected before there are ten samples: a machine that did not change is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import field

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.drifting import MIN_SAMPLES, PARTS, MeasuredBesidePredicted, design, explained, outdated
from hotfuse.hpm.model import Correction, Vector
from hotfuse.hpm.work import FAMILIES
from hotfuse.machine.peaks import LEVELS

WINDOW = 160
CLIP = 1.5
"""Log factors beyond this are hiccups."""
_STEP = 5
"""Samples of a batch after which it is asked what changed: the newest tell, not those from before and behind a change together."""
_CHANGES = 3
"""Parts that may be found to have changed by so many samples."""
_Sample = tuple[int, int, float, int]


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

    _samples: deque[_Sample] = field(default_factory=lambda: deque[_Sample](maxlen=WINDOW))
    _parts: Vector = field(default_factory=lambda: np.zeros(PARTS))
    seen: int = 0
    _told: float = 0.0
    _since: int = 0
    """Samples since the machine's speed was told."""

    def note_slowdown(self, slower_by: float, since: int = 0) -> None:
        """The machine's own probe runs so many times slower, for so many samples already: that counts until enough of them speak
        for themselves.
        """
        self._told, self._since = float(np.log(slower_by)) if slower_by > 0 else 0.0, since

    def observe(
        self, family: int, level: int, predicted_s: float, measured_s: float, problem: Hashable | None = None
    ) -> None:
        """One measurement next to what the *uncorrected* model predicted for it."""
        if predicted_s > 0 and measured_s > 0:
            problems = () if problem is None else (problem,)
            self.observe_all([(family, level, float(np.log(measured_s / predicted_s)))], problems)

    def observe_all(self, residuals: Iterable[tuple[int, int, float]], problems: Sequence[Hashable] = ()) -> None:
        """Several: family, level (-1: arithmetic), log(measured / predicted); whose problem's way each is, unless all differ."""
        for nth, (family, level, off) in enumerate(residuals):
            if nth and nth % _STEP == 0:
                self._learn()
            self.seen += 1
            self._since += 1
            problem = hash(problems[nth]) if problems else -self.seen
            self._samples.append((family, level, float(np.clip(off, -CLIP, CLIP)), problem))
        self._learn()

    def _learn(self) -> None:
        """Say anew what changed; samples from before a change go."""
        if len(self._samples) < MIN_SAMPLES:
            return
        self._parts = explained(self._arrays(), self._parts)
        for _ in range(_CHANGES):
            old = outdated(self._arrays(), self._parts)
            if old is None:
                break
            kept = (s for s, gone in zip(self._samples, old.tolist(), strict=True) if not gone)
            self._samples = deque(kept, maxlen=WINDOW)
            self._parts = explained(self._arrays(), self._parts)

    def _arrays(self) -> MeasuredBesidePredicted:
        family, level, off, problem = zip(*self._samples, strict=True)
        return MeasuredBesidePredicted(np.array(family), np.array(level), np.array(off, np.float64), np.array(problem))

    def shift(self, family: npt.NDArray[np.int64], level: npt.NDArray[np.int64]) -> Vector:
        """Log factors for predictions."""
        if not self._parts.any():
            return np.full(len(family), self._told if self._since < MIN_SAMPLES else 0.0)
        return design(family, level) @ self._parts

    @property
    def drifted(self) -> Drifted:
        """What the samples say has changed."""
        p = self._parts
        families = {n: float(p[1 + i]) for i, n in enumerate(FAMILIES) if p[1 + i]}
        levels = {n: float(p[1 + len(FAMILIES) + i]) for i, n in enumerate(LEVELS) if p[1 + len(FAMILIES) + i]}
        everything = float(p[0]) if p.any() or self._since >= MIN_SAMPLES else self._told
        return Drifted(everything, families, levels, len(self._samples))
