"""How loops along rows are cut into vectors: what lowering decides by (`lower.cpu`), and what the performance model counts by
(`hpm.work`, `hpm.cuts`, `hpm.reduction_passes`). `tests/contract/test_hpm_counts.py` holds both to each other.

Formulas take numbers and columns of numbers alike.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import numpy as np

FUNCTIONS = {
    "exp": ("exp", "exp2", "expm1", "log", "log2", "log1p", "log10"),
    "sigmoid": ("sigmoid", "silu", "softplus", "mish", "log_sigmoid"),
    "tanh": ("tanh", "elu", "selu", "celu"),
    "erf": ("gelu", "erf", "erfc"),
    "root": ("sqrt", "rsqrt", "reciprocal", "div", "true_divide", "floor_divide", "remainder", "fmod"),
    "special": ("sin", "cos", "tan", "sinh", "cosh", "pow", "hypot", "logaddexp", "xlogy", "logit"),
}  # fmt: skip
"""Functions of single elements, by the code that they become: polynomials with a power of two, those with a division behind
them, and so on; divisions and roots are instructions."""
CODE_OF = {f"aten.{op}": code for code, ops in FUNCTIONS.items() for op in ops}
"""By the operator's packet."""
HEAVY = frozenset({*CODE_OF, "lower.decay"})
"""Ops that cost much more than reading their result from a cache would."""
LIGHT_VECTORS, HEAVY_VECTORS = 4, 2
"""Vectors of one step; fewer where functions fill the registers (`HEAVY`)."""
KEPT_BYTES = 256 * 1024
"""Size of a row up to which a pass keeps what the next one would have to compute again."""
_POWERS = (1, 2, 4, 8, 16, 32)
"""The widest rest is shorter than a vector of 64 bytes."""
WALKED, JUMPED = 1.0, -0.5
"""What an access in steps of one says for vectors along a counter, and what one in other steps says."""
SOFTMAX_CACHE_PART = 64
"""A row of a softmax that three rows share a loop in is at most this part of the second-level cache."""


def step_vectors(*, heavy: bool) -> int:
    """Vectors of one step of a loop."""
    return HEAVY_VECTORS if heavy else LIGHT_VECTORS


def whole_turns(length: Any, width: Any) -> Any:
    """Turns of a loop that take `width` elements each and need no mask."""
    return np.floor(length / width)


def rest_vector(rest: Any) -> Any:
    """Elements of the vector that takes what is left behind whole turns: the next power of two."""
    return reduce(add, ((rest > n) * n for n in _POWERS), 1)


def vector_score(walked: Any, jumped: Any, filled: Any) -> Any:
    """How well vectors along a counter suit so many accesses in steps of one and in others; `filled` is the part of a vector that
    the counter's extent fills. The best counter is taken, a row's only if it is better than a column's and above zero."""
    points = walked * WALKED + jumped * JUMPED
    return points * (1.0 + (points > 0) * (filled - 1.0))


def fits_three_rows(width: Any, lanes: Any, l2: Any) -> Any:
    """Whether a lone softmax of rows this wide has three of them in hand at a time (`lower.cpu.softmax_rows`)."""
    return (width >= HEAVY_VECTORS * lanes) & (SOFTMAX_CACHE_PART * width <= l2)
