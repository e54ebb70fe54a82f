"""What a model may be used for, by how it did on problems that it had not seen.

    believed   its forecasts decide
    asked      it says what is worth a look; what is taken was measured, as with rooflines
    aside      rooflines predicted the same rows better: nobody asks it

A short calibration gives a model of few rows. Where it is believed it is worse than none: rooflines decide nothing without a
measurement, so that what they get wrong costs time to compile and no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from hotfuse.base.lazy_dataclass import dataclass

MIN_WITHIN_20 = 0.7
"""The part of unseen kernels within 20% from which on forecasts decide: below, choosing by them lost 3 to 5%, above under 1%."""


class Trust(StrEnum):
    """How far a model's forecasts are trusted."""

    BELIEVED = "believed"
    ASKED = "asked"
    ASIDE = "aside"


@dataclass(frozen=True, slots=True)
class Judged:
    """How far a model is believed, and why."""

    trust: Trust
    because: str


def judged(facts: Mapping[str, Any]) -> Judged:
    """By what training wrote down; rooflines that an older program did not judge are taken for worse."""
    held = facts.get("held_out") or {}
    within, mine = (float(held.get(n, math.nan)) for n in ("within20", "mape"))
    alone = float((facts.get("rooflines") or {}).get("mape", math.inf))
    if math.isfinite(alone) and not mine < alone:
        text = f"on problems it had not seen it is off by {mine:.0%}, rooflines alone by {alone:.0%}"
        return Judged(Trust.ASIDE, text)
    text = f"{within:.0%} of the kernels it had not seen are within 20%"
    if math.isnan(within):
        return Judged(Trust.ASKED, "nobody judged it on kernels it had not seen: what it proposes is measured first")
    if within < MIN_WITHIN_20:
        return Judged(Trust.ASKED, f"{text}, less than {MIN_WITHIN_20:.0%}: what it proposes is measured first")
    return Judged(Trust.BELIEVED, text)
