"""How many threads call, as calls that are looked at show it: a plan that won with one caller may lose with eight."""

from __future__ import annotations

WINDOW = 128
"""Calls looked at that a level is of."""


class Callers:
    """A level that doubles with the number of threads; it changes when two windows in a row agree on another one."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._looks = self._before = 0
        self.level = 0
        """0 before anything is known; 1: one thread, 2: two or three, 3: four to seven."""
        self.changes = 0
        """How often a level took the place of another one."""

    def note(self, thread: int) -> None:
        """A call of that thread was looked at."""
        self._seen.add(thread)
        self._looks += 1
        if self._looks < WINDOW:
            return
        now = len(self._seen).bit_length()
        if now == self._before and now != self.level:
            self.changes += bool(self.level)
            self.level = now
        self._before = now
        self._seen, self._looks = set(), 0
