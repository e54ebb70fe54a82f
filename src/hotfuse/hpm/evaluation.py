"""How good a model is on problems it never saw, for readers; `benchmarks.hpm_selection` has what choices by it cost."""

from __future__ import annotations

from dataclasses import field, replace

import numpy as np

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm import model as models
from hotfuse.hpm.features import derive
from hotfuse.hpm.model import PerformanceModel, TrainingRows, Vector, accuracy
from hotfuse.hpm.roofline import Roofline
from hotfuse.hpm.work import FAMILIES, families


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out samples with predictions by models that saw none of their problems.

    They are judged as what models are trained on: times without the phases in which the machine was slow. `as_measured` are the
    same predictions beside the times that the clock said.
    """

    samples: TrainingRows
    predicted: Vector
    slow: Vector = field(default_factory=lambda: np.zeros(0))
    """Log factors by which samples were slowed when they were measured; empty for none."""

    @property
    def as_measured(self) -> HeldOut:
        """Slow phases included."""
        if not self.slow.any():
            return self
        return HeldOut(replace(self.samples, seconds=self.samples.seconds * np.exp(self.slow)), self.predicted)

    @property
    def overall(self) -> dict[str, float]:
        """Accuracy over all families."""
        return accuracy(self.samples.seconds, self.predicted)

    def by_family(self) -> dict[str, dict[str, float]]:
        """Accuracy of each family that there are samples of."""
        kind = families(self.samples.table)
        return {n: accuracy(self.samples.seconds[kind == i], self.predicted[kind == i]) for i, n in enumerate(FAMILIES)
                if (kind == i).any()}  # fmt: skip


def held_out(samples: TrainingRows, at: Roofline) -> HeldOut:
    """Every sample predicted by a model that saw none of its problem."""
    told = models.unseen(samples, at)
    return HeldOut(told.samples, told.predicted, told.slow)


def roofline_alone(samples: TrainingRows, at: Roofline) -> dict[str, float]:
    """Accuracy of the roofline, which no measurement of kernels went into."""
    return accuracy(samples.seconds, derive(samples.table, at).roofline.seconds)


def importance(model: PerformanceModel) -> dict[str, float]:
    """How often trees ask for a feature, as parts of all questions, most first."""
    counts = model.forest.split_counts(len(models.INPUTS))
    share = counts / max(counts.sum(), 1)
    return {models.INPUTS[i]: float(share[i]) for i in np.argsort(-share) if share[i] > 0}


def coverage(model: PerformanceModel, held: HeldOut, at: Roofline) -> float:
    """The part of measurements that lies in the stated intervals."""
    width = model.widths(derive(held.samples.table, at), held.predicted)
    return float((np.abs(np.log(held.samples.seconds / held.predicted)) <= width).mean())
