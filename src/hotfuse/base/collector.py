"""Python's garbage collector, told what is there to stay."""

from __future__ import annotations

import gc

FROZEN = 1_000
"""Objects out of the collector's sight before somebody is said to have put them there: Python 3.12 begins with some hundred."""


def take_for_old() -> bool:
    """Let the collector take all objects there are for old, as if it had looked through them; False where somebody froze objects
    and wants them to stay so."""
    if gc.get_freeze_count() >= FROZEN:
        return False
    gc.freeze()
    gc.unfreeze()
    return True
