"""Winograd convolutions (Toom and Cook's algorithm): transforms, and when they pay.

    m outputs of a window of r along a dim      r * m products, or m + r - 1 with transforms on both sides
    y = A' [(G g) * (B' d)]                        d: m + r - 1 inputs, g: the window; along two dims the transforms nest

The transforms are exact in real arithmetic; in fp32 their numbers are larger than those they stand for, so an error of a few times
that of plain sums is the price (`Scheme.growth`). G is applied when weights are packed, in fp64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from hotfuse.base.lazy_dataclass import dataclass

Array = npt.NDArray[Any]
Matrix = tuple[tuple[Fraction, ...], ...]

PIECE = 4096
"""Windows that are transformed at once: a megabyte of results."""
_PAIRS: dict[int, tuple[Fraction, ...]] = {
    4: (Fraction(1),),
    6: (Fraction(3, 4), Fraction(3, 2)),
    8: (Fraction(1, 2), Fraction(1), Fraction(2)),
}
"""Per number of products: where polynomials are evaluated, besides 0 and infinity. Each with its opposite, which shares half of the
arithmetic; powers that stay near 1 keep errors small, and fractions of powers of two are exact."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The transforms along one dim."""

    outputs: int
    window: int

    @property
    def points(self) -> int:
        """Products, and inputs, along the dim."""
        return self.outputs + self.window - 1

    @property
    def data(self) -> Matrix:
        """B': points x points."""
        return _matrices(self.outputs, self.window)[0]

    @property
    def weights(self) -> Matrix:
        """G: points x window."""
        return _matrices(self.outputs, self.window)[1]

    @property
    def results(self) -> Matrix:
        """A': outputs x points."""
        return _matrices(self.outputs, self.window)[2]

    @property
    def growth(self) -> float:
        """How much larger rounding errors become: of independent errors in every product, what reaches an output."""
        b, g, a = (np.array(m, np.float64) for m in _matrices(self.outputs, self.window))
        through = np.sqrt((b**2).sum(1)) * np.sqrt((g**2).sum(1) / self.window)
        return float(np.sqrt(((a * through) ** 2).sum(1) / self.window).max())


@functools.cache
def _matrices(m: int, r: int) -> tuple[Matrix, Matrix, Matrix]:
    n = m + r - 1
    if n == 1:
        one: Matrix = ((Fraction(1),),)
        return one, one, one
    finite = (Fraction(0), *(p for pair in _PAIRS[n] for p in (pair, -pair)))
    data: list[tuple[Fraction, ...]] = []
    weights: list[tuple[Fraction, ...]] = []
    for i, at in enumerate(finite):
        others = [p for j, p in enumerate(finite) if j != i]
        scale = functools.reduce(lambda x, p: x * (at - p), others, Fraction(1))
        data.append((*_expanded(others), Fraction(0)))
        weights.append(tuple(at**k / scale for k in range(r)))
    data.append(_expanded(finite))
    weights.append((*(Fraction(0),) * (r - 1), Fraction(1)))
    results = tuple((*(at**k for at in finite), Fraction(int(k == m - 1))) for k in range(m))
    return tuple(data), tuple(weights), results


def _expanded(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """The coefficients of the product of (x - root), the lowest power first."""
    found = [Fraction(1)]
    for root in roots:
        found = [a - root * b for a, b in zip([Fraction(0), *found], [*found, Fraction(0)], strict=True)]
    return tuple(found)


def schemes(window: int) -> tuple[Scheme, ...]:
    """All Winograd transforms of a window, few outputs first; a window of one element has none but the plain one."""
    if window == 1:
        return (Scheme(1, 1),)
    return tuple(Scheme(n - window + 1, window) for n in _PAIRS if n - window >= 1)


def transformed(windows: Array, window: Sequence[int], outputs: Sequence[int]) -> Array:
    """Windows [places of all dims, ...] as what is multiplied with transformed data, [points of all dims, ...].

    The transforms of all dims are one product, in fp64, a piece at a time that stays in a cache; the result is rounded once.
    """
    each = [np.array(Scheme(m, r).weights, np.float64) for m, r in zip(outputs, window, strict=True)]
    g = functools.reduce(np.kron, each)
    flat = windows.reshape(len(windows), -1)
    made = np.empty((len(g), flat.shape[1]), windows.dtype)
    for at in range(0, flat.shape[1], PIECE):
        made[:, at : at + PIECE] = g @ flat[:, at : at + PIECE].astype(np.float64)
    return made.reshape(len(g), *windows.shape[1:])
