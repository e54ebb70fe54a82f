"""Which part of a machine has changed, from how far measurements lie from predictions.

    log(measured / predicted) = everything + family + memory level + error

Errors have long tails, and each family has a spread of its own (products far less than reductions). So a part is found by how much
likelier it makes the measurements, with Student's t as the likelihood: two products that read the third-level cache and take 1.6
times as long say more than ten reductions do. A part must explain more than chance explains (`MIN_GAIN`), parts are fitted
together, and one that is no longer needed beside the others goes again. A problem counts once, however often and in however many
variants it was measured: the model misses all of them alike.

Samples from before a change are forgotten: if the newest samples of a part contradict its correction, the older ones are dropped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.work import FAMILIES
from hotfuse.machine.peaks import LEVELS

Vector = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]
PARTS = 1 + len(FAMILIES) + len(LEVELS)
"""Everything, then each family, then each memory level."""
MIN_SAMPLES = 10
"""Samples before anything is said: fewer do more harm than good."""
_BY_KIND = (1, len(FAMILIES), len(LEVELS))
PROBLEMS = np.repeat((4.0, 3.0, 3.0), _BY_KIND)
"""Problems that a part must have been met in: fewer may be missed alike by chance."""
MIN_GAIN = np.repeat((4.0, 7.0, 3.5), _BY_KIND)
"""How much likelier a part must make what was seen, as a logarithm. Families need most, since models err by families too."""
FLOOR = np.repeat((0.1, 0.18, 0.18), _BY_KIND)
"""Log factors smaller than this are nothing: a family that is off by so much may be the model's error as well."""
FASTER = 2.0
"""A part that is faster than when it was calibrated must explain so many times more: machines slow down, models err both ways."""
STAYS = 2.0
"""How much less a part must explain that is corrected already: corrections do not come and go with single samples."""
MAX_PARTS = 3
TAIL = 3.0
"""Degrees of freedom of the errors."""
USUAL, USUAL_COUNTS, NARROWEST = 0.12, 6.0, 0.06
"""How wide errors are before a family's own are known, how many samples that counts for, and the least that is believed."""
HALF_LIFE = 10.0
"""Samples of the same family and level after which one counts half."""
NEWEST = (3, 5, 8, 12, 20)
"""So many samples of a part are looked at for a change; of a sudden one the fewest tell first, of a small one more are needed."""
SURPRISE = 2.0
"""How much more than its worth a change must explain before what was is forgotten."""
MIN_CHANGE = 0.15
_STEPS = 6


@dataclass(frozen=True, slots=True)
class MeasuredBesidePredicted:
    """Measurements beside predictions, the newest last."""

    family: Whole
    level: Whole
    """-1: arithmetic."""
    off: Vector
    """log(measured / predicted)"""
    problem: Whole

    def __len__(self) -> int:
        return len(self.off)


def design(family: Whole, level: Whole) -> Vector:
    """Which parts a kernel belongs to: 1 or 0, a row a kernel."""
    found = np.zeros((len(family), PARTS))
    found[:, 0] = 1.0
    own = np.arange(len(family))
    found[own, 1 + family] = 1.0
    known = level >= 0
    found[own[known], 1 + len(FAMILIES) + level[known]] = 1.0
    return found


def explained(seen: MeasuredBesidePredicted, before: Vector) -> Vector:
    """Log factors by part, 0 for those that stay as they were; `before` is what was said last."""
    found = np.zeros(PARTS)
    if len(seen) < MIN_SAMPLES:
        return found
    x, weight = design(seen.family, seen.level), _weights(seen)
    scale = _scales(seen, weight)
    fit = _Fit(seen.off, x, scale, weight)
    stays = STAYS * (before != 0)
    met = _problems(seen, x)
    parts: list[int] = []
    shifts = np.zeros(0)
    while len(parts) < MAX_PARTS:
        left = seen.off - x[:, parts] @ shifts
        gain, shift = fit.gain_of_each(left)
        gain = gain - _asked(shift) + stays
        gain[(met < PROBLEMS) | np.isin(np.arange(PARTS), parts)] = -1.0
        best = int(gain.argmax())
        if gain[best] <= 0:
            break
        parts.append(best)
        shifts = fit.together(parts)
    parts, shifts = _needed(fit, parts, shifts, stays)
    found[parts] = shifts
    return found


def _asked(shift: Vector) -> Vector:
    """What each part must explain, moved by so much; everything may as well be faster, as clocks are."""
    return MIN_GAIN * np.where((shift < 0) & (np.arange(PARTS) > 0), FASTER, 1.0)


def _needed(fit: _Fit, parts: list[int], shifts: Vector, stays: Vector) -> tuple[list[int], Vector]:
    """Without the parts that the others make superfluous, the least needed first."""
    while parts:
        whole = fit.loss(fit.off - fit.x[:, parts] @ shifts)
        needed, all_shifts = np.empty(len(parts)), np.zeros(PARTS)
        all_shifts[parts] = shifts
        asked = _asked(all_shifts) - stays
        for i, part in enumerate(parts):
            rest = [p for p in parts if p != part]
            needed[i] = fit.loss(fit.off - fit.x[:, rest] @ fit.together(rest)) - whole - asked[part]
        needed[np.abs(shifts) < FLOOR[parts]] = -1.0
        least = int(needed.argmin())
        if needed[least] > 0:
            break
        parts = parts[:least] + parts[least + 1 :]
        shifts = fit.together(parts)
    return parts, shifts


def outdated(seen: MeasuredBesidePredicted, parts: Vector) -> npt.NDArray[np.bool_] | None:
    """Samples from before a change that a correction by `parts` does not know of; None where nothing changed."""
    x, weight = design(seen.family, seen.level), _weights(seen)
    scale, left = _scales(seen, weight), seen.off - x @ parts
    most, found = 0.0, None
    for part in range(PARTS):
        own = np.flatnonzero(x[:, part])
        for count in NEWEST:
            if count + 2 > len(own):
                break
            newest = own[-count:]
            middle = float(np.median(left[newest]))
            if abs(middle) < MIN_CHANGE:
                continue
            _, which, times = np.unique(seen.problem[newest], return_inverse=True, return_counts=True)
            once, wide = 1.0 / times[which], scale[newest]
            gain = _loss(left[newest], wide, once) - _loss(left[newest] - middle, wide, once) - MIN_GAIN[part] - SURPRISE
            if gain > most:
                most, found = gain, own[:-count]
    if found is None or len(seen) - len(found) < MIN_SAMPLES:  # a change of everything waits until enough samples tell of it
        return None
    old = np.zeros(len(seen), bool)
    old[found] = True
    return old


@dataclass(frozen=True, slots=True)
class _Fit:
    """Fitting shifts of parts to samples, by iterated weighted means."""

    off: Vector
    x: Vector
    scale: Vector
    weight: Vector

    def loss(self, left: Vector) -> float:
        return _loss(left, self.scale, self.weight)

    def gain_of_each(self, left: Vector) -> tuple[Vector, Vector]:
        """How much likelier each part alone makes what is left, and by how much it is moved for that."""
        precise = self.weight / self.scale
        shift = np.array([_middle(left[own], precise[own]) if own.any() else 0.0 for own in self.x.T > 0])
        for _ in range(_STEPS):
            trust = self.x * self._trust(left[:, None] - shift)
            shift = (trust * left[:, None]).sum(0) / np.maximum(trust.sum(0), 1e-30)
        apart = (left[:, None] - shift * self.x) / self.scale[:, None]
        after = (self.weight[:, None] * (TAIL + 1) / 2 * np.log1p(apart**2 / TAIL)).sum(0)
        return self.loss(left) - after, shift

    def together(self, parts: list[int]) -> Vector:
        """Shifts of these parts that explain the samples best."""
        x, shift, precise = self.x[:, parts], np.zeros(len(parts)), self.weight / self.scale
        for i in range(len(parts)):
            own = x[:, i] > 0
            shift[i] = _middle((self.off - x @ shift)[own], precise[own])
        for _ in range(_STEPS if parts else 0):
            trust = self._trust((self.off - x @ shift)[:, None])
            normal = x.T @ (trust * x) + 1e-6 * np.eye(len(parts))
            shift = np.linalg.solve(normal, x.T @ (trust[:, 0] * self.off)).astype(np.float64)
        return shift

    def _trust(self, left: Vector) -> Vector:
        return (self.weight / self.scale**2)[:, None] / (1 + (left / self.scale[:, None]) ** 2 / TAIL)


def _weights(seen: MeasuredBesidePredicted) -> Vector:
    """What a sample counts: less where newer ones of its family and level are known, and a problem once in all."""
    weight = np.empty(len(seen))
    cell = seen.family * (len(LEVELS) + 1) + seen.level + 1
    for c in np.unique(cell):
        own = np.flatnonzero(cell == c)
        weight[own] = 0.5 ** (np.arange(len(own))[::-1] / HALF_LIFE)
    _, which = np.unique(seen.problem, return_inverse=True)
    total, most = np.bincount(which, weight), np.zeros(which.max() + 1)
    np.maximum.at(most, which, weight)
    return weight * (most / total)[which]


def _scales(seen: MeasuredBesidePredicted, weight: Vector) -> Vector:
    """How wide the errors of each sample's family are, whatever the family as a whole is off by."""
    scale = np.empty(len(seen))
    for f in np.unique(seen.family):
        own = seen.family == f
        off, w = seen.off[own], weight[own]
        spread = 1.48 * _middle(np.abs(off - _middle(off, w)), w)
        count = float(w.sum())
        scale[own] = np.sqrt((USUAL_COUNTS * USUAL**2 + count * spread**2) / (USUAL_COUNTS + count))
    return np.maximum(scale, NARROWEST)


def _problems(seen: MeasuredBesidePredicted, x: Vector) -> Vector:
    """In how many problems each part was met."""
    _, which = np.unique(seen.problem, return_inverse=True)
    met = np.zeros((which.max() + 1, PARTS))
    np.maximum.at(met, which, x)
    return met.sum(0)


def _middle(values: Vector, weight: Vector) -> float:
    """The weighted median."""
    order = np.argsort(values)
    sums = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(sums, sums[-1] / 2)])


def _loss(left: Vector, scale: Vector, weight: Vector) -> float:
    return float((weight * (TAIL + 1) / 2 * np.log1p((left / scale) ** 2 / TAIL)).sum())
