"""Calls, compiles and swaps on one time axis, in the format that Chrome's and Perfetto's trace viewers open.

One row per track and thread; decisions are instants on a row of their own. Times are microseconds since the log began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DECISIONS = "decisions"


def chrome_trace(name: str, spans: Sequence[Mapping[str, Any]], decisions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A trace of one model, from its spans and decisions as plain data."""
    rows: dict[tuple[str, int], int] = {(DECISIONS, 0): 1}
    events: list[dict[str, Any]] = []
    for s in spans:
        row = rows.setdefault((s["track"], s["thread"]), len(rows) + 1)
        events.append({"ph": "X", "pid": 1, "tid": row, "name": s["name"], "cat": s["track"], "ts": round(s["begin"] * 1e6, 3),
                       "dur": round((s["end"] - s["begin"]) * 1e6, 3), "args": dict(s["evidence"])})
    for d in decisions:
        events.append({"ph": "i", "s": "p", "pid": 1, "tid": 1, "name": f"{d['action']}: {d['why']}", "cat": DECISIONS,
                       "ts": round(d["at"] * 1e6, 3), "args": dict(d["evidence"])})
    titles = [{"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": f"{track} {thread}" if thread else track}}
              for (track, thread), row in rows.items()]
    process = {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": name}}
    return {"displayTimeUnit": "ms", "traceEvents": [process, *titles, *sorted(events, key=lambda e: e["ts"])]}
