"""The table of models by threads: ratios are of the best peer, round by round; efficiency needs one thread."""

from __future__ import annotations

import math

from benchmarks.threads import summary, table, with_efficiency


def test_ratios_and_efficiency() -> None:
    ms = {"hotfuse": [8.0, 8.0, 8.0], "eager": [16.0, 12.0, 12.0], "ort": [12.0, 16.0, 9.0]}
    one = summary({"model": "m", "threads": 1, "ms": ms, "absent": {}, "tiers": {}})
    four = summary({"model": "m", "threads": 4, "ms": {"hotfuse": [4.0, 2.0, 4.0], "eager": [3.0, 3.0, 3.0]},
                    "absent": {"ort": "not here"}, "tiers": {}})  # fmt: skip
    alone = summary({"model": "n", "threads": 2, "ms": {"hotfuse": [1.0]}, "absent": {}, "tiers": {}})
    assert one["ratio"] == 1.5 and four["ratio"] == 0.75 and math.isnan(alone["ratio"])
    rows = with_efficiency([one, four, alone])
    assert rows[1]["efficiency"] == {"hotfuse": 0.5, "eager": 1.0} and rows[2]["efficiency"] == {}
    shown = table(rows)
    assert "0.75x" in shown and "ort: not here" in shown and "worst 0.75x" in shown
