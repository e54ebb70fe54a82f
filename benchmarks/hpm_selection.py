"""What the choice by a model costs, how well it orders candidates, and how fast samples of calls correct it, for `benchmarks.hpm`.

Regret is scored on labels that were not used to find the best candidate: a second measurement of the same kernels, or the
measured minimum would favour a candidate that was lucky.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotfuse.hpm import model as models
from hotfuse.hpm.features import derive
from hotfuse.hpm.model import LENGTHS, TrainingRows, Vector, accuracy
from hotfuse.hpm.online import Online
from hotfuse.hpm.roofline import Roofline
from hotfuse.hpm.work import FAMILIES

APART = 0.03
"""Candidates nearer than this have no order."""


def learned(
    samples: TrainingRows, predicted: Vector, at: Roofline, count: int = 20, seed: int = 0
) -> tuple[Online, npt.NDArray[np.bool_]]:
    """What some online samples teach, and which samples were not among those."""
    found = derive(samples.table, at)
    level = models.binding(found)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(samples.seconds > LENGTHS[0]))[:count]
    online = Online()
    off = np.log(samples.seconds / predicted)
    online.observe_all(
        ((int(found.family[i]), int(level[i]), float(off[i])) for i in order), samples.group[order].tolist()
    )
    rest = np.ones(len(samples), bool)
    rest[order] = False
    return online, rest


@dataclass(frozen=True, slots=True)
class SelectionTrial:
    """Candidates of one problem: predicted, measured once to find the best, measured again to score."""

    predicted: Vector
    first: Vector
    second: Vector


@dataclass(frozen=True, slots=True)
class PairOrder:
    """Pairs of candidates whose first labels differ by so much."""

    pairs: int = 0
    """Those that both labels put in the same order: what is judged."""
    right: int = 0
    turned: int = 0
    """Those that the second labels put in the other order."""

    @property
    def accuracy(self) -> float:
        """How often predictions have the order of both labels."""
        return self.right / self.pairs if self.pairs else float("nan")

    @property
    def ceiling(self) -> float:
        """What who knows all true times would reach: as many pairs as turned agree by chance, half of them the wrong way."""
        return 1 - 0.5 * min(1.0, self.turned / self.pairs) if self.pairs else float("nan")

    def __add__(self, other: PairOrder) -> PairOrder:
        return PairOrder(self.pairs + other.pairs, self.right + other.right, self.turned + other.turned)


BY = (APART, 0.06, 0.12, 0.3, float("inf"))
"""Differences that pairs are told apart by."""


def orders(choices: Sequence[SelectionTrial]) -> dict[float, PairOrder]:
    """Pairs that differ by more than 3%, by the least difference of their part."""
    found = dict.fromkeys(BY[:-1], PairOrder())
    for c in choices:
        for i, j in itertools.combinations(range(len(c.first)), 2):
            ratio, again = c.first[i] / c.first[j], c.second[i] / c.second[j]
            more = max(ratio, 1 / ratio)
            part = next((low for low, high in itertools.pairwise(BY) if 1 + low < more <= 1 + high), None)
            if part is not None:
                same, right = (ratio > 1) == (again > 1), (c.predicted[i] > c.predicted[j]) == (ratio > 1)
                found[part] += PairOrder(int(same), int(same and right), int(not same))
    return found


def pair_accuracy(choices: Sequence[SelectionTrial]) -> float:
    """How often two candidates that differ by more than 3% are put in the right order."""
    return sum(orders(choices).values(), PairOrder()).accuracy


def regret(choices: Sequence[SelectionTrial], top: int = 1) -> Vector:
    """What the chosen candidate takes more than the best: of the `top` by prediction, the one measured fastest is chosen."""
    found: list[float] = []
    for c in choices:
        few = np.argsort(c.predicted)[:top]
        chosen = few[np.argmin(c.first[few])]
        best = np.argmin(c.first)
        found.append(max(0.0, c.second[chosen] / c.second[best] - 1))
    return np.array(found)


def learning_curve(samples: TrainingRows, at: Roofline, sizes: Sequence[int], seed: int = 0) -> dict[int, float]:
    """MAPE on a quarter of the problems, of models trained on so many samples of the others."""
    names = np.unique(samples.group)
    shuffled = np.random.default_rng(seed).permutation(names)
    test = np.isin(samples.group, shuffled[: len(names) // 4])
    rest, judged = samples.pick(~test), samples.pick(test)
    order = np.argsort(
        np.random.default_rng(seed).permutation(len(names))[np.searchsorted(names, rest.group)], kind="stable"
    )
    found: dict[int, float] = {}
    for n in sizes:
        if n <= len(rest):
            part = rest.pick(order[:n])
            made = models.grown(derive(part.table, at), part.seconds, models.weights(part))
            found[n] = accuracy(judged.seconds, made.seconds(derive(judged.table, at)))["mape"]
    return found


BARS = {"mape": 0.12, "within10": 0.65, "within20": 0.90}
HARM = 0.1
"""How much worse than without a correction predictions may become where nothing drifted, as a part of their error."""


@dataclass(frozen=True, slots=True)
class DriftTrial:
    """How online samples follow an injected change."""

    samples: Mapping[str, int]
    """Until predictions are within all bars again, and stay there, per injected slowdown; `nothing`: 0, or the most where a
    correction did harm at any time."""
    error_only: Mapping[str, int]
    """The same by the bar of the mean error alone."""
    worst: float
    """The largest MAPE with a correction over the MAPE without, where nothing drifted."""
    lost: tuple[str, ...]
    """Bars that a correction missed at some time and the model without one kept, where nothing drifted."""


def _missed(now: Mapping[str, float], plain: Mapping[str, float]) -> list[str]:
    """Bars that are missed; where the model misses one by itself, its own figure (and a little) is the bar."""
    return [n for n, bar in BARS.items()
            if (now[n] > max(bar, plain[n] * (1 + HARM)) if n == "mape" else now[n] < min(bar, plain[n] - 0.02))]  # fmt: skip


def drift_samples(
    samples: TrainingRows, predicted: Vector, at: Roofline, *, factor: float = 1.6, most: int = 200, seed: int = 0
) -> DriftTrial:
    """Follow everything, the commonest family or the commonest memory level as it slows down, and a machine that does not.

    A correction does harm where nothing drifted if it makes the mean error larger than the model's own by more than `HARM`, or if a
    bar is missed that the model keeps without it, after any number of samples.
    """
    found = derive(samples.table, at)
    level = models.binding(found)
    long = samples.seconds > LENGTHS[0]
    common = np.bincount(found.family[long], minlength=len(FAMILIES)).argmax()
    memory = np.bincount(level[long & (level >= 0)], minlength=4).argmax()
    slowed = {
        "everything": np.ones(len(samples), bool), "family": found.family == common, "level": level == memory,
        "nothing": np.zeros(len(samples), bool),
    }  # fmt: skip
    plain = accuracy(samples.seconds, predicted)
    result, by_error = dict[str, int](), dict[str, int]()
    worst, lost = 1.0, dict[str, None]()
    for name, where in slowed.items():
        times = np.where(where, samples.seconds * factor, samples.seconds)
        online, order = Online(), np.random.default_rng(seed).permutation(np.flatnonzero(long))
        outside = far = 0
        for n, i in enumerate(order[:most], 1):
            seen, problem = (int(found.family[i]), int(level[i])), int(samples.group[i])
            online.observe(*seen, float(predicted[i]), float(times[i]), problem)
            now = accuracy(times, predicted * np.exp(online.shift(found.family, level)))
            missed = _missed(now, plain)
            outside, far = n if missed else outside, n if "mape" in missed else far
            if name == "nothing":
                worst = max(worst, now["mape"] / plain["mape"])
                lost |= dict.fromkeys(missed)
        result[name], by_error[name] = (min(last + 1, most) if last else 0 for last in (outside, far))
    result["nothing"] = by_error["nothing"] = most if lost or worst > 1 + HARM else 0
    return DriftTrial(result, by_error, worst, tuple(lost))


def grouped(keys: Sequence[str], predicted: Vector, first: Vector, second: Vector) -> list[SelectionTrial]:
    """Candidates of the same problem and sizes put together; problems with a single one are no choice."""
    where: dict[str, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        where[key].append(i)
    return [SelectionTrial(predicted[at], first[at], second[at]) for at in where.values() if len(at) > 1]
