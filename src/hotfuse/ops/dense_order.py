"""Which order of dimensions strides lie in: of numbers, or of expressions that the caller can compare."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from hotfuse.ir.types import ROW_MAJOR, STRIDED, Layout

Same = Callable[[Any, Any], bool]


def layout_by(sizes: Sequence[Any], strides: Sequence[Any], same: Same = operator.eq) -> Layout:
    """The layout of strides: row-major, dense in another order, or strided. Dimensions of size 1 fit anywhere."""
    if any(s == 0 for s in sizes):
        return ROW_MAJOR
    if _is_dense(sizes, strides, same):
        return ROW_MAJOR
    order: list[int] = []
    left = list(range(len(sizes)))
    want: Any = 1
    while left:
        fits = [i for i in left if same(strides[i], want)]
        if not fits:
            break
        chosen = max(fits, key=lambda i: (sizes[i] == 1, i))
        order.append(chosen)
        left.remove(chosen)
        want = want * sizes[chosen]
    if any(sizes[i] != 1 for i in left):
        return STRIDED
    return Layout(order=(*left, *reversed(order)))


def _is_dense(sizes: Sequence[Any], strides: Sequence[Any], same: Same) -> bool:
    want: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if not same(stride, want):
            return False
        want = want * size
    return True
