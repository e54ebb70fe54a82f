"""Positions: where in a value an iteration of the loops is, as sums over the loops' counters.

    coord    ::= offset + coef * counter + ...          one per dim of a value
    position ::= (coord, ...)
    space    ::= counters with their extents; a root dim of the loops' own shape is one counter, or several after a split

Merging dims multiplies and adds, so it always works. Taking a merged coord apart works where the parts show: the terms that
are multiples of the inner size make the outer part, the others must stay below the inner size. Where they do not, the counter
in the way has to be split (`Split`) and the kernel tried again with the finer loops. A dim that is put together from pieces,
by `cat` or `pad`, makes its counter's loop run piece by piece (`SplitLoop`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, Sym, expr, sym, symbols
from hotfuse.lower.common.algebra import (
    add,
    at_most,
    divide,
    factors_at_least_one,
    mul,
    normal,
    not_negative,
    product,
    same,
    sub,
)
from hotfuse.lower.common.errors import CannotLower


@dataclass(frozen=True, slots=True)
class Coord:
    """A place along one dim; `offset` may hold counters too, where no sum says what is meant (a quotient)."""

    offset: Dim = 0
    terms: tuple[tuple[int, Dim], ...] = ()
    """(counter, coefficient), by counter."""


Position = tuple[Coord, ...]
ORIGIN = Coord()


class Refine(Exception):
    """The loops have to be finer; never seen outside `lower`."""


@dataclass
class Split(Refine):
    """A counter has to become an outer one and an inner one of this extent."""

    counter: int
    inner: Dim


@dataclass
class SplitLoop(Refine):
    """A counter's loop has to stop at this value and go on from it."""

    counter: int
    at: Dim


def counter_symbol(counter: int) -> Sym:
    """What stands for a counter inside an expression until its loop is written."""
    return sym(f"%{counter}")


def coord(offset: Dim, terms: dict[int, Dim]) -> Coord:
    """In normal form."""
    return Coord(normal(offset), tuple(sorted((k, normal(c)) for k, c in terms.items() if normal(c) != 0)))


def shifted(c: Coord, by: Dim) -> Coord:
    """Moved by a number of elements."""
    return Coord(add(c.offset, by), c.terms)


def scaled(c: Coord, by: Dim) -> Coord:
    """Multiplied."""
    return coord(mul(c.offset, by), {k: mul(f, by) for k, f in c.terms})


def summed(a: Coord, b: Coord) -> Coord:
    """Added up."""
    terms = dict(a.terms)
    for k, f in b.terms:
        terms[k] = add(terms.get(k, 0), f)
    return coord(add(a.offset, b.offset), terms)


def as_dim(c: Coord) -> Dim:
    """As an expression over counter symbols."""
    return add(c.offset, *(mul(counter_symbol(k), f) for k, f in c.terms))


def counters_in(d: Dim) -> frozenset[int]:
    """The counters inside an expression."""
    return frozenset(int(s[1:]) for s in symbols(d) if s.startswith("%"))


def counters_of(position: Position) -> frozenset[int]:
    """Every counter that a position depends on."""
    return frozenset(k for c in position for k, _ in c.terms).union(*(counters_in(c.offset) for c in position))


@dataclass(frozen=True)
class Space:
    """The loops' own shape: root dims, the counters each consists of, outermost first."""

    roots: tuple[tuple[int, ...], ...]
    extents: tuple[Dim, ...]
    cuts: tuple[tuple[Dim, ...], ...]
    """Per counter, the values inside (0, extent) where its loop stops, in order."""

    @staticmethod
    def of(shape: tuple[Dim, ...]) -> Space:
        """One counter per dim."""
        return Space(tuple((i,) for i in range(len(shape))), tuple(shape), ((),) * len(shape))

    @cached_property
    def positive(self) -> frozenset[str]:
        """Symbols that are at least 1 while the loops run."""
        return frozenset[str]().union(*(factors_at_least_one(n) for n in self.extents))

    def root(self, at: int) -> Coord:
        """Where the loops are along one of their own dims."""
        terms: dict[int, Dim] = {}
        step: Dim = 1
        for k in reversed(self.roots[at]):
            if self.extents[k] != 1:
                terms[k] = step
            step = mul(step, self.extents[k])
        return coord(0, terms)

    def with_root(self, extent: Dim) -> Space:
        """With another dim."""
        new = len(self.extents)
        return Space((*self.roots, (new,)), (*self.extents, extent), (*self.cuts, ()))

    def refined(self, by: Refine) -> Space:
        """The finer loops that were asked for."""
        match by:
            case Split(k, inner):
                outer = divide(self.extents[k], inner)
                if outer is None or self.cuts[k]:
                    raise CannotLower(f"a loop over {self.extents[k]} cannot be split by {inner}")
                new = len(self.extents)
                roots = tuple(tuple(x for a in r for x in ((a, new) if a == k else (a,))) for r in self.roots)
                extents = (*self.extents[:k], outer, *self.extents[k + 1:], inner)
                return Space(roots, extents, (*self.cuts, ()))
            case SplitLoop(k, at):
                cuts = self._ordered(k, at)
                return replace(self, cuts=(*self.cuts[:k], cuts, *self.cuts[k + 1:]))
            case _:
                raise AssertionError(by)

    def _ordered(self, k: int, at: Dim) -> tuple[Dim, ...]:
        before = [c for c in self.cuts[k] if at_most(c, at, self.positive)]
        after = [c for c in self.cuts[k] if at_most(at, c, self.positive)]
        if len(before) + len(after) != len(self.cuts[k]):
            raise CannotLower(f"it is not known whether {at} comes before or after {', '.join(map(str, self.cuts[k]))}")
        return (*before, normal(at), *after)

    def bounds(self, c: Coord) -> tuple[Dim, Dim] | None:
        """The least and the greatest value; None where a coefficient's sign is not known."""
        if counters_in(c.offset):
            return None
        low = high = c.offset
        for k, f in c.terms:
            reach = mul(f, sub(self.extents[k], 1))
            if not_negative(f, self.positive):
                high = add(high, reach)
            elif not_negative(mul(f, -1), self.positive):
                low = add(low, reach)
            else:
                return None
        return low, high

    def below(self, c: Coord, size: Dim) -> bool:
        """Whether 0 <= c < size for sure."""
        found = self.bounds(c)
        return (
            found is not None
            and not_negative(found[0], self.positive)
            and not_negative(sub(sub(size, 1), found[1]), self.positive)
        )

    def apart(self, c: Coord, inner: Dim) -> tuple[Coord, Coord]:
        """(c // inner, c % inner)."""
        if self.below(c, inner):
            return ORIGIN, c
        whole: dict[int, Dim] = {}
        rest: dict[int, Dim] = {}
        for k, f in c.terms:
            times = divide(f, inner)
            if times is None:
                rest[k] = f
            else:
                whole[k] = times
        start = divide(c.offset, inner)
        if start is not None:
            left: Dim = 0
        elif isinstance(c.offset, int) and isinstance(inner, int) and inner:
            start, left = divmod(c.offset, inner)
        else:
            start, left = 0, c.offset
        remainder = coord(left, rest)
        if self.below(remainder, inner):
            return coord(start, whole), remainder
        for k, f in rest.items():
            size = divide(inner, f if not_negative(f, self.positive) else mul(f, -1))
            if size not in (None, 1) and not_negative(size) and divide(self.extents[k], size) not in (None, 1):
                raise Split(k, size)
        at = as_dim(c)
        return Coord(expr("//", at, inner)), Coord(expr("%", at, inner))

    def reshaped(self, position: Position, shape: tuple[Dim, ...], to: tuple[Dim, ...]) -> Position:
        """The same element's place when the value has another shape."""
        result: list[Coord] = [ORIGIN] * len(to)
        for ours, theirs in matched(shape, to):
            if len(ours) == 1 and len(theirs) == 1:
                result[theirs[0]] = position[ours[0]]
                continue
            flat = ORIGIN
            for i in ours:
                flat = summed(scaled(flat, shape[i]), position[i])
            for j in reversed(theirs[1:]):
                flat, result[j] = self.apart(flat, to[j])
            if theirs:
                result[theirs[0]] = flat
        return tuple(result)


T = TypeVar("T")


def in_finer_loops(shape: Sequence[Dim], tries: int, write: Callable[[Space], T]) -> T:
    """What `write` gives in loops over a shape: where one has to be finer, all of it is written again, so many times at most."""
    space = Space.of(tuple(shape))
    for _ in range(tries):
        try:
            return write(space)
        except Refine as finer:
            space = space.refined(finer)
    raise CannotLower("the loops do not become fine enough")


def matched(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> list[tuple[list[int], list[int]]]:
    """Runs of dims of equal product, as short as they show; dims of extent 1 belong to none."""
    left = [i for i, n in enumerate(a) if n != 1]
    right = [j for j, n in enumerate(b) if n != 1]
    runs: list[tuple[list[int], list[int]]] = []
    while left or right:
        ours, theirs = left[:1], right[:1]
        while not same(x := product(tuple(a[i] for i in ours)), y := product(tuple(b[j] for j in theirs))):
            if len(ours) == len(left) and len(theirs) == len(right):
                raise CannotLower(f"shapes {_show(a)} and {_show(b)} do not hold equally many elements for sure")
            more_of_b = (x > y) if isinstance(x, int) and isinstance(y, int) else divide(x, y) is not None
            if (more_of_b or len(ours) == len(left)) and len(theirs) < len(right):
                theirs = right[: len(theirs) + 1]
            else:
                ours = left[: len(ours) + 1]
        left, right = left[len(ours):], right[len(theirs):]
        runs.append((ours, theirs))
    return runs


def _show(shape: tuple[Dim, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
