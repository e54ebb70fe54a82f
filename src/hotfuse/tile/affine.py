"""Differences of index expressions, as far as sums and products with numbers go."""

from __future__ import annotations

from hotfuse.ir.dims import Dim, dims_in
from hotfuse.tile.program import Loop


def terms(d: Dim) -> dict[Dim, int]:
    """The expression as factors of its parts: `2*k + n + 3` is {k: 2, n: 1, 1: 3}; what cannot be taken apart is one part."""
    found: dict[Dim, int] = {}
    _add(d, 1, found)
    return {part: factor for part, factor in found.items() if factor}


def _add(d: Dim, factor: int, into: dict[Dim, int]) -> None:
    if isinstance(d, int):
        into[1] = into.get(1, 0) + d * factor
        return
    if d.op == "+":
        for part in dims_in(d):
            _add(part, factor, into)
        return
    if d.op == "*":
        numbers = [a for a in dims_in(d) if isinstance(a, int)]
        others = [a for a in dims_in(d) if not isinstance(a, int)]
        if len(others) == 1:
            for n in numbers:
                factor *= n
            _add(others[0], factor, into)
            return
    into[d] = into.get(d, 0) + factor


def difference(a: Dim, b: Dim) -> int | None:
    """a - b where it is the same number for all values of the symbols; None where that does not show."""
    parts = terms(a)
    _add(b, -1, parts)
    return parts.get(1, 0) if all(part == 1 or not factor for part, factor in parts.items()) else None


def trip_count(loop: Loop) -> int | None:
    """How often a loop runs, where that is a number."""
    length = difference(loop.hi, loop.lo)
    return None if length is None or loop.step < 1 else max(0, -(-length // loop.step))
