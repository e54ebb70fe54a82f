"""Numbers for the things that records speak of, and the way back to their names.

Given out in the serving process, once for all its models, so that records stay small and the analyzer needs no names at all.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

Shapes = tuple[tuple[int, ...], ...]
MAX_SIGNATURES = 512
OTHER = 0
"""The signature of calls beyond the limit."""


class Names:
    """A register of graphs, their items, and their signatures.

    A graph's number is never reused; a forgotten number resolves to nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._graphs: dict[int, str] = {}
        self._items: dict[int, dict[str, int]] = {}
        self._signatures: dict[int, dict[Shapes, int]] = {}
        self.overflow = 0
        """Calls of signatures beyond the limit."""

    def graph(self, name: str) -> int:
        """A new number for a graph; two graphs may bear one name."""
        with self._lock:
            number = next(self._numbers)
            self._graphs[number], self._items[number], self._signatures[number] = name, {}, {}
            return number

    def forget(self, graph: int) -> None:
        """A graph is gone; calls that are still in it may ask on."""
        with self._lock:
            for names in (self._graphs, self._items, self._signatures):
                names.pop(graph, None)

    def __len__(self) -> int:
        """How many graphs are known."""
        return len(self._graphs)

    def item(self, graph: int, name: str) -> int:
        """The number of a value, control node or partition of a graph."""
        items = self._items.get(graph, {})
        if (found := items.get(name)) is None:
            with self._lock:
                found = items.setdefault(name, len(items))
        return found

    def signature(self, graph: int, shapes: Shapes) -> int:
        """The number of a call's input shapes, from 1."""
        known = self._signatures.get(graph)
        if known is None:
            return OTHER
        if (found := known.get(shapes)) is None:
            if len(known) >= MAX_SIGNATURES:
                self.overflow += 1
                return OTHER
            with self._lock:
                found = known.setdefault(shapes, len(known) + 1)
        return found

    def graph_name(self, graph: int) -> str:
        """A graph's name."""
        return self._graphs.get(graph, f"graph {graph}")

    def item_name(self, graph: int, item: int) -> str:
        """An item's name."""
        return next((n for n, i in self._items.get(graph, {}).items() if i == item), f"item {item}")

    def shapes(self, graph: int, signature: int) -> Sequence[tuple[int, ...]] | None:
        """The shapes behind a signature; None for those beyond the limit."""
        return next((s for s, i in self._signatures.get(graph, {}).items() if i == signature), None)
