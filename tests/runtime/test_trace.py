"""Calls, compiles and swaps on one time axis."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import hotfuse
from hotfuse.base.settings import Settings


def test_a_trace_holds_calls_decisions_and_compiles(tmp_path: Path) -> None:
    with torch.no_grad(), hotfuse.jit(nn.Linear(8, 8).eval(), settings=Settings(capture="inline", hot_calls=1)) as fast:
        for _ in range(6):
            fast(torch.randn(2, 8))
        trace = json.loads(fast.explain().to_trace(tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {"calls", "compile"} <= {e["cat"] for e in spans}
    calls = sorted((e for e in spans if e["cat"] == "calls"), key=lambda e: e["ts"])
    assert calls and all(e["dur"] > 0 and e["ts"] > 0 for e in calls)
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(calls)), "one call ends before the next"
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert any(n.startswith("calls") for n in names) and "decisions" in names
    instants = [e["name"] for e in events if e["ph"] == "i"]
    assert any(n.startswith("deploy") for n in instants)
    times = [e["ts"] for e in events if "ts" in e]
    assert times == sorted(times)
