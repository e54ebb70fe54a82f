"""Which compiled plans must go so that what they hold fits the memory allowed for it: the least recently used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from hotfuse.base.lazy_dataclass import dataclass

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MemoryHolder(Generic[T]):
    """Something that takes memory: packed weights, machine code and arenas of a plan."""

    owner: T
    bytes: int
    last_used: int
    """A clock of calls: greater is later."""


def victims(held: Sequence[MemoryHolder[T]], limit: int, keep: T | None = None) -> tuple[T, ...]:
    """The owners to let go, oldest first, until the rest fits; never `keep`, which was just made or is just used.

    What alone exceeds the limit goes too, unless it is to be kept: then everything else goes.
    """
    total = sum(h.bytes for h in held)
    gone: list[T] = []
    for h in sorted(held, key=lambda h: h.last_used):
        if total <= limit:
            break
        if h.owner is keep or h.bytes == 0:
            continue
        gone.append(h.owner)
        total -= h.bytes
    return tuple(gone)
