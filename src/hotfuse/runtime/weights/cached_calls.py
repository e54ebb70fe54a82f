"""What a function behind `functools.lru_cache` keeps: its results, and whether it was told to forget them.

    @functools.lru_cache
    def table(n): ...                 table(8).mul_(2)          table.cache_clear()

The results are values that a model's code reads, so they are looked through like any others. New ones, and old ones that make room,
are no change: what was read is what would be made anew. Where all are forgotten, the function runs again, and what it reads by then
may be something else.
"""

from __future__ import annotations

import functools
import gc
from typing import Any, cast

from hotfuse.base.lazy_dataclass import dataclass

CACHED = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True, slots=True)
class CachedCalls:
    """What one function keeps at one time."""

    function: Any
    results: tuple[Any, ...]
    """And what it was called with, where the two cannot be told apart."""
    entries: dict[Any, Any]
    """The function's own, whose tag shows every change."""
    misses: int
    """Results that were made so far."""

    def forgotten(self) -> bool:
        """Whether the function was told to forget its results since."""
        return self.function.cache_info().misses < self.misses


def cached_calls(function: Any) -> CachedCalls | None:
    """What a function keeps now; None where it does not show that."""
    info = function.cache_info()
    held = gc.get_referents(function)
    at = next((i for i in range(len(held) - 1, 0, -1) if held[i] is function.__wrapped__), 0)
    entries = held[at - 1] if at else None
    if type(entries) is not dict or len(cast(dict[Any, Any], entries)) != info.currsize:
        return None
    found = cast(dict[Any, Any], entries)
    results = tuple(found.values()) if info.maxsize is None else tuple(held[: at - 1])
    return CachedCalls(function, results, found, info.misses)
