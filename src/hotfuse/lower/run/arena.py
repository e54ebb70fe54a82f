"""Memory of intermediates: offsets in one block, shared by values that are never needed at the same time.

Where all sizes are numbers, the largest values are placed first, each at the lowest offset that is free while it is needed. Where
sizes are known only at run time, values share slots: a slot is as large as the largest of its values, whatever the sizes are.

Values that are needed at the same time do not begin at a multiple of 4 KiB from each other: loads and stores at the same distance
in two such buffers meet in one set of the first cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotfuse.base.errors import HotfuseError
from hotfuse.base.lazy_dataclass import dataclass
from hotfuse.ir.dims import Dim, evaluate, expr
from hotfuse.lower.common.algebra import normal, same

LINE = 64
_PAGE = 4096
_SKEW = 192
"""What is left free behind a slot: with sizes that are multiples of a page, which are the common ones, no two slots then begin
at a multiple of a page from each other."""


@dataclass(frozen=True, slots=True)
class Live:
    """A value: its bytes, and the first and last step that touch it."""

    name: int
    bytes: Dim
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Arena:
    """Where values lie, and how much memory that takes."""

    offsets: Mapping[int, Dim]
    bytes: Dim


def rounded(d: Dim, to: int = LINE) -> Dim:
    """Up to whole lines."""
    return -(-d // to) * to if isinstance(d, int) else expr("*", expr("ceildiv", d, to), to)


def merged(values: Sequence[Live], inplace: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Whose memory a value takes over: of (made, dying) pairs, those whose sizes are equal and whose lives meet in one step.

    Each value is taken over at most once, and what it took over goes with it: a chain of pointwise kernels stays in one place.
    """
    by_name = {v.name: v for v in values}
    heir: dict[int, int] = {}
    taken: set[int] = set()
    for made, dying in inplace:
        a, b = by_name.get(made), by_name.get(dying)
        if a is None or b is None or made in heir or dying in taken:
            continue
        if b.last == a.first and same(a.bytes, b.bytes):
            heir[made] = dying
            taken.add(dying)
    for made in heir:
        while heir[made] in heir:
            heir[made] = heir[heir[made]]
    return heir


def allocate(values: Sequence[Live], inplace: Sequence[tuple[int, int]] = (), sizes: Mapping[str, int] | None = None) -> Arena:
    """Offsets for all values; `sizes` are those of a real call, by which slots are chosen."""
    heir = merged(values, inplace)
    last = {v.name: v.last for v in values}
    for made, owner in heir.items():
        last[owner] = max(last[owner], last[made])
    owners = [Live(v.name, rounded(normal(v.bytes)), v.first, last[v.name]) for v in values if v.name not in heir]
    if all(isinstance(v.bytes, int) for v in owners):
        arena = _fixed(owners)
    else:
        arena = _slots(owners, sizes or {})
    return Arena({**arena.offsets, **{made: arena.offsets[owner] for made, owner in heir.items()}}, arena.bytes)


def _meet(a: Live, b: Live) -> bool:
    return a.first <= b.last and b.first <= a.last


def _fixed(values: Sequence[Live]) -> Arena:
    """The largest first, each at the lowest place that is free and not a page's multiple away from a neighbour in time."""
    placed: list[tuple[int, int, Live]] = []
    for v in sorted(values, key=lambda v: (-int(v.bytes), v.first)):  # type: ignore[arg-type]
        size = int(v.bytes)  # type: ignore[arg-type]
        others = sorted(((at, n) for at, n, o in placed if _meet(o, v)), key=lambda p: p[0])
        at = 0
        while (again := _bumped(at, size, others)) != at:
            at = again
        placed.append((at, size, v))
    return Arena({v.name: at for at, _, v in placed}, max((at + n for at, n, _ in placed), default=0))


def _bumped(at: int, size: int, others: Sequence[tuple[int, int]]) -> int:
    for start, n in others:
        if at < start + n and start < at + size:
            return start + n
        if n and size and (at - start) % _PAGE == 0:
            return at + LINE
    return at


@dataclass(slots=True)
class _Slot:
    sizes: list[Dim]
    free_from: int


def _slots(values: Sequence[Live], sizes: Mapping[str, int]) -> Arena:
    """In order of time; each value takes the free slot whose size comes nearest, or a new one."""
    slots: list[_Slot] = []
    home: dict[int, int] = {}
    for v in sorted(values, key=lambda v: v.first):
        free = [i for i, s in enumerate(slots) if s.free_from < v.first]
        want = _about(v.bytes, sizes)
        best = min(free, key=lambda i: abs(max(_about(s, sizes) for s in slots[i].sizes) - want), default=-1)
        if best < 0:
            best = len(slots)
            slots.append(_Slot([], -1))
        slots[best].free_from = v.last
        if v.bytes not in slots[best].sizes:
            slots[best].sizes.append(v.bytes)
        home[v.name] = best
    offsets: list[Dim] = []
    at: Dim = 0
    for slot in slots:
        offsets.append(at)
        largest = slot.sizes[0] if len(slot.sizes) == 1 else expr("max", *slot.sizes)
        at = expr("+", at, rounded(largest), _SKEW)
    return Arena({name: offsets[i] for name, i in home.items()}, at)


def _about(d: Dim, sizes: Mapping[str, int]) -> int:
    """A size in the real call; symbols it does not show count as 64."""
    try:
        return evaluate(d, _Guess(sizes))
    except (HotfuseError, ZeroDivisionError):
        return 0


class _Guess(dict[str, int]):
    def __missing__(self, _name: str) -> int:
        return 64
