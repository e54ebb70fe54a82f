"""Outputs of any structure as arrays, and how far two lists of them are apart; knows nothing of what is measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

Arrays = list[np.ndarray[Any, Any]]


def flat(result: Any) -> Arrays:
    """Outputs of whatever structure as arrays."""
    leaves = result if isinstance(result, list) else pytree.tree_flatten(result)[0]
    return [v.detach().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for v in leaves]


def difference(got: Arrays, want: Arrays) -> float:
    """The largest error relative to the largest magnitude of each output; infinite where shapes differ."""
    if [g.shape for g in got] != [w.shape for w in want]:
        return math.inf
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if w.size:
            error = float(np.abs(g.astype(np.float64) - w).max())
            worst = max(worst, error / (float(np.abs(w).max()) or 1.0) if error == error else math.inf)
    return worst
