"""Two plans that answer calls in turns: two calls in a row of one thread and of one kind make a round.

Threads that call at the same time, and calls of other sizes, take other times: each has rounds of its own. Who goes first is drawn,
so that traffic with a period of its own favours neither. A thread's first call by a new plan finds its memory cold and is no part
of a round. Where the new one serves all other calls (`deployed`), each change of sides costs the caches what they held: the first
call behind it is no part of a round either, or the old one would always be measured cold.
"""

from __future__ import annotations

from hotfuse.runtime.samples import Signature

OLD, NEW = 0, 1
MAX_KEYS = 256
"""Threads and kinds of calls whose halves of rounds are kept: servers start a thread per request."""

Key = tuple[int, Signature, bool]
"""The calling thread, the sizes of its call, and whether that wants gradients."""
Round = tuple[float, float]
"""Seconds of the old one and of the new one."""


class Turns:
    """Whose turn it is. Takes no lock: a key belongs to one thread."""

    def __init__(self, seed: int = 1, *, deployed: bool = False) -> None:
        self._deployed = deployed
        self._half: dict[Key, tuple[int, float]] = {}
        self._warm: dict[Key, int] = {}
        """Who answered a key's last call, which may not have counted."""
        self._again: set[Key] = set()
        """Keys whose last call did not count: the same one answers again."""
        self._seed = seed * 2654435761 % 2**32 | 1

    def next(self, key: Key) -> int:
        """Who answers the next call: the other one of a round that was begun; the new one at first; else it is drawn."""
        if key in self._again:
            return self._warm[key]
        if (half := self._half.get(key)) is not None:
            return NEW if half[0] == OLD else OLD
        if self._deployed:
            self._warm[key] = NEW  # whatever the last round ended with, it has served since
        elif key not in self._warm:
            return NEW
        self._seed = (self._seed * 1664525 + 1013904223) % 2**32
        return self._seed >> 16 & 1

    def took(self, key: Key, side: int, seconds: float) -> Round | None:
        """A call was answered; the round that it completes."""
        if len(self._warm) >= MAX_KEYS and key not in self._warm:
            self._half.clear()
            self._warm.clear()
            self._again.clear()
        last, self._warm[key] = self._warm.get(key), side
        if key in self._again:
            self._again.discard(key)
        elif (last != side) if self._deployed else (last is None and side == NEW):
            if self._deployed:
                self._again.add(key)
            return None
        half = self._half.pop(key, None)
        if half is None or half[0] == side:
            self._half[key] = (side, seconds)
            return None
        return (seconds, half[1]) if side == OLD else (half[1], seconds)

    def forget(self, key: Key) -> None:
        """A round that was begun is none any more."""
        self._half.pop(key, None)
        self._again.discard(key)

    def half(self, key: Key) -> bool:
        """Whether a round was begun and waits for its other call."""
        return key in self._half or key in self._again
