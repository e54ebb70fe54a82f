"""Why a model is slower than somebody else: read from its explanation, never guessed.

    cause            told by
    not captured     no plan: the last refusal
    tier 1 refused   tier 0 serves: the refusal of tier 1
    tier 1 late      tier 0 serves: nothing was refused, so it is still being compiled
    interrupts a run, stays with the library, cut before …      the plan's notes, by operator
    wrong tier       guards missed, or most calls were answered by another tier
    own kernels      everything is generated code, and it is slower
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

_NOTES = (
    (re.compile(r"^(?P<op>[\w.]+) interrupts a run: (?P<why>.*)"), "interrupts a run"),
    (re.compile(r"^(?P<op>.+?) stays with the library: (?P<why>.*)"), "stays with the library"),
    (re.compile(r"cut before (?P<op>[\w.]+): (?P<why>.*)"), "cut before"),
)
MOST = 12
"""Of one model's reasons that a row keeps."""


def causes(explained: Mapping[str, Any]) -> list[str]:
    """From the most telling one on; the first is what the model's lost time is counted under."""
    plans = [p for site in explained["sites"] for p in site["plans"]]
    refusals = [d for d in explained["decisions"] if d["action"] == "refuse"]
    faults = [f"background fault: {name} x{count}" for name, count in explained.get("background_faults", {}).items()]
    told = [f"{d['why']}: {d['evidence']}"[:240] for d in reversed(refusals)]
    if not plans:
        return [*faults, *(f"not captured: {t}" for t in told), "not captured"][:MOST]
    plan = max(plans, key=lambda p: p["calls"])
    if plan["tier"] == 0:
        return [*faults, *(f"tier 1 refused: {t}" for t in told), *notes(plan), "tier 1 late"][:MOST]
    library = Counter(op for p in plan["partitions"] if p["backend"] == "library" for op in p["ops"])
    left = [f"stays with the library: {op.removeprefix('aten.')} x{n}" for op, n in library.most_common(6)]
    return [*faults, *notes(plan), *left, "own kernels"][:MOST]


def notes(plan: Mapping[str, Any]) -> list[str]:
    """A plan's notes by kind, operator and reason, the most frequent first."""
    found: Counter[str] = Counter()
    for note in plan.get("notes", ()):
        for pattern, kind in _NOTES:
            if match := pattern.search(note):
                found[f"{kind}: {match['op']}: {_plain(match['why'])}"] += 1
                break
    return [f"{text} x{n}" if n > 1 else text for text, n in found.most_common()]


def kind_of(cause: str) -> str:
    """A cause without its model's particulars: what rows are added up by."""
    head, _, rest = cause.partition(": ")
    op = rest.split(": ")[0] if head in ("interrupts a run", "stays with the library", "cut before") else ""
    return f"{head}: {re.sub(r' x[0-9]+$', '', op)}" if op else head


def _plain(why: str) -> str:
    """Without numbers, which differ from node to node."""
    return re.sub(r"\d[\d.,]*", "#", why)[:120]
