"""Facts about sizes: sums of products in one normal form, exact division, and what is surely not negative.

    normal(2 * (s0 + 1))          ->  (s0 * 2) + 2
    divide(s0 * 768, 64)          ->  s0 * 12
    not_negative(s0 * 2 + -1, {s0})  ->  True      s0 is at least 1

Sizes are at least 0; those named in `positive` are at least 1, because a loop over them is running. What is not a sum of
products (a quotient, a maximum) is one unknown of its own.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import lru_cache

from hotfuse.ir.dims import Dim, Sym, dims_in, expr

Terms = tuple[tuple[tuple[Sym, ...], int], ...]
"""Products of unknowns with their factors; the empty product is the number."""

_NEVER_NEGATIVE = {"//", "%", "ceildiv", "max"}
_MAX_TERMS = 64
_remembered = lru_cache(1 << 16)
"""Sizes of calls are numbers here, and a process that serves meets new ones for ever."""


@_remembered
def _terms(d: Dim) -> Terms:
    if isinstance(d, int):
        return (((), d),) if d else ()
    parts = [_terms(a) for a in dims_in(d)]
    if d.op == "+":
        return _collect([t for part in parts for t in part])
    if d.op == "*":
        product: Terms = (((), 1),)
        for part in parts:
            if len(product) * len(part) > _MAX_TERMS:
                return (((d,), 1),)
            product = _collect([((*a, *b), m * n) for a, m in product for b, n in part])
        return product
    if d.op == "**" and isinstance(d.args[1], int) and 0 <= d.args[1] <= 4:
        return _terms(expr("*", 1, *(next(dims_in(d)),) * d.args[1]))
    if d.op == "sym":
        return (((d,), 1),)
    inner = expr(d.op, *(normal(a) for a in dims_in(d)))
    return (((inner,), 1),) if isinstance(inner, Sym) else _terms(inner)


def _collect(terms: list[tuple[tuple[Sym, ...], int]]) -> Terms:
    total: dict[tuple[Sym, ...], int] = {}
    for unknowns, factor in terms:
        key = tuple(sorted(unknowns, key=str))
        total[key] = total.get(key, 0) + factor
    return tuple(sorted(((k, n) for k, n in total.items() if n), key=lambda t: [str(s) for s in t[0]]))


@_remembered
def normal(d: Dim) -> Dim:
    """The same size with products multiplied out and equal terms added up."""
    if isinstance(d, int):
        return d
    return _dim(_terms(d))


def _dim(terms: Terms) -> Dim:
    return expr("+", 0, *(expr("*", *unknowns, factor) for unknowns, factor in terms))


def add(*parts: Dim) -> Dim:
    """A sum in normal form."""
    return normal(expr("+", 0, *parts))


def mul(*parts: Dim) -> Dim:
    """A product in normal form."""
    return normal(expr("*", 1, *parts))


def sub(a: Dim, b: Dim) -> Dim:
    """A difference in normal form."""
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    return add(a, expr("*", b, -1))


def product(sizes: tuple[Dim, ...]) -> Dim:
    """The number of elements."""
    return mul(*sizes)


def same(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal whatever the symbols are."""
    return a == b or normal(a) == normal(b)


@_remembered
def divide(a: Dim, b: Dim) -> Dim | None:
    """a / b where that is a size for all values of the symbols; None where it does not show."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    if same(a, b):
        return 1
    divisor = _terms(b)
    if len(divisor) != 1:  # a sum: it must stand as a factor
        factors = list(dims_in(a)) if isinstance(a, Sym) and a.op == "*" else []
        for i, f in enumerate(factors):
            if same(f, b):
                return mul(*factors[:i], *factors[i + 1:])
        return None
    unknowns, number = divisor[0]
    quotient: list[tuple[tuple[Sym, ...], int]] = []
    for have, factor in _terms(a):
        rest = list(have)
        for u in unknowns:
            if u not in rest:
                return None
            rest.remove(u)
        if factor % number:
            return None
        quotient.append((tuple(rest), factor // number))
    return _dim(_collect(quotient))


@_remembered
def _not_negative(d: Dim, positive: frozenset[str]) -> bool:
    """Replace every positive s by 1 + t: if no term is negative then, nothing can be."""
    shifted: list[tuple[tuple[Sym, ...], int]] = []
    for unknowns, factor in _terms(d):
        expanded: list[tuple[tuple[Sym, ...], int]] = [((), factor)]
        for u in unknowns:
            name = str(u.args[0]) if u.op == "sym" else ""
            expanded = [((*have, u), n) for have, n in expanded] + (expanded if name in positive else [])
        shifted.extend(expanded)
    return all(n >= 0 and all(u.op == "sym" or u.op in _NEVER_NEGATIVE for u in have) for have, n in _collect(shifted))


def not_negative(d: Dim, positive: AbstractSet[str] = frozenset()) -> bool:
    """Whether d is at least 0 for sure."""
    return d >= 0 if isinstance(d, int) else _not_negative(d, frozenset(positive))


def at_most(a: Dim, b: Dim, positive: AbstractSet[str] = frozenset()) -> bool:
    """Whether a <= b for sure."""
    return not_negative(sub(b, a), positive)


def factors_at_least_one(d: Dim) -> frozenset[str]:
    """The symbols that are at least 1 when d, being a product, is."""
    terms = _terms(d)
    if len(terms) != 1:
        return frozenset()
    return frozenset(str(u.args[0]) for u in terms[0][0] if u.op == "sym")


def terms_of(d: Dim) -> Terms:
    """A size as a sum of products of unknowns."""
    return _terms(d)
