"""Fits the fraction of `lower/cpu/recurrent/cell.py`: tanh(x) = x P(x^2) / Q(x^2), both beginning with 1, for |x| up to 9.

The equation P - f Q = 0, with f = tanh(x) / x, is linear in the coefficients: it is solved by least squares on Chebyshev nodes,
each weighted with the Q of the round before (so that it is the fraction's error that counts), the weights sharpened (Lawson)
until the relative error is level.

    python tools/fit_tanh.py
"""

from __future__ import annotations

import numpy as np

LIMIT, DEGREE, NODES, ROUNDS = 9.02, 4, 1200, 60


def fitted() -> tuple[float, list[float], list[float]]:
    """The relative error, and the coefficients of P and Q, the constants first."""
    x = (np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES) + 1) / 2 * LIMIT
    f, s = np.tanh(x) / x, (x / LIMIT) ** 2
    powers = np.stack([s**i for i in range(1, DEGREE + 1)], 1)
    equations = np.concatenate([powers, -f[:, None] * powers], 1)
    below, weight = np.ones(NODES), np.ones(NODES)
    best = (np.inf, np.zeros(2 * DEGREE))
    for _ in range(ROUNDS):
        scale = np.sqrt(weight) / (f * below)
        found = np.linalg.lstsq(equations * scale[:, None], (f - 1) * scale, rcond=None)[0]
        below = 1 + powers @ found[DEGREE:]
        error = np.abs((1 + powers @ found[:DEGREE]) / below / f - 1)
        best = min(best, (float(error.max()), found), key=lambda b: b[0])
        weight = weight * (error / error.mean() + 1e-3)
        weight /= weight.mean()
    scaled = [float(c) / LIMIT ** (2 * (i % DEGREE + 1)) for i, c in enumerate(best[1])]
    return best[0], [1.0, *scaled[:DEGREE]], [1.0, *scaled[DEGREE:]]


if __name__ == "__main__":
    error, top, under = fitted()
    print(f"TANH_TOP = {tuple(top)}\nTANH_UNDER = {tuple(under)}\n# relative error {error:.1e}")
