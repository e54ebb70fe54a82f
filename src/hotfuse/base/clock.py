"""How long ago something was written down, by a clock that is set from time to time and differs from machine to machine."""

from __future__ import annotations

import time


def is_recent(at: float, within_s: float) -> bool:
    """Whether something of this time (seconds since the epoch) was so short a while ago.

    A time that lies as far ahead is of a clock that was wrong then, or is now. It is no newer than one as far behind: taken as it
    stands, a refusal written while the clock was a year ahead would be believed for a year, and an abandoned file kept as long.
    """
    return abs(time.time() - at) < within_s
