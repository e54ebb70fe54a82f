"""What is bet on an entry's calls, how often it held, and what it saved: for `explain()` and `hotfuse watch`."""

from __future__ import annotations

import time
from typing import Any

from hotfuse.runtime.plan import BetCount
from hotfuse.runtime.site import Entry
from hotfuse.specialize.table import ZERO_ROWS, row, sizes_key


def bets_of(entry: Entry) -> list[dict[str, Any]]:
    """Every specialization of the plan that serves, the outermost first, then versions for sizes.

    Where the plan itself does not measure what a bet saves, it is what the race before showed, for every call in which it held.
    """
    plans = (entry.plan, *entry.versions.values())
    found: list[dict[str, Any]] = []
    for layer in entry.layers:
        counts = [count() for p in plans for key, count in p.bets if key == layer.key]
        if layer.key.row == ZERO_ROWS:
            sides = [p.sides.counts() for p in plans if p.sides is not None]
            counts = [BetCount(c["calls_skipping_rows"], c["calls_with_all_rows"]) for c in sides]
        held, missed = sum(c.held for c in counts), sum(c.missed for c in counts)
        won = next((entry.won[k] for k in layer.keys if k in entry.won), None)
        known = [c.saved_s for c in counts if c.saved_s is not None]
        saved = sum(known) if known else held * max(0.0, won.us_before - won.us_after) * 1e-6 if won is not None else None
        found.append({
            "row": layer.key.row, "of": layer.key.about, "guard": row(layer.key.row).guard, "held": held, "missed": missed,
            "ms_saved": None if saved is None else round(saved * 1e3, 3), "measured": bool(known),
            "since_s": None if won is None else round(time.time() - won.at, 1),
        })  # fmt: skip
    for signature in entry.versions:
        won = entry.won.get(sizes_key(signature))
        found.append({
            "row": sizes_key(signature).row, "of": sizes_key(signature).about, "guard": row("sizes").guard, "held": None,
            "missed": None, "ms_saved": None, "measured": False,
            "since_s": None if won is None else round(time.time() - won.at, 1),
        })  # fmt: skip
    return found


def inputs_of(entry: Entry) -> list[dict[str, Any]]:
    """What calls that follow each other have in common, input by input."""
    seen = entry.repeats
    return [{"input": v.name, "came_again": round(seen.share((i,)), 3), "pairs": seen.pairs}
            for i, v in enumerate(entry.baseline.graph.inputs)] if seen.pairs else []  # fmt: skip


def bet_text(bet: dict[str, Any]) -> str:
    """One of them for a reader."""
    said = f"{bet['row']}" + (f" ({bet['of']})" if bet["of"] else "")
    if bet["held"] is not None:
        calls = bet["held"] + bet["missed"]
        said += f": held in {bet['held']} of {calls} calls" if calls else ": no calls yet"
    if bet["ms_saved"] is not None:
        said += f", saved {bet['ms_saved']:.1f} ms" + ("" if bet["measured"] else " by what its race showed")
    return said + (f", for {bet['since_s']:.0f} s" if bet["since_s"] is not None else "")
