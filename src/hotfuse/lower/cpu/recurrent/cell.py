"""What a recurrent cell does with its gates, in registers.

    sigmoid(x) = 1 / (1 + e^-x)
    tanh(x)    = x P(x^2) / Q(x^2)        |x| <= 9, beyond which fp32 knows only one number

Both are fractions, so a product of the two is one division: an LSTM's step has three of them instead of five, and needs no second
exponential for each tanh. P and Q are fitted by `tools/fit_tanh.py` (relative error 2.2e-8; 3e-7 as fp32 computes it, and exactly x
for small x).
"""

from __future__ import annotations

from hotfuse.ir.types import DType
from hotfuse.tile.build import KernelBuilder
from hotfuse.tile.program import Tile

TANH_LIMIT = 9.0
TANH_TOP = (1.0, 0.1338263718950006, 0.003497397514936776, 2.063481688419604e-05, 1.3382892242129202e-08)
"""P, the constant first."""
TANH_UNDER = (1.0, 0.4671595847099018, 0.0258841337118723, 0.0003288418127938809, 7.789676650859985e-07)
"""Q."""


def lstm(b: KernelBuilder, gates: Tile, c: Tile) -> tuple[Tile, Tile]:
    """The new c and h of some rows; gates lie side by side: input, forget, output, and the one that is no sigmoid."""
    under = _under_sigmoid(b, _part(b, gates, c, 0, 3))
    top, below = _tanh(b, _part(b, gates, c, 3))
    new = b.map("div", top, b.map("mul", below, _part(b, under, c, 0)))
    c = b.map("add", b.map("div", c, _part(b, under, c, 1)), new)
    top, below = _tanh(b, c)
    return c, b.map("div", top, b.map("mul", below, _part(b, under, c, 2)))


def gru(b: KernelBuilder, gx: Tile, gh: Tile, h: Tile) -> Tile:
    """The new h of some rows from what inputs and state give to the gates: reset, update, and the one that is no sigmoid."""
    under = _under_sigmoid(b, b.map("add", _part(b, gx, h, 0, 2), _part(b, gh, h, 0, 2)))
    reset = b.map("div", _part(b, gh, h, 2), _part(b, under, h, 0))
    new = b.map("div", *_tanh(b, b.map("add", reset, _part(b, gx, h, 2))))
    return b.map("add", b.map("div", b.map("sub", h, new), _part(b, under, h, 1)), new)


def _part(b: KernelBuilder, tile: Tile, like: Tile, first: int, gates: int = 1) -> Tile:
    """Some gates of a tile that has them side by side, each as wide as a state."""
    rows, lanes = like.type.shape
    return b.extract(tile, (0, first * lanes), (rows, gates * lanes))


def _under_sigmoid(b: KernelBuilder, x: Tile) -> Tile:
    """What 1 is divided by: infinite where the sigmoid is zero."""
    return b.map("add", b.map("exp", b.map("neg", x)), 1.0)


def _tanh(b: KernelBuilder, x: Tile) -> tuple[Tile, Tile]:
    """The upper and the lower part of tanh's fraction; NaN stays in the upper one."""
    x = b.map("max", -TANH_LIMIT, b.map("min", TANH_LIMIT, x))
    square = b.map("mul", x, x)
    return b.map("mul", x, _polynomial(b, square, TANH_TOP)), _polynomial(b, square, TANH_UNDER)


def _polynomial(b: KernelBuilder, x: Tile, coefficients: tuple[float, ...]) -> Tile:
    """Horner's rule; the constant comes first in the table."""
    *rest, last = coefficients
    acc = b.fill(last, DType.F32, x.type.shape)
    for coefficient in reversed(rest):
        acc = b.map("fma", acc, x, coefficient)
    return acc
