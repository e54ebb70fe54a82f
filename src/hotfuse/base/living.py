"""Objects that there are in a process, while threads make more of them.

Walking through a `WeakSet` runs Python code between its members, and fails when another thread adds one meanwhile: "Set changed
size during iteration". Here a walk goes through those that there were when it began.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Living(Generic[T]):
    """Members go when nobody else holds them. Any thread may do anything at any time."""

    __slots__ = ("_members",)

    def __init__(self) -> None:
        self._members: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, member: T) -> None:
        """It counts from here on."""
        self._members[id(member)] = member

    def discard(self, member: T) -> None:
        """It counts no more."""
        self._members.pop(id(member), None)

    def __iter__(self) -> Iterator[T]:
        references = self._members.valuerefs()  # a copy, made in one step
        return (member for reference in references if (member := reference()) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)
