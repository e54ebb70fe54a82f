"""Regression forests as plain arrays: grown by scikit-learn, evaluated here, stored as numbers.

A tree's two children lie side by side, so a step down is `first[node] + (x > threshold)`; a leaf is its own child. Native code
takes the steps (`hpm.compiled.tree_walk`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.errors import InternalError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.hpm.compiled import tree_walk

Vector = npt.NDArray[np.float64]
Table = npt.NDArray[np.float32] | npt.NDArray[np.float64]
BOOST_FROM_ROWS = 1000
"""Below so many samples extra trees are better, above boosted ones."""
EXTRA = {"n_estimators": 40, "max_depth": 10, "min_samples_leaf": 2, "max_features": 0.6}
BOOSTED = {"n_estimators": 220, "max_depth": 5, "learning_rate": 0.07, "subsample": 0.7, "max_features": 0.4,
           "min_samples_leaf": 4, "loss": "huber", "alpha": 0.95}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forest:
    """Nodes of all trees, one after another."""

    feature: npt.NDArray[np.int64]
    threshold: npt.NDArray[np.float32]
    first: npt.NDArray[np.int64]
    """The left child; the right one follows. A leaf's is itself, with a threshold nothing exceeds."""
    value: npt.NDArray[np.float64]
    roots: npt.NDArray[np.int64]
    depth: int
    base: float
    scale: float
    """prediction = base + scale * sum of the trees' leaves"""

    packed: npt.NDArray[Any] = field(init=False, compare=False, repr=False)
    starts: npt.NDArray[np.int32] = field(init=False, compare=False, repr=False)
    width: int = field(init=False, compare=False, repr=False)
    """The same as native code reads it, and the columns that it reads of."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", tree_walk.packed(self.feature, self.threshold, self.first))
        object.__setattr__(self, "starts", np.ascontiguousarray(self.roots, np.int32))
        object.__setattr__(self, "value", np.ascontiguousarray(self.value, np.float64))
        object.__setattr__(self, "width", int(self.feature.max()) + 1)

    def predict(self, x: npt.NDArray[Any]) -> Vector:
        """Predictions of a batch of numbers, compared in single precision, or of what `walk.ordered` made of them."""
        if x.ndim != 2 or x.shape[1] < self.width:
            raise InternalError(f"a forest that asks for {self.width} columns was given {x.shape}")
        keys = np.ascontiguousarray(x) if x.dtype == np.uint32 else tree_walk.ordered(np.ascontiguousarray(x, np.float32))
        found = tree_walk.sums(self.packed, self.value, self.starts, self.depth, keys)
        return self.base + self.scale * found

    def arrays(self, prefix: str = "") -> dict[str, npt.NDArray[Any]]:
        """Plain arrays for the store."""
        facts = np.array([self.depth, self.base, self.scale])
        small = {f"{prefix}{n}": getattr(self, n).astype(np.int32) for n in ("feature", "first", "roots")}
        return {**small, f"{prefix}threshold": self.threshold, f"{prefix}value": self.value, f"{prefix}facts": facts}

    def split_counts(self, features: int) -> Vector:
        """How many nodes ask for each feature."""
        inner = self.first != np.arange(len(self.first))
        return np.bincount(self.feature[inner], minlength=features).astype(np.float64)


def from_arrays(arrays: Mapping[str, npt.NDArray[Any]], features: int, prefix: str = "") -> Forest:
    """The inverse of `Forest.arrays`; raises ValueError where the numbers are no forest."""
    try:
        feature, threshold, first, value, roots, facts = (
            arrays[prefix + n] for n in ("feature", "threshold", "first", "value", "roots", "facts")
        )
    except KeyError as e:
        raise ValueError(f"a forest without {e}") from e
    nodes = len(feature)
    own = np.arange(nodes)
    fits = len(threshold) == len(first) == len(value) == nodes and len(facts) == 3 and feature.ndim == roots.ndim == 1
    if not fits or not nodes or not len(roots):
        raise ValueError("arrays of a forest do not fit together")
    inner = first != own
    if (
        feature.min() < 0 or feature.max() >= features or first.min() < 0 or (first[inner] + 1).max(initial=0) >= nodes
        or roots.min() < 0 or roots.max() >= nodes or not np.isfinite(value).all() or not np.isfinite(facts).all()
        or not np.isposinf(threshold[~inner]).all() or not 0 <= facts[0] <= 64
    ):  # fmt: skip
        raise ValueError("numbers of a forest are out of range")
    return Forest(feature.astype(np.int64), threshold.astype(np.float32), first.astype(np.int64), value.astype(np.float64),
                  roots.astype(np.int64), int(facts[0]), float(facts[1]), float(facts[2]))  # fmt: skip


def _single(threshold: float) -> float:
    """The largest float32 that is no larger: what a float32 is compared with must not move past it."""
    near = np.float32(threshold)
    return float(np.nextafter(near, np.float32(-np.inf)) if near > threshold else near)


def _flat(trees: Sequence[Any], base: float, scale: float) -> Forest:
    nodes: list[list[float]] = []
    """[feature, threshold, first child, value]"""

    def leaf() -> int:
        nodes.append([0, np.inf, len(nodes), 0.0])
        return len(nodes) - 1

    roots: list[int] = []
    deepest = 0
    for tree in trees:
        deepest = max(deepest, int(tree.max_depth))
        roots.append(leaf())
        waiting = [(0, roots[-1])]
        while waiting:
            node, at = waiting.pop()
            nodes[at][3] = float(tree.value[node].ravel()[0])
            if tree.children_left[node] >= 0:
                left, right = leaf(), leaf()
                nodes[at][:3] = [int(tree.feature[node]), _single(float(tree.threshold[node])), left]
                waiting += [(int(tree.children_left[node]), left), (int(tree.children_right[node]), right)]
    table = np.array(nodes)
    return Forest(table[:, 0].astype(np.int64), table[:, 1].astype(np.float32), table[:, 2].astype(np.int64),
                  table[:, 3].copy(), np.array(roots, np.int64), deepest, base, scale)  # fmt: skip


def grow(x: Table, y: Vector, weight: Vector | None = None, *, seed: int = 0, few: int = BOOST_FROM_ROWS) -> Forest:
    """A forest fitted to samples: extra trees for few, boosted ones for many."""
    return extra(x, y, weight, EXTRA, seed) if len(y) < few else boosted(x, y, weight, BOOSTED, seed)


def extra(x: Table, y: Vector, weight: Vector | None, options: Mapping[str, Any], seed: int = 0) -> Forest:
    """Trees with thresholds drawn at random, each for the whole; the mean counts."""
    from sklearn.ensemble import ExtraTreesRegressor  # half a second to import

    made: Any = ExtraTreesRegressor(**options, random_state=seed).fit(x.astype(np.float32), y, weight)
    trees = [e.tree_ for e in made.estimators_]
    return _flat(trees, 0.0, 1.0 / len(trees))


def boosted(x: Table, y: Vector, weight: Vector | None, options: Mapping[str, Any], seed: int = 0) -> Forest:
    """Boosted trees, each for what those before it left."""
    from sklearn.ensemble import GradientBoostingRegressor

    made: Any = GradientBoostingRegressor(**options, random_state=seed).fit(x.astype(np.float32), y, weight)
    base = float(np.ravel(made.init_.constant_)[0])
    return _flat([e.tree_ for e in made.estimators_[:, 0]], base, float(made.learning_rate))
