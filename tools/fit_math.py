"""Fits the polynomials of `backends/llvm/emission/coefficients.py` and prints that file.

Each row is a function near zero written as known terms plus `scale(x) * P(x)`. P is fitted by weighted least squares on
Chebyshev nodes, the weights sharpened (Lawson) until the relative error is level; coefficients are rounded to fp32 one
after the other from the constant up, the rest being fitted anew each time, so that rounding costs next to nothing.

    python tools/fit_math.py > src/hotfuse/backends/llvm/emission/coefficients.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mpmath as mp
import numpy as np

mp.mp.dps = 60
NODES = 400


@dataclass(frozen=True)
class Row:
    """One polynomial to be fitted."""

    name: str
    note: str
    target: Callable[[mp.mpf], mp.mpf]
    """What P(u) should be."""
    weight: Callable[[mp.mpf], mp.mpf]
    """How much an error of P matters relative to the whole function."""
    lo: float
    hi: float
    degree: int


def series(f: Callable[[mp.mpf], mp.mpf], at_zero: Callable[[mp.mpf], mp.mpf]) -> Callable[[mp.mpf], mp.mpf]:
    """f, but its series where f would cancel."""
    return lambda u: at_zero(u) if abs(u) < mp.mpf(10) ** -15 else f(u)


def root(u: mp.mpf) -> mp.mpf:
    """sqrt, for functions of the square."""
    return mp.sqrt(u)


LN2 = mp.log(2)
PI4 = float(mp.pi / 4) + 1e-4
ROWS = (
    Row(
        "EXP",
        "e^r = 1 + r + r^2 P(r), |r| <= ln2/2",
        series(lambda r: (mp.exp(r) - 1 - r) / r**2, lambda r: mp.mpf(0.5)),
        lambda r: r**2 / mp.exp(r),
        -0.3467,
        0.3467,
        4,
    ),
    Row(
        "EXP_SHORT",
        "the same where nothing is subtracted from it",
        series(lambda r: (mp.exp(r) - 1 - r) / r**2, lambda r: mp.mpf(0.5)),
        lambda r: r**2 / mp.exp(r),
        -0.3467,
        0.3467,
        3,
    ),
    Row(
        "EXP2",
        "2^r = 1 + r P(r), |r| <= 1/2",
        series(lambda r: (mp.power(2, r) - 1) / r, lambda r: LN2),
        lambda r: abs(r) / mp.power(2, r),
        -0.5001,
        0.5001,
        5,
    ),
    Row(
        "EXP2_SHORT",
        "the same where a fifth of the error counts: 1 - erfc",
        series(lambda r: (mp.power(2, r) - 1) / r, lambda r: LN2),
        lambda r: abs(r) / mp.power(2, r),
        -0.5001,
        0.5001,
        4,
    ),
    Row(
        "LOG",
        "log(1 + f) = f + f^2 P(f), sqrt(1/2) <= 1 + f <= sqrt(2)",
        series(lambda f: (mp.log1p(f) - f) / f**2, lambda f: mp.mpf(-0.5)),
        lambda f: abs(f**2 / mp.log1p(f)) if f else mp.mpf(0),
        -0.29295,
        0.41425,
        7,
    ),
    Row(
        "SIN",
        "sin r = r + r^3 P(r^2), |r| <= pi/4",
        series(lambda z: (mp.sin(root(z)) - root(z)) / root(z) ** 3, lambda z: -mp.mpf(1) / 6),
        lambda z: z * root(z) / mp.sin(root(z)) if z else mp.mpf(0),
        0,
        PI4**2,
        2,
    ),
    Row(
        "COS",
        "cos r = 1 - r^2/2 + r^4 P(r^2), |r| <= pi/4",
        series(lambda z: (mp.cos(root(z)) - 1 + z / 2) / z**2, lambda z: mp.mpf(1) / 24),
        lambda z: z**2 / mp.cos(root(z)),
        0,
        PI4**2,
        2,
    ),
    Row(
        "TANH",
        "tanh x = x + x^3 P(x^2), |x| <= 0.55",
        series(lambda z: (mp.tanh(root(z)) - root(z)) / root(z) ** 3, lambda z: -mp.mpf(1) / 3),
        lambda z: z * root(z) / mp.tanh(root(z)) if z else mp.mpf(0),
        0,
        0.5501**2,
        3,
    ),
    Row(
        "ERF",
        "erf x = x + x P(x^2), |x| <= 0.92",
        series(lambda z: mp.erf(root(z)) / root(z) - 1, lambda z: 2 / mp.sqrt(mp.pi) - 1),
        lambda z: root(z) / mp.erf(root(z)) if z else mp.sqrt(mp.pi) / 2,
        0,
        0.921**2,
        5,
    ),
    Row(
        "ERFC",
        "log2(erfc t) = t P(t), 0.92 <= t <= 4",
        lambda t: mp.log(mp.erfc(t)) / LN2 / t,
        lambda t: t * mp.erfc(t) / mp.erf(t) * LN2,
        0.92,
        4.01,
        5,
    ),
    Row(
        "NORMAL",
        "log2 of a normal distribution's share below -t = -1 + t P(t), t <= 6 (falling beyond)",
        series(lambda t: (mp.log(mp.erfc(t / mp.sqrt(2)) / 2) / LN2 + 1) / t, lambda t: -mp.sqrt(2 / mp.pi) / LN2),
        lambda t: t * LN2 * (mp.erfc(t / mp.sqrt(2)) / 2) ** mp.mpf(0.75),
        0,
        6,
        7,
    ),
)


def fit(row: Row) -> tuple[list[float], float]:
    """Coefficients, and the largest relative error."""
    k = np.arange(NODES)
    unit = np.cos((2 * k + 1) * np.pi / (2 * NODES))
    nodes = [mp.mpf(float(u)) * (row.hi - row.lo) / 2 + mp.mpf(row.hi + row.lo) / 2 for u in unit]
    want = np.array([float(row.target(u)) for u in nodes])
    weight = np.array([float(row.weight(u)) for u in nodes])
    x = np.array([float(u) for u in nodes])
    done: list[float] = []
    for _ in range(row.degree + 1):
        left = row.degree + 1 - len(done)
        rest = want - sum((c * x**i for i, c in enumerate(done)), np.zeros(NODES))
        power = np.stack([x ** (len(done) + i) for i in range(left)], 1)
        sharp = np.ones(NODES)
        best: tuple[float, np.ndarray] | None = None
        for _ in range(60):
            w = weight * np.sqrt(sharp)
            scale = np.abs(power * w[:, None]).max(0)
            solved = np.linalg.lstsq(power * w[:, None] / scale, rest * w, rcond=None)[0] / scale
            error = np.abs((power @ solved - rest) * weight)
            if best is None or error.max() < best[0]:
                best = (error.max(), solved)
            sharp = sharp * (error / error.max() + 1e-3)
            sharp /= sharp.sum() / NODES
        assert best is not None
        done.append(float(np.float32(best[1][0])))
    values = sum((c * x**i for i, c in enumerate(done)), np.zeros(NODES))
    return done, float(np.abs((values - want) * weight).max())


def main() -> None:
    """Print the file."""
    print('"""Polynomials of the fp32 functions, constant first, made by `tools/fit_math.py`: change them there."""\n')
    for row in ROWS:
        coefficients, error = fit(row)
        print(f"{row.name} = (")
        for c in coefficients:
            print(f"    {c!r},")
        print(f')\n"""{row.note}; relative error {error:.1e}"""')


if __name__ == "__main__":
    main()
