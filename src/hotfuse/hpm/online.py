"""Corrections per host from what serving measures: the machine drifts, the model need not be trained again for that.

    log(measured / predicted) = everything + family + memory level + noise

A part (everything, one family, one level) is corrected by the median of its newest samples, the one that explains most first, as
long as that median is far beyond what chance does to it. Nothing is corrected before there are ten samples: a machine that did not
change is left alone.
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
LEAST_OF_FAMILY, LEAST_OF_LEVEL = 9, 4
"""The same of a part. Few samples of a family are often one problem in several ways, which the model misses alike; a memory level
is met by all families."""
WINDOW = 160
OWN, OWN_OF_ALL = 20, 40
"""Samples of a part that count, the newest: what was before a change is forgotten after so many. Every sample is one of the machine
as a whole, which is therefore known twice as well: its correction must not waver with the last few of them."""
RECENT = 40
"""Samples on which parts are compared: the one wins that explains most of them. Of a part that is met more rarely, as many as it
needs count, however old: that nobody met it lately does not speak against its correction."""
HALF_LIFE = 0.4
"""Part of these after which a sample counts half."""
CLIP = 1.5
"""Log factors beyond this are hiccups."""
SURE = 3.5
"""Standard errors that a correction must be away from none."""
FLOOR = 0.1
"""Log factors smaller than this are nothing."""
SPREAD = 0.12
"""The least that samples are thought to lie apart: a few that happen to agree prove nothing."""
MOST_PARTS = 4
_COLUMNS = 1 + len(FAMILIES) + len(LEVELS)
_NEEDED = (LEAST, *[LEAST_OF_FAMILY] * len(FAMILIES), *[LEAST_OF_LEVEL] * len(LEVELS))


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

    _samples: deque[tuple[int, int, float]] = field(
        default_factory=lambda: deque[tuple[int, int, float]](maxlen=WINDOW)
    )
    _parts: Vector = field(default_factory=lambda: np.zeros(_COLUMNS))
    seen: int = 0
    _told: float = 0.0
    _since: int = 0
    """Samples since the machine's speed was told."""

    def told(self, slower_by: float, since: int = 0) -> None:
        """The machine's own probe runs so many times slower, for so many samples already: that counts until enough of them speak
        for themselves.
        """
        self._told, self._since = float(np.log(slower_by)) if slower_by > 0 else 0.0, since

    def observe(self, family: int, level: int, predicted_s: float, measured_s: float) -> None:
        """One measurement next to what the *uncorrected* model predicted for it."""
        if predicted_s > 0 and measured_s > 0:
            self.observe_all([(family, level, float(np.log(measured_s / predicted_s)))])

    def observe_all(self, residuals: Iterable[tuple[int, int, float]]) -> None:
        """Several: family, level (-1: arithmetic), log(measured / predicted)."""
        for family, level, off in residuals:
            self._samples.append((family, level, float(np.clip(off, -CLIP, CLIP))))
            self.seen += 1
            self._since += 1
        self._parts = self._solved()

    def _solved(self) -> Vector:
        found = np.zeros(_COLUMNS)
        if len(self._samples) < LEAST:
            return found
        family, level, off = (np.array(c) for c in zip(*self._samples, strict=True))
        design = _design(family.astype(np.int64), level.astype(np.int64)) > 0
        off = off.astype(np.float64)
        recent = np.arange(len(off)) >= len(off) - RECENT
        for _ in range(MOST_PARTS):
            best, gain, shift = -1, 0.0, 0.0
            for part in range(_COLUMNS):
                most = OWN if part else OWN_OF_ALL
                own = np.flatnonzero(design[:, part])[-most:]
                if len(own) < _NEEDED[part]:
                    continue
                middle = _certain(off[own], most)
                touched = off[np.union1d(np.flatnonzero(design[:, part] & recent), own[-_NEEDED[part] :])]
                saved = float((np.abs(touched) - np.abs(touched - middle)).sum())
                if middle and saved > gain:
                    best, gain, shift = part, saved, middle
            if best < 0:
                break
            found[best] += shift
            off = off - shift * design[:, best]
        return found

    def shift(self, family: npt.NDArray[np.int64], level: npt.NDArray[np.int64]) -> Vector:
        """Log factors for predictions."""
        if not self._parts.any():
            return np.full(len(family), self._told if self._since < LEAST else 0.0)
        return _design(family, level) @ self._parts

    @property
    def drifted(self) -> Drifted:
        """What the samples say has changed."""
        p = self._parts
        families = {n: float(p[1 + i]) for i, n in enumerate(FAMILIES) if p[1 + i]}
        levels = {n: float(p[1 + len(FAMILIES) + i]) for i, n in enumerate(LEVELS) if p[1 + len(FAMILIES) + i]}
        everything = float(p[0]) if p.any() or self._since >= LEAST else self._told
        return Drifted(everything, families, levels, len(self._samples))


def _design(family: npt.NDArray[np.int64], level: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    design = np.zeros((len(family), _COLUMNS))
    design[:, 0] = 1.0
    own = np.arange(len(family))
    design[own, 1 + family] = 1.0
    known = level >= 0
    design[own[known], 1 + len(FAMILIES) + level[known]] = 1.0
    return design


def _certain(off: Vector, most: int) -> float:
    """The weighted median of residuals, newest last, of which so many count; 0 where it may well be chance."""
    weight = 0.5 ** (np.arange(len(off))[::-1] / (HALF_LIFE * most))
    weight = weight / weight.sum()
    order = np.argsort(off)
    middle = float(off[order][np.searchsorted(np.cumsum(weight[order]), 0.5)])
    apart = np.abs(off - middle)
    by = np.argsort(apart)
    spread = 1.48 * float(apart[by][np.searchsorted(np.cumsum(weight[by]), 0.5)])
    error = 1.25 * max(spread, SPREAD) * float(np.sqrt((weight**2).sum()))
    return middle if abs(middle) > max(FLOOR, SURE * error) else 0.0
