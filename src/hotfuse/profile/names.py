"""Numbers for the things that records speak of, and the way back to their names.

Given out in the serving process, once for all its models, so that records stay small and the analyzer needs no names at all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

Shapes = tuple[tuple[int, ...], ...]
MAX_SIGNATURES = 512
OTHER = 0
"""The signature of calls beyond the limit."""


class Names:
    """A register of graphs, their items, and their signatures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: list[str] = []
        self._items: list[dict[str, int]] = []
        self._signatures: list[dict[Shapes, int]] = []
        self.overflow = 0
        """Calls of signatures beyond the limit."""

    def graph(self, name: str) -> int:
        """A new number for a graph; two graphs may bear one name."""
        with self._lock:
            self._graphs.append(name)
            self._items.append({})
            self._signatures.append({})
            return len(self._graphs) - 1

    def item(self, graph: int, name: str) -> int:
        """The number of a value, control node or partition of a graph."""
        items = self._items[graph]
        if (found := items.get(name)) is None:
            with self._lock:
                found = items.setdefault(name, len(items))
        return found

    def signature(self, graph: int, shapes: Shapes) -> int:
        """The number of a call's input shapes, from 1."""
        known = self._signatures[graph]
        if (found := known.get(shapes)) is None:
            if len(known) >= MAX_SIGNATURES:
                self.overflow += 1
                return OTHER
            with self._lock:
                found = known.setdefault(shapes, len(known) + 1)
        return found

    def graph_name(self, graph: int) -> str:
        """A graph's name."""
        return self._graphs[graph] if 0 <= graph < len(self._graphs) else f"graph {graph}"

    def item_name(self, graph: int, item: int) -> str:
        """An item's name."""
        items = self._items[graph] if 0 <= graph < len(self._items) else {}
        return next((n for n, i in items.items() if i == item), f"item {item}")

    def shapes(self, graph: int, signature: int) -> Sequence[tuple[int, ...]] | None:
        """The shapes behind a signature; None for those beyond the limit."""
        known = self._signatures[graph] if 0 <= graph < len(self._signatures) else {}
        return next((s for s, i in known.items() if i == signature), None)
