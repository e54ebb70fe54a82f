"""Up to which share of live rows packing pays: what it takes is a straight line in that share, and its ends are measured."""

from __future__ import annotations

PAYS = 0.98
"""Part of the padded plan's time that packing may take at most."""


def break_even_share(before: float, some: float, whole: float, share: float) -> float:
    """Where a straight line from `some` (a share of rows) to `whole` (all of them) meets what the plan there was takes."""
    if share >= 1 or whole <= some:
        return 1.0 if whole <= PAYS * before else share
    return min(1.0, max(share, share + (PAYS * before - some) / (whole - some) * (1 - share)))
