"""Stretches of a run whose calls do not need each other's results, and the word of memory that says whether they fork."""

from __future__ import annotations

import ctypes

from hotfuse.base.lazy_dataclass import dataclass

_ON = 0
TAKEN = 1
"""Where in a switch forks are counted."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Steps `first` up to `last` of a run, as lanes of calls that are independent of those in other lanes."""

    first: int
    last: int
    lanes: tuple[tuple[int, ...], ...]
    """Per lane, the numbers of its steps, in order."""


class Switch:
    """Whether a run forks, and how often it did; native code reads and counts here."""

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * 2)()
        self.address = ctypes.addressof(self._words)

    @property
    def on(self) -> bool:
        """Whether lanes run at the same time."""
        return bool(self._words[_ON])

    @on.setter
    def on(self, value: bool) -> None:
        self._words[_ON] = int(value)

    @property
    def taken(self) -> int:
        """Forks taken so far."""
        return int(self._words[TAKEN])
